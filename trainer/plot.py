"""Draws the plot of a run: reward, accuracy, language consistency, staleness, weight updates, time of a step.

Reads a run folder only (metrics.jsonl, evaluations.jsonl) and writes plot.png into it. The dashboard shows more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from shared.atomic_write import beside
from shared.errors import DataError
from shared.metrics import read_rows, series
from trainer.evaluation import GREEDY, EvaluationRecord, read_evaluations

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

BLUE, ORANGE, GREEN, RED, GREY = "#2f6db5", "#d9742b", "#3a9a5b", "#b04a5a", "#8a8f98"
STYLE: Any = {
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e6e8eb",
    "axes.axisbelow": True, "font.size": 10, "axes.titlesize": 11, "axes.titleweight": "bold",
    "axes.titlelocation": "left", "legend.frameon": False, "legend.fontsize": 9, "axes.edgecolor": GREY,
}  # fmt: skip


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


def whole_steps(axis: Axis) -> None:
    """Label an axis with a few whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 5, 10], integer=True))


PANELS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("Reward (training, all completions)", "", {
        "reward/mean": "total", "reward/correctness": "correctness", "reward/language": "language",
        "reward/format": "format", "reward/length": "length penalty",
    }),
    ("Accuracy", "accuracy", {"accuracy": "training, sampled"}),
    ("Language consistency", "consistency", {"consistency": "training, sampled"}),
    ("Staleness (policy versions)", "", {"staleness/mean": "mean token", "staleness/max": "oldest trained token"}),
    ("Weight update (s)", "", {"sync/total_s": "whole update and proof", "sync/update_s": "in the engine"}),
    ("Where a step's time goes (s)", "", {
        "time/step_s": "whole step", "time/wait_batch_s": "waiting for groups", "time/train_s": "training",
        "time/wait_sync_s": "waiting for weights",
    }),
)  # fmt: skip
"""title of a diagram, the figure of evaluations that it shows too, and its metrics with their labels"""


def write_plot(run_dir: Path) -> Path:
    """Draw plot.png into the run folder. Raises DataError while there is no training step to show."""
    rows, records = read_rows(run_dir / "metrics.jsonl"), read_evaluations(run_dir)
    steps, _ = series(rows, "reward/mean")
    if not steps:
        raise DataError(f"{run_dir / 'metrics.jsonl'}: no training step yet")
    path = run_dir / "plot.png"
    with figure(path, f"{run_dir.name}: {steps[-1]} steps", 2, 3, (13.5, 7)) as axes:
        for axis, (title, evaluated, metrics) in zip(axes.flat, PANELS, strict=True):
            axis.set_title(title)
            for (name, label), color in zip(metrics.items(), (BLUE, GREEN, ORANGE, GREY, RED), strict=False):
                if (curve := series(rows, name))[0]:
                    axis.plot(*curve, color=color, label=label, linewidth=1.4)
            if evaluated:
                axis.set_ylim(0, 1.03)
                _draw_evaluations(axis, records, evaluated)
            axis.set_xlim(left=0, right=max(steps[-1], 1))
            whole_steps(axis.xaxis)
            axis.set_xlabel("optimiser step")
            if axis.get_legend_handles_labels()[0]:
                axis.legend(loc="best")
    return path


def _draw_evaluations(axis: Axes, records: list[EvaluationRecord], name: str) -> None:
    for greedy, color, label in ((False, ORANGE, "validation, sampled"), (True, GREEN, "validation, greedy")):
        values = [
            (record.version, value, record.evaluation.accuracy_half_width if name == "accuracy" else 0.0)
            for record in records
            if (record.evaluation.temperature == GREEDY) == greedy
            and (value := getattr(record.evaluation, name)) is not None
        ]
        if values:
            versions, shares, half = zip(*values, strict=True)
            axis.errorbar(versions, shares, yerr=half, color=color, label=label, marker="o", linestyle="--", capsize=2)
