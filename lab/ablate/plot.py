"""Draws the plot of an ablation: a diagram per metric, a colour per variant, mean and range over the seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lab.ablate.ablation import Ablation, Panel
from lab.ablate.results import Curve, FinishedRuns
from trainer.plot import figure, whole_steps

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ("#2f6db5", "#d9742b", "#3a9a5b", "#b04a5a", "#7b5aa6", "#8a6d3b", "#d565a8", "#5f6670", "#a3a52f", "#2aa5b8")
LINES = ("-", "--", ":", "-.")
"""line styles; the next one is used when the colours are exhausted"""
USUAL = (Panel(metric="reward/mean"), Panel(metric="accuracy"), Panel(metric="entropy"), Panel(metric="length/mean"))
SMOOTH_STEPS = 5
MOST_COLUMNS = 3
NAMES = {
    "evaluation/accuracy": "validation accuracy",
    "evaluation/consistency": "validation consistency",
    "evaluation/pass_at_k": "validation pass@k",
    "evaluation/majority": "validation maj@k",
    "reward/mean": "reward",
    "entropy": "entropy",
    "length/mean": "tokens",
    "kl/k3": "KL to the sampler",
    "kl/reference": "KL from the start",
    "clip/high": "clipped above",
    "groups/filtered": "groups filtered",
    "tests_passed": "tests passed",
}
"""short names of metrics, in table and plot"""


def metric_label(metric: str) -> str:
    """Return a metric's name in a heading: evaluation/accuracy/language/fr is "validation accuracy, fr"."""
    if metric in NAMES:
        return NAMES[metric]
    section, _, rest = metric.partition("/")
    if section != "evaluation":
        return metric
    name, *part = rest.split("/", 2)
    return ", ".join([f"validation {name}", *part[1:]])


def write_plot(ablation: Ablation, runs: FinishedRuns, path: Path) -> bool:
    """Draw the curves of all finished runs; returns False, and writes no file, if there are none."""
    variants = [name for name in ablation.variants if runs.finished(name)]
    panels = [(panel, _curves(runs, panel, variants)) for panel in ablation.panels or USUAL]
    panels = [(panel, curves) for panel, curves in panels if any(curves.values())]
    if not panels:
        return False
    styles = {name: (COLORS[i % len(COLORS)], LINES[i // len(COLORS) % len(LINES)]) for i, name in enumerate(variants)}
    columns = min(MOST_COLUMNS, len(panels)) if len(panels) != 4 else 2
    rows = math.ceil(len(panels) / columns)
    size = (4.6 * columns + 0.4, 3.3 * rows + 1)
    with figure(path, f"{ablation.about}\n", rows, columns, size) as axes:
        for axis, (panel, curves) in zip(axes.flat, panels, strict=False):
            _draw(axis, panel, ablation, curves, styles)
        for axis in axes.flat[len(panels) :]:
            axis.set_visible(False)
        axes[0, 0].figure.supxlabel(
            "Mean over seeds, bands from the lowest to the highest seed; training curves are means over "
            f"{SMOOTH_STEPS} steps.", x=0.01, ha="left", fontsize=9,
        )  # fmt: skip
    return True


def _curves(runs: FinishedRuns, panel: Panel, variants: Sequence[str]) -> dict[str, list[Curve]]:
    """Return variant -> its seeds' curves of the panel's metric."""
    chosen = [name for name in variants if not panel.variants or name in panel.variants]
    found = {name: [runs.curve(name, seed, panel.metric) for seed in runs.finished(name)] for name in chosen}
    return {name: [curve for curve in curves if curve] for name, curves in found.items()}


def _draw(
    axis: Axes, panel: Panel, ablation: Ablation, curves: dict[str, list[Curve]], styles: dict[str, tuple[str, str]]
) -> None:
    name = metric_label(panel.metric)
    axis.set_title(panel.title or name[0].upper() + name[1:])
    few = panel.metric.startswith("evaluation/")  # validation figures: a handful of points, drawn as they are
    for variant, seeds in curves.items():
        if not seeds:
            continue
        steps, middle, low, high = band([curve if few else smooth(curve, SMOOTH_STEPS) for curve in seeds])
        color, style = styles[variant]
        axis.plot(
            steps, middle, color=color, linestyle=style, label=ablation.label(variant), linewidth=1.7,
            marker="o" if few else "", markersize=4,
        )  # fmt: skip
        axis.fill_between(steps, low, high, color=color, alpha=0.13, linewidth=0)
    axis.set_xlim(left=0)
    axis.set_xlabel("optimiser step")
    whole_steps(axis.xaxis)
    axis.legend(loc="best", fontsize=8)


def smooth(curve: Curve, steps: int) -> Curve:
    """Replace each value by the mean of the `steps` values that end with it (fewer at the beginning)."""
    values = [value for _, value in curve]
    windows = [values[max(0, i + 1 - steps) : i + 1] for i in range(len(values))]
    return [(step, math.fsum(window) / len(window)) for (step, _), window in zip(curve, windows, strict=True)]


def band(curves: Sequence[Curve]) -> tuple[list[int], list[float], list[float], list[float]]:
    """Return the steps that every curve has, with mean, lowest and highest value over the curves."""
    by_step = [dict(curve) for curve in curves]
    steps = sorted(set.intersection(*(set(values) for values in by_step)))
    stacked = [[values[step] for values in by_step] for step in steps]
    return steps, [math.fsum(row) / len(row) for row in stacked], list(map(min, stacked)), list(map(max, stacked))
