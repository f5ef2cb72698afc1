"""What ranks send the controller without being asked: typed, tagged msgspec structs (never pickle).

What the controller asks for are calls (calls.py).
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from itertools import accumulate, groupby

import msgspec

from shared.types import Completion

FINISHED_BYTES = 1 << 24
"""most bytes of completions in one message: far below `MESSAGE_BYTES`, and read in a moment"""


class Message(msgspec.Struct, tag=True):
    """Base of all messages: the tag is the class name."""


class Register(Message):
    """First message of a rank: who it is."""

    role: str
    rank: int
    pid: int
    host: str


class RankFailed(Message):
    """The work of a rank raised: the error's text, and its kind (a class name of `errors.py`). Also an answer."""

    kind: str
    message: str
    traceback: str = ""


def failure(error: BaseException) -> RankFailed:
    """Return an error as a message."""
    lines = traceback.format_exception(error)
    return RankFailed(kind=type(error).__name__, message=str(error) or repr(error), traceback="".join(lines))


class Finished(Message, gc=False):
    """Completions ended on an engine; those of one moment travel together."""

    completions: list[Completion]


def parts(completions: list[Completion]) -> Iterator[list[Completion]]:
    """Yield the completions in parts, encoded in FINISHED_BYTES each but for the last completion of a part."""
    before = accumulate((len(msgspec.msgpack.encode(one)) for one in completions), initial=0)
    for _, part in groupby(completions, lambda _: next(before) // FINISHED_BYTES):
        yield list(part)


class EngineEnded(Message):
    """An engine died and is being started again."""

    engine: int
    reason: str


class EngineRestarted(Message):
    """An engine died and was started again; its completions continue."""

    engine: int
    seconds: float
    continued: int
    reason: str


class GenerateRequest(msgspec.Struct, gc=False):
    """One completion to sample or to continue (`completion.token_ids` non-empty)."""

    prompt_ids: list[int]
    completion: Completion
    max_tokens: int
    """limit of the whole completion; tokens that it has already count, those of an environment too"""
    temperature: float
    """0 is greedy"""
    keep_routes: bool = True
    """whether those of a mixture are written for the trainers, where they are replayed"""


Event = Register | RankFailed | Finished | EngineEnded | EngineRestarted
