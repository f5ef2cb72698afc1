"""Scores the text of completions with the verifiers; stops the run when verifiers fail too often."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from shared.chat import Chat
from shared.config import Config
from shared.errors import RunError
from shared.reasoning_tags import CONTROL, TEXT
from shared.sections import RewardWeights
from shared.types import Completion, Group, Problem, Reward, Verdict
from verify.answer_checker import AnswerChecker
from verify.code.runner import ProgramVerifier
from verify.format import parts_of
from verify.plugins import Case, Failed
from verify.reward import CompletionScorer
from verify.verifiers import verifier_for

REPORTED_AGAIN = 10
"""a kind of failure is reported at first, and whenever its count is so many times the one reported last"""


@dataclass
class Failure:
    """One kind of failed verification: its first case, and how often it came."""

    first: str
    """id of the first problem, and the reason in full"""
    count: int = 0
    reported: int = 0
    """the count that was reported last"""


def _take_news(cases: dict[str, Failure]) -> list[str]:
    """Return the kinds that are to be reported, and note that they are."""
    kinds = [
        kind
        for kind, case in cases.items()
        if case.count > case.reported and case.count >= case.reported * REPORTED_AGAIN
    ]
    for kind in kinds:
        cases[kind].reported = cases[kind].count
    return kinds


class FailureWindow:
    """Keeps the most recent verdicts, and raises when too many of them say nothing about the policy."""

    def __init__(self, max_share: float, size: int = 1000, least: int = 200) -> None:
        self.max_share, self.least = max_share, least
        self.recent: deque[Verdict] = deque(maxlen=max(size, least))

    @property
    def counts(self) -> dict[str, int]:
        """Number of recent verdicts of each class."""
        counted = Counter(self.recent)
        return {verdict.value: counted[verdict] for verdict in Verdict}

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


class Settled(NamedTuple):
    """A completion with its reward and its text."""

    completion: Completion
    reward: Reward
    text: str


class InForce(Protocol):
    """What knows the settings in force: a run's stages."""

    now: Config


