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
from collections.abc import Callable, Mapping, Sequence
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
    group: int = 0
    """which draw of the problem this is: the same for all completions of a group"""


class RewardOptions(Section):
    """The options of an extra reward; one with more of them has a subclass."""

    log_sigmoid: float | None = None
    """the reward counts as log sigmoid(value - log_sigmoid), so that sums mean "and\""""


Function = Callable[..., Any]
"""of a `Case`: a number, or an awaitable of one; of a list of them, where it is a reward of the group: as many"""
F = TypeVar("F", bound=Callable[..., Any])
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
    group: bool = False
    """called once, with all completions of a group"""


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
    group: bool = False,
) -> None:
    """Register a reward whose function is built from the settings. Raises ConfigError when the name is taken."""
    home = home or inspect.getsourcefile(make) or "?"
    known = REWARDS.get(name)
    if name in MAGISTRAL or (known is not None and known.home != home):
        owner = "Magistral's own" if name in MAGISTRAL else f"defined in {known.home if known else '?'}"
        raise ConfigError(f"{home}: a reward '{name}' exists already ({owner}): choose another name")
    REWARDS[name] = Registered(name, make, lowest, deadline_s, home, options, group)


def reward(
    name: str,
    lowest: float | Callable[[Any], float] = 0.0,
    options: type[RewardOptions] | None = None,
    *,
    group: bool = False,
) -> Callable[[F], F]:
    """Decorator: register a function as the reward `name`, which never returns less than `lowest`.

    options: of this reward; the function is given them as `options`, beside the case, and so is a function `lowest`.
    group: as `group_reward` does.
    """
    kind = options or RewardOptions

    def known(function: F) -> F:
        def make(settings: RewardWeights) -> Function:
            if options is None:
                return function
            return functools.partial(function, options=read_options(name, kind, settings))

        def least(settings: RewardWeights) -> float:
            return lowest(read_options(name, kind, settings)) if callable(lowest) else lowest

        register(name, make, lowest=least, home=inspect.getsourcefile(function) or "?", options=kind, group=group)
        return function

    return known


def group_reward(
    name: str, lowest: float | Callable[[Any], float] = 0.0, options: type[RewardOptions] | None = None
) -> Callable[[F], F]:
    """Decorator: register a function of all well-formed completions of a group, a list of cases, as the reward `name`.

    It is called when the last completion of the group has ended, and returns a number for each case. Else as `reward`.
    """
    return reward(name, lowest, options, group=True)


def read_options(name: str, kind: type[Kind], settings: RewardWeights) -> Kind:
    """Return the options of a reward. Raises ConfigError as `checked_options`."""
    return checked_options("reward.options", name, kind, settings.options.get(name, {}))


def checked_options(place: str, name: str, kind: type[Kind], given: Mapping[str, Any]) -> Kind:
    """Return the options that a file's reward or environment is given. place: the table of the settings that holds
    those of each name. Raises ConfigError that lists every mistake in them, one line each."""
    try:
        options = kind.model_validate(dict(given))
        if wrong := list(options.own_contradictions()):
            raise ConfigError("\n".join(wrong))
        return options
    except ValidationError as error:
        lines = []
        for found in error.errors():
            option = str(found["loc"][0]) if found["loc"] else ""
            where, field = f"{place}.{name}.{option}".rstrip("."), kind.model_fields.get(option)
            if field is None and option:
                has = ", ".join(sorted(kind.model_fields)) or "none"
                lines.append(f"{where}: there is no such option; {name} has {has}")
            elif found["type"] == "value_error":  # a check of the option's own says what is wrong
                lines.append(f"{where}: {found['ctx']['error']}")
            else:
                value = f" = {literal(given[option])}" if option in given else ""
                lines.append(f"{where}{value}: must be {type_name(field) if field is not None else found['msg']}")
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
    group: bool = False
    """a reward of the group"""
    of: tuple[Extra, ...] = ()
    """of "robust": the rewards that its value is made of; it has no function"""
    mean: float = 1.0
    """of "robust": weight of their mean; that of their minimum is 1 - mean"""

    async def value(self, case: Case) -> float:
        """Return the value of a completion. Raises Failed when the function raises, is late, or returns nonsense."""
        return self._usable(await self._called(case))

    async def values(self, cases: Sequence[Case]) -> list[float]:
        """Return [completions] the values of a group. Raises Failed as `value`."""
        found = await self._called(list(cases))
        if not isinstance(found, Sequence) or len(found) != len(cases):
            raise Failed(
                Verdict.CRASH, f"reward {self.name}: returned {found!r:.80}, not a number for each of {len(cases)}"
            )
        return [self._usable(value) for value in found]

    def made_of(self, values: Mapping[str, float]) -> float:
        """Return the value of "robust": mean * the mean of its rewards + (1 - mean) * the least of them.

        Source: Reward-Robust RLHF (2409.15360), section 3, with the ensemble's members as its set of rewards.
        """
        found = [values[member.name] for member in self.of]
        return self.mean * sum(found) / len(found) + (1 - self.mean) * min(found)

    def weighed(self, value: float) -> float:
        """Return weight * (transformed) value."""
        return self.weight * (value if self.reference is None else log_sigmoid(value, self.reference))

    async def _called(self, given: Case | list[Case]) -> Any:
        try:
            value = self.function(given)
            if inspect.isawaitable(value):
                value = await asyncio.wait_for(value, self.deadline_s)
            return value
        except TimeoutError as error:
            raise Failed(Verdict.TIMEOUT, f"reward {self.name}: no value after {self.deadline_s:g} s") from error
        except Failed:
            raise
        except Exception as error:
            raise Failed(Verdict.CRASH, f"reward {self.name}: {type(error).__name__}: {error}"[:500]) from error

    def _usable(self, value: Any) -> float:
        if not isinstance(value, int | float) or not math.isfinite(value) or value < self.floor:
            said = f"returned {value!r:.80}, not a number of at least {self.floor:g}"
            raise Failed(Verdict.CRASH, f"reward {self.name}{f' ({self.place})' if self.place else ''}: {said}")
        return value


