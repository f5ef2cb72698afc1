"""Writes the results of an ablation: one table with claims (table.md), all figures (results.json) and one plot.

The plot has a diagram for each metric and a colour for each variant: mean and range over the seeds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.ablate.ablation import DETAILED, KINDS, Ablation, Panel, window_of
from lab.ablate.results import ClaimResult, Curve, Estimate, FinishedRuns, decide_all, estimate
from lab.ablate.runner import wall_s
from lab.ablate.runs import AblationRun
from shared.atomic_write import write_whole
from shared.metrics import METRICS
from shared.progress import duration
from trainer.plot import bound_shares, figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

USUAL = (
    "evaluation/accuracy", "evaluation/consistency", "reward/mean", "entropy", "length/mean", "kl/k3", "kl/reference",
)  # fmt: skip

COLORS = ("#2f6db5", "#d9742b", "#3a9a5b", "#b04a5a", "#7b5aa6", "#8a6d3b", "#d565a8", "#5f6670", "#a3a52f", "#2aa5b8")
LINES = ("-", "--", ":", "-.")
"""line styles; the next one is used when the colours are exhausted"""
USUAL_PANELS = tuple(Panel(metric=metric) for metric in ("reward/mean", "accuracy", "entropy", "length/mean"))
SMOOTH_STEPS = 5
MOST_COLUMNS = 3
NAMES = {
    "evaluation/accuracy": "validation accuracy", "evaluation/consistency": "validation consistency",
    "evaluation/pass_at_k": "validation pass@k", "evaluation/majority": "validation maj@k", "reward/mean": "reward",
    "entropy": "entropy", "length/mean": "tokens", "kl/k3": "KL to the sampler", "kl/reference": "KL from the start",
    "clip/high": "clipped above", "groups/filtered": "groups filtered", "tests_passed": "tests passed",
}  # fmt: skip
"""short names of metrics, in table and plot"""


def number(value: float) -> str:
    """Format a number with three digits: 0.8125 -> "0.812", 31.46 -> "31.5", 0.000213 -> "2.13e-04"."""
    size = abs(value)
    if 1e-12 < size < 0.00995:
        return f"{value:.2e}"
    return f"{value:.3f}" if size < 9.995 else f"{value:.1f}" if size < 99.95 else f"{value:,.0f}"


def cell(mean: Estimate | None) -> str:
    """Format a mean with half of its interval."""
    if mean is None:
        return "-"
    return number(mean.mean) + (f" ± {number(mean.half)}" if mean.half is not None else "")


def interval(difference: Estimate | None) -> str:
    """Format a difference with its interval, e.g. "+0.120 (+0.080 to +0.160)"."""
    if difference is None:
        return "-"
    values = (difference.mean, difference.low, difference.high)
    mean, low, high = (("+" if value > 0 else "") + number(value) for value in values)
    return mean if difference.half is None else f"{mean} ({low} to {high})"


def table(*rows: Sequence[str]) -> list[str]:
    """Return the lines of a Markdown table; the first row is the head."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return [lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]


