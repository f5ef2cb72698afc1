"""Writes a page of its own."""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.figures import Section, benchmark


@benchmark(page="docs/none.md")
def paged(quick: bool, page: Path, loud: bool = False) -> Iterator[Section]:
    yield Section("LOUD" if loud else "quiet", str(page), files={".png": b"\x89PNG"})
