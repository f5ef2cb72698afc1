r"""Measures models on a plane in weight space: each point's weights are loaded into one running engine and sampled.

    weights of point (a1, a2)  =  w* + a1 c1 + a2 c2          w*: the snapshot around which the surface is drawn

Three copies of the weights are in memory (c1, c2 and the point, float32); w* is read from its file for every point.
The seeds of all points are the same, so that neighbours differ only in their weights.

The plane is that in which a run moved most: the first two principal directions of its snapshots.

With T snapshots of W weights stacked in rows, less their mean, as D [T, W], the principal directions are the leading
eigenvectors of the covariance D^T D [W, W]. The paper finds them by Lanczos-Arnoldi iteration, which needs D^T D only
as a product with vectors. The small matrix gives the same: G = D D^T [T, T] has the same nonzero eigenvalues, and if
G u = s u with |u| = 1,

    D^T D (D^T u) = D^T (G u) = s (D^T u),    |D^T u|^2 = u^T G u = s,    so    c = D^T u / sqrt(s)

is the normalised principal direction, up to its sign, and row t of D lies at D_t . c = sqrt(s) u_t along it. T is some
tens, so G is exact and cheap: each tensor is read twice, piece by piece, and summed in float64. The T x W numbers are
never in memory together.

The sign is chosen so that the last snapshot lies further along c than the first.
Source: Magistral (2506.10910), section 7.1.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lab.analyse.snapshots import WeightSnapshot, common_shapes, pieces
from shared.chat import Chat
from shared.clean_text import clean
from shared.config import Config
from shared.errors import ConfigError
from shared.journal import Journal
from shared.jsonl import spread
from shared.model import hf
from shared.progress_bar import ProgressBar
from shared.types import Group, Prompt, Verdict
from trainer.data.data_source import PromptFormat
from trainer.data.problem_file import read_problems
from trainer.solver import Solver
from verify.verifiers import without_environment

DIRECTIONS = 2
FLAT = 1e-10
"""a variance below this share of the first counts as rounding error"""


class Plane(NamedTuple):
    """Two directions in weight space, and the coordinates of the snapshots along them."""

    steps: list[int]
    explained: list[float]
    """share of the variance along each principal direction, largest first; they add up to 1"""
    path: NDArray[np.float64]
    """[snapshots, 2] coordinates, relative to the snapshot around which the surface is drawn"""
    directions: tuple[dict[str, Tensor], dict[str, Tensor]]
    """each of length 1 over all tensors together, float32, by name"""


def principal(gram: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return variances [T], largest first, and eigenvectors [T, T] in columns, with the signs of the module header.

    Raises ConfigError if the snapshots lie in one point or on one line.
    """
    values, vectors = np.linalg.eigh(gram)
    values, vectors = np.maximum(values[::-1], 0.0), vectors[:, ::-1]
    if values[1] <= FLAT * values[0] or values[0] == 0:
        where = "equal" if values[0] == 0 else "on one line"
        raise ConfigError(f"the weights of all {len(values)} snapshots are {where}: there is no plane to draw")
    signs = np.where(vectors[-1] < vectors[0], -1.0, 1.0)
    return values, vectors * signs


def find_plane(snapshots: Sequence[WeightSnapshot], around: int) -> Plane:
    """Return the plane of the snapshots; coordinates are relative to snapshot number `around` (its own are 0, 0).

    Reads all weights twice, with a bar on the error stream. Raises ConfigError, CheckpointError.
    """
    shapes, count = common_shapes(snapshots), len(snapshots)
    parts = list(pieces(shapes, count))
    gram = np.zeros((count, count))  # products of the snapshots less their mean, summed over all weights
    directions = tuple({name: torch.empty(shape) for name, shape in shapes.items()} for _ in range(DIRECTIONS))
    with contextlib.closing(ProgressBar("reading", "read", 0, 2 * len(parts))) as bar:
        for number, part in enumerate(parts, 1):
            centred = _centred(snapshots, *part)
            gram += centred @ centred.T
            bar.show(number)
        values, vectors = principal(gram)
        scaled = vectors[:, :DIRECTIONS] / np.sqrt(values[:DIRECTIONS])
        for number, (name, first, last) in enumerate(parts, len(parts) + 1):
            found = scaled.T @ _centred(snapshots, name, first, last)
            for direction, row in zip(directions, found, strict=True):
                piece = direction[name][first:last]
                piece.copy_(torch.from_numpy(row.reshape(piece.shape)))
            bar.show(number)
    coordinates = vectors[:, :DIRECTIONS] * np.sqrt(values[:DIRECTIONS])
    return Plane(
        steps=[snapshot.step for snapshot in snapshots],
        explained=(values / values.sum()).tolist(),
        path=coordinates - coordinates[around],
        directions=(directions[0], directions[1]),
    )


