"""What a speed benchmark returns: figures with a unit, what they are a ratio of, a target, and a value a repeat.

    def rows(task: Task) -> list[Row]: ...        # of every module that registered.py names

A benchmark that cannot run here raises `NotMeasured` with the reason; a single figure that cannot be had is a row with
`not_measured`. No torch, so that a benchmark may prepare the environment before it is loaded.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

TOLERANCE = {"throughput": 0.05, "sync": 0.10}
"""a figure that is worse by more than this share is a regression; weight updates vary more"""


class NotMeasured(Exception):
    """This machine lacks what a benchmark needs; the message says what."""


class Row(msgspec.Struct, frozen=True, omit_defaults=True):
    """One figure, e.g. Row("write", [0.71, 0.69, 0.74], "", of="memcpy of the same bytes", better="higher",
    target=0.7)."""

    name: str
    """unique in its benchmark"""
    values: list[float]
    """[repeats]"""
    unit: str
    """e.g. "groups/s"; "" for a ratio, "%" for a share (value 0.19 is shown as 19 %)"""
    of: str = ""
    """the peer or limit, measured in the same run, that the value is a ratio of; "" for an absolute figure"""
    better: Literal["higher", "lower", ""] = ""
    """"" for a figure that says what was measured, not how fast: it is never compared"""
    target: float | None = None
    """least value where higher is better, else largest"""
    kind: Literal["throughput", "sync"] = "throughput"
    """how much it may vary: see TOLERANCE"""
    not_measured: str = ""
    """why there are no values"""

    def __post_init__(self) -> None:
        if bool(self.values) == bool(self.not_measured):
            raise ValueError(f"{self.name}: give values, or say in not_measured why there are none")
        if self.target is not None and not self.better:
            raise ValueError(f"{self.name}: a target needs better = 'higher' or 'lower'")

    @property
    def median(self) -> float:
        """Over the repeats."""
        return statistics.median(self.values)

    @property
    def met(self) -> bool | None:
        """Whether the median reaches the target; None where there is none, or no value."""
        if self.target is None or not self.values:
            return None
        return self.median >= self.target if self.better == "higher" else self.median <= self.target

    def loss(self, old: Row) -> float:
        """How much worse than `old` this is, as a share of the old median: 0.1 is 10 % worse, negative is better."""
        change = (self.median - old.median) / abs(old.median) if old.median else 0.0
        return -change if self.better == "higher" else change


class Place(msgspec.Struct, frozen=True):
    """Where and when something was measured."""

    machine: str
    versions: dict[str, str]
    commit: str
    date: str
    """year-month-day"""


class Measured(msgspec.Struct, frozen=True, omit_defaults=True):
    """One benchmark as it stands in results.json."""

    place: Place
    rows: list[Row] = []
    not_measured: str = ""
    seconds: float = 0.0
    """that the benchmark took"""
    quick: bool = False
    """fewer repeats, smaller loads: not to be compared with a full one"""
    stolen: float = 0.0
    """share of the processors' working time that a host gave to other guests meanwhile (Linux: steal)"""


Results = dict[str, Measured]
"""benchmark -> its figures"""


def encode(results: Mapping[str, Measured]) -> bytes:
    """results.json: every row also with its median, lowest and highest value."""
    table: dict[str, Any] = msgspec.to_builtins(dict(results))
    for name, measured in results.items():
        for row, written in zip(measured.rows, table[name].get("rows", []), strict=True):
            if row.values:
                written |= {"median": row.median, "lowest": min(row.values), "highest": max(row.values)}
    return msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n"


def decode(content: bytes) -> Results:
    """Raises msgspec.MsgspecError for anything else than `encode` wrote."""
    return msgspec.json.decode(content, type=Results)


class Task:
    """What a benchmark is told, and how it tells how far it is."""

    def __init__(self, quick: bool = False, tell: Callable[[int, int], None] = lambda done, total: None):
        """quick: a try of seconds; tell: called with the parts done and all parts."""
        self.quick, self.tell = quick, tell
        self.done = self.total = 0

    def parts(self, total: int) -> None:
        """So many parts, of about the same length, are to come."""
        self.total = total
        self.tell(self.done, total)

    def part_done(self) -> None:
        """One more part is done."""
        self.done += 1
        self.tell(self.done, self.total)
