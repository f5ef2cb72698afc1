"""Measures the surface of an analysis: chooses problems, and samples the missing points with one engine."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from pathlib import Path

from lab.analyse.plane import Plane
from lab.analyse.snapshots import Snapshot
from lab.analyse.surface import Point, Points, measure
from shared.bar import Bar
from shared.chat import Chat
from shared.config import Config
from shared.errors import ConfigError
from shared.jsonl import spread
from shared.model import hf
from shared.types import Prompt
from trainer.data import PromptFormat, load_problems
from trainer.solver import Solver

Axes = tuple[list[float], list[float]]


def survey(
    options: argparse.Namespace,
    config: Config,
    plane: Plane,
    snapshots: list[Snapshot],
    around: int,
    axes: Axes,
    folder: Path,
) -> dict[tuple[int, int], Point]:
    """Measure the missing points; returns all points, by (row, column)."""
    model_dir = model_folder(options.run_dir, config)
    chat = Chat(model_dir)
    prompts = find_prompts(options, config, chat)
    question = {
        "snapshots": [[snapshot.step, snapshot.kind] for snapshot in snapshots],
        "origin": snapshots[around].step,
        "points": options.points,
        "margin": options.margin,
        "axes": [[f"{value:.3g}" for value in axis] for axis in axes],
        "problems": [prompt.problem.id for prompt in prompts],
        "samples": options.samples,
    }
    with contextlib.closing(Points(folder / "points.jsonl", question, options.restart)) as points:
        total = options.points**2
        if 0 < len(points.found) < total:
            tell(f"{points.path} holds {len(points.found)} of {total} points: going on")
        if len(points.found) < total:
            solver = Solver(config, model_dir, chat, tell)
            bar = Bar("measuring", "measured", len(points.found), total)
            try:
                asyncio.run(measure(solver, prompts, options.samples, plane, snapshots[around], axes, points, bar.show))
            finally:
                bar.close()
        return points.found


def tell(text: str) -> None:
    """Print one line on the error stream, beside the bar."""
    sys.stderr.write(f"{text}\n")


def model_folder(run_dir: Path, config: Config) -> Path:
    """Return a folder of the run's model, for its tokenizer and shapes; the engine's weights are replaced."""
    for folder in (run_dir / "latest", run_dir / "made" / "model"):
        if (folder / "config.json").is_file():
            return folder
    return hf.resolve(config.model.path)


def find_prompts(options: argparse.Namespace, config: Config, chat: Chat) -> list[Prompt]:
    """Return prompts of problems spread evenly over the file, rendered as in the run, without those that are too long
    for the model. Raises ConfigError if none fits."""
    held_out = config.data.held_out or config.data.train
    own = options.run_dir / "made" / "held_out.jsonl"
    path = options.data or (own if held_out == "stories" else Path(held_out))
    style, room = PromptFormat(chat, config.data), config.model.max_tokens - config.rollout.max_completion_tokens
    prompts = [
        Prompt(index, problem, style.render(problem.text, problem.domain))
        for index, problem in enumerate(spread(load_problems(path, "--data"), options.problems))
    ]
    fitting = [prompt for prompt in prompts if len(prompt.token_ids) <= room]
    if not fitting:
        raise ConfigError(f"--data {path}: every prompt is longer than the {room} tokens that the run left for it")
    return fitting
