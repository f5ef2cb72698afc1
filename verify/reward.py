r"""The reward of one completion: format, correctness, length and language, weighted as in Magistral, and extras.

    format broken            -> total 0: nothing else is graded, no length penalty (the paper is silent on it; a
                                truncated completion breaks the format anyway, and equal zeros carry no signal)
    format right             -> weights.format
      + answer correct       -> + weights.correctness
      + length penalty       -> 0 down to - weights.length, right or wrong answer alike
      + one language         -> + weights.language, right or wrong answer alike
      + every extra reward   -> + weight * value; with a broken format + its lowest (`plugins.py`; none by default)

`reward.refuse` names what is refused although these rules would reward it: empty boxes, copied thoughts, answers that
are denied, hidden or still to be computed, foreign words in formulas and code (`refusals.py`).

An open problem (domain "open") has a true answer that nothing is compared with: correctness 0, the rest as above.
A verdict that is not graded (timeout, crash, unverifiable, sandbox refused) leaves correctness at 0, but says nothing
about the policy: the trainer must mask such a completion (`Reward.verdict.graded` is False), so its total must not be
used. An extra reward that fails does the same. A broken format is NO_ANSWER, which is a grade. `FailureWindow` stops a
run whose verifier fails too often. Source: Magistral (2506.10910), section 2.2; total lies in [-0.1 + 0.1, 1.1] with
the paper's weights.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections import Counter, deque
from collections.abc import Coroutine, Mapping
from typing import Any, Protocol

from shared.config import Config
from shared.errors import RunError
from shared.jsonl import problem_of
from shared.sections import RewardWeights, Sandbox
from shared.types import Problem, Reward, Verdict
from verify.code.exam import checked
from verify.code.programs import Programs
from verify.extract import MAX_ANSWER_CHARACTERS
from verify.format import Parts, check_format
from verify.language import Consistency, LanguageOptions, consistency
from verify.length import length_penalty
from verify.plugins import Case, Failed, choose, read_options
from verify.refusals import refuse_answer, refuse_format
from verify.symbolic import compare


class Grader(Protocol):
    """Interface of what grades final answers, such as a `pool.Pool`."""

    async def grade(self, gold: str, answer: str) -> Verdict:
        """Compare an extracted answer with the true one."""
        ...


class Graded(Protocol):
    """Interface of the result of a program."""

    @property
    def verdict(self) -> Verdict:
        """CORRECT when every test passed."""
        ...

    @property
    def share(self) -> float:
        """Share of the tests that passed, in [0, 1]."""
        ...

    @property
    def reason(self) -> str:
        """One line for a human, "" when there is nothing to say."""
        ...


class ProgramGrader(Protocol):
    """Interface of what runs programs on their tests."""

    async def run(self, problem: Problem, source: str, language: str, group: int) -> Graded:
        """Run a program on the tests of (problem, group); `language`: the word behind its fence, in lower case."""
        ...


LONG_CHARACTERS = 20_000
"""the language of longer responses is detected in a thread: it takes about 1 ms for 2,000 characters"""
REASONS = {
    Verdict.CORRECT: "answer is right",
    Verdict.WRONG: "answer differs from the true one",
    Verdict.OPEN: "no verifier is asked: the problem is open",
    Verdict.TIMEOUT: "verifier killed at its deadline",
    Verdict.CRASH: "verifier process died",
    Verdict.UNVERIFIABLE: "the true answer is not understood",
}
_CODE_REASONS = {
    Verdict.CORRECT: "every test passed",
    Verdict.WRONG: "a test failed",
    Verdict.CRASH: "the box of the program died twice",
    Verdict.UNVERIFIABLE: "the tests cannot be run",
    Verdict.SANDBOX_REFUSED: "no program was run",
}


class Scorer:
    """Scores completions with one set of rewards."""

    def __init__(self, settings: RewardWeights, pool: Grader, programs: ProgramGrader | None = None):
        """settings: length_max must be resolved (0 stands for rollout.max_completion_tokens) where it weighs.

        Raises ConfigError when an extra reward is unknown or cannot be made.
        """
        self.settings, self.pool, self.programs = settings, pool, programs
        self.extras = choose(settings)
        self.undetermined = read_options("language", LanguageOptions, settings).undetermined

    async def score(
        self,
        problem: Problem,
        response: str,
        tokens: int | None,
        *,
        opened: bool = False,
        parts: Parts | None = None,
        group: int = 0,
    ) -> Reward:
        """Return the reward of a response of `tokens` tokens (as sampled, end token included) with every component.

        `tokens` None: unknown; there is no length penalty, and extras see 0. `opened`: the chat template already
        opened the thought (see `format.check_format`). `parts`: the format check, where it was made on tokens. `group`:
        which draw of the problem this is; all programs of a group sit the same tests.
        Raises ConfigError for impossible length limits, RunError when no verifier process can start.
        """
        settings = self.settings
        penalty = 0.0
        if tokens is not None:
            penalty = length_penalty(tokens, settings.length_max, settings.overlong_buffer, settings.length)
        if parts is None:
            parts = check_format(response, opened=opened, domain=problem.domain)
        if not parts.ok or parts.answer is None:
            return self._broken(parts.failed)
        parts = refuse_format(problem, parts, settings.refuse)
        if not parts.ok:
            return self._broken(parts.failed)
        parts = parts._replace(  # lone surrogates would break every later record
            thoughts=_storable(parts.thoughts), solution=_storable(parts.solution), answer=_storable(parts.answer)
        )
        verdict, share, reason = await self._grade(problem, parts, group)
        judge = functools.partial(
            consistency,
            hint=problem.language,
            undetermined=self.undetermined,
            hidden="foreign" in settings.refuse,
            program=parts.program is not None,
        )
        spoken_parts = (problem.text, parts.thoughts, parts.solution)
        if sum(map(len, spoken_parts)) > LONG_CHARACTERS:
            spoken = await asyncio.to_thread(judge, *spoken_parts)
        else:
            spoken = judge(*spoken_parts)
        extra: dict[str, float] = {}
        if verdict.graded and self.extras:
            parted = (parts.thoughts, parts.solution, parts.answer or "")
            case = Case(problem, *parted, tokens or 0, verdict, share or 0.0, settings)
            try:
                for chosen in self.extras:
                    extra[chosen.name] = await chosen.contribution(case)
            except Failed as failed:
                verdict, reason, extra = failed.verdict, str(failed), {}
        return self._sum(parts, verdict, share, penalty, spoken, extra, reason)

    def _broken(self, rule: str) -> Reward:
        lowest = {chosen.name: chosen.lowest for chosen in self.extras}
        total = sum(lowest.values()) if lowest else 0.0
        return Reward(total, 0.0, 0.0, 0.0, 0.0, Verdict.NO_ANSWER, reason=f"format: {rule}", extra=lowest)

    async def _grade(self, problem: Problem, parts: Parts, group: int) -> tuple[Verdict, float | None, str]:
        """Return the verdict, the share of the tests that passed (None for open problems), and the reason."""
        if not problem.verified:
            return Verdict.OPEN, None, REASONS[Verdict.OPEN]
        if refused := refuse_answer(problem, parts, self.settings.refuse):
            return Verdict.WRONG, 0.0, refused
        if parts.program is None:
            verdict = await self.pool.grade(problem.answer, parts.answer or "")
            return verdict, float(verdict is Verdict.CORRECT), REASONS[verdict]
        if self.programs is None:
            return Verdict.UNVERIFIABLE, 0.0, "no code verifier is at hand"
        graded = await self.programs.run(problem, parts.program.source, parts.program.language, group)
        said = _CODE_REASONS[graded.verdict] + (f": {graded.reason}" if graded.reason else "")
        return graded.verdict, graded.share, _storable(said)

    def _sum(
        self,
        parts: Parts,
        verdict: Verdict,
        share: float | None,
        penalty: float,
        spoken: Consistency,
        extra: dict[str, float],
        reason: str,
    ) -> Reward:
        settings = self.settings
        correctness = settings.correctness if verdict is Verdict.CORRECT else 0.0
        language = settings.language if spoken.consistent else 0.0
        total = settings.format + correctness + penalty + language
        return Reward(
            total=total + sum(extra.values()) if extra else total,
            format=settings.format,
            correctness=correctness,
            length=penalty,
            language=language,
            verdict=verdict,
            reason=reason + (f"; language: {spoken.reason}" if spoken.reason else ""),
            consistent=spoken.consistent,
            languages=spoken.languages,
            answer=(parts.answer or "")[:MAX_ANSWER_CHARACTERS],
            share=share,
            extra=extra,
        )


def _storable(text: str | None) -> str:
    return (text or "").encode("utf-8", "replace").decode("utf-8")


class _Blocking:
    """A grader for callers without an event loop of their own."""

    async def grade(self, gold: str, answer: str) -> Verdict:
        return compare(gold, answer)


def score(
    problem: Problem | Mapping[str, Any],
    response: str,
    config: Config | RewardWeights | None = None,
    *,
    tokens: int | None = None,
    opened: bool = False,
    programs: ProgramGrader | None = None,
) -> Reward:
    """Return the reward of one response with every component. Blocking; for event loops there is `Scorer`.

    problem: a `Problem`, or a row of a data file ({"problem", "answer", "language"?, "domain"?}). config: a run's
    settings or their [reward] section, None for Magistral's weights. tokens: length of the response; None when it is
    not known, then there is no length penalty. programs: what runs programs, None for boxes of this process. Raises
    DataError for an unusable row, ConfigError for impossible settings, RunError when no verifier process can start.
    """
    if isinstance(problem, Mapping):
        problem = checked(problem_of(problem, "problem"), "problem")
    if isinstance(config, Config):
        settings = config.reward.resolved(config.rollout.max_completion_tokens)
    else:
        settings = config or RewardWeights()
    if programs is None and problem.domain == "code":
        programs = _programs(settings.sandbox)
    return _finish(Scorer(settings, _Blocking(), programs).score(problem, response, tokens, opened=opened))


@functools.cache
def _programs(settings: Sandbox) -> Programs:
    """Return the boxes of blocking callers, which end with the process."""
    return Programs(settings)


def _finish(work: Coroutine[Any, Any, Reward]) -> Reward:
    """Run a coroutine to its end, also where this thread already runs an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    found: list[Reward] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(asyncio.run(work))
        except BaseException as error:  # noqa: BLE001 - raised again below, in the caller's thread
            failed.append(error)

    thread = threading.Thread(target=run, name="verify-score")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]


class FailureWindow:
    """Keeps the most recent verdicts, and raises when too many of them say nothing about the policy."""

    def __init__(self, max_share: float, size: int = 1000, least: int = 200) -> None:
        self.max_share, self.least = max_share, least
        self.recent: deque[Verdict] = deque(maxlen=max(size, least))

    @property
    def counts(self) -> dict[str, int]:
        """Number of recent verdicts of each class."""
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
