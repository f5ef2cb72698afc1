"""Measures what it was told."""

from collections.abc import Iterator

from benchmarks.figures import Figure, benchmark


@benchmark()
def good(quick: bool, values: list[float] = [2.0, 1.0, 3.0]) -> Iterator[Figure]:  # noqa: B006
    print("noise, which is no line of JSON")
    yield Figure("rate", [value / (2 if quick else 1) for value in values], "x/s", better="higher", target=1.5)
