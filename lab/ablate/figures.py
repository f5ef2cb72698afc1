"""Figures of finished runs: a metric of one run over some of its steps, and mean and interval over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from mpmath import mp

from lab.ablate.ablation import END, WINDOW
from lab.ablate.launch import Launch
from shared.metrics import kind_of, read_rows, series
from trainer.evaluate import Part
from trainer.evaluations import at_temperature, read_evaluations

CONFIDENCE = 0.95


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


@cache
def student(count: int) -> float:
    """Return the two-sided 95 % quantile of Student's t with count - 1 degrees of freedom, e.g. 4.3027 for 3.

    The tail P(|T| > t) is the regularised incomplete beta function I_{d/(d+t^2)}(d/2, 1/2), inverted by bisection.
    """
    free = count - 1
    low, high = 0.0, 1e6
    for _ in range(80):
        middle = (low + high) / 2
        tail = mp.betainc(free / 2, 0.5, 0, free / (free + middle * middle), regularized=True)
        low, high = (middle, high) if tail > 1 - CONFIDENCE else (low, middle)
    return high


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


def select(points: Sequence[tuple[int, float]], window: str) -> list[float]:
    """Return the values of a window; points are (step, value) by step. "last" and "first" count from their ends.

    Example: select([(1, .1), (2, .2), (3, .3)], "last 2 steps") == [.2, .3].
    """
    if not points:
        return []
    if window == "start":
        return [points[0][1]]
    if window == END:
        return [points[-1][1]]
    found = WINDOW.fullmatch(window)
    assert found is not None, window
    low, high = points[0][0], points[-1][0]
    if found["side"] == "last":
        low = high - int(found["count"]) + 1
    elif found["side"] == "first":
        high = low + int(found["count"]) - 1
    elif found["from"]:
        low, high = int(found["from"]), int(found["to"])
    return [value for step, value in points if low <= step <= high]


class Runs:
    """Reads the metrics of an ablation's finished runs; files are read once."""

    def __init__(self, launches: Sequence[Launch]):
        self.launches = {(launch.variant, launch.seed): launch for launch in launches if launch.variant}
        self.curve = lru_cache(maxsize=None)(self._curve)
        self.rows = lru_cache(maxsize=None)(read_rows)
        self.evaluated = lru_cache(maxsize=None)(evaluated_parts)

    @property
    def seeds(self) -> list[int]:
        """The seeds of the launches, in order."""
        return list(dict.fromkeys(seed for _, seed in self.launches))

    def finished(self, variant: str) -> list[int]:
        """Return the seeds whose run of this variant is finished."""
        return [seed for (name, seed), launch in self.launches.items() if name == variant and launch.finished]

    def _curve(self, variant: str, seed: int, metric: str) -> list[tuple[int, float]]:
        """Return (step, value) of one run by step; [] if it is not finished or has no such metric."""
        launch = self.launches.get((variant, seed))
        if launch is None or not launch.finished:
            return []
        if metric.count("/") > 1:
            _, figure, part = metric.split("/", 2)
            return [
                (version, float(getattr(parts[part], figure)))
                for version, parts in self.evaluated(launch.run_dir, launch.config.rollout.temperature)
                if part in parts and getattr(parts[part], figure) is not None
            ]
        rows = self.rows(launch.run_dir / "metrics.jsonl")
        return sorted(zip(*series(rows, metric, kind_of({metric: 0})), strict=True))

    def value(self, variant: str, seed: int, metric: str, window: str) -> float | None:
        """Return the mean of a metric of one run over a window; None if the window has no values."""
        values = select(self.curve(variant, seed, metric), window)
        return math.fsum(values) / len(values) if values else None

    def values(self, variant: str, metric: str, window: str) -> dict[int, float]:
        """Return seed -> mean over a window, for the finished runs that have the metric."""
        found = {seed: self.value(variant, seed, metric, window) for seed in self.seeds}
        return {seed: value for seed, value in found.items() if value is not None}

    def parts(self, kind: str) -> list[str]:
        """Return the parts of a kind that evaluations of finished runs report, e.g. ["language/de", "language/fr"]."""
        found = {
            part
            for launch in self.launches.values()
            if launch.finished
            for _, parts in self.evaluated(launch.run_dir, launch.config.rollout.temperature)
            for part in parts
        }
        return sorted(part for part in found if part.startswith(f"{kind}/"))


def evaluated_parts(run_dir: Path, temperature: float) -> list[tuple[int, dict[str, Part]]]:
    """Return (version, parts) of a run's evaluations at its sampling temperature, by version."""
    records = at_temperature(read_evaluations(run_dir), temperature)
    return [(record.version, record.evaluation.parts) for record in records]
