"""Draws the plot of a run: reward, accuracy, language consistency, staleness, weight updates, time of a step.

Reads metrics.jsonl of a run folder and writes plot.png beside it. The dashboard shows more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from shared.atomic_write import beside
from shared.errors import DataError
from shared.metrics import METRICS, kind_of, read_rows, series

BLUE, ORANGE, GREEN, RED, GREY = "#2f6db5", "#d9742b", "#3a9a5b", "#b04a5a", "#8a8f98"
STYLE: Any = {
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e6e8eb",
    "axes.axisbelow": True, "font.size": 10, "axes.titlesize": 11, "axes.titleweight": "bold",
    "axes.titlelocation": "left", "legend.frameon": False, "legend.fontsize": 9, "axes.edgecolor": GREY,
}  # fmt: skip
PANELS = {
    "Reward": ("reward/mean", "reward/correctness", "reward/language", "reward/format", "reward/length"),
    "Accuracy": ("accuracy", "evaluation/greedy_accuracy", "evaluation/accuracy"),
    "Language consistency": ("consistency", "evaluation/greedy_consistency", "evaluation/consistency"),
    "Staleness (policy versions)": ("staleness/mean", "staleness/max"),
    "Weight update (s)": ("sync/total_s", "sync/update_s"),
    "Time of a step (s)": ("time/step_s", "time/wait_batch_s", "time/train_s", "time/wait_sync_s"),
}
"""title of a diagram -> its metrics"""


@contextmanager
def figure(path: Path, title: str, rows: int, columns: int, size: tuple[float, float]) -> Iterator[NDArray[Any]]:
    """Context with axes [rows, columns] to draw on, `size` in inches; writes the PNG at its end. Raises DiskError."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed; here, so that importing this file does not load it
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE):
        made, axes = pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
        try:
            yield axes
            made.suptitle(title, x=0.01, ha="left", fontsize=12)
            with beside(path) as partial:
                made.savefig(partial, dpi=110, format="png")
        finally:
            pyplot.close(made)


def bound_shares(axis: Any, metrics: Sequence[str]) -> None:
    """Let an axis that shows shares alone end at 0 and at 1."""
    if all(name in METRICS and METRICS[name].unit == "share" for name in metrics):
        low, high = axis.get_ylim()
        axis.set_ylim(max(low, 0), min(high, 1))


def write_plot(run_dir: Path) -> Path:
    """Draw plot.png into the run folder. Raises DataError while there is no training step to show."""
    rows = read_rows(run_dir / "metrics.jsonl")
    steps, _ = series(rows, "reward/mean")
    if not steps:
        raise DataError(f"{run_dir / 'metrics.jsonl'}: no training step yet")
    path = run_dir / "plot.png"
    with figure(path, f"{run_dir.name}: {steps[-1]} steps", 2, 3, (13.5, 7)) as axes:
        for axis, (title, metrics) in zip(axes.flat, PANELS.items(), strict=True):
            axis.set_title(title)
            axis.set_xlabel("optimiser step")
            for name, color in zip(metrics, (BLUE, GREEN, ORANGE, GREY, RED), strict=False):
                steps, values = series(rows, name, kind_of({name: 0}))
                if steps:
                    axis.plot(steps, values, color=color, label=name, linewidth=1.4, marker="o" * (len(steps) < 20))
            if axis.get_legend_handles_labels()[0]:
                axis.legend(loc="best")
            axis.locator_params(axis="x", integer=True)
            bound_shares(axis, metrics)
    return path
