"""Cannot be measured here."""

from collections.abc import Iterator

from benchmarks.figures import Figure, NotMeasured, benchmark


@benchmark()
def absent(quick: bool) -> Iterator[Figure]:
    yield Figure("before", [1.0], "s")
    raise NotMeasured("no such card here")
