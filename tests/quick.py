"""Which tests `--quick` runs: those that took little time when `make test ARGS=--time-tests` last wrote slow_tests.txt.

Of a function's parametrised cases it runs CASES, and of those marked `sampled` every run has a few, drawn by the seed
that pytest-randomly prints.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("slow_tests.txt")
LEAST_S = 0.15
"""a function one of whose cases takes longer, its fixtures included, is not quick"""
CASES = 3
"""of each parametrised function"""


def function_of(nodeid: str) -> str:
    """The id of a test without its parameters."""
    return nodeid.partition("[")[0]


def read() -> dict[str, float]:
    """The functions of slow_tests.txt, and the seconds of their slowest case."""
    lines = (line.split() for line in FILE.read_text(encoding="utf-8").splitlines())
    return {name: float(taken) for taken, name in lines}


def choose(items: Sequence[pytest.Item], seed: int) -> list[pytest.Item]:
    """The quick tests among these, in their order."""
    slow = read()
    quick = [item for item in items if not item.get_closest_marker("slow") and function_of(item.nodeid) not in slow]
    return draw(quick, seed, lambda item: (CASES, ""))


def sample(items: Sequence[pytest.Item], seed: int, named: Sequence[str]) -> list[pytest.Item]:
    """These without the cases that `sampled` leaves out. named: arguments of the command line; what has its name there
    runs whole."""

    def share(item: pytest.Item) -> tuple[int, str]:
        marker, function = item.get_closest_marker("sampled"), function_of(item.nodeid)
        if marker is None or any(function == function_of(name) for name in named):
            return len(items), ""
        count, *table = marker.args
        return count, "".join(table)

    return draw(items, seed, share)


def draw(items: Sequence[pytest.Item], seed: int, share: Callable[[pytest.Item], tuple[int, str]]) -> list[pytest.Item]:
    """At most so many cases of each function, in their order. share: that count, and which of the function's tables it
    is for."""
    dice = random.Random(seed)
    tables: defaultdict[tuple[str, int, str], list[pytest.Item]] = defaultdict(list)
    for item in sorted(items, key=lambda item: item.nodeid):
        tables[function_of(item.nodeid), *share(item)].append(item)
    drawn = {item for (_, count, _), cases in tables.items() for item in dice.sample(cases, min(count, len(cases)))}
    return [item for item in items if item in drawn]


def is_there(function: str) -> bool:
    """Whether a test's file still has it."""
    file, _, name = function.partition("::")
    path = FILE.parents[1] / file
    return path.is_file() and f"def {name}(" in path.read_text(encoding="utf-8")


def write(seconds: Mapping[str, float]) -> None:
    """Keep the functions that took long, and as they were those that did not run but are still there. seconds: test id
    -> what it took."""
    ran = {function_of(nodeid) for nodeid in seconds}
    kept = {name: taken for name, taken in read().items() if name not in ran and is_there(name)}
    longest = defaultdict(float, kept)
    for nodeid, taken in seconds.items():
        longest[function_of(nodeid)] = max(longest[function_of(nodeid)], taken)
    lines = [f"{taken:8.2f} {name}\n" for name, taken in sorted(longest.items()) if taken > LEAST_S]
    FILE.write_text("".join(lines), encoding="utf-8")
