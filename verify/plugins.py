"""Rewards by name: what one is given, and how one is registered (chosen_rewards.py chooses among them).

A reward is a function from a `Case` to a number. `[reward] extra = { name = weight }` adds weight * value to the total
of every well-formed completion; a broken format earns weight * lowest instead, so that breaking it never pays. Each
reward has options of its own, read from `options = { name = { option = value } }`; all have `log_sigmoid`, with which
the value counts as log sigmoid(value - log_sigmoid). docs/rewards.md shows how to add one. A reward that fails or is
late makes its completion "not graded" (the trainer masks it), never a crash.
Those of plug-in files run in a process of their own (`plugin_host.py`), so that one that hangs or exits harms no other;
so do the verifiers (`verify/verifiers`) that such files define. Those that a program registers for a session of its own
run in that program's process (`InThread`).

A function with a parameter `completions`, `prompts` or `completion_ids` has TRL's signature (`ByColumns`).
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError

from shared.errors import ConfigError
from shared.judge_settings import Judge
from shared.section import Section
from shared.sections import RewardWeights
from shared.served import line_of
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
    text: str = ""
    """the whole completion, with the tags of its reasoning"""
    token_ids: Sequence[int] = ()
    """the completion as sampled; () where only its text is known"""


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
    function: Function | None = None
    """what `reward` decorates"""
    columns: Mapping[str, str] = {}
    """as `ByColumns.columns`"""


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
    group: as `group_reward` does. The function takes a `Case`, or has TRL's signature (`ByColumns`).
    """
    kind = options or RewardOptions

    def known(function: F) -> F:
        by_columns = bool({*inspect.signature(function).parameters} & {*GIVEN})
        asked: Function = ByColumns(name, function) if by_columns else function

        def make(settings: RewardWeights) -> Function:
            if options is None:
                return asked
            return functools.partial(asked, options=read_options(name, kind, settings))

        def least(settings: RewardWeights) -> float:
            return lowest(read_options(name, kind, settings)) if callable(lowest) else lowest

        notebook = getattr(function, "__module__", "") == "__main__"  # or script; each cell has a file of its own
        home = "__main__" if notebook else inspect.getsourcefile(function) or "?"
        register(name, make, lowest=least, home=home, options=kind, group=group)
        REWARDS[name] = REWARDS[name]._replace(function=function, columns=getattr(asked, "columns", {}))
        return function

    return known


def group_reward(
    name: str, lowest: float | Callable[[Any], float] = 0.0, options: type[RewardOptions] | None = None
) -> Callable[[F], F]:
    """Decorator: register a function of all well-formed completions of a group, a list of cases, as the reward `name`.

    It is called when the last completion of the group has ended, and returns a number for each case. Else as `reward`.
    """
    return reward(name, lowest, options, group=True)


def registered(function: Any) -> str:
    """Return the name of a reward, under which a plain function is registered first: its own. Raises ConfigError."""
    if known := [each.name for each in REWARDS.values() if each.function is function]:
        return known[0]
    name = getattr(function, "__name__", "")
    if not callable(function) or not name.isidentifier():
        raise ConfigError(f"rewards: {function!r:.80} is no function with a name: write it with def")
    reward(name)(function)
    return name


GIVEN = ("prompts", "completions", "completion_ids")
"""arguments of TRL's signature that are no columns of the rows"""
EVERY = "*"
"""stands for all columns"""


class ByColumns:
    """A function of a `Case` that calls one with TRL's signature, by keyword and with lists of one. That one returns a
    list with a number, or None where the reward does not apply, which counts 0.

    prompts and completions are texts, or lists of messages where the row's `prompt` is one; completion_ids are tokens;
    further arguments are columns of the rows, None in a row that lacks one. Source: TRL, GRPO Trainer, "Using a custom
    reward function".
    """

    def __init__(self, name: str, function: Function):
        self.function, self.takes = function, inspect.signature(function).parameters
        self.columns = {"prompt": ""}
        """columns that it asks for -> `name` where it cannot do without, else \"\""""
        for parameter in self.takes.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                self.columns[EVERY] = ""
            elif parameter.name not in (*GIVEN, "options"):
                self.columns[parameter.name] = name if parameter.default is parameter.empty else ""
        functools.update_wrapper(self, function, ())

    def __call__(self, case: Case, **options: Any) -> Any:
        """Return the value, or an awaitable of it. Raises TypeError for what is no list of one."""
        row, needed = case.problem.columns, [name for name, who in self.columns.items() if who]
        talk = isinstance(row.get("prompt"), list)
        given: dict[str, Any] = {name: [row.get(name)] for name in (*needed, *row) if name not in ("prompt", "options")}
        given["prompts"] = [row["prompt"] if talk else case.problem.text]
        given["completions"] = [[{"role": "assistant", "content": case.text}] if talk else case.text]
        given["completion_ids"] = [list(case.token_ids)]
        given = {name: value for name, value in given.items() if EVERY in self.columns or name in self.takes}
        values = self.function(**given, **options)
        return _awaited(values) if inspect.isawaitable(values) else _only(values)


async def _awaited(values: Awaitable[Any]) -> float:
    return _only(await values)


def _only(values: Any) -> float:
    try:
        [value] = values
        return 0.0 if value is None else float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"returned {values!r:.80}, not a list with a number or None for each completion") from error


class InThread:
    """A reward of this process with a deadline. Calls run one after the other, each in a thread, which cannot be ended:
    while one hangs, further calls fail at once. What the function awaits is awaited here, and calls overlap."""

    def __init__(self, name: str, function: Function, deadline_s: float):
        self.name, self.function, self.deadline_s = name, function, deadline_s
        self._turn, self._busy = asyncio.Lock(), False

    async def __call__(self, given: Any) -> Any:
        """Return the function's value. Raises Failed where it raises, or comes too late."""
        async with self._turn:
            if self._busy:
                raise Failed(Verdict.TIMEOUT, f"reward {self.name}: an earlier call has not come to an end")
            self._busy, answer = True, Future[Any]()
            threading.Thread(target=self._run, args=(given, answer), name=f"reward {self.name}", daemon=True).start()
            value = await self._in_time(asyncio.wrap_future(answer))
        return await self._in_time(value) if inspect.isawaitable(value) else value

    async def _in_time(self, work: Awaitable[Any]) -> Any:
        try:
            return await asyncio.wait_for(work, self.deadline_s)
        except TimeoutError as error:
            raise Failed(Verdict.TIMEOUT, f"reward {self.name}: no value after {self.deadline_s:g} s") from error
        except Exception as error:
            file = getattr(getattr(inspect.unwrap(self.function), "__code__", None), "co_filename", "")
            at = f" ({line})" if (line := line_of(error, [file])) else ""
            raise Failed(Verdict.CRASH, f"reward {self.name}{at}: {type(error).__name__}: {error}"[:500]) from error

    def _run(self, given: Any, answer: Future[Any]) -> None:
        try:
            value, fault = self.function(given), None
        except BaseException as error:  # noqa: BLE001 - raised where the value is awaited
            ends = isinstance(error, StopIteration) or not isinstance(error, Exception)  # a loop, this program
            value, fault = None, RuntimeError(f"it raises {error!r}") if ends else error
        self._busy = False
        with suppress(InvalidStateError, RuntimeError):  # nobody waits any more
            answer.set_exception(fault) if fault is not None else answer.set_result(value)


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
