"""Calls: methods of a rank's class that the controller may call. The decorated method is the whole declaration.

    class TrainerRank:
        @call("optimiser step", deadline="step")
        def step(self, learning_rate: float) -> Stepped: ...

    await trainers.call(TrainerRank.step, 1e-5)

The message is a struct of the method's parameters, tagged with the method's name, and the answer a struct around what
it returns. msgspec derives both from the annotations and checks them where they arrive; nothing is ever pickled.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, Protocol, TypeVar

import msgspec

from shared.errors import RunError
from shared.launch.messages import Message, RankFailed

if TYPE_CHECKING:
    from shared.launch.batch_queue import BatchQueue
    from shared.sections import Deadlines

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Method = TypeVar("Method", bound=Callable[..., Any])
Deadline = Literal["start", "step", "sync"] | float
"""the setting deadlines.NAME_s, or seconds of a call that no setting concerns"""

encode = msgspec.msgpack.Encoder().encode


class CallReply(msgspec.Struct, Generic[Result], tag=True):
    """The answer to a call that succeeded."""

    value: Result


@dataclass(frozen=True, eq=False)
class RankCall:
    """What the controller and the rank know about a callable method."""

    method: Callable[..., Any]
    phase: str
    """for messages to people; may name parameters, as in "weight update to version {version}" """
    deadline: Deadline
    last: bool
    """the rank ends after it has answered"""
    survives: tuple[type[Exception], ...]
    """errors that are reported and do not end the rank"""

    @cached_property
    def message(self) -> type[msgspec.Struct]:
        """The struct of the method's parameters."""
        hints = typing.get_type_hints(self.method)
        fields = []
        for parameter in list(inspect.signature(self.method).parameters.values())[1:]:
            required = (parameter.name, hints[parameter.name])
            default = parameter.default
            fields.append(required if default is parameter.empty else (*required, default))
        return msgspec.defstruct(self.method.__name__, fields, tag=self.method.__name__)

    @cached_property
    def decode_answer(self) -> Callable[[bytes | memoryview], Any]:
        """Decode an answer to `CallReply` or `RankFailed`. Raises msgspec.DecodeError for a value of another type."""
        returned = typing.get_type_hints(self.method)["return"]
        return msgspec.msgpack.Decoder(RankFailed | CallReply[returned]).decode  # type: ignore[valid-type]

    @property
    def setting(self) -> str:
        """Name of the setting that is the deadline; "" if there is none."""
        return f"deadlines.{self.deadline}_s" if isinstance(self.deadline, str) else ""

    def seconds(self, deadlines: Deadlines) -> float:
        """Return the deadline in seconds."""
        return getattr(deadlines, f"{self.deadline}_s") if isinstance(self.deadline, str) else self.deadline


def call(
    phase: str, *, deadline: Deadline, last: bool = False, survives: tuple[type[Exception], ...] = ()
) -> Callable[[Method], Method]:
    """Make a method callable by the controller; all parameters and the result need annotations that msgspec knows.

    phase, deadline, last, survives: see `RankCall`.
    """

    def declare(method: Method) -> Method:
        method.declared = RankCall(method, phase, deadline, last, survives)  # type: ignore[attr-defined]
        return method

    return declare


@dataclass(frozen=True)
class CallRequest(Generic[Result]):
    """A call with its arguments."""

    call: RankCall
    message: msgspec.Struct

    @property
    def phase(self) -> str:
        """What the call does, in words."""
        return self.call.phase.format_map(self._arguments())

    def run(self, rank: object) -> Any:
        """Call the method of `rank`. Returns what it returns: of an async method, a coroutine."""
        return self.call.method(rank, **self._arguments())

    def _arguments(self) -> dict[str, Any]:
        return {name: getattr(self.message, name) for name in self.message.__struct_fields__}


@typing.overload
def request(
    method: Callable[Concatenate[Any, Parameters], Coroutine[Any, Any, Result]],
    *arguments: Parameters.args,
    **named: Parameters.kwargs,
) -> CallRequest[Result]: ...


