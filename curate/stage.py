"""Defines the stages of the data pipeline: a stage sees all rows once, then keeps or rejects each.

    class Stage:                                          # any class of this shape
        name = "format"
        settings = {"figures": True}                      # JSON; another value is another result
        under_way = 64                                    # rows judged at once
        async def prepare(self, rows, show): ...          # all rows, before the first is judged
        async def judge(self, index, row): ...            # -> Kept([...]) or Rejected("proof", "asks to prove")
        async def close(self): ...                        # always called

A row's decision must depend on the rows and the settings alone: a resumed run judges only the missing rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from shared.jsonl import Row

Fields = dict[str, Any]
"""a row as decoded from JSON"""
Show = Callable[[int, int], Awaitable[None]]
"""await show(done, total): moves the bar of a long `prepare`, and lets Ctrl-C through"""


class Kept(msgspec.Struct, frozen=True):
    """The output rows of an input row: none, itself (perhaps changed), or several."""

    rows: list[Fields]
    counts: dict[str, int] = {}
    """counts of what happened to the row, added up for the report, e.g. {"tests dropped": 2}"""


class Rejected(msgspec.Struct, frozen=True):
    """The decision to leave a row out, with the reason."""

    reason: str
    """a few words, the same for all rows of the kind, which are counted by it"""
    detail: str = ""
    """details of this row, in one line"""
    counts: dict[str, int] = {}
    """as of `Kept`"""


Decision = Kept | Rejected


class Stage(Protocol):
    """One stage with its settings."""

    @property
    def name(self) -> str:
        """The name on the command line."""
        ...

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that may change a decision, as JSON; no worker counts, keys or full paths."""
        ...

    @property
    def under_way(self) -> int:
        """The number of rows that are judged at once."""
        ...

    async def prepare(self, rows: Sequence[Row], show: Show) -> None:
        """See all rows before the first is judged, again after a resume. Raises DataError for rows it cannot take."""
        ...

    async def judge(self, index: int, row: Row) -> Decision:
        """Decide about one row; `index` is its position over all input files, from 0."""
        ...

    async def close(self) -> None:
        """Stop processes and close connections; called once, also after an error or Ctrl-C."""
        ...


class Command(NamedTuple):
    """The command-line interface of a stage."""

    summary: str
    """one line for the list of stages"""
    explanation: str
    """for its --help: input, output, examples"""
    add_options: Callable[[argparse.ArgumentParser], None]
    make: Callable[[argparse.Namespace], Stage]
    """makes the stage from parsed options; heavy imports happen here. Raises InputError"""
    find: Callable[[Sequence[Path]], Sequence[Path]] = tuple
    """returns the files of the given inputs, which may be folders. Raises InputError"""
