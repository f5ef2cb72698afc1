"""Renders the results of an ablation as Markdown (table.md) and as data (results.json)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lab.ablate.ablation import DETAILED, KINDS, Ablation, window_of
from lab.ablate.figures import Estimate, Runs, estimate
from lab.ablate.runner import Failure
from lab.ablate.verdict import Decision
from shared.metrics import METRICS
from shared.progress import duration

COLUMNS = {
    "evaluation/accuracy": "held-out accuracy",
    "evaluation/consistency": "held-out consistency",
    "evaluation/pass_at_k": "held-out pass@k",
    "evaluation/majority": "held-out maj@k",
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
USUAL = (
    "evaluation/accuracy", "evaluation/consistency", "reward/mean", "entropy", "length/mean", "kl/k3", "kl/reference",
)  # fmt: skip


def short(metric: str) -> str:
    """Return a metric's name in a heading: evaluation/accuracy/language/fr is "held-out accuracy, fr"."""
    if metric in COLUMNS:
        return COLUMNS[metric]
    section, _, rest = metric.partition("/")
    if section != "evaluation":
        return metric
    figure, *part = rest.split("/", 2)
    return ", ".join([f"held-out {figure}", *part[1:]])


def number(value: float) -> str:
    """Format a number with three digits: 0.8125 -> "0.812", 31.46 -> "31.5", 0.000213 -> "2.13e-04"."""
    size = abs(value)
    if 1e-12 < size < 0.00995:
        return f"{value:.2e}"
    return f"{value:.3f}" if size < 9.995 else f"{value:.1f}" if size < 99.95 else f"{value:,.0f}"


def cell(found: Estimate | None) -> str:
    """Format a mean with half of its interval."""
    if found is None:
        return "-"
    return number(found.mean) + (f" ± {number(found.half)}" if found.half is not None else "")


def interval(found: Estimate | None) -> str:
    """Format a difference with its interval, e.g. "+0.120 (+0.080 to +0.160)"."""
    if found is None:
        return "-"
    signed = [("+" if value > 0 else "") + number(value) for value in (found.mean, found.low, found.high)]
    return signed[0] if found.half is None else f"{signed[0]} ({signed[1]} to {signed[2]})"


def of(runs: Runs, variant: str, metric: str, window: str) -> Estimate | None:
    """Return the estimate over seeds of one metric; None if no run has it."""
    values = runs.values(variant, metric, window)
    return estimate(list(values.values())) if values else None


# ---- Markdown ----------------------------------------------------------------------------------------------------


def markdown(
    ablation: Ablation,
    command: str,
    runs: Runs,
    decisions: Sequence[Decision],
    failures: Sequence[Failure],
    wall_s: float,
) -> str:
    """Return the whole document."""
    variants = list(dict.fromkeys(variant for variant, _ in runs.launches))
    parts = [
        f"# {ablation.about}",
        "",
        f"`{command}`: {runs_text(runs)} of {steps_text(runs)} steps, seeds "
        f"{', '.join(map(str, runs.seeds))}, {duration(wall_s)} in all. {start_text(ablation)}",
        "",
        *variant_lines(ablation, runs, variants),
        "",
        *(claim_lines(ablation, decisions) if decisions else []),
        *(line for each in ablation.each for line in part_lines(ablation, runs, variants, each)),
        "![curves](plot.png)",
        "",
    ]
    if failures:
        parts += ["Not finished:", "", *(f"- {failure.title}: {failure.why}" for failure in failures), ""]
    return "\n".join(parts)


def runs_text(runs: Runs) -> str:
    """Return the number of finished runs, and that of all runs if some are not finished."""
    done, count = sum(launch.finished for launch in runs.launches.values()), len(runs.launches)
    return f"{done} runs" if done == count else f"{done} of {count} runs"


def steps_text(runs: Runs) -> str:
    """Return the number of steps of the runs, or the smallest and largest."""
    steps = sorted({launch.config.steps for launch in runs.launches.values()})
    return str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"


def start_text(ablation: Ablation) -> str:
    """Return a sentence that says what the runs begin from."""
    if ablation.start is None:
        return "Every run starts by itself."
    if ablation.start.per_seed:
        return "All runs of a seed begin from the same weights; every seed has a start of its own."
    return "All runs begin from the same weights: the intervals are over seeds of reinforcement learning only."


def variant_lines(ablation: Ablation, runs: Runs, variants: Sequence[str]) -> list[str]:
    """Return the table with one row per variant; columns without any value are left out."""
    columns = [
        (metric, window)
        for metric in ablation.columns or USUAL
        for window in [window_of(metric, "", ablation.over)]
        if any(of(runs, variant, metric, window) for variant in variants)
    ]
    head = ["variant", "settings", "seeds", *(short(metric) for metric, _ in columns)]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for variant in variants:
        settings = " ".join(f"`{setting}`" for setting in ablation.variants[variant].settings) or "-"
        cells = [cell(of(runs, variant, metric, window)) for metric, window in columns]
        lines.append(f"| {' | '.join([ablation.label(variant), settings, str(len(runs.finished(variant))), *cells])} |")
    lines += ["", "Mean over seeds ± half of the 95 % interval (Student's t)."]
    lines += [f"- {short(metric)}: {definition(metric)}, {window}" for metric, window in columns]
    return lines


