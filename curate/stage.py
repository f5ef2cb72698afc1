"""What a stage of the data pipeline is: it looks at all rows once, then keeps or rejects each.

    class Stage:                                          # any class of this shape
        name = "format"
        settings = {"figures": True}                      # JSON; another value is another result
        under_way = 64                                    # rows judged at once
        async def prepare(self, rows, show): ...          # all rows, before the first is judged
        async def judge(self, index, row): ...            # -> Kept([...]) or Rejected("proof", "asks to prove")
        async def close(self): ...                        # always called

A row's decision must depend on the rows and the settings alone: a run that was stopped judges only what is missing.
"""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from shared.rows import Row

Fields = dict[str, Any]
"""a row as JSON gives it"""
Show = Callable[[int, int], Awaitable[None]]
"""await show(done, total): moves the bar of a long `prepare`, and lets Ctrl-C through"""


class Kept(msgspec.Struct, frozen=True):
    """Output rows that an input row gives: none, itself (perhaps changed), or several."""

    rows: list[Fields]
    counts: dict[str, int] = {}
    """what happened to it, added up for the report, e.g. {"tests dropped": 2}"""


class Rejected(msgspec.Struct, frozen=True):
    """The row is left out."""

    reason: str
    """a few words, the same for all rows of the kind: they are counted by it"""
    detail: str = ""
    """what in this row, in one line"""
    counts: dict[str, int] = {}
    """as of `Kept`"""


Decision = Kept | Rejected


class Stage(Protocol):
    """One stage with its settings."""

    @property
    def name(self) -> str:
        """As on the command line."""
        ...

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that may change a decision, as JSON: neither worker counts nor keys nor whole paths."""
        ...

    @property
    def under_way(self) -> int:
        """How many rows are judged at once."""
        ...

    async def prepare(self, rows: Sequence[Row], show: Show) -> None:
        """See all rows before the first is judged, again after a resume. Raises DataError for rows it cannot take."""
        ...

    async def judge(self, index: int, row: Row) -> Decision:
        """Decide about one row; `index` is its position over all input files, from 0."""
        ...

    async def close(self) -> None:
        """End processes and connections; called once, also after an error or Ctrl-C."""
        ...


class Command(NamedTuple):
    """How a stage appears on the command line."""

    summary: str
    """one line for the list of stages"""
    explanation: str
    """for its --help: input, output, examples"""
    add_options: Callable[[argparse.ArgumentParser], None]
    make: Callable[[argparse.Namespace], Stage]
    """the stage of parsed options. Raises InputError; imports what is heavy"""
    find: Callable[[Sequence[Path]], Sequence[Path]] = tuple
    """the files of the inputs given, where these may be folders. Raises InputError"""
