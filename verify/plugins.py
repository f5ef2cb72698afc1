"""Rewards by name: what one is given, how one is registered, and how the settings choose among them.

A reward is a function from a `Case` to a number. `[reward] extra = { name = weight }` adds weight * value to the total
of every well-formed completion; a broken format earns weight * lowest instead, so that breaking it never pays. Each
reward has options of its own, read from `options = { name = { option = value } }`; all have `log_sigmoid`, with which
the value counts as log sigmoid(value - log_sigmoid). docs/rewards.md shows how to add one. A reward that fails or is
late makes its completion "not graded" (the trainer masks it), never a crash.
Those of plug-in files run in a process of their own (`plugin_host.py`), so that one that hangs or exits harms no other;
so do the verifiers (`verify/verifiers`) that such files define.
"""

from __future__ import annotations

import asyncio
import difflib
import functools
import importlib
import importlib.util
import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError

from shared.errors import ConfigError
from shared.section import Section
from shared.sections import RewardWeights
from shared.settings_file import literal, type_name
from shared.types import Problem, Verdict
from verify import verifiers
from verify.language import LanguageOptions

READY = ("verify.builtin_rewards", "verify.llm_judge")
"""modules with the rewards that come with the project"""
MAGISTRAL = ("format", "correctness", "length", "language")


class Case(NamedTuple):
    """One graded, well-formed completion, as a reward sees it."""

    problem: Problem
    reasoning: str
    response: str
    """text after the reasoning"""
    answer: str
    """the final answer, or the program"""
    tokens: int
    """length of the completion, end token included"""
    verdict: Verdict
    """CORRECT or WRONG; OPEN for open problems"""
    share: float
    """share of a program's tests that passed; 1 or 0 for a right or wrong answer; 0 for open problems"""
    settings: RewardWeights
    """the [reward] section, length_max filled in"""


class RewardOptions(Section):
    """The options of an extra reward; one with more of them has a subclass."""

    log_sigmoid: float | None = None
    """the reward counts as log sigmoid(value - log_sigmoid), so that sums mean "and\""""


Function = Callable[[Case], float | Awaitable[float]]
F = TypeVar("F", bound=Callable[..., float | Awaitable[float]])
Kind = TypeVar("Kind", bound=Section)


class Registered(NamedTuple):
    """A reward that the settings may name."""

    name: str
    make: Callable[[RewardWeights], Function]
    lowest: Callable[[RewardWeights], float]
    deadline_s: Callable[[RewardWeights], float]
    home: str
    """file that defines it"""
    options: type[RewardOptions] = RewardOptions


_in_force = RewardWeights()


def in_force() -> RewardWeights:
    """Return the [reward] section of which `choose` chose last in this process."""
    return _in_force


REWARDS: dict[str, Registered] = {}
"""name -> reward"""


def register(
    name: str,
    make: Callable[[RewardWeights], Function],
    *,
    lowest: Callable[[RewardWeights], float],
    deadline_s: Callable[[RewardWeights], float] = lambda settings: settings.deadline_s,
    home: str = "",
    options: type[RewardOptions] = RewardOptions,
) -> None:
    """Register a reward whose function is built from the settings. Raises ConfigError when the name is taken."""
    home = home or inspect.getsourcefile(make) or "?"
    known = REWARDS.get(name)
    if name in MAGISTRAL or (known is not None and known.home != home):
        owner = "Magistral's own" if name in MAGISTRAL else f"defined in {known.home if known else '?'}"
        raise ConfigError(f"{home}: a reward '{name}' exists already ({owner}): choose another name")
    REWARDS[name] = Registered(name, make, lowest, deadline_s, home, options)


def reward(
    name: str, lowest: float | Callable[[Any], float] = 0.0, options: type[RewardOptions] | None = None
) -> Callable[[F], F]:
    """Decorator: register a function as the reward `name`, which never returns less than `lowest`.

    options: of this reward; the function is given them as `options`, beside the case, and so is a function `lowest`.
    """
    kind = options or RewardOptions

    def known(function: F) -> F:
        def make(settings: RewardWeights) -> Function:
            if options is None:
                return function
            return functools.partial(function, options=read_options(name, kind, settings))

        def least(settings: RewardWeights) -> float:
            return lowest(read_options(name, kind, settings)) if callable(lowest) else lowest

        register(name, make, lowest=least, home=inspect.getsourcefile(function) or "?", options=kind)
        return function

    return known


def read_options(name: str, kind: type[Kind], settings: RewardWeights) -> Kind:
    """Return the options of a reward. Raises ConfigError that lists every mistake in them, one line each."""
    given = settings.options.get(name, {})
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        lines = []
        for found in error.errors():
            option = str(found["loc"][0])
            place, field = f"reward.options.{name}.{option}", kind.model_fields.get(option)
            if field is None:
                lines.append(f"{place}: there is no such option; {name} has {', '.join(sorted(kind.model_fields))}")
            else:
                value = f" = {literal(given[option])}" if option in given else ""
                lines.append(f"{place}{value}: must be {type_name(field)}")
        raise ConfigError("\n".join(lines)) from error