def _centred(snapshots: Sequence[WeightSnapshot], name: str, first: int, last: int) -> NDArray[np.float64]:
    """Return the [T, weights] of a piece, less their mean over the snapshots."""
    rows: NDArray[np.float64] = np.empty((len(snapshots), math.prod(snapshots[0].shapes[name][1:]) * (last - first)))
    for row, snapshot in zip(rows, snapshots, strict=True):
        row[:] = snapshot.rows(name, first, last).numpy().ravel()
    rows -= rows.mean(axis=0)
    return rows


def grid(path: NDArray[np.float64], points: int, margin: float) -> tuple[list[float], list[float]]:
    """Return `points` values along each direction, evenly over the path and `margin` times its width beyond each end.

    Values are rounded to five digits, so that a later launch finds the same ones.
    """

    def axis(values: NDArray[Any]) -> list[float]:
        low, high = float(values.min()), float(values.max())
        beyond = margin * (high - low)
        return [float(f"{value:.5g}") for value in np.linspace(low - beyond, high + beyond, points)]

    return axis(path[:, 0]), axis(path[:, 1])


Axes = tuple[list[float], list[float]]
"""values along the first and the second direction"""


class Point(msgspec.Struct, frozen=True):
    """One measured model of the surface. Rewards and shares are means over graded completions."""

    row: int
    """row of the grid, along the second direction"""
    column: int
    """column of the grid, along the first direction"""
    alpha: tuple[float, float]
    reward: float
    raw_reward: float
    """the reward without its length penalty"""
    accuracy: float
    """over verified problems; 0 if all are open"""
    format: float
    length: float
    """mean tokens of all completions"""
    truncated: float
    """share of completions cut at the limit"""
    completions: int


Points = dict[tuple[int, int], Point]
"""by (row, column)"""


def summarise(row: int, column: int, alpha: tuple[float, float], groups: Sequence[Group], limit: int) -> Point:
    """Return the means of one point. limit: rollout.max_completion_tokens. Raises ConfigError if nothing is graded."""
    lengths = [len(completion.token_ids) for group in groups for completion in group.completions]
    graded = [
        (group.prompt.problem, reward)
        for group in groups
        for reward in group.rewards
        if reward is not None and reward.verdict.graded
    ]
    rewards = [reward for _, reward in graded]
    right = [reward.verdict is Verdict.CORRECT for problem, reward in graded if problem.verified]
    if not rewards:
        raise ConfigError("no completion could be graded: look at the answers of the problems (--data)")
    return Point(
        row=row,
        column=column,
        alpha=alpha,
        reward=sum(reward.total for reward in rewards) / len(rewards),
        raw_reward=sum(reward.total - reward.length for reward in rewards) / len(rewards),
        accuracy=sum(right) / max(len(right), 1),
        format=sum((reward.format or 0.0) > 0 for reward in rewards) / len(rewards),
        length=sum(lengths) / len(lengths),
        truncated=sum(tokens >= limit for tokens in lengths) / len(lengths),
        completions=len(lengths),
    )


PointFile = Journal[tuple[int, int], Point]
"""the points measured so far, by (row, column), and a description of the surface"""


def open_points(path: Path, surface: dict[str, Any], restart: bool) -> PointFile:
    """Open or create the file. Raises ConfigError if it holds points of another surface, or another process has it."""
    return Journal(
        path, Point, lambda point: (point.row, point.column), surface, "give --restart to measure anew", sync=False,
        restart=restart,
    )  # fmt: skip


def missing(points: PointFile, axes: Axes) -> Iterator[tuple[int, int, tuple[float, float]]]:
    """Yield (row, column, alpha) of the points that are not measured yet."""
    for (row, second), (column, first) in itertools.product(enumerate(axes[1]), enumerate(axes[0])):
        if points.lacks((row, column)):
            yield row, column, (first, second)


