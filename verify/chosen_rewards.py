"""The rewards that the settings choose, with their weights: built in, of plug-in files, or judges.

`[reward] extra = { name = weight }` adds weight * value. Most values are those of one reward; a combination, such as
"robust", makes its value of several.
"""

from __future__ import annotations

import asyncio
import difflib
import functools
import importlib
import inspect
import math
import operator
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shared.errors import ConfigError
from shared.sections import RewardWeights
from shared.types import Verdict
from shared.user_file import missing
from verify import verifiers
from verify.language import LanguageOptions
from verify.plugin_host import host_of
from verify.plugins import (
    JUDGES,
    MAGISTRAL,
    READY,
    REWARDS,
    Case,
    Failed,
    Function,
    InThread,
    log_sigmoid,
    put_in_force,
    read_options,
)


class Member(NamedTuple):
    """A reward as it is asked."""

    name: str
    function: Function
    floor: float
    """least value of the function"""
    deadline_s: float | None = None
    """None: the function enforces its own"""
    location: str = ""
    """file and line of a plug-in's function"""
    group: bool = False
    """a reward of the group"""
    columns: Mapping[str, str] = {}
    """of the rows that it asks for, as `plugins.ByColumns.columns`"""

    async def value(self, case: Case) -> float:
        """Return the value of a completion. Raises Failed when the function raises, is late, or returns nonsense."""
        return self._usable(await self._called(case))

    async def values(self, cases: Sequence[Case]) -> list[float]:
        """Return [completions] the values of a group. Raises Failed as `value`."""
        values = await self._called(list(cases))
        if not isinstance(values, Sequence) or len(values) != len(cases):
            raise Failed(
                Verdict.CRASH, f"reward {self.name}: returned {values!r:.80}, not a number for each of {len(cases)}"
            )
        return [self._usable(value) for value in values]

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
            reason = f"returned {value!r:.80}, not a number of at least {self.floor:g}"
            if isinstance(value, int | float) and value < self.floor:
                reason += f' (@reward("{self.name}", lowest={value:g}) allows it)'
            raise Failed(Verdict.CRASH, f"reward {self.name}{f' ({self.location})' if self.location else ''}: {reason}")
        return value


class Extra(NamedTuple):
    """A part of the total: weight * what the values of its members make."""

    name: str
    members: tuple[Member, ...]
    combine: Callable[[list[float]], float]
    """its value, from the members' values"""
    weight: float
    reference: float | None
    """reference of the log-sigmoid transform, None for none"""

    @property
    def group(self) -> bool:
        """Whether it is a reward of the group."""
        return self.members[0].group

    @property
    def lowest(self) -> float:
        """Least contribution, weight and transform included."""
        return self._weighed(min(member.floor for member in self.members))

    def contribution(self, values: Mapping[str, float]) -> float:
        """Return weight * (transformed) value. values: of the members, by name."""
        return self._weighed(self.combine([values[member.name] for member in self.members]))

    def _weighed(self, value: float) -> float:
        return self.weight * (value if self.reference is None else log_sigmoid(value, self.reference))


class Chosen(NamedTuple):
    """What the settings choose."""

    extras: list[Extra]
    """the parts with a weight, in the order of the settings"""
    gates: list[Member]
    """rewards that a gate asks"""
    judges: list[Any]
    """the `llm_judge.Endpoint` of each judge that is asked"""

    @property
    def columns(self) -> dict[str, str]:
        """The columns that these rewards ask for, as `plugins.ByColumns.columns`."""
        members = [*self.gates, *(member for extra in self.extras for member in extra.members)]
        asked = [pair for member in members for pair in member.columns.items()]
        return dict(sorted(asked, key=lambda pair: pair[1]))


def choose(settings: RewardWeights) -> Chosen:
    """Return the extra rewards that the settings name, in their order, without those of weight 0, and what gates ask.

    The verifiers of the plug-in files are registered. Raises ConfigError for unknown names (naming the nearest), for
    options that a reward does not have, and for plug-in files that cannot be loaded.
    """
    put_in_force(settings)
    read_options("language", LanguageOptions, settings)
    if not settings.extra and not settings.plugins and not settings.gates:
        return Chosen([], [], [])
    judges = endpoints(settings)
    known = _of_files(settings) if settings.plugins else {}
    for name, judge in judges.items():
        if name in {*MAGISTRAL, *REWARDS, *known}:
            raise ConfigError(f"reward.judges.{name}: a reward '{name}' exists already: choose another name")
        known[name] = Member(name, judge.reward, 0.0, group=judge.judge.asks != "score")  # it has its own deadlines
    extras = [
        _extra(name, weight, settings, known)
        for name, weight in settings.extra.items()
        if weight or name not in {*REWARDS, *known}
    ]
    gates = []
    for name in settings.gates:
        if name not in ("correctness", "language"):
            gate = _member(name, settings, known, "reward.gates")
            if gate.group or _member_names(name, settings):
                raise ConfigError(f"reward.gates.{name}: a gate must be a reward of single completions")
            gates.append(gate)
    return Chosen(extras, gates, [*judges.values()])


