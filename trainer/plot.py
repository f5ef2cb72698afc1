"""Draws the plot of a run: reward, accuracy, language consistency, staleness, weight updates, time of a step.

Reads a run folder only (metrics.jsonl, evaluations.jsonl, config.toml) and writes plot.png into it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from shared import settings_file
from shared.atomic_write import beside
from shared.errors import DataError, InputError
from shared.metrics import read_rows, series
from shared.progress import duration
from trainer.evaluation import GREEDY, EvaluationRecord, at_temperature, read_evaluations

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

BLUE, ORANGE, GREEN, RED, GREY, LIGHT = "#2f6db5", "#d9742b", "#3a9a5b", "#b04a5a", "#8a8f98", "#d4d7dc"
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


def write_plot(run_dir: Path) -> Path:
    """Draw plot.png into the run folder. Raises DataError while there is no training step to show."""
    rows, records = read_rows(run_dir / "metrics.jsonl"), read_evaluations(run_dir)
    steps, _ = series(rows, "reward/mean")
    if not steps:
        raise DataError(f"{run_dir / 'metrics.jsonl'}: no training step yet")
    path = run_dir / "plot.png"
    with figure(path, _headline(run_dir, rows, steps[-1]), 2, 3, (13.5, 7)) as axes:
        _draw_reward(axes[0, 0], rows)
        _draw_share(axes[0, 1], rows, records, "accuracy", "Accuracy")
        _draw_share(axes[0, 2], rows, records, "consistency", "Language consistency")
        _draw_staleness(axes[1, 0], rows, staleness_bound(run_dir))
        _draw_sync(axes[1, 1], rows)
        _draw_time(axes[1, 2], rows)
        for axis in axes.flat:
            axis.set_xlim(left=0, right=max(steps[-1], 1))
            whole_steps(axis.xaxis)
            if axis.get_legend_handles_labels()[0]:
                axis.legend(loc="upper left" if axis is axes[1, 2] else "best", ncols=2 if axis is axes[1, 2] else 1)
        whole_steps(axes[1, 0].yaxis)
        for axis in axes[1]:
            axis.set_xlabel("optimiser step")
    return path


def _headline(run_dir: Path, rows: list[dict[str, Any]], step: int) -> str:
    _, seconds = series(rows, "time/total_s")
    took = f", {duration(seconds[-1])}" if seconds else ""
    return f"{run_dir.name}: {step} steps{took}"


def _line(axis: Axes, rows: list[dict[str, Any]], name: str, color: str, label: str, **style: Any) -> None:
    steps, values = series(rows, name)
    if steps:
        axis.plot(steps, values, color=color, label=label, **{"linewidth": 1.8, **style})


def _draw_reward(axis: Axes, rows: list[dict[str, Any]]) -> None:
    axis.set_title("Reward (training, all completions)")
    _line(axis, rows, "reward/mean", BLUE, "total")
    _line(axis, rows, "reward/correctness", GREEN, "correctness", linewidth=1.1)
    _line(axis, rows, "reward/language", ORANGE, "language", linewidth=1.1)
    _line(axis, rows, "reward/format", GREY, "format", linewidth=1.1)
    _line(axis, rows, "reward/length", RED, "length penalty", linewidth=1.1)


def _draw_share(axis: Axes, rows: list[dict[str, Any]], records: list[EvaluationRecord], name: str, title: str) -> None:
    axis.set_title(title)
    axis.set_ylim(0, 1.03)
    _line(axis, rows, name, BLUE, "training, sampled", linewidth=1.3, alpha=0.75)
    greedy = at_temperature(records, GREEDY)
    sampled = [record for record in records if record.evaluation.temperature != GREEDY]
    sides = ((sampled, ORANGE, "validation, sampled", "o"), (greedy, GREEN, "validation, greedy", "D"))
    for found, color, label, marker in sides:
        side = [record for record in found if getattr(record.evaluation, name) is not None]
        if not side:
            continue
        values = [getattr(record.evaluation, name) for record in side]
        half = [record.evaluation.accuracy_half_width if name == "accuracy" else 0.0 for record in side]
        axis.errorbar(
            [record.version for record in side], values, yerr=half if any(half) else None, color=color, label=label,
            marker=marker, markersize=5, linewidth=1.0, linestyle="--", capsize=2, clip_on=False, zorder=3,
        )  # fmt: skip


def staleness_bound(run_dir: Path) -> int | None:
    """The staleness bound that follows from the run's settings, in versions; None where they cannot be read."""
    try:
        return settings_file.load(run_dir / "config.toml").max_staleness
    except InputError:
        return None


def _draw_staleness(axis: Axes, rows: list[dict[str, Any]], bound: int | None) -> None:
    axis.set_title("Staleness (policy versions)")
    _line(axis, rows, "staleness/max", ORANGE, "oldest trained token", drawstyle="steps-mid")
    _line(axis, rows, "staleness/mean", BLUE, "mean token")
    if bound is not None:
        axis.axhline(bound, color=GREY, linestyle=":", label="bound")
    axis.set_ylim(0, max(axis.get_ylim()[1], bound or 0, 1) * 1.25)


def _draw_sync(axis: Axes, rows: list[dict[str, Any]]) -> None:
    axis.set_title("Weight update (ms)")
    parts = (("sync/total_s", BLUE, 1.8, "whole update and proof"), ("sync/update_s", GREEN, 1.1, "in the engine"))
    for name, color, width, label in parts:
        steps, seconds = series(rows, name)
        if steps:
            axis.plot(steps, [1000 * value for value in seconds], color=color, linewidth=width, label=label)
    _line(axis, rows, "sync/stall_ms", ORANGE, "stall seen by requests")
    axis.set_ylim(bottom=0)


def _draw_time(axis: Axes, rows: list[dict[str, Any]]) -> None:
    axis.set_title("Where a step's time goes (s)")
    steps, whole = series(rows, "time/step_s")
    if not steps:
        return
    by_step = {row["step"]: row for row in rows if row["kind"] == "train"}
    names = [("time/train_s", GREEN, "training"), ("time/wait_batch_s", BLUE, "waiting for groups"),
             ("time/wait_sync_s", ORANGE, "waiting for weights")]  # fmt: skip
    parts = [[float(by_step[step].get(name) or 0.0) for step in steps] for name, _, _ in names]
    rest = [max(total - sum(values), 0.0) for total, values in zip(whole, zip(*parts, strict=True), strict=True)]
    axis.stackplot(
        steps, *parts, rest, colors=[*(color for _, color, _ in names), LIGHT],
        labels=[*(label for _, _, label in names), "other"], alpha=0.85, linewidth=0,
    )  # fmt: skip
    axis.set_ylim(0, 1.35 * sorted(whole)[int(0.98 * (len(whole) - 1))])  # one slow step must not flatten the rest