@dataclass(frozen=True)
class Survey:
    """What is measured: the points of a grid in the plane of a run, by completions of some problems."""

    run_dir: Path
    config: Config
    """settings of the run's last stage"""
    snapshots: list[WeightSnapshot]
    around: int
    """number of the snapshot at the origin"""
    plane: Plane
    axes: Axes
    margin: float
    """share of the path's width by which the grid goes beyond it"""
    problems: int
    samples: int
    """completions of a problem"""
    data: Path | None = None
    """file of problems; None for the run's validation problems"""

    @property
    def folder(self) -> Path:
        """Where everything is written."""
        return self.run_dir / "analysis"

    def points(self, restart: bool) -> Points:
        """Measure the missing points with one engine; returns all points. restart: measure those on file again too."""
        if not self.axes[0]:
            return {}
        model = self.model_folder()
        chat = Chat.of_run(model, self.config)
        prompts = self.prompts(chat)
        described = {
            "snapshots": [[snapshot.step, snapshot.kind] for snapshot in self.snapshots],
            "origin": self.snapshots[self.around].step,
            "points": len(self.axes[0]),
            "margin": self.margin,
            "axes": [[f"{value:.3g}" for value in axis] for axis in self.axes],
            "problems": [prompt.problem.id for prompt in prompts],
            "samples": self.samples,
        }
        with open_points(self.folder / "points.jsonl", described, restart) as file:
            total = len(self.axes[0]) * len(self.axes[1])
            if 0 < len(file.rows) < total:
                warn(f"{file.path} holds {len(file.rows)} of {total} points: going on")
            if len(file.rows) < total:
                solver = Solver(self.config, model, chat, warn)
                with contextlib.closing(ProgressBar("measuring", "measured", len(file.rows), total)) as bar:
                    asyncio.run(self.measure(solver, prompts, file, bar))
            return file.rows

    def model_folder(self) -> Path:
        """Return a folder of the run's model, for its tokenizer and shapes; the engine's weights are replaced."""
        latest = self.run_dir / "latest"
        return latest if (latest / "config.json").is_file() else hf.resolve(self.config.locate(self.config.model.path))

    def prompts(self, chat: Chat) -> list[Prompt]:
        """Return prompts of problems spread evenly over the file, rendered as in the run, without those that are too
        long for the model. Raises ConfigError if none fits."""
        config = self.config
        path = self.data or Path(
            config.locate(config.data.validation, "data.validation")
            if config.data.validation
            else config.locate(config.data.train)
        )
        style, room = PromptFormat(chat, config.data), config.model.max_tokens - config.rollout.max_completion_tokens
        problems = read_problems(path, "--data", config.data, config.environment.name).problems
        for problem in problems:
            without_environment(problem, f"--data {path}: {problem.id}", "a surface is measured with")
        prompts = [
            Prompt(index, problem, style.prompt_of(problem))
            for index, problem in enumerate(spread(problems, self.problems))
        ]
        fitting = [prompt for prompt in prompts if len(prompt.token_ids) <= room]
        if not fitting:
            raise ConfigError(f"--data {path}: every prompt is longer than the {room} tokens that the run left for it")
        return fitting

    async def measure(self, solver: Solver, prompts: Sequence[Prompt], file: PointFile, bar: ProgressBar) -> None:
        """Measure the missing points, one after the other. When cancelled by Ctrl-C, measured points are kept."""
        limit = self.config.rollout.max_completion_tokens
        try:
            await solver.start([prompt.problem for prompt in prompts])
            weights = {
                name: torch.nn.Parameter(torch.empty(direction.shape, device=solver.engine.device))
                for name, direction in self.plane.directions[0].items()
            }
            await solver.engine.follow(list(weights.items()))
            bar.show(len(file.rows))
            for row, column, alpha in list(missing(file, self.axes)):
                await asyncio.to_thread(put, weights, self.snapshots[self.around], self.plane, alpha)
                await solver.engine.update()
                groups = await asyncio.gather(*(solver.solve(prompt, self.samples) for prompt in prompts))
                file.add(summarise(row, column, alpha, groups, limit))
                bar.show(len(file.rows))
        finally:
            await solver.close()


def warn(text: str) -> None:
    """Print one line on the error stream, beside the bar."""
    sys.stderr.write(f"{clean(text)}\n")


@torch.no_grad()
def put(weights: dict[str, torch.nn.Parameter], star: WeightSnapshot, plane: Plane, alpha: tuple[float, float]) -> None:
    """Write w* + a1 c1 + a2 c2 into `weights`, tensor by tensor, in float32."""
    first, second = plane.directions
    for name, parameter in weights.items():
        value = star.tensor(name) + alpha[0] * first[name]  # not in place: it may lie in the mapped file
        parameter.copy_(value.add_(second[name], alpha=alpha[1]))
