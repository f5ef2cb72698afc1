r"""Measures models on a plane in weight space: loads each point's weights into one running engine and samples from it.

    weights of point (a1, a2)  =  w* + a1 c1 + a2 c2          w*: the last snapshot

Three copies of the weights are in memory (c1, c2 and the point, float32); w* is read from its file for every point.
The seeds of all points are the same, so that neighbours differ only in their weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from lab.analyse.plane import Plane
from lab.analyse.snapshots import WeightSnapshot
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

Axes = tuple[list[float], list[float]]
"""values along the first and the second direction"""


def grid(path: NDArray[np.float64], points: int, margin: float) -> Axes:
    """Return `points` values along each direction, evenly over the path and `margin` times its width beyond each end.

    Values are rounded to five digits, so that a later launch gets the same ones.
    """
    low, high = path.min(axis=0), path.max(axis=0)
    beyond = margin * (high - low)
    first, second = np.linspace(low - beyond, high + beyond, points).T
    return [float(f"{value:.5g}") for value in first], [float(f"{value:.5g}") for value in second]


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
"""(row, column) -> its point"""


def summarise(row: int, column: int, alpha: tuple[float, float], groups: Sequence[Group], limit: int) -> Point:
    """Return the means of one point. limit: rollout.max_completion_tokens. Raises ConfigError if nothing is graded."""
    lengths = [len(completion.token_ids) for group in groups for completion in group.completions]
    graded = [
        (group.prompt.problem, reward)
        for group in groups for reward in group.rewards if reward is not None and reward.verdict.graded
    ]  # fmt: skip
    rewards = [reward for _, reward in graded]
    right = [reward.verdict is Verdict.CORRECT for problem, reward in graded if problem.verified]
    if not rewards:
        raise ConfigError("no completion could be graded: look at the answers of the problems (--data)")
    return Point(
        row=row, column=column, alpha=alpha,
        reward=sum(reward.total for reward in rewards) / len(rewards),
        raw_reward=sum(reward.total - reward.length for reward in rewards) / len(rewards),
        accuracy=sum(right) / max(len(right), 1),
        format=sum((reward.format or 0.0) > 0 for reward in rewards) / len(rewards),
        length=sum(lengths) / len(lengths),
        truncated=sum(tokens >= limit for tokens in lengths) / len(lengths),
        completions=len(lengths),
    )  # fmt: skip


@dataclass(frozen=True)
class Survey:
    """Measures the points of a grid in the plane of a run, by completions of some problems."""

    config: Config
    """settings of the run's last stage"""
    snapshots: list[WeightSnapshot]
    plane: Plane
    options: Namespace
    """options of the command"""

    @property
    def axes(self) -> Axes:
        """The grid; empty without points."""
        points = self.options.points
        return grid(self.plane.path, points, self.options.margin) if points else ([], [])

    def points(self, path: Path) -> Points:
        """Measure the points that the file lacks, with one engine; returns all points."""
        if not self.options.points:
            return {}
        latest = self.config.run_dir / "latest"  # for its tokenizer and shapes: the engine's weights are replaced
        has_export = (latest / "config.json").is_file()
        model = latest if has_export else hf.resolve(self.config.locate(self.config.model.path))
        chat = Chat.of_run(model, self.config)
        prompts = self.prompts(chat)
        identity = {
            "snapshots": [[snapshot.step, snapshot.kind] for snapshot in self.snapshots],
            "origin": self.snapshots[-1].step, "points": self.options.points, "margin": self.options.margin,
            "axes": [[f"{value:.3g}" for value in axis] for axis in self.axes],
            "problems": [prompt.problem.id for prompt in prompts], "samples": self.options.samples,
        }  # fmt: skip
        with Journal(
            path, Point, lambda point: (point.row, point.column), identity, "give --restart to measure anew",
            sync=False, restart=self.options.restart,
        ) as journal:  # fmt: skip
            total, done = self.options.points**2, len(journal.rows)
            if 0 < done < total:
                warn(f"{path} holds {done} of {total} points: going on")
            if done < total:
                warn(f"starting an engine; then {total - done} points, each of {len(prompts)} problems")
                asyncio.run(self.measure(Solver(self.config, model, chat, warn), prompts, journal))
            return journal.rows

    def prompts(self, chat: Chat) -> list[Prompt]:
        """Return prompts of problems spread evenly over the file, rendered as in the run, without those that are too
        long for the model. Raises ConfigError if none fits."""
        config, data = self.config, self.config.data
        validation = config.locate(data.validation, "data.validation") if data.validation else None
        path = self.options.data or Path(validation or config.locate(data.train))
        problems = read_problems(path, "--data", data, config.environment.name).problems
        for problem in problems:
            without_environment(problem, f"--data {path}: {problem.id}", "a surface is measured with")
        chosen = enumerate(spread(problems, self.options.problems))
        style, room = PromptFormat(chat, data), config.model.max_tokens - config.rollout.max_completion_tokens
        prompts = [Prompt(index, problem, style.prompt_of(problem)) for index, problem in chosen]
        fitting = [prompt for prompt in prompts if len(prompt.token_ids) <= room]
        if not fitting:
            raise ConfigError(f"--data {path}: every prompt is longer than the {room} tokens that the run left for it")
        return fitting

    async def measure(
        self, solver: Solver, prompts: Sequence[Prompt], journal: Journal[tuple[int, int], Point]
    ) -> None:
        """Measure the missing points, one after the other. When cancelled by Ctrl-C, measured points are kept."""
        limit, samples = self.config.rollout.max_completion_tokens, self.options.samples
        try:
            await solver.start([prompt.problem for prompt in prompts])
            weights = {
                name: torch.nn.Parameter(torch.empty(direction.shape, device=solver.engine.device))
                for name, direction in self.plane.directions[0].items()
            }
            await solver.engine.follow(list(weights.items()))
            done, total = (number * len(prompts) for number in (len(journal.rows), self.options.points**2))
            with contextlib.closing(ProgressBar("measuring", "problems sampled:", done, total)) as bar:

                async def solve(prompt: Prompt) -> Group:
                    group = await solver.solve(prompt, samples)
                    bar.show(bar.done + 1)
                    return group

                for (row, second), (column, first) in product(enumerate(self.axes[1]), enumerate(self.axes[0])):
                    if journal.lacks((row, column)):
                        await asyncio.to_thread(put, weights, self.snapshots[-1], self.plane, (first, second))
                        await solver.engine.update()
                        groups = await asyncio.gather(*map(solve, prompts))
                        journal.add(summarise(row, column, (first, second), groups, limit))
        finally:
            await solver.close()


def warn(text: str) -> None:
    """Print one line on the error stream."""
    sys.stderr.write(f"{clean(text)}\n")


@torch.no_grad()
def put(weights: dict[str, torch.nn.Parameter], star: WeightSnapshot, plane: Plane, alpha: tuple[float, float]) -> None:
    """Write w* + a1 c1 + a2 c2 into `weights`, tensor by tensor, in float32."""
    first, second = plane.directions
    for name, parameter in weights.items():
        value = star.tensor(name) + alpha[0] * first[name]  # not in place: it may lie in the mapped file
        parameter.copy_(value.add_(second[name], alpha=alpha[1]))