class Chosen(NamedTuple):
    """What the settings choose."""

    extras: list[Extra]
    """the rewards with a weight, in the order of the settings"""
    gates: list[Extra]
    """rewards that a gate asks"""
    judges: list[Any]
    """the `llm_judge.Endpoint` of each judge that is asked"""


def choose(settings: RewardWeights) -> list[Extra]:
    """Return the extra rewards that the settings name; see `chosen`."""
    return chosen(settings).extras


def chosen(settings: RewardWeights) -> Chosen:
    """Return the extra rewards that the settings name, in their order, without those of weight 0, and what gates ask.

    The verifiers of the plug-in files are registered. Raises ConfigError for unknown names (naming the nearest), for
    options that a reward does not have, and for plug-in files that cannot be loaded.
    """
    global _in_force
    _in_force = settings
    read_options("language", LanguageOptions, settings)
    if not settings.extra and not settings.plugins and not settings.gates:
        return Chosen([], [], [])
    for module in READY:
        importlib.import_module(module)
    from verify.llm_judge import endpoints  # it knows this module

    hosted = _hosted(settings) if settings.plugins else {}
    judges = endpoints(settings)
    for name in judges:
        if name in {*MAGISTRAL, *REWARDS, *hosted}:
            raise ConfigError(f"reward.judges.{name}: a reward '{name}' exists already: choose another name")
        group = judges[name].judge.asks != "score"
        hosted[name] = Extra(name, judges[name].reward, 0.0, 0.0, 0.0, None, None, group=group)  # it has its deadlines

    def made(name: str, weight: float, setting: str = "reward.extra") -> Extra:
        found = hosted[name] if name in hosted else _extra(name, weight, settings, [*hosted], setting)
        if name == "robust":
            options = read_options(name, REWARDS[name].options, settings)
            of = tuple(made(member, 0.0, "reward.options.robust.of") for member in options.of)  # type: ignore[attr-defined]
            if not of or any(member.group or member.of for member in of):
                raise ConfigError(
                    f"reward.options.robust.of = {[one.name for one in of]}: name rewards of single completions"
                )
            floor = min(member.floor for member in of)
            found = found._replace(of=of, mean=options.mean, floor=floor)  # type: ignore[attr-defined]
        return _weighed(found, weight, settings)

    extras = [
        made(name, weight) for name, weight in settings.extra.items() if weight or name not in {*REWARDS, *hosted}
    ]
    gates = [made(name, 0.0, "reward.gates") for name in settings.gates if name not in ("correctness", "language")]
    if bad := [gate.name for gate in gates if gate.group or gate.of]:
        raise ConfigError(f"reward.gates.{bad[0]}: a gate must be a reward of single completions")
    return Chosen(extras, gates, [*judges.values()])


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
            known.name,
            functools.partial(host.values if known.group else host.value, known),
            *(0.0, 0.0, known.floor, None, None, known.place, known.group),
        )
        for known in described.rewards
    }


def _weighed(made: Extra, weight: float, settings: RewardWeights) -> Extra:
    reference = settings.options.get(made.name, {}).get("log_sigmoid")
    lowest = weight * (made.floor if reference is None else log_sigmoid(made.floor, reference))
    return made._replace(weight=weight, lowest=lowest, reference=reference)


def _extra(name: str, weight: float, settings: RewardWeights, hosted: Sequence[str], setting: str) -> Extra:
    if name in MAGISTRAL:
        raise ConfigError(f"{setting}.{name}: this is one of Magistral's own parts, write reward.{name} = {weight:g}")
    if name not in REWARDS:
        all_known = [*REWARDS, *hosted]
        near = difflib.get_close_matches(name, [*all_known, *MAGISTRAL], n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else "reward.plugins names the files that define more"
        raise ConfigError(f"{setting}.{name}: there is no such reward; {hint} Known: {', '.join(sorted(all_known))}")
    known = REWARDS[name]
    read_options(name, known.options, settings)
    made, deadline_s = known.make(settings), known.deadline_s(settings)
    return Extra(name, made, 0.0, 0.0, known.lowest(settings), None, deadline_s, group=known.group)
