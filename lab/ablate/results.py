"""Figures of finished runs, and the verdicts on claims: means over seeds with their 95 % intervals.

For each seed the run of one variant is compared with that of the other, which began from the same weights, drew the
same problems in the same order and sampled with the same seeds. Every relation of a claim is one or two inequalities
"slack > 0" (or >= 0); the mean slack over seeds has a 95 % interval (Student's t).

    reproduced        every inequality holds in its whole interval
    not reproduced    an inequality fails in its whole interval
    unclear           the interval extends to both sides, or fewer than two seeds have both runs
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from scipy import stats

from lab.ablate.ablation import END, MARGIN, WINDOW, Ablation, Claim, window_of
from lab.ablate.runs import AblationRun
from shared.metrics import kind_of, read_rows, series
from trainer.evaluation import Breakdown, at_temperature, read_evaluations

CONFIDENCE = 0.95
REPRODUCED, NOT_REPRODUCED, UNCLEAR = "reproduced", "not reproduced", "unclear"
Curve = list[tuple[int, float]]
"""(step, value) by step"""


# ---- means over seeds --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its interval."""

    mean: float
    half: float | None
    """half of the 95 % interval (Student's t over seeds); None with one seed"""
    count: int
    """number of seeds"""

    @property
    def low(self) -> float:
        """Lower end; minus infinity with one seed."""
        return -math.inf if self.half is None else self.mean - self.half

    @property
    def high(self) -> float:
        """Upper end; infinity with one seed."""
        return math.inf if self.half is None else self.mean + self.half


def student(count: int) -> float:
    """Return the two-sided 95 % quantile of Student's t with count - 1 degrees of freedom, e.g. 4.3027 for 3."""
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1))


def estimate(values: Sequence[float]) -> Estimate:
    """Return mean and 95 % interval of the seeds' values: mean +- t s / sqrt(n), s with n - 1. At least one value."""
    count = len(values)
    mean = math.fsum(values) / count
    if count < 2:
        return Estimate(mean, None, count)
    if len(set(values)) == 1:
        return Estimate(values[0], 0.0, count)  # exactly, whatever the rounding of the mean
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return Estimate(mean, student(count) * math.sqrt(variance / count), count)


# ---- finished runs -----------------------------------------------------------------------------------------------


def select(points: Sequence[tuple[int, float]], window: str) -> list[float]:
    """Return the values of a window; points are (step, value) by step. "last" and "first" count from their ends.

    Example: select([(1, .1), (2, .2), (3, .3)], "last 2 steps") == [.2, .3].
    """
    if not points:
        return []
    low, high = points[0][0], points[-1][0]
    match = WINDOW.fullmatch(window)
    assert match is not None, window
    if window == "start":
        high = low
    elif window == END:
        low = high
    elif match["side"] == "last":
        low = high - int(match["count"]) + 1
    elif match["side"] == "first":
        high = low + int(match["count"]) - 1
    elif match["from"]:
        low, high = int(match["from"]), int(match["to"])
    return [value for step, value in points if low <= step <= high]


class FinishedRuns:
    """Reads the metrics of an ablation's finished runs; files are read once."""

    def __init__(self, runs: Sequence[AblationRun]):
        self.runs = {(run.variant, run.seed): run for run in runs if run.variant}
        self.curve = lru_cache(maxsize=None)(self._curve)
        self.rows = lru_cache(maxsize=None)(read_rows)
        self.evaluated = lru_cache(maxsize=None)(evaluated_parts)

    @property
    def seeds(self) -> list[int]:
        """The seeds of the runs, in order."""
        return list(dict.fromkeys(seed for _, seed in self.runs))

    @property
    def variants(self) -> list[str]:
        """The variants of the runs, in order."""
        return list(dict.fromkeys(variant for variant, _ in self.runs))

    def finished(self, variant: str) -> list[int]:
        """Return the seeds whose run of this variant is finished."""
        return [seed for (name, seed), run in self.runs.items() if name == variant and run.finished]

    def _curve(self, variant: str, seed: int, metric: str) -> Curve:
        """Return the curve of one run; [] if it is not finished or has no such metric."""
        run = self.runs.get((variant, seed))
        if run is None or not run.finished:
            return []
        if metric.count("/") > 1:
            _, figure, subset = metric.split("/", 2)
            return [
                (version, float(getattr(parts[subset], figure)))
                for version, parts in self.evaluated(run.run_dir, run.config.rollout.temperature)
                if subset in parts and getattr(parts[subset], figure) is not None
            ]
        rows = self.rows(run.run_dir / "metrics.jsonl")
        return sorted(zip(*series(rows, metric, kind_of({metric: 0})), strict=True))

    def values(self, variant: str, metric: str, window: str) -> dict[int, float]:
        """Return seed -> mean of a metric over a window, for the finished runs that have values in it."""
        by_seed = {seed: select(self.curve(variant, seed, metric), window) for seed in self.seeds}
        return {seed: math.fsum(values) / len(values) for seed, values in by_seed.items() if values}

    def estimate(self, variant: str, metric: str, window: str) -> Estimate | None:
        """Return the estimate over seeds of a metric; None if no run has it."""
        values = self.values(variant, metric, window)
        return estimate(list(values.values())) if values else None

    def parts(self, kind: str) -> list[str]:
        """Return the parts of a kind that evaluations of finished runs report, e.g. ["language/de", "language/fr"]."""
        names = {
            name
            for run in self.runs.values() if run.finished
            for _, parts in self.evaluated(run.run_dir, run.config.rollout.temperature)
            for name in parts
        }  # fmt: skip
        return sorted(name for name in names if name.startswith(f"{kind}/"))