class RewardScorer:
    """Scores completions concurrently; verdicts are keyed by completion, never by position."""

    def __init__(self, stages: InForce, chat: Chat):
        self.stages, self.chat = stages, chat
        config = stages.now
        self.checker = AnswerChecker(workers=config.reward.workers, deadline_s=config.reward.deadline_s)
        self.programs = ProgramVerifier(config.reward.sandbox)
        self.window = FailureWindow(config.reward.max_failure_share)
        self.counts: dict[Verdict, int] = {}
        self.failures: dict[str, Failure] = {}
        """kind of failure -> its cases since the launch"""
        self.waiting: dict[int, dict[int, Settled]] = {}
        """group -> index -> completion that waits for the others of its group"""
        self._made: tuple[RewardWeights, CompletionScorer] = config.reward, self._scorer_of(config)

    def _scorer_of(self, config: Config) -> CompletionScorer:
        settings = config.reward.resolved(config.rollout.max_completion_tokens)
        if any(tags.close in self.chat.think_prefix for tags in (TEXT, CONTROL)):
            # the chat template closes the reasoning: none is expected of the policy
            settings = settings.model_copy(
                update={"refuse": [rule for rule in settings.refuse if rule != "thoughtless"]}
            )
        return CompletionScorer(settings, self.checker, self.programs)

    @property
    def scorer(self) -> CompletionScorer:
        """Scores with the rewards in force."""
        if self._made[0] is not (now := self.stages.now).reward:
            self._made = now.reward, self._scorer_of(now)
        return self._made[1]

    async def start(self, problems: Sequence[Problem]) -> str:
        """Start what these problems need; returns one line about the isolation of programs, "" when there are none.

        Raises SandboxRefused where programs are to be run and the host cannot isolate them.
        """
        await self.checker.start()
        return await self.programs.start() if any(verifier_for(one).needs == "sandbox" for one in problems) else ""

    async def score(self, problem: Problem, completion: Completion) -> tuple[Reward, str]:
        """The reward of a finished completion, and its text; the reward is masked if engines died of the completion."""
        if completion.finish_reason == "abort":
            return _ungraded(Verdict.CRASH, "given up: engines died of it"), ""
        begun = self._begun(problem)
        text = self.chat.think_prefix + self.chat.decode([*begun, *completion.token_ids])
        if completion.finish_reason in ("crash", "timeout"):
            reward = _ungraded(Verdict(completion.finish_reason), completion.turns[-1].failure, format=None)
        elif completion.turns and completion.turns[-1].reward is not None:
            reward = reward_of(completion)
        else:
            last = text if not completion.turns else self.chat.think_prefix + self.chat.decode(completion.last_turn)
            parts = parts_of(self.chat, [*begun, *completion.last_turn], verifier_for(problem))
            tokens = completion.sampled_tokens
            ids = completion.last_turn
            reward = await self.scorer.score(problem, last, tokens, parts=parts, group=completion.group, token_ids=ids)
        self._count(problem, reward)
        return reward, text

    async def settle(self, group: Group, completion: Completion, reward: Reward, text: str) -> list[Settled]:
        """Take a scored completion of a group; returns what is now settled: itself, or, where there are rewards of the
        group, all of it with the last one. A completion of an environment is settled at once."""
        if not self.scorer.group_extras or group.prompt.problem.environment:
            return [Settled(completion, reward, text)]
        settled = self.waiting.setdefault(completion.group, {})
        settled[completion.index] = Settled(completion, reward, text)
        if len(settled) < group.rewards.count(None):
            return []
        del self.waiting[completion.group]
        whole = [settled[index] for index in sorted(settled)]
        cases = [self._case(group.prompt.problem, old) for old in whole]
        rewards = await self.scorer.with_group([old.reward for old in whole], cases)
        for old, new in zip(whole, rewards, strict=True):
            if new.verdict is not old.reward.verdict:
                self.counts[old.reward.verdict] -= 1
                self._count(group.prompt.problem, new)
        return [old._replace(reward=new) for old, new in zip(whole, rewards, strict=True)]

    def _case(self, problem: Problem, settled: Settled) -> Case | None:
        """The completion as rewards of the group see it; None where it has no format or is not graded."""
        reward, completion = settled.reward, settled.completion
        if not reward.verdict.graded or reward.verdict is Verdict.NO_ANSWER or reward.reason.startswith("gate "):
            return None
        ids = [*self._begun(problem), *completion.token_ids]
        parts = parts_of(self.chat, ids, verifier_for(problem))
        given = (parts.reasoning, parts.response, reward.answer or "", completion.sampled_tokens, reward.verdict)
        more = completion.group, settled.text, completion.token_ids
        return Case(problem, *given, reward.share or 0.0, self.scorer.settings, *more)

    def _begun(self, problem: Problem) -> list[int]:
        """[tokens] of the problem's prefix, which stand at the end of its prompt."""
        return self.chat.encode_completion(problem.prefix) if problem.prefix else []

    @property
    def judge_metrics(self) -> dict[str, float]:
        """What is known of the judges."""
        return {name: value for judge in self.scorer.judges for name, value in judge.measurement.metrics.items()}

    def failed(self, problem: Problem, failure: Failed) -> None:
        """Count an episode that could not begin. Raises RunError as `score`."""
        self._count(problem, _ungraded(failure.verdict, str(failure), format=None))

    def _count(self, problem: Problem, reward: Reward) -> None:
        self.counts[reward.verdict] = self.counts.get(reward.verdict, 0) + 1
        for judge in self.scorer.judges:
            judge.measurement.check()
        if not reward.verdict.graded:
            kind = f"{reward.verdict.value}, {re.split(': |; ', reward.reason, maxsplit=1)[0]}"
            failure = self.failures.setdefault(kind, Failure(f"problem '{problem.id}': {reward.reason}"))
            failure.count += 1
        try:
            self.window.add(reward.verdict)
        except RunError as error:
            raise RunError(f"{error}. Since the launch: {'; '.join(map(self._line, self.failures))}") from error

    def news(self) -> list[str]:
        """One line for each kind of failed verification that is new, or ten times as frequent as when last reported."""
        return [f"not graded and not trained on: {self._line(kind)}" for kind in _take_news(self.failures)]

    def _line(self, kind: str) -> str:
        failure, every = self.failures[kind], sum(self.counts.values())
        share = failure.count / max(every, 1)
        return f"{failure.count:,} of {every:,} completions ({share:.1%}) are {kind} (first: {failure.first})"

    async def close(self) -> None:
        """End the verifier processes."""
        await self.checker.close()
        await self.programs.close()


def _ungraded(verdict: Verdict, reason: str, format: float | None = 0.0) -> Reward:
    return Reward(0.0, format, 0.0, 0.0, 0.0, verdict, reason=reason)


def reward_of(completion: Completion) -> Reward:
    """The reward of an episode that its environment grades: the sum over its turns. It is solved where the environment
    says so, else from a reward of 1 on."""
    total = sum(turn.reward or 0.0 for turn in completion.turns)
    solved_turns = [turn.solved for turn in completion.turns if turn.solved is not None]
    solved = solved_turns[-1] if solved_turns else total >= 1
    given = ", ".join(f"{turn.reward:g}" for turn in completion.turns if turn.reward is not None)
    return Reward(
        total=total,
        format=None,
        correctness=total,
        length=0.0,
        language=0.0,
        verdict=Verdict.CORRECT if solved else Verdict.WRONG,
        reason=f"rewards of the environment: {given}",
        share=float(solved),
    )