@typing.overload
def request(
    method: Callable[Concatenate[Any, Parameters], Result], *arguments: Parameters.args, **named: Parameters.kwargs
) -> CallRequest[Result]: ...


def request(method: Any, *arguments: Any, **named: Any) -> CallRequest[Any]:
    """Return the request to call a method with these arguments, e.g. `request(TrainerRank.step, 1e-5)`."""
    declared: RankCall = method.declared
    return CallRequest(declared, declared.message(*arguments, **named))


class RequestDecoder:
    """Decodes the messages that a class of ranks understands."""

    def __init__(self, rank_class: type):
        members = (getattr(getattr(rank_class, name), "declared", None) for name in dir(rank_class))
        self.rank_class = rank_class
        self.calls = {declared.message: declared for declared in members if isinstance(declared, RankCall)}
        self._decode = msgspec.msgpack.Decoder(typing.Union[tuple(self.calls)]).decode  # noqa: UP007

    def __call__(self, content: bytes | memoryview) -> CallRequest[Any]:
        """Decode a request. Raises RunError for an unknown method and for arguments of another type."""
        try:
            message = self._decode(content)
        except (msgspec.DecodeError, RecursionError) as error:
            raise RunError(f"{self.rank_class.__name__} cannot read a call: {error}") from error
        return CallRequest(self.calls[type(message)], message)


class Connection(Protocol):
    """What reaches ranks: the hub of a launch (rpc.py), or a link within this process (rollout/local_engine.py)."""

    events: BatchQueue[tuple[int, Message]]

    def name(self, rank: int) -> str:
        """The rank's name for people."""

    async def post(self, rank: int, request: CallRequest[Any]) -> None:
        """Call a rank without waiting for its answer."""

    async def call_all(
        self, requests: Mapping[int, CallRequest[Result]], deadline_s: float, excused: Callable[[], set[int]] = set
    ) -> list[Result]:
        """One call to each rank; see `rpc.Hub.call_all`."""


class RankClient:
    """Calls the methods of all ranks of one kind."""

    def __init__(self, hub: Connection, ranks: range, deadlines: Deadlines):
        self.hub, self.ranks, self.deadlines = hub, ranks, deadlines
        self.prepare: Callable[[CallRequest[Any]], Coroutine[Any, Any, None]] | None = None
        """awaited with each call before it is made"""
        self.under_way = 0
        """calls that the ranks have not answered yet"""

    @typing.overload
    async def call(
        self,
        method: Callable[Concatenate[Any, Parameters], Coroutine[Any, Any, Result]],
        *arguments: Parameters.args,
        **named: Parameters.kwargs,
    ) -> list[Result]: ...

    @typing.overload
    async def call(
        self,
        method: Callable[Concatenate[Any, Parameters], Result],
        *arguments: Parameters.args,
        **named: Parameters.kwargs,
    ) -> list[Result]: ...

    async def call(self, method: Any, *arguments: Any, **named: Any) -> list[Any]:
        """Call a method of every rank, e.g. `call(TrainerRank.step, 1e-5)`. Returns the ranks' answers in order.

        Raises the error of a rank that failed, DeadlineExceeded if one is late.
        """
        asked = request(method, *arguments, **named)
        return await self.call_each([asked] * len(self.ranks))

    async def call_each(self, requests: list[CallRequest[Result]]) -> list[Result]:
        """Call one method of every rank, with arguments of its own. Raises as `call`."""
        self.under_way += 1
        try:
            if self.prepare is not None:
                await self.prepare(requests[0])
            deadline_s = requests[0].call.seconds(self.deadlines)
            return await self.hub.call_all(dict(zip(self.ranks, requests, strict=True)), deadline_s, self.excused)
        finally:
            self.under_way -= 1

    def excused(self) -> set[int]:
        """Ranks that may be late now."""
        return set()