def evaluated_parts(run_dir: Path, temperature: float) -> list[tuple[int, dict[str, Breakdown]]]:
    """Return (version, parts) of a run's evaluations at its sampling temperature, by version."""
    records = at_temperature(read_evaluations(run_dir), temperature)
    return [(record.version, record.evaluation.parts) for record in records]


# ---- claims ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClaimResult:
    """The verdict on a claim, with the estimates it rests on."""

    claim: Claim
    subset: str
    """problems that it is about, e.g. "language/fr"; "" for all validation problems"""
    verdict: str
    why: str
    """reason why nothing was decided; "" if an interval decided"""
    left: Estimate | None = None
    """estimate of `variant`"""
    right: Estimate | None = None
    """estimate of `than`"""
    difference: Estimate | None = None
    """`variant` less `than`, seed by seed"""

    @property
    def metric(self) -> str:
        """The metric that is compared."""
        return f"{self.claim.metric}/{self.subset}" if self.subset else self.claim.metric


def decide_all(ablation: Ablation, runs: FinishedRuns) -> list[ClaimResult]:
    """Decide every claim, those with `each` for every part."""
    return [
        decide(ablation, claim, subset, runs)
        for claim in ablation.claims
        for subset in (runs.parts(claim.each) or [""] if claim.each else [""])
    ]


def decide(ablation: Ablation, claim: Claim, subset: str, runs: FinishedRuns) -> ClaimResult:
    """Decide one claim, for one part of the validation problems."""
    if claim.each and not subset:
        return ClaimResult(claim, subset, UNCLEAR, f"no evaluation tells several {claim.each}s apart")
    metric = f"{claim.metric}/{subset}" if subset else claim.metric
    over = window_of(metric, claim.over, ablation.over)
    left = runs.values(claim.variant, metric, over)
    right = runs.values(claim.than or claim.variant, metric, claim.than_over or over)
    pairs = [(left[seed], right[seed]) for seed in sorted(left.keys() & right.keys())]
    if not pairs:
        return ClaimResult(claim, subset, UNCLEAR, "no seed has both")
    ours, theirs = zip(*pairs, strict=True)
    verdict, why = verdict_on(claim.relation, claim.margin, pairs), "one seed" if len(pairs) == 1 else ""
    difference = estimate([x - y for x, y in pairs])
    return ClaimResult(claim, subset, verdict, why, estimate(ours), estimate(theirs), difference)


def verdict_on(relation: str, margin: float | str, pairs: Sequence[tuple[float, float]]) -> str:
    """Return the verdict on "x relation y" from the (x, y) of the seeds.

    With m the margin (a share is taken of |y|, seed by seed): above x - y - m > 0, below y - x - m > 0, not above
    y - x + m >= 0, not below x - y + m >= 0, as: the last two.
    """

    def slack(sign: int, side: int) -> Estimate:
        return estimate([sign * (x - y) + side * margin_of(margin, y) for x, y in pairs])

    strict = relation in ("above", "below")
    side = -1 if strict else 1
    signs = {"above": [1], "below": [-1], "not above": [-1], "not below": [1], "as": [1, -1]}[relation]
    verdicts = set()
    for mean in (slack(sign, side) for sign in signs):
        if mean.low > 0 or (mean.low == 0 and not strict):
            verdicts.add(REPRODUCED)
        elif mean.high < 0 or (mean.high == 0 and strict):
            verdicts.add(NOT_REPRODUCED)
        else:
            verdicts.add(UNCLEAR)
    return next(verdict for verdict in (NOT_REPRODUCED, UNCLEAR, REPRODUCED) if verdict in verdicts)


def margin_of(margin: float | str, value: float) -> float:
    """Return a margin in the metric's unit: a number as it is, "10 %" as a share of |value|."""
    if isinstance(margin, str):
        match = MARGIN.fullmatch(margin)
        assert match is not None, margin
        return float(match["number"]) / 100 * abs(value)
    return margin
