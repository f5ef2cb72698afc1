"""Which tests `--quick` runs: those that took little time when `make test ARGS=--time-tests` last wrote slow_tests.txt.

Of a function's parametrised cases it runs CASES, drawn by the seed that pytest-randomly prints.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("slow_tests.txt")
LEAST_S = 0.15
"""a function one of whose cases takes longer, its fixtures included, is not quick"""
CASES = 3


def function_of(nodeid: str) -> str:
    """The id of a test without its parameters."""
    return nodeid.partition("[")[0]


def slow_functions() -> set[str]:
    """The functions that slow_tests.txt lists."""
    return {line.split()[1] for line in FILE.read_text(encoding="utf-8").splitlines()}


def choose(items: Sequence[pytest.Item], seed: int) -> list[pytest.Item]:
    """The quick tests among these, in their order."""
    slow, draw = slow_functions(), random.Random(seed)
    tables: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in sorted(items, key=lambda item: item.nodeid):
        if not item.get_closest_marker("slow") and function_of(item.nodeid) not in slow:
            tables[function_of(item.nodeid)].append(item)
    drawn = {item for cases in tables.values() for item in draw.sample(cases, min(CASES, len(cases)))}
    return [item for item in items if item in drawn]


def write(seconds: Mapping[str, float]) -> None:
    """Keep the functions that took long. seconds: test id -> what it took."""
    longest: defaultdict[str, float] = defaultdict(float)
    for nodeid, taken in seconds.items():
        longest[function_of(nodeid)] = max(longest[function_of(nodeid)], taken)
    FILE.write_text("".join(listing(longest.items())), encoding="utf-8")


def listing(longest: Iterable[tuple[str, float]]) -> list[str]:
    return [f"{taken:8.1f} {name}\n" for name, taken in sorted(longest) if taken > LEAST_S]
