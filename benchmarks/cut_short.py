"""The end-to-end benchmark with completions that are cut off at 128 tokens: lengths hardly differ, little is padded."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.end_to_end import CUT_SHORT, QUICK, both_sides
from benchmarks.figures import Figure, benchmark


@benchmark()
def cut_short(quick: bool) -> Iterator[Figure]:
    """Measure both sides, one after the other."""
    yield from both_sides(QUICK if quick else CUT_SHORT)
