"""Measures models on a plane in weight space: each point's weights are loaded into one running engine and sampled.

    weights of point (a1, a2)  =  w* + a1 c1 + a2 c2          w*: the snapshot around which the surface is drawn

Three copies of the weights are in memory (c1, c2 and the point, float32); w* is read from its file for every point.
The seeds of all points are the same, so that neighbours differ only in their weights.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from lab.analyse.plane import Plane
from lab.analyse.snapshots import Snapshot
from shared.atomic_write import open_log
from shared.errors import ConfigError
from shared.types import Group, Prompt, Verdict
from trainer.solver import Solver


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


def summarise(row: int, column: int, alpha: tuple[float, float], groups: Sequence[Group], limit: int) -> Point:
    """Return the means of one point. limit: rollout.max_completion_tokens. Raises ConfigError if nothing is graded."""
    completions = [completion for group in groups for completion in group.completions]
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
    count, lengths = len(rewards), [len(completion.token_ids) for completion in completions]
    return Point(
        row=row,
        column=column,
        alpha=alpha,
        reward=sum(reward.total for reward in rewards) / count,
        raw_reward=sum(reward.total - reward.length for reward in rewards) / count,
        accuracy=sum(right) / max(len(right), 1),
        format=sum(reward.format > 0 for reward in rewards) / count,
        length=sum(lengths) / len(lengths),
        truncated=sum(tokens >= limit for tokens in lengths) / len(lengths),
        completions=len(completions),
    )


class Points:
    """The points measured so far, in a file: its first line describes the surface, each other line is a point."""

    def __init__(self, path: Path, question: dict[str, Any], restart: bool):
        """Open or create the file. Raises ConfigError if it holds points of another surface, or if another process has
        it."""
        self.path, self.found = path, dict[tuple[int, int], Point]()
        self._stream, lines = open_log(path, str(path), restart)
        try:
            self._read(question, lines)
        except BaseException:
            self._stream.close()
            raise

    def _read(self, question: dict[str, Any], lines: list[bytes]) -> None:
        path = self.path
        if not lines:
            self._stream.write(json.dumps(question).encode() + b"\n")
            self._stream.flush()
        for number, line in enumerate(lines, 1):
            try:
                if number > 1:
                    point = msgspec.json.decode(line, type=Point)
                    self.found[point.row, point.column] = point
                elif (before := json.loads(line)) != json.loads(json.dumps(question)):
                    raise ConfigError(f"{path} holds {differing(before, question)}: give --restart to measure anew")
            except (ValueError, msgspec.MsgspecError) as error:
                raise ConfigError(f"{path}:{number} is damaged ({error}): give --restart to measure anew") from error

    def add(self, point: Point) -> None:
        """Add one point and write it at once."""
        self.found[point.row, point.column] = point
        self._stream.write(msgspec.json.encode(point) + b"\n")
        self._stream.flush()

    def close(self) -> None:
        """Close the file and release its lock."""
        self._stream.close()


def differing(before: Any, question: dict[str, Any]) -> str:
    """Describe how the surface in the file differs from the requested one."""
    names = [name for name in question if not isinstance(before, dict) or before.get(name) != question[name]]
    return f"points of another surface (other {', '.join(names)})"


def missing(axes: tuple[list[float], list[float]], points: Points) -> Iterator[tuple[int, int, tuple[float, float]]]:
    """Yield (row, column, alpha) of the points that are not measured yet."""
    for (row, second), (column, first) in itertools.product(enumerate(axes[1]), enumerate(axes[0])):
        if (row, column) not in points.found:
            yield row, column, (first, second)


async def measure(
    solver: Solver,
    prompts: Sequence[Prompt],
    samples: int,
    plane: Plane,
    star: Snapshot,
    axes: tuple[list[float], list[float]],
    points: Points,
    show: Callable[[int], None],
) -> None:
    """Measure the missing points, one after the other. When cancelled by Ctrl-C, measured points are kept."""
    limit = solver.config.rollout.max_completion_tokens
    todo = list(missing(axes, points))
    try:
        await solver.start([prompt.problem for prompt in prompts])
        weights = {
            name: torch.nn.Parameter(torch.empty(direction.shape, device=solver.sampler.device))
            for name, direction in plane.directions[0].items()
        }
        await solver.sampler.follow(list(weights.items()))
        show(len(points.found))
        for row, column, alpha in todo:
            await asyncio.to_thread(put, weights, star, plane, alpha)
            await solver.sampler.update()
            groups = await asyncio.gather(*(solver.solve(prompt, samples) for prompt in prompts))
            points.add(summarise(row, column, alpha, groups, limit))
            show(len(points.found))
    finally:
        await solver.close()


@torch.no_grad()
def put(weights: dict[str, torch.nn.Parameter], star: Snapshot, plane: Plane, alpha: tuple[float, float]) -> None:
    """Write w* + a1 c1 + a2 c2 into `weights`, tensor by tensor, in float32."""
    first, second = plane.directions
    for name, parameter in weights.items():
        value = star.tensor(name) + alpha[0] * first[name]  # not in place: it may lie in the mapped file
        parameter.copy_(value.add_(second[name], alpha=alpha[1]))
