r"""The reward of one completion: format, correctness, length and language, weighted as in Magistral, and extras.

    format broken            -> total 0: nothing else is graded, no length penalty (the paper is silent on it; a
                                truncated completion breaks the format anyway, and equal zeros carry no signal)
    format right             -> weights.format
      + answer correct       -> + weights.correctness
      + length penalty       -> 0 down to - weights.length, right or wrong answer alike
      + one language         -> + weights.language, right or wrong answer alike
      + every extra reward   -> + weight * value; with a broken format + its lowest (`chosen_rewards.py`; default: none)

`reward.refuse` names what is refused although these rules would reward it: empty boxes, copied reasoning, answers that
are one of several, hidden or still to be computed, foreign words in formulas and code (`refusals.py`).

An open problem has a ground truth that nothing is compared with: correctness 0, the rest as above.
A verdict that is not graded (timeout, crash, unverifiable, sandbox refused) leaves correctness at 0, but says nothing
about the policy: the trainer must mask such a completion (`Reward.verdict.graded` is False), so its total must not be
used. An extra reward that fails does the same. A broken format is NO_ANSWER, which is a grade. A gate that is closed
(`reward.gates`) earns what a broken format does, and keeps its verdict.
Source: Magistral (2506.10910), section 2.2; total lies in [-0.1 + 0.1, 1.1] with the paper's weights.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from shared.config import Config
from shared.errors import ConfigError
from shared.sandbox_settings import Sandbox
from shared.sections import RewardWeights
from shared.types import Problem, Reward, Verdict
from verify.answer_checker import check_answer
from verify.chosen_rewards import choose
from verify.code.runner import ProgramVerifier
from verify.extract import MAX_ANSWER_CHARACTERS
from verify.format import Parts, check_format
from verify.language import Consistency, LanguageOptions, consistency
from verify.plugins import Case, Failed, read_options
from verify.refusals import refuse_answer, refuse_format
from verify.verifiers import NOT_VERIFIED, Answer, Finding, Needs, read_problem, verifier_for

LONG_CHARACTERS = 20_000
"""the language of longer completions is detected in a thread: it takes about 1 ms for 2,000 characters"""


def length_penalty(tokens: int, length_max: int, overlong_buffer: int, weight: float = 0.1) -> float:
    """Return the penalty of a completion of `tokens` tokens, between 0 and -weight.

    The soft length penalty of Magistral (2506.10910), section 2.2.3; the shape is DAPO's (2503.14476):
    0 up to length_max - overlong_buffer, then -weight * (tokens - length_max + overlong_buffer) / overlong_buffer up to
    length_max, -weight above. All three lengths are in tokens. Raises ConfigError when the limits are impossible.
    """
    if not 0 < overlong_buffer <= length_max:
        raise ConfigError(
            f"reward.overlong_buffer = {overlong_buffer} must lie between 1 and reward.length_max = {length_max} "
            "(0 stands for rollout.max_completion_tokens and must be resolved before): lower overlong_buffer"
        )
    if tokens <= length_max - overlong_buffer:
        return 0.0
    if tokens > length_max:
        return -weight
    return -weight * (tokens - length_max + overlong_buffer) / overlong_buffer


class CompletionScorer:
    """Scores completions with one set of rewards."""

    def __init__(self, settings: RewardWeights, checker: Any, programs: Any = None):
        """settings: length_max must be resolved (0 stands for rollout.max_completion_tokens) where it weighs.

        checker: an `AnswerChecker`, programs: a `ProgramVerifier`, for the verifiers that need them. Raises ConfigError
        when an extra reward is unknown or cannot be made.
        """
        self.settings = settings
        self.tools: dict[Needs, Any] = {"answer checker": checker, "sandbox": programs}
        chosen = choose(settings)
        self.extras = [extra for extra in chosen.extras if not extra.group]
        self.group_extras = [extra for extra in chosen.extras if extra.group]
        """rewards of the group, which `with_group` adds"""
        self.judges: list[Any] = chosen.judges
        members = [*(member for extra in self.extras for member in extra.members), *chosen.gates]
        self._asked = {member.name: member for member in members}
        """what is asked about a completion, each once"""
        self.undetermined = read_options("language", LanguageOptions, settings).undetermined

    async def score(
        self,
        problem: Problem,
        completion: str,
        tokens: int | None,
        *,
        opened: bool = False,
        parts: Parts | None = None,
        group: int = 0,
        token_ids: Sequence[int] = (),
    ) -> Reward:
        """Return the reward of a completion of `tokens` tokens (as sampled, end token included) with every component.

        `tokens` None: unknown; there is no length penalty, and extras see 0. `opened`: the chat template already
        opened the reasoning (see `format.check_format`). `parts`: the format check, where it was made on tokens.
        `group`: which draw of the problem this is; all programs of a group run the same tests. `token_ids`: as sampled.
        Raises ConfigError for impossible length limits, RunError when no verifier process can start.
        """
        settings, penalty = self.settings, 0.0
        if tokens is not None and settings.length:
            penalty = length_penalty(tokens, settings.length_max, settings.overlong_buffer, settings.length)
        if parts is None:
            parts = check_format(completion, opened=opened, verifier=verifier_for(problem))
        if parts.ok and parts.answer is not None:
            parts = refuse_format(problem, parts, settings.refuse)
        if not parts.ok or parts.answer is None:
            return self._broken(parts.failed)
        parts = parts._replace(  # lone surrogates would break every later record
            reasoning=_storable(parts.reasoning), response=_storable(parts.response), answer=_storable(parts.answer)
        )
        verdict, share, reason = await self._verify(problem, parts, group)
        check_language = functools.partial(
            consistency,
            hint=problem.language,
            asked=problem.reasoning_language,
            undetermined=self.undetermined,
            hidden="foreign" in settings.refuse,
            program=verifier_for(problem).answer_in == "code block",
        )
        spoken_parts = (problem.text, parts.reasoning, parts.response)
        if sum(map(len, spoken_parts)) > LONG_CHARACTERS:
            spoken = await asyncio.to_thread(check_language, *spoken_parts)
        else:
            spoken = check_language(*spoken_parts)
        extra: dict[str, float] = {}
        if verdict.graded and (self._asked or settings.gates):
            parted = (parts.reasoning, parts.response, parts.answer or "")
            case = Case(
                problem, *parted, tokens or 0, verdict, share or 0.0, settings, group, _storable(completion), token_ids
            )
            try:
                values = await self._values(case)
            except Failed as failed:
                verdict, reason = failed.verdict, str(failed)
            else:
                given = {"correctness": float(verdict is Verdict.CORRECT), "language": float(bool(spoken.consistent))}
                if closed := self._closed(given | values):
                    return self._broken(closed, verdict=verdict, share=share, answer=parts.answer)
                extra = {extra.name: extra.contribution(values) for extra in self.extras}
        return self._sum(parts, verdict, share, penalty, spoken, extra, reason)

    async def _values(self, case: Case) -> dict[str, float]:
        """Ask every reward that is needed about a completion, at once. Raises Failed of the first that failed."""
        answers = await asyncio.gather(*(member.value(case) for member in self._asked.values()), return_exceptions=True)
        values: dict[str, float] = {}
        for name, value in zip(self._asked, answers, strict=True):
            if isinstance(value, BaseException):
                raise value
            values[name] = value
        for judge, other in itertools.permutations((judge for judge in self.judges if judge.name in values), 2):
            judge.measurement.agreed.append(float((values[judge.name] > 0.5) == (values[other.name] > 0.5)))
        return values

    def _closed(self, values: Mapping[str, float]) -> str:
        """The first gate that a response does not pass, "" if it passes all. Source: CGPO (2409.20370), section 4: a
        response that breaks one constraint is worth nothing."""
        for name, least in self.settings.gates.items():
            if values[name] < least:
                return f"gate {name}: {values[name]:.3g} is below {least:g}"
        return ""

    async def with_group(self, rewards: Sequence[Reward], cases: Sequence[Case | None]) -> list[Reward]:
        """The rewards of a group with those of the group added.

        cases: [completions] None where the format is broken or a gate is closed, which earns the lowest, and where
        nothing is graded, which stays. A reward that fails makes the completions with a case "not graded".
        """
        formed = [case for case in cases if case is not None]
        added = [dict[str, float]() for _ in formed]
        try:
            for extra in self.group_extras if formed else ():
                values = await extra.members[0].values(formed)
                for parts, value in zip(added, values, strict=True):
                    parts[extra.name] = extra.contribution({extra.name: value})
        except Failed as failed:
            lost = Reward(0.0, 0.0, 0.0, 0.0, 0.0, failed.verdict, reason=str(failed))
            return [old if case is None else lost for old, case in zip(rewards, cases, strict=True)]
        left, lowest = iter(added), {extra.name: extra.lowest for extra in self.group_extras}
        completed = []
        for old, case in zip(rewards, cases, strict=True):
            more = next(left) if case is not None else lowest if old.verdict.graded else {}
            completed.append(
                msgspec.structs.replace(old, total=old.total + sum(more.values()), extra={**old.extra, **more})
            )
        return completed

    def _broken(
        self, rule: str, verdict: Verdict = Verdict.NO_ANSWER, share: float | None = None, answer: str | None = None
    ) -> Reward:
        lowest = {extra.name: extra.lowest for extra in self.extras}
        total = sum(lowest.values()) if lowest else 0.0
        reason = f"format: {rule}" if verdict is Verdict.NO_ANSWER else rule
        answer = None if answer is None else answer[:MAX_ANSWER_CHARACTERS]
        return Reward(total, 0.0, 0.0, 0.0, 0.0, verdict, reason=reason, extra=lowest, share=share, answer=answer)

    async def _verify(self, problem: Problem, parts: Parts, group: int) -> Finding:
        """Return what the verifier of the problem's domain finds, unless the answer is refused before."""
        if not problem.verified:
            return NOT_VERIFIED
        if refused := refuse_answer(problem, parts, self.settings.refuse):
            return Finding(Verdict.WRONG, 0.0, refused)
        answer = Answer(problem, parts.answer or "", parts.language, group)
        try:
            finding = await verifier_for(problem).verify(answer, self.tools)
        except Failed as failed:
            return Finding(failed.verdict, 0.0, str(failed))
        return finding._replace(reason=_storable(finding.reason))

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
    """An answer checker for callers without an event loop of their own."""

    async def check(self, ground_truth: str, answer: str) -> Verdict:
        return check_answer(ground_truth, answer)


