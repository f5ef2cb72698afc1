"""The process in which plug-in files run, with their rewards and verifiers: what hangs, exits or exhausts memory there
harms nothing else.

It runs as a `Child` (shared/child_process.py) of the host. What the functions print goes to standard error. The
kernel's out-of-memory killer takes this process first.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from shared.chat import AnswerFormat
from shared.errors import ConfigError
from shared.launch.calls import call
from shared.sections import RewardWeights
from shared.served import Served, line_of
from shared.types import Problem, Verdict
from shared.user_file import run_file
from verify import plugins, verifiers


class Described(msgspec.Struct):
    """One reward that the files define, under the given settings."""

    name: str
    floor: float
    deadline_s: float
    where: str
    """file and line of the function"""
    group: bool = False
    columns: dict[str, str] = {}


class DescribedVerifier(msgspec.Struct):
    """One verifier that the files define; the fields are those of `verifiers.Verifier`."""

    domain: str
    ground_truth: verifiers.GroundTruth
    answer_in: verifiers.AnswerIn
    form: AnswerFormat
    verifies: bool
    home: str
    where: str
    """file and line of the function"""


class Description(msgspec.Struct):
    """All rewards and verifiers of the files."""

    rewards: list[Described]
    verifiers: list[DescribedVerifier]


class Value(msgspec.Struct):
    """The outcome of a call: numbers, or why there are none."""

    values: list[float] | None
    """[cases] of a reward; a single one of a verification"""
    verdict: Verdict = Verdict.CORRECT
    reason: str = ""


CaseFields = tuple[Problem, str, str, str, int, Verdict, float, int, str, list[int]]
"""the fields of a `plugins.Case` in their order, without the settings"""


@lru_cache(maxsize=64)
def settings_of(text: str) -> RewardWeights:
    """Parse the JSON of the [reward] section."""
    return RewardWeights.model_validate_json(text)


@lru_cache(maxsize=256)
def function_of(name: str, settings: str) -> plugins.Function:
    """Return the function of a reward under the given settings, which is made once."""
    return plugins.REWARDS[name].make(settings_of(settings))


def _where(function: Any, home: str) -> str:
    code = getattr(inspect.unwrap(getattr(function, "func", function)), "__code__", None)
    return f"{home}:{code.co_firstlineno}" if inspect.iscode(code) else home


def _value(values: Any, count: int) -> list[float] | None:
    """The values as numbers; None unless they are a list of `count` numbers."""
    if not isinstance(values, list | tuple) or len(values) != count:
        return None
    return list(map(float, values)) if all(isinstance(value, int | float) for value in values) else None


class PluginProcess(Served):
    """Runs the functions of plug-in files."""

    says_begun = True
    expendable = True

    @call("run the files", deadline=60.0)
    def begin(self, files: list[str]) -> None:
        """Run the files. Raises ConfigError, with the line."""
        self.files = files
        try:
            for module in plugins.READY:
                importlib.import_module(module)
            verifiers.known_domains()  # all are loaded, so that a name which is taken is noticed
            for file in files:
                run_file(Path(file), "reward.plugins")
        except ConfigError:
            raise
        except BaseException as error:
            raise ConfigError(f"reward.plugins: {self._fault(error, 'a file')}") from error

    @call("describe", deadline=60.0)
    async def describe(self, settings: str) -> Description:
        """What the files define under these settings. Raises ConfigError where a reward cannot be made."""
        try:
            rewards = [self._reward(known, settings) for known in plugins.REWARDS.values() if known.home in self.files]
            verifying = [known for known in verifiers.VERIFIERS.values() if known.home in self.files]
            return Description(rewards, [self._verifier(known) for known in verifying])
        except ConfigError:
            raise
        except BaseException as error:
            raise ConfigError(f"reward.plugins: {self._fault(error, 'a reward')}") from error

    def _reward(self, known: plugins.Registered, settings: str) -> Described:
        weights = settings_of(settings)
        plugins.read_options(known.name, known.options, weights)
        where = _where(function_of(known.name, settings), known.home)
        return Described(
            known.name, float(known.lowest(weights)), known.deadline_s(weights), where, known.group, {**known.columns}
        )

    def _verifier(self, known: verifiers.Verifier) -> DescribedVerifier:
        where = _where(known.function, known.home)
        if known.needs or known.validate is not None:
            raise ConfigError(
                f"reward.plugins: the verifier of '{known.domain}' ({where}) gives 'needs' or 'validate', which only "
                "verifiers of this project can: leave them out"
            )
        return DescribedVerifier(
            known.domain, known.ground_truth, known.answer_in, known.form, known.verifies, known.home, where
        )

    def _fault(self, error: BaseException, what: str) -> str:
        where = line_of(error, self.files)
        return f"{where or what} fails with {type(error).__name__}: {error}"[:500]

    @call("reward", deadline=60.0)
    async def reward(self, settings: str, name: str, cases: list[CaseFields]) -> Value:
        """The value of one case, or those of the cases of a group. settings: JSON of the [reward] section."""
        weights, known = settings_of(settings), plugins.REWARDS[name]

        def work() -> Any:
            made = [plugins.Case(*fields[:7], weights, *fields[7:]) for fields in cases]
            return function_of(name, settings)(made if known.group else made[0])

        if known.group:
            return await self._outcome(work, known.deadline_s(weights), len(cases))
        return await self._outcome(work, known.deadline_s(weights))

    @call("verify", deadline=60.0)
    async def verify(self, settings: str, domain: str, answer: verifiers.Answer) -> Value:
        """Whether an answer is right, as a number: the share of it that is."""
        function, weights = verifiers.VERIFIERS[domain].function, settings_of(settings)
        return await self._outcome(lambda: function(answer), weights.deadline_s)

    async def _outcome(self, work: Callable[[], Any], deadline_s: float, count: int | None = None) -> Value:
        """Call one function; its value, or why there is none. count: of the numbers in its list, None for a number."""
        try:
            value = work()
            if inspect.isawaitable(value):
                value = await asyncio.wait_for(value, deadline_s)
            if (values := _value([value], 1) if count is None else _value(value, count)) is not None:
                return Value(values)
            instead = "which is no number" if count is None else f"not a list of {count} numbers"
            return Value(None, Verdict.CRASH, f"returned {value!r:.80}, {instead}")
        except TimeoutError:
            return Value(None, Verdict.TIMEOUT, f"no value after {deadline_s:g} s")
        except plugins.Failed as error:
            return Value(None, error.verdict, str(error))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever a plug-in raises, sys.exit too, is told by the host
            where, fault = line_of(error, self.files), f"{type(error).__name__}: {error}"[:400]
            return Value(None, Verdict.CRASH, f"{fault} ({where})" if where else fault)