def definition(metric: str) -> str:
    """Return the definition of a metric, and its unit."""
    name = metric if metric in METRICS else "/".join(metric.split("/")[:2])
    return f"{METRICS[name].definition} ({METRICS[name].unit})"


def claim_lines(ablation: Ablation, decisions: Sequence[Decision]) -> list[str]:
    """Return the table with one row per claim."""
    lines = [
        "## Claims",
        "",
        "Decided by the 95 % interval of the difference over paired seeds: all of it must lie where the claim says.",
        "",
        "| claim | checked | measured | difference | verdict |",
        "|---|---|---|---|---|",
    ]
    for found in decisions:
        verdict = f"**{found.verdict}**" + (f" ({found.why})" if found.why else "")
        measured = f"{cell(found.left)} against {cell(found.right)}" if found.left else "-"
        cells = [found.claim.says, statement(ablation, found), measured, interval(found.difference), verdict]
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return [*lines, ""]


def statement(ablation: Ablation, found: Decision) -> str:
    """Describe the comparison, e.g. "entropy of clip-higher above symmetric clip, last 10 steps"."""
    claim = found.claim
    metric = f"{claim.metric}/{found.part}" if found.part else claim.metric
    over = window_of(metric, claim.over, ablation.over)
    than = "itself" if claim.than in ("", claim.variant) else ablation.label(claim.than)
    text = f"{short(metric)} of {ablation.label(claim.variant)} {claim.relation} {than}"
    if claim.margin:
        share = claim.margin if isinstance(claim.margin, str) else number(claim.margin)
        text += f" {'by more than' if claim.relation in ('above', 'below') else 'within'} {share}"
    return f"{text}, {over}" + (f" against {claim.than_over}" if claim.than_over and claim.than_over != over else "")


def part_lines(ablation: Ablation, runs: Runs, variants: Sequence[str], each: str) -> list[str]:
    """Return held-out figures by language, domain or set after training: one table per figure."""
    parts = runs.parts(each)
    names = [part.partition("/")[2] for part in parts]
    lines = [f"## By {each}", ""]
    for figure in DETAILED:
        rows = []
        for variant in variants:
            found = [of(runs, variant, f"evaluation/{figure}/{part}", "end") for part in parts]
            if any(found):
                rows.append(f"| {ablation.label(variant)} | {' | '.join(map(cell, found))} |")
        if rows:
            head = [f"Held-out {figure}, after training:", "", f"| variant | {' | '.join(names)} |"]
            lines += [*head, "|---|" + "---|" * len(parts), *rows, ""]
    return lines


# ---- data --------------------------------------------------------------------------------------------------------


def as_data(
    ablation: Ablation, runs: Runs, decisions: Sequence[Decision], failures: Sequence[Failure], wall_s: float
) -> dict[str, Any]:
    """Return the contents of the tables, unrounded, with every figure of every seed."""
    variants = list(dict.fromkeys(variant for variant, _ in runs.launches))
    metrics = [*(ablation.columns or USUAL)]
    metrics += [f"evaluation/{figure}/{part}" for kind in KINDS for part in runs.parts(kind) for figure in DETAILED]
    return {
        "about": ablation.about,
        "seeds": runs.seeds,
        "wall_s": round(wall_s, 1),
        "variants": {
            variant: {
                "label": ablation.label(variant),
                "settings": ablation.variants[variant].settings,
                "figures": figures_of(ablation, runs, variant, metrics),
            }
            for variant in variants
        },
        "claims": [
            {**found.claim.model_dump(), "part": found.part, "verdict": found.verdict, "why": found.why}
            | {name: as_dict(getattr(found, name)) for name in ("left", "right", "difference")}
            for found in decisions
        ],
        "failures": [{"run": failure.title, "why": failure.why} for failure in failures],
    }


def figures_of(ablation: Ablation, runs: Runs, variant: str, metrics: Sequence[str]) -> dict[str, Any]:
    """Return metric -> window, value of each seed, mean and interval; metrics that no run has are left out."""
    found: dict[str, Any] = {}
    for metric in metrics:
        window = window_of(metric, "", ablation.over)
        if values := runs.values(variant, metric, window):
            by_seed = {str(seed): value for seed, value in values.items()}
            found[metric] = {"over": window, "seeds": by_seed, **(as_dict(estimate(list(values.values()))) or {})}
    return found


def as_dict(found: Estimate | None) -> dict[str, float | int | None] | None:
    """Return an estimate as JSON; None for none."""
    return None if found is None else {"mean": found.mean, "half_width": found.half, "count": found.count}