def log_sigmoid(value: float, reference: float) -> float:
    """Return log(1 / (1 + exp(reference - value))), computed without overflow; between -inf and 0.

    A sum of such terms rewards being above the reference in all of them ("and"): far above, a term saturates. Source:
    Transforming and Combining Rewards for Aligning Large Language Models (2402.00742).
    """
    difference = value - reference
    return min(difference, 0.0) - math.log1p(math.exp(-abs(difference)))


class Failed(Exception):
    """A reward gave no usable value; `verdict` says why."""

    def __init__(self, verdict: Verdict, reason: str):
        self.verdict = verdict
        super().__init__(reason)


class Extra(NamedTuple):
    """A reward that the settings chose, with its weight and bounds."""

    name: str
    function: Function
    weight: float
    lowest: float
    """least contribution, weight and transform included"""
    floor: float
    """least value of the function"""
    reference: float | None
    """reference of the log-sigmoid transform, None for none"""
    deadline_s: float | None
    """None: the function enforces its own"""
    place: str = ""
    """file and line of a plug-in's function"""

    async def contribution(self, case: Case) -> float:
        """Return weight * (transformed) value. Raises Failed when the function raises, is late, or returns nonsense."""
        try:
            value = self.function(case)
            if inspect.isawaitable(value):
                value = await asyncio.wait_for(value, self.deadline_s)
        except TimeoutError as error:
            raise Failed(Verdict.TIMEOUT, f"reward {self.name}: no value after {self.deadline_s:g} s") from error
        except Failed:
            raise
        except Exception as error:
            raise Failed(Verdict.CRASH, f"reward {self.name}: {type(error).__name__}: {error}"[:500]) from error
        if not isinstance(value, int | float) or not math.isfinite(value) or value < self.floor:
            said = f"returned {value!r:.80}, not a number of at least {self.floor:g}"
            raise Failed(Verdict.CRASH, f"reward {self.name}{f' ({self.place})' if self.place else ''}: {said}")
        return self.weight * (value if self.reference is None else log_sigmoid(value, self.reference))


def choose(settings: RewardWeights) -> list[Extra]:
    """Return the extra rewards that the settings name, in their order, without those of weight 0.

    The verifiers of the plug-in files are registered. Raises ConfigError for unknown names (naming the nearest), for
    options that a reward does not have, and for plug-in files that cannot be loaded.
    """
    global _in_force
    _in_force = settings
    read_options("language", LanguageOptions, settings)
    if not settings.extra and not settings.plugins:
        return []
    for module in READY:
        importlib.import_module(module)
    hosted = _hosted(settings) if settings.plugins else {}
    return [
        _weighed(hosted[name] if name in hosted else _extra(name, weight, settings, [*hosted]), weight, settings)
        for name, weight in settings.extra.items()
        if weight or name not in {*REWARDS, *hosted}
    ]


def _hosted(settings: RewardWeights) -> dict[str, Extra]:
    """Return the rewards of the plug-in files by name, without their weights yet; register their verifiers."""
    from verify.plugin_host import host_of  # it knows this module

    files = [Path(file).resolve() for file in settings.plugins]
    for file, path in zip(settings.plugins, files, strict=True):
        if not path.is_file():
            raise ConfigError(
                f"reward.plugins names '{file}': there is no such file (paths start at the working directory)"
            )
    host = host_of(tuple(map(str, files)))
    described = host.describe(settings)
    verifiers.register_of_user([host.verifier(one, settings) for one in described.verifiers])
    return {
        known.name: Extra(
            known.name, functools.partial(host.value, known), 0.0, 0.0, known.floor, None, None, known.place
        )
        for known in described.rewards
    }


def _weighed(made: Extra, weight: float, settings: RewardWeights) -> Extra:
    reference = settings.options.get(made.name, {}).get("log_sigmoid")
    lowest = weight * (made.floor if reference is None else log_sigmoid(made.floor, reference))
    return made._replace(weight=weight, lowest=lowest, reference=reference)


def _extra(name: str, weight: float, settings: RewardWeights, hosted: Sequence[str]) -> Extra:
    if name in MAGISTRAL:
        raise ConfigError(
            f"reward.extra.{name}: this is one of Magistral's own parts, write reward.{name} = {weight:g}"
        )
    if name not in REWARDS:
        all_known = [*REWARDS, *hosted]
        near = difflib.get_close_matches(name, [*all_known, *MAGISTRAL], n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else "reward.plugins names the files that define more"
        raise ConfigError(f"reward.extra.{name}: there is no such reward; {hint} Known: {', '.join(sorted(all_known))}")
    known = REWARDS[name]
    read_options(name, known.options, settings)
    return Extra(name, known.make(settings), 0.0, 0.0, known.lowest(settings), None, known.deadline_s(settings))
