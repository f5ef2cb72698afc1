"""Fails."""

from collections.abc import Iterator

from benchmarks.figures import Figure, benchmark


@benchmark()
def broken(quick: bool) -> Iterator[Figure]:
    yield Figure("before", [1.0], "s")
    raise RuntimeError("it broke")
