"""What a benchmark is and what it yields: one decorated function in a file that has its name.

    @benchmark()
    def packing(quick: bool, seed: int = 0) -> Iterator[Figure | Section]:
        yield Figure("padding", [0.01, 0.02], "%", better="lower")

Its further parameters are options of the command line. Figures go to results.json and docs/performance.md; a `Section`
is text for a page of its own. No torch here, so that a benchmark may prepare the environment before it is loaded.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

ROOT = Path(__file__).resolve().parents[1]
TOLERANCE = {"throughput": 0.05, "sync": 0.10}
"""a figure that is worse by more than this share is a regression; weight updates vary more"""


class NotMeasured(Exception):
    """This machine lacks what a benchmark needs; the message says what."""


class Figure(msgspec.Struct, frozen=True, omit_defaults=True):
    """One figure, e.g. Figure("write", [0.71, 0.69], "", of="memcpy of the same bytes", better="higher")."""

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
        """The median over the repeats."""
        return statistics.median(self.values)

    @property
    def met(self) -> bool | None:
        """Whether the median reaches the target; None where there is none, or no value."""
        if self.target is None or not self.values:
            return None
        return self.median >= self.target if self.better == "higher" else self.median <= self.target

    def loss(self, old: Figure) -> float:
        """Return how much worse than `old` this is, as a share of its median: 0.1 is 10 % worse, negative is better."""
        change = (self.median - old.median) / abs(old.median) if old.median else 0.0
        return -change if self.better == "higher" else change


class Section(msgspec.Struct, frozen=True):
    """Markdown for a page: all of it, or what stands between two marks."""

    text: str
    page: str = ""
    """path from the root of the checkout; "" for the benchmark's own page"""
    mark: str = ""
    """written between <!-- mark --> and <!-- end of mark -->; "" for a page that is written whole"""
    files: dict[str, bytes] = {}
    """suffix, e.g. ".png" -> content of a file that is written beside the page, with its name"""


Found = Figure | Section
Measure = TypeVar("Measure", bound=Callable[..., Iterator[Found]])


def benchmark(page: str = "") -> Callable[[Measure], Measure]:
    """Mark the function that measures. page: where its sections go; a benchmark without one yields figures, and is run
    where the command names none."""

    def mark(function: Measure) -> Measure:
        return function

    return mark


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
    rows: list[Figure] = []
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
    """Return the content of results.json: every figure also with its median, lowest and highest value."""
    table: dict[str, Any] = msgspec.to_builtins(dict(results))
    for name, measured in results.items():
        for row, written in zip(measured.rows, table[name].get("rows", []), strict=True):
            if row.values:
                written |= {"median": row.median, "lowest": min(row.values), "highest": max(row.values)}
    return msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n"


def decode(content: bytes) -> Results:
    """Read what `encode` wrote. Raises msgspec.MsgspecError for anything else."""
    return msgspec.json.decode(content, type=Results)


def describe_machine() -> str:
    """Describe processor, cores in use, memory and GPU."""
    import torch

    text = Path("/proc/cpuinfo").read_text()
    model = re.search(r"model name\s*:\s*(.*)", text)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    name = model.group(1).strip() if model else platform.machine()
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    return f"{len(os.sched_getaffinity(0))} cores of {name}, {memory:.0f} GiB, {gpu}"


def measured_with(command: str, when: datetime.date | None = None) -> str:
    """Return the sentence that begins a page, without its full stop: day, command and machine."""
    return f"Measured on {when or datetime.date.today()} with `python -m benchmarks {command}` on {describe_machine()}"
