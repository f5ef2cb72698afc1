"""A benchmark that fails."""

from benchmarks.speed.rows import Row, Task


def rows(task: Task) -> list[Row]:
    raise RuntimeError("it broke")
