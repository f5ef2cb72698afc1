"""Draws the plots of an analysis: the path through the plane, the surfaces, reward against length.

Reward against the logarithm of the mean completion length is fitted with a straight line:

    reward = slope * ln(length) + intercept            least squares; R^2 = 1 - residual / total sum of squares

"Reward" is the raw one, without the length penalty, which is itself a function of length.
Source: Magistral (2506.10910), section 7.1: raw reward is linear in log length until the length limit takes effect.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
from scipy.stats import linregress

from lab.analyse.plane import Plane
from lab.analyse.surface import Axes, Points
from shared.jsonl import spread
from shared.metrics import read_rows
from trainer.plot import BLUE, GREEN, GREY, RED, figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Diagram

SURFACES = (
    ("reward", "Reward", "viridis"),
    ("raw_reward", "Reward without the length penalty", "viridis"),
    ("accuracy", "Accuracy", "cividis"),
    ("length", "Mean completion length (tokens)", "magma"),
)
LEAST = 3
"""points that a line is fitted to"""
LABELS = 8
"""most snapshots that are labelled with their step"""


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
    logs = np.log(np.asarray(lengths, float))
    if len(logs) < LEAST or np.ptp(logs) < 1e-9:
        return None
    line = linregress(logs, rewards)
    r_squared = None if np.ptp(rewards) < 1e-9 else float(line.rvalue**2)
    return Fit(float(line.slope), float(line.intercept), r_squared, len(logs))


class RewardByLength(NamedTuple):
    """Mean lengths in tokens and mean raw rewards of some models."""

    lengths: list[float]
    rewards: list[float]

    @property
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


def share(plane: Plane, direction: int) -> str:
    """Return the label of an axis, with its share of the variance."""
    name = ("first", "second")[direction]
    return f"{name} principal direction ({plane.explained[direction]:.0%} of the variance)"


def draw_path(axis: Diagram, plane: Plane, color: str, border: str) -> None:
    """Draw the snapshots in order, the first (square) and last (diamond) marked, some labelled with their step."""
    from matplotlib.patheffects import withStroke

    path, outline = plane.path, [withStroke(linewidth=2.6, foreground=border)]
    axis.plot(*path.T, color=color, linewidth=1.4, marker="o", markersize=3.5, zorder=3, path_effects=outline)
    for end, marker in ((0, "s"), (-1, "D")):
        axis.plot(*path[end], marker=marker, markersize=7, color=color, markeredgecolor=border, zorder=4)
    for number in {*spread(range(len(path)), LABELS), len(path) - 1}:
        axis.annotate(
            f"{plane.steps[number]}", path[number], xytext=(5, 5), textcoords="offset points", fontsize=8, color=color,
            path_effects=outline, zorder=5,
        )  # fmt: skip
    axis.set_xlabel(share(plane, 0), fontsize=9)
    axis.set_ylabel(share(plane, 1), fontsize=9)


def draw_plane(path: Path, plane: Plane, title: str) -> Path:
    """Draw plane.png: the path of the run."""
    with figure(path, title, 1, 1, (7.5, 6)) as axes:
        axis = axes[0, 0]
        axis.set_title("Path of the weights (numbers: steps)")
        draw_path(axis, plane, BLUE, "white")
        axis.set_aspect("equal", adjustable="datalim")
    return path


def draw_surfaces(path: Path, plane: Plane, axes: Axes, points: Points, title: str) -> Path:
    """Draw surface.png: four heat maps with the path of the run over them."""
    with figure(path, title, 2, 2, (12.5, 9.5)) as panels:
        for axis, (name, label, colors) in zip(panels.flat, SURFACES, strict=True):
            axis.set_title(label)
            axis.grid(False)
            values = np.array([getattr(points[key], name) for key in sorted(points)])
            mesh = axis.pcolormesh(*axes, values.reshape(len(axes[1]), -1), cmap=colors, shading="nearest")
            axis.figure.colorbar(mesh, ax=axis, shrink=0.9)
            area = mesh.get_datalim(axis.transData)
            draw_path(axis, plane, "white", "black")
            axis.set_xlim(area.x0, area.x1)
            axis.set_ylim(area.y0, area.y1)
    return path


def draw_lengths(path: Path, surface: RewardByLength, training: RewardByLength, title: str) -> Path:
    """Draw length.png: raw reward against mean length on a logarithmic axis, over the surface and over training."""
    sides = (("points of the surface", surface, GREEN), ("training steps", training, BLUE))
    with figure(path, title, 1, 2, (12, 4.8)) as axes:
        for axis, (name, side, color) in zip(axes[0], sides, strict=True):
            axis.set_title(f"Over the {name}")
            axis.set_xlabel("mean completion length (tokens, logarithmic)")
            axis.set_ylabel("reward without the length penalty")
            if side.lengths:
                _draw_side(axis, side, color)
            else:
                axis.text(0.5, 0.5, "not measured", transform=axis.transAxes, ha="center", color=GREY)
    return path


def _draw_side(axis: Diagram, side: RewardByLength, color: str) -> None:
    """Draw points and fitted line; lengths are labelled as plain numbers, also within one decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_xscale("log")
    axis.scatter(side.lengths, side.rewards, s=16, color=color, alpha=0.8)
    if (fit := side.fit) is not None:
        ends = np.array([min(side.lengths), max(side.lengths)])
        quality = "" if fit.r_squared is None else f", $R^2$ = {fit.r_squared:.2f}"
        label = f"{fit.slope:.2f} ln(length) {fit.intercept:+.2f}{quality}"
        axis.plot(ends, fit.slope * np.log(ends) + fit.intercept, color=RED, linewidth=1.4, label=label)
        axis.legend(loc="best")
    axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