@dataclass
class Report:
    """The results of one ablation."""

    ablation: Ablation
    command: str
    """command that makes the report again"""
    runs: FinishedRuns
    results: list[ClaimResult]
    failures: Sequence[tuple[str, str]]
    """(title of a run, why it failed)"""
    wall_s: float
    """seconds of all launches"""
    drawn: bool = True
    """whether there is a plot"""

    # ---- Markdown ------------------------------------------------------------------------------------------------

    def markdown(self) -> str:
        """Return the whole document."""
        runs, failures = self.runs.runs.values(), [f"- {title}: {why}" for title, why in self.failures]
        done, steps = sum(run.finished for run in runs), sorted({run.config.steps for run in runs})
        counted = f"{done} runs" if done == len(runs) else f"{done} of {len(runs)} runs"
        lengths = str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
        lines = [
            f"# {self.ablation.about}",
            "",
            f"`{self.command}`: {counted} of {lengths} steps, seeds {', '.join(map(str, self.runs.seeds))}, "
            f"{duration(self.wall_s)} in all. {self.start()}",
            "",
            *self.variant_lines(),
            "",
            *(self.claim_lines() if self.results else []),
            "![curves](plot.png)" if self.drawn else "No run is finished: there are no curves.",
            "",
            *(["Not finished:", "", *failures, ""] if failures else []),
        ]
        return "\n".join(lines)

    def start(self) -> str:
        """Return a sentence that says what the runs begin from."""
        if self.ablation.start is None:
            return "Every run starts by itself."
        if self.ablation.start.per_seed:
            return "All runs of a seed begin from the same weights; every seed has a start of its own."
        return "All runs begin from the same weights: the intervals are over seeds of reinforcement learning only."

    def variant_lines(self) -> list[str]:
        """Return the table with one row per variant; columns without any value are left out."""
        ablation, runs = self.ablation, self.runs
        windows = {metric: window_of(metric, "", ablation.over) for metric in ablation.columns or USUAL}
        columns = {
            metric: [runs.estimate(variant, metric, window) for variant in runs.variants]
            for metric, window in windows.items()
        }
        columns = {metric: column for metric, column in columns.items() if any(column)}
        rows = [
            [
                ablation.label(variant), " ".join(map("`{}`".format, ablation.variants[variant].settings)) or "-",
                str(len(runs.finished(variant))), *(cell(column[index]) for column in columns.values()),
            ]
            for index, variant in enumerate(runs.variants)
        ]  # fmt: skip
        lines = table(["variant", "settings", "seeds", *map(metric_label, columns)], *rows)
        lines += ["", "Mean over seeds ± half of the 95 % interval (Student's t).", ""]
        return lines + [f"- {metric_label(metric)}: {definition(metric)}, {windows[metric]}" for metric in columns]

    def claim_lines(self) -> list[str]:
        """Return the table with one row per claim."""
        rows = []
        for result in self.results:
            verdict = f"**{result.verdict}**" + (f" ({result.why})" if result.why else "")
            measured = f"{cell(result.left)} against {cell(result.right)}" if result.left else "-"
            cells = [result.claim.says, self.statement(result), measured, interval(result.difference), verdict]
            rows.append([text.replace("|", "/") for text in cells])
        return [
            "## Claims",
            "",
            "Decided by the 95 % interval of the difference over paired seeds: all of it must lie where the claim "
            "says.",
            "",
            *table(["claim", "checked", "measured", "difference", "verdict"], *rows),
            "",
        ]

    def statement(self, result: ClaimResult) -> str:
        """Describe the comparison, e.g. "entropy of clip-higher above symmetric clip, last 10 steps"."""
        ablation, claim = self.ablation, result.claim
        metric = result.metric
        over = window_of(metric, claim.over, ablation.over)
        than = "itself" if claim.than in ("", claim.variant) else ablation.label(claim.than)
        text = f"{metric_label(metric)} of {ablation.label(claim.variant)} {claim.relation} {than}"
        if claim.margin:
            share = claim.margin if isinstance(claim.margin, str) else number(claim.margin)
            text += f" {'by more than' if claim.relation in ('above', 'below') else 'within'} {share}"
        return f"{text}, {over}" + (f" against {claim.than_over}" if claim.than_over not in ("", over) else "")

    # ---- data ----------------------------------------------------------------------------------------------------

    def data(self) -> dict[str, Any]:
        """Return the contents of the tables, unrounded, with every figure of every seed."""
        metrics = [*(self.ablation.columns or USUAL)]
        metrics += [
            f"evaluation/{figure}/{part}" for kind in KINDS for part in self.runs.parts(kind) for figure in DETAILED
        ]
        return {
            "about": self.ablation.about, "seeds": self.runs.seeds, "wall_s": round(self.wall_s, 1),
            "variants": {
                variant: {
                    "label": self.ablation.label(variant), "settings": self.ablation.variants[variant].settings,
                    "figures": self.figures(variant, metrics),
                }
                for variant in self.runs.variants
            },
            "claims": [
                {**result.claim.model_dump(), "part": result.subset, "verdict": result.verdict, "why": result.why}
                | {name: as_data(getattr(result, name)) for name in ("left", "right", "difference")}
                for result in self.results
            ],
            "failures": [{"run": title, "why": why} for title, why in self.failures],
        }  # fmt: skip

    def figures(self, variant: str, metrics: Sequence[str]) -> dict[str, Any]:
        """Return metric -> window, value of each seed, mean and interval; metrics that no run has are left out."""
        figures: dict[str, Any] = {}
        for metric in metrics:
            window = window_of(metric, "", self.ablation.over)
            if values := self.runs.values(variant, metric, window):
                by_seed = {str(seed): value for seed, value in values.items()}
                figures[metric] = {"over": window, "seeds": by_seed, **(as_data(estimate(list(values.values()))) or {})}
        return figures


def definition(metric: str) -> str:
    """Return the definition of a metric, and its unit."""
    name = metric if metric in METRICS else "/".join(metric.split("/")[:2])
    return f"{METRICS[name].definition} ({METRICS[name].unit})"


def as_data(mean: Estimate | None) -> dict[str, float | int | None] | None:
    """Return an estimate as JSON; None for none."""
    return None if mean is None else {"mean": mean.mean, "half_width": mean.half, "count": mean.count}


def metric_label(metric: str) -> str:
    """Return a metric's name in a heading: evaluation/accuracy/language/fr is "validation accuracy, fr"."""
    if metric in NAMES:
        return NAMES[metric]
    section, _, rest = metric.partition("/")
    if section != "evaluation":
        return metric
    name, *kind_and_value = rest.split("/", 2)
    return ", ".join([f"validation {name}", *kind_and_value[1:]])


def write_plot(ablation: Ablation, runs: FinishedRuns, path: Path) -> bool:
    """Draw the curves of all finished runs; returns False, and writes no file, if there are none."""
    variants = [name for name in ablation.variants if runs.finished(name)]
    panels = [(panel, _curves(runs, panel, variants)) for panel in ablation.panels or USUAL_PANELS]
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
    curves = {name: [runs.curve(name, seed, panel.metric) for seed in runs.finished(name)] for name in chosen}
    return {name: [curve for curve in seeds if curve] for name, seeds in curves.items()}


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
    bound_shares(axis, [panel.metric])
    axis.set_xlabel("optimiser step")
    axis.locator_params(axis="x", integer=True)
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


def write_report(
    ablation: Ablation, command: str, folder: Path, runs: Sequence[AblationRun], failures: Mapping[Path, str]
) -> tuple[str, list[Path]]:
    """Write table.md, plot.png (if a run is finished) and results.json; returns the table and the files."""
    finished = FinishedRuns(runs)
    failed = [(run.title, failures[run.run_dir]) for run in runs if run.run_dir in failures]
    folder.mkdir(parents=True, exist_ok=True)
    plot = folder / "plot.png"
    if not (drawn := write_plot(ablation, finished, plot)):
        plot.unlink(missing_ok=True)
    report = Report(ablation, command, finished, decide_all(ablation, finished), failed, wall_s(folder), drawn)
    text = report.markdown()
    data = json.dumps(report.data(), indent=1, ensure_ascii=False) + "\n"
    for name, content in (("table.md", text), ("results.json", data)):
        write_whole(folder / name, content)
    return text, [path for path in (folder / "table.md", plot, folder / "results.json") if path.exists()]