def endpoints(settings: RewardWeights) -> dict[str, Any]:
    """Return the `llm_judge.Endpoint` of each judge of [reward.judges] that a reward or a gate asks, by name."""
    for module in READY:
        importlib.import_module(module)
    named = {*settings.extra, *settings.gates}
    asked = named.union(*(_member_names(name, settings) for name in named))
    return {
        name: JUDGES[judge.asks](name, judge, f"reward.judges.{name}")
        for name, judge in settings.judges.items()
        if name in asked
    }


def _of_files(settings: RewardWeights) -> dict[str, Member]:
    """Return the rewards of the plug-in files by name; register their verifiers."""
    files = [Path(file).resolve() for file in settings.plugins]
    for file, path in zip(settings.plugins, files, strict=True):
        if not path.is_file():
            raise ConfigError(
                f"reward.plugins names '{file}': {missing(Path(file))} (paths start at the working directory)"
            )
    host = host_of(tuple(map(str, files)))
    described = host.describe(settings)
    where = [*(one.where for one in described.rewards), *(one.where for one in described.verifiers)]
    for path in files:
        if not any(at.startswith(str(path)) for at in where):
            raise ConfigError(
                f'reward.plugins: {path} was read, and registers nothing: write @reward("NAME") or @verifier("DOMAIN") '
                "above a function of it"
            )
    verifiers.register_of_user([host.verifier(verifier, settings) for verifier in described.verifiers])
    members = {}
    for reward in described.rewards:
        function = functools.partial(host.values if reward.group else host.value, reward)
        members[reward.name] = Member(
            reward.name, function, reward.floor, None, reward.where, reward.group, reward.columns
        )
    return members


def _member_names(name: str, settings: RewardWeights) -> Collection[str]:
    """Return the rewards of which a combination makes its value; none for other rewards."""
    registered = REWARDS.get(name)
    return registered.members(settings) if registered is not None and registered.members is not None else ()


def _extra(name: str, weight: float, settings: RewardWeights, known: Mapping[str, Member]) -> Extra:
    reference = settings.options.get(name, {}).get("log_sigmoid")
    if name not in REWARDS or REWARDS[name].members is None:
        return Extra(
            name, (_member(name, settings, known, "reward.extra", weight),), operator.itemgetter(0), weight, reference
        )
    names, setting = _member_names(name, settings), f"reward.options.{name}.of"
    members = tuple(_member(member, settings, known, setting) for member in names)
    if not members or any(member.group or _member_names(member.name, settings) for member in members):
        raise ConfigError(f"{setting} = {[*names]}: name rewards of single completions")
    return Extra(name, members, REWARDS[name].make(settings), weight, reference)


def _member(
    name: str, settings: RewardWeights, known: Mapping[str, Member], setting: str, weight: float = 0.0
) -> Member:
    """Return a reward by name. setting: the table that names it. known: the rewards of files and the judges."""
    if name in known:
        return known[name]
    if name in MAGISTRAL:
        raise ConfigError(f"{setting}.{name}: this is one of Magistral's own parts, write reward.{name} = {weight:g}")
    if name not in REWARDS:
        all_known = [*REWARDS, *known]
        near = difflib.get_close_matches(name, [*all_known, *MAGISTRAL], n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else "reward.plugins names the files that define more"
        raise ConfigError(f"{setting}.{name}: there is no such reward; {hint} Known: {', '.join(sorted(all_known))}")
    reward = REWARDS[name]
    read_options(name, reward.options, settings)
    function, floor, deadline_s = reward.make(settings), reward.lowest(settings), reward.deadline_s(settings)
    if reward.home not in {sys.modules[module].__file__ for module in READY if module in sys.modules}:
        mine = InThread(name, function, deadline_s)
        return Member(name, mine, floor, None, group=reward.group, columns=reward.columns)
    return Member(name, function, floor, deadline_s, group=reward.group)
