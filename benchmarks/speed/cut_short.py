"""The end-to-end benchmark with completions that are cut off at 128 tokens: lengths hardly differ, little is padded."""

from __future__ import annotations

from benchmarks.speed.end_to_end import compare
from benchmarks.speed.rows import Row, Task
from benchmarks.speed.workload import CUT_SHORT


def rows(task: Task) -> list[Row]:
    """Both sides, one after the other; ours alone where TRL is not installed."""
    return compare(task, CUT_SHORT)
