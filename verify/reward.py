r"""The reward of one completion: format, correctness, length and language, weighed as Magistral does.

    format broken            -> total 0: nothing else is graded, no length penalty (the paper is silent on it; a
                                truncated completion breaks the format anyway, and equal zeros carry no signal)
    format right             -> weights.format
      + answer correct       -> + weights.correctness
      + length penalty       -> 0 down to - weights.length, right or wrong answer alike
      + one language         -> + weights.language, right or wrong answer alike

A verdict that is not graded (timeout, crash, unverifiable) leaves correctness at 0, but says nothing about the policy:
the trainer must mask such a completion (`Reward.verdict.graded` is False), so its total must not be used. A broken
format is a graded WRONG. `FailureWindow` stops a run whose verifier fails too often.
What this does not do: turn rewards into advantages. Who calls this: the controller.
Source: Magistral (2506.10910), section 2.2; total lies in [-0.1 + 0.1, 1.1] with the paper's weights.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Protocol

from shared.errors import RunError
from shared.types import Problem, Reward, Verdict
from verify.extract import MAX_ANSWER_CHARACTERS
from verify.format import check_format
from verify.language import consistency
from verify.length import length_penalty


class Weights(Protocol):
    """What `score` reads of the settings (`shared.config.RewardWeights` with length_max resolved)."""

    @property
    def format(self) -> float: ...
    @property
    def correctness(self) -> float: ...
    @property
    def length(self) -> float: ...
    @property
    def language(self) -> float: ...
    @property
    def length_max(self) -> int: ...
    @property
    def length_cache(self) -> int: ...


class Grader(Protocol):
    """What `score` needs of a pool."""

    async def grade(self, gold: str, answer: str) -> Verdict:
        """Compare an extracted answer with the true one."""
        ...


_REASONS = {
    Verdict.CORRECT: "answer is right",
    Verdict.WRONG: "answer differs from the true one",
    Verdict.TIMEOUT: "verifier killed at its deadline",
    Verdict.CRASH: "verifier process died",
    Verdict.UNVERIFIABLE: "the true answer is not understood",
}


async def score(
    problem: Problem, response: str, tokens: int, weights: Weights, pool: Grader, *, opened: bool = False
) -> Reward:
    """Return the reward of a response of `tokens` tokens (as sampled, end token included) with every component.

    `weights.length_max` must be resolved (0 in the settings stands for rollout.max_completion_tokens).
    `opened`: the chat template already opened the thought (see `format.check_format`).
    Raises ConfigError for impossible length limits, RunError when no verifier process can start.
    """
    penalty = length_penalty(tokens, weights.length_max, weights.length_cache, weights.length)
    response = response.encode("utf-8", "replace").decode("utf-8")  # lone surrogates would break every later record
    parts = check_format(response, opened=opened)
    if not parts.ok or parts.answer is None:
        return Reward(0.0, 0.0, 0.0, 0.0, 0.0, Verdict.WRONG, reason=f"format: {parts.failed}")
    verdict = await pool.grade(problem.answer, parts.answer)
    spoken = consistency(problem.text, parts.thoughts, parts.solution, hint=problem.language)
    correctness = weights.correctness if verdict is Verdict.CORRECT else 0.0
    language = weights.language if spoken.consistent else 0.0
    reason = _REASONS[verdict] + (f"; language: {spoken.reason}" if spoken.reason else "")
    return Reward(
        total=weights.format + correctness + penalty + language,
        format=weights.format,
        correctness=correctness,
        length=penalty,
        language=language,
        verdict=verdict,
        reason=reason,
        consistent=spoken.consistent,
        languages=spoken.languages,
        answer=parts.answer[:MAX_ANSWER_CHARACTERS],
    )


class FailureWindow:
    """The most recent verdicts; complains when too many of them say nothing about the policy."""

    def __init__(self, max_share: float, size: int = 1000, least: int = 200) -> None:
        self.max_share, self.least = max_share, least
        self.recent: deque[Verdict] = deque(maxlen=max(size, least))

    @property
    def counts(self) -> dict[str, int]:
        """How many recent verdicts of each class."""
        found = Counter(self.recent)
        return {verdict.value: found[verdict] for verdict in Verdict}

    @property
    def share(self) -> float:
        """Share of recent verdicts that are not graded."""
        return sum(not verdict.graded for verdict in self.recent) / len(self.recent) if self.recent else 0.0

    def add(self, verdict: Verdict) -> None:
        """Count one verdict. Raises RunError when the share of failures among at least `least` is above the limit."""
        self.recent.append(verdict)
        if len(self.recent) >= self.least and self.share > self.max_share:
            counts = ", ".join(f"{name} {count}" for name, count in self.counts.items() if count)
            raise RunError(
                f"{self.share:.1%} of the last {len(self.recent)} verdicts are no grade ({counts}); allowed: "
                f"reward.max_failure_share = {self.max_share:g}. Look at the data's answers (unverifiable), raise "
                "reward.deadline_s (timeout), or raise reward.max_failure_share"
            )
