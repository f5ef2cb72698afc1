"""Starts a launch, and waits for it."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

from benchmarks.figures import Figure, benchmark


@benchmark(page="docs/none.md")
def starts(quick: bool, line: Path = Path()) -> Iterator[Figure]:
    subprocess.run(["setsid", "bash", "-c", f"exec 9>{line}; sleep 1000 & printf x >&9; sleep 1000"], check=True)
    yield Figure("never", [0.0], "")
