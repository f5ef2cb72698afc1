"""Rewards by name: what one is given, and how one is registered (chosen_rewards.py chooses among them).

A reward is a function from a `Case` to a number. `[reward] extra = { name = weight }` adds weight * value to the total
of every well-formed completion; a broken format earns weight * lowest instead, so that breaking it never pays. Each
reward has options of its own, read from `options = { name = { option = value } }`; all have `log_sigmoid`, with which
the value counts as log sigmoid(value - log_sigmoid). docs/rewards.md shows how to add one. A reward that fails or is
late makes its completion "not graded" (the trainer masks it), never a crash.
Those of plug-in files run in a process of their own (`plugin_host.py`), so that one that hangs or exits harms no other;
so do the verifiers (`verify/verifiers`) that such files define.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError

from shared.errors import ConfigError
from shared.judge_settings import Judge
from shared.section import Section
from shared.sections import RewardWeights
from shared.settings_file import literal, type_name
from shared.types import Problem, Verdict

READY = ("verify.builtin_rewards", "verify.llm_judge", "oversight.judge")
"""modules with the rewards and judges that come with the project"""
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
"""takes a `Case`, returns a number or an awaitable of one; as a reward of the group it takes a list and returns one"""
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
    members: Callable[[RewardWeights], list[str]] | None = None
    """the rewards whose values a combination's function is given in place of a case"""


_in_force = RewardWeights()


def in_force() -> RewardWeights:
    """Return the [reward] section from which this process chose its rewards last."""
    return _in_force


def put_in_force(settings: RewardWeights) -> None:
    """Make a [reward] section the one that is in force."""
    global _in_force
    _in_force = settings


REWARDS: dict[str, Registered] = {}
"""name -> reward"""
JUDGES: dict[str, Callable[[str, Judge, str], Any]] = {}
"""`Judge.asks` -> the kind of `llm_judge.Endpoint` that asks it"""


def register(
    name: str,
    make: Callable[[RewardWeights], Function],
    *,
    lowest: Callable[[RewardWeights], float],
    deadline_s: Callable[[RewardWeights], float] = lambda settings: settings.deadline_s,
    home: str = "",
    options: type[RewardOptions] = RewardOptions,
    group: bool = False,
    members: Callable[[RewardWeights], list[str]] | None = None,
) -> None:
    """Register a reward whose function is built from the settings. Raises ConfigError when the name is taken."""
    home = home or inspect.getsourcefile(make) or "?"
    known = REWARDS.get(name)
    if name in MAGISTRAL or (known is not None and known.home != home):
        owner = "Magistral's own" if name in MAGISTRAL else f"defined in {known.home if known else '?'}"
        raise ConfigError(f"{home}: a reward '{name}' exists already ({owner}): choose another name")
    REWARDS[name] = Registered(name, make, lowest, deadline_s, home, options, group, members)


def reward(
    name: str,
    lowest: float | Callable[[Any], float] = 0.0,
    options: type[RewardOptions] | None = None,
    *,
    group: bool = False,
) -> Callable[[F], F]:
    """Decorator: register a function as the reward `name`, which never returns less than `lowest`.

    options: of this reward; the function is also given them, as `options`, and so is a function `lowest`.
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


def checked_options(table: str, name: str, kind: type[Kind], given: Mapping[str, Any]) -> Kind:
    """Return the options that a file's reward or environment is given. table: the table of the settings that holds
    those of each name. Raises ConfigError that lists every mistake in them, one line each."""
    try:
        options = kind.model_validate(dict(given))
        if wrong := list(options.own_contradictions()):
            raise ConfigError("\n".join(wrong))
        return options
    except ValidationError as error:
        lines, fields = [], {field.alias or attribute: field for attribute, field in kind.model_fields.items()}
        for mistake in error.errors():
            option = str(mistake["loc"][0]) if mistake["loc"] else ""
            where, field = f"{table}.{name}.{option}".rstrip("."), fields.get(option)
            if field is None and option:
                has = ", ".join(sorted(fields)) or "none"
                lines.append(f"{where}: there is no such option; {name} has {has}")
            elif mistake["type"] == "value_error":  # a check of the option's own says what is wrong
                lines.append(f"{where}: {mistake['ctx']['error']}")
            else:
                value = f" = {literal(given[option])}" if option in given else ""
                lines.append(f"{where}{value}: must be {type_name(field) if field is not None else mistake['msg']}")
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
