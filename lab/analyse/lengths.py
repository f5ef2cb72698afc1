"""Fits reward against the logarithm of the mean completion length with a straight line.

    reward = slope * ln(length) + intercept            least squares; R^2 = 1 - residual / total sum of squares

"Reward" is the raw one, without the length penalty, which is itself a function of length.
Source: Magistral (2506.10910), section 7.1: raw reward is linear in log length until the length limit takes effect.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np

from shared.metrics import read_rows

LEAST = 3


class Fit(msgspec.Struct, frozen=True):
    """A fitted line and its quality."""

    slope: float
    """reward per e-fold of length"""
    intercept: float
    r_squared: float | None
    """1 for a perfect fit; None if all rewards are equal"""
    points: int


def fit_log(lengths: Sequence[float], rewards: Sequence[float]) -> Fit | None:
    """Return the least-squares line; None below three points or if all lengths are equal. lengths: tokens, above 0."""
    logs, values = np.log(np.asarray(lengths, float)), np.asarray(rewards, float)
    if len(logs) < LEAST or np.ptp(logs) < 1e-9:
        return None
    centred = logs - logs.mean()
    slope = float(centred @ values / (centred @ centred))
    intercept = float(values.mean() - slope * logs.mean())
    residual = float(((values - slope * logs - intercept) ** 2).sum())
    total = float(((values - values.mean()) ** 2).sum())
    return Fit(slope, intercept, 1 - residual / total if total > 1e-18 else None, len(logs))


@dataclass(frozen=True)
class RewardByLength:
    """Mean lengths in tokens and mean raw rewards of some models."""

    lengths: list[float]
    rewards: list[float]

    @cached_property
    def fit(self) -> Fit | None:
        """The line through them."""
        return fit_log(self.lengths, self.rewards)


def training_points(run_dir: Path) -> tuple[list[int], RewardByLength]:
    """Return the training steps in metrics.jsonl, and their lengths and rewards.

    Lengths are of the trained groups, rewards of all graded completions of the step, as shared/metrics.py defines them.
    """
    steps, lengths, rewards = [], [], []
    for row in read_rows(run_dir / "metrics.jsonl"):
        length, reward = row.get("length/mean"), row.get("reward/mean")
        if row["kind"] == "train" and length and reward is not None and math.isfinite(reward):
            steps.append(int(row["step"]))
            lengths.append(float(length))
            rewards.append(float(reward) - float(row.get("reward/length") or 0.0))
    return steps, RewardByLength(lengths, rewards)
