"""Does sampling ahead pay on the quickstart? Its optimiser steps synchronous and with its own async level, real ranks.

`python -m trainer configs/quickstart.toml` without SFT, evaluation and filter, so that both train equal numbers
of completions: one trainer and one engine with a thread each, which have a core each where there are two. The first
steps, and those at the end in which nothing is sampled any more, do not count.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.speed.end_to_end import StepTime, counted, from_metrics
from benchmarks.speed.rows import Row
from benchmarks.speed.startup import OVERRIDES, run

ASYNC_LEVELS = (0, 2)
"""synchronous, and that of the quickstart"""
STEPS, WARM_UP = 16, 4
TARGET = 0.95


def launch(async_level: int, steps: int) -> list[StepTime]:
    """The steps of one launch that count."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            **OVERRIDES,
            "runs_dir": folder,
            "steps": steps,
            "rollout.max_async_level": async_level,
            "checkpoint.every": 0,
        }
        run([sys.executable, "-m", "trainer", "configs/quickstart.toml", *(f"--{k}={v}" for k, v in settings.items())])
        return counted(
            from_metrics(Path(folder) / str(OVERRIDES["name"]) / "metrics.jsonl"), WARM_UP, max(ASYNC_LEVELS)
        )


def table(launches: Mapping[int, Sequence[Sequence[StepTime]]]) -> list[Row]:
    """async_level -> launches -> steps. Seconds of a step, and each async level beside the median of the synchronous
    ones."""
    seconds = {async_level: [statistics.fmean(step.seconds for step in one) for one in found]
               for async_level, found in launches.items()}  # fmt: skip
    alone = statistics.median(seconds[0])
    names = {level: f"quickstart, async level {level}" if level else "quickstart, synchronous" for level in seconds}
    rows = [Row(f"{names[level]}: step", values, "s", better="lower") for level, values in seconds.items()]
    ahead = [Row(f"{names[level]}: step time", [value / alone for value in values], "", "synchronous", "lower", TARGET)
             for level, values in seconds.items() if level]  # fmt: skip
    return rows + ahead


def rows(repeats: int) -> list[Row]:
    """Launches take turns."""
    launches: dict[int, list[list[StepTime]]] = {async_level: [] for async_level in ASYNC_LEVELS}
    for _ in range(repeats):
        for async_level in ASYNC_LEVELS:
            launches[async_level].append(launch(async_level, STEPS))
    return table(launches)
