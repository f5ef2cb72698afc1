"""A benchmark that measures."""

from benchmarks.speed.rows import Row, Task


def rows(task: Task) -> list[Row]:
    task.parts(1)
    task.part_done()
    return [Row("rate", [2.0, 1.0, 3.0], "x/s", better="higher", target=1.5)]