def score(
    problem: Problem | Mapping[str, Any],
    completion: str,
    config: Config | RewardWeights | None = None,
    *,
    tokens: int | None = None,
    opened: bool = False,
    programs: ProgramVerifier | None = None,
) -> Reward:
    """Return the reward of one completion with every component. Blocking; for event loops there is `CompletionScorer`.

    problem: a `Problem`, or a row of a data file ({"problem", "answer", "language"?, "domain"?}). config: a run's
    settings or their [reward] section, None for Magistral's weights. tokens: length of the completion; None when it is
    not known, then there is no length penalty. programs: what runs programs, None for sandboxes of this process. Raises
    DataError for an unusable row, ConfigError for impossible settings, RunError when no verifier process can start.
    """
    if isinstance(problem, Mapping):
        problem = read_problem(problem, "problem")
    if isinstance(config, Config):
        settings = config.reward.resolved(config.rollout.max_completion_tokens)
    else:
        settings = config or RewardWeights()
    if programs is None and verifier_for(problem).needs == "sandbox":
        programs = _programs(settings.sandbox)
    return _finish(CompletionScorer(settings, _Blocking(), programs).score(problem, completion, tokens, opened=opened))


@functools.cache
def _programs(settings: Sandbox) -> ProgramVerifier:
    """Return the sandboxes of blocking callers, which end with the process."""
    return ProgramVerifier(settings)


def _finish(work: Coroutine[Any, Any, Reward]) -> Reward:
    """Run a coroutine to its end in a thread of its own, since this one may already run an event loop."""
    with ThreadPoolExecutor(1, "verify-score") as threads:
        return threads.submit(asyncio.run, work).result()
