"""Soft values of prompts under the policy that reinforcement learning starts with, for SPO (arXiv 2503.05453).

    V(x) = beta log E_{y ~ ref}[exp(r(x, y) / beta)], estimated by value_samples completions

The engines hold the reference before the first step and never again, so the prompts of the whole run are sampled then.
The draws of a run are known beforehand (data.py). Kept in the run's folder, with the settings that they hold for, so
that a resumed run goes on with them.
With few samples a rare success is missed and V is too low: then every success is pushed up by more, which errs on the
side of learning; larger beta and more samples help.
What it does not: sample (evaluate.py). Who calls this: session.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from shared.config import Config
from shared.disk import beside
from shared.errors import ConfigError, DataError, NonFinite
from shared.progress import Progress
from shared.types import Problem
from trainer.data import DataSource
from trainer.engines import Engines
from trainer.evaluate import Evaluator
from trainer.judges import Judges

FILE = "values.json"
SPARE = 1.25
"""draws that are valued for each one that is trained: some groups may have nothing that could be graded"""


class SoftValues(msgspec.Struct):
    """The file."""

    beta: float
    """objective.beta that they hold for"""
    values: dict[str, float]
    """problem id -> soft value"""


def soft_value(rewards: Sequence[float], beta: float) -> float:
    """beta log mean exp(r / beta) of one prompt's rewards, without overflow. For rewards of 0 and 1, p of them 1, it is
    beta log(1 - p + p exp(1 / beta)). Raises NonFinite for a reward that is not a finite number."""
    if not all(map(math.isfinite, rewards)):
        raise NonFinite(f"a reward is not a finite number: {list(rewards)}")
    top = max(rewards)
    return top + beta * math.log(math.fsum(math.exp((reward - top) / beta) for reward in rewards) / len(rewards))


def drawn_problems(source: DataSource, config: Config) -> list[Problem]:
    """The different problems of as many draws as the run may need, in order of their first draw.

    A stage draws anew from the order of its own problems, and how many steps it has need not be known: so each has the
    draws of the whole run, and all its problems where some may be left out as solved by then, which changes the order.
    """
    found: dict[str, Problem] = {}
    dropping = False
    for number, stage in enumerate(config.every_stage):
        drawn = DataSource(source.all, stage, source.prompt_format)
        dropping = dropping or number > 0 and stage.data.drop_solved > 0
        draws = math.ceil(SPARE * stage.rollout.prompts_per_step * (config.steps + stage.rollout.lead + 1))
        index = 0
        for _ in range(len(drawn.problems) if dropping else draws):
            prompt = drawn.draw(index)
            if prompt.index >= len(drawn.problems):
                break  # the second epoch: all that fit are there
            found.setdefault(prompt.problem.id, prompt.problem)
            index = prompt.index + 1
    return list(found.values())


def read_values(config: Config, source: DataSource) -> dict[str, float] | None:
    """Problem id -> soft value, as kept in the run's folder; None if there is no such file.

    Raises DataError for a damaged one, ConfigError where the run was begun with another objective.beta, or with fewer
    steps or other problems than it is to go on with.
    """
    path = config.run_dir / FILE
    if not path.is_file():
        return None
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=SoftValues)
    except msgspec.MsgspecError as error:
        raise DataError(f"{path} is damaged ({error}): start again with another --name") from error
    if kept.beta != (beta := config.objective.resolved().beta):
        raise ConfigError(
            f"objective.beta = {beta}, but the soft values in {path} were sampled for {kept.beta}: set that, or start "
            "another run (--name=...)"
        )
    if missing := [problem.id for problem in drawn_problems(source, config) if problem.id not in kept.values]:
        raise ConfigError(
            f'{path} lacks the soft values of {len(missing)} problems, "{missing[0]}" among them, which objective.loss '
            '= "spo" samples before the first step: go on with the steps, stages and data.train that this run began '
            "with, or start another one (--name=...)"
        )
    return kept.values


def forget_values(run_dir: Path) -> None:
    """Remove what a run that never began has left."""
    (run_dir / FILE).unlink(missing_ok=True)


async def estimate_values(
    config: Config, engines: Engines, judges: Judges, source: DataSource, progress: Progress
) -> dict[str, float]:
    """Sample with the engines' policy, score, write the file; returns problem id -> soft value.

    A prompt of which nothing could be graded has the mean of the others.
    """
    settings = config.objective.resolved()
    problems, samples = drawn_problems(source, config), settings.value_samples or 1
    progress.phase(f"soft values of {len(problems)} prompts ({samples} completions each)")
    evaluator = Evaluator(engines, judges, source, problems, config.seed)
    sampled = await evaluator.sample(config.rollout.temperature, samples, progress.sampled)
    found: dict[str, float] = {}
    for problem, group in zip(problems, sampled, strict=True):
        rewards = [sampled.reward.total for sampled in group if sampled.reward.verdict.graded]
        if rewards:
            found[problem.id] = soft_value(rewards, settings.beta or 0.0)
    if not found:
        raise DataError("objective.loss = \"spo\": no completion of any prompt could be graded; see the verifier")
    mean = math.fsum(found.values()) / len(found)
    found |= {problem.id: mean for problem in problems if problem.id not in found}
    with beside(config.run_dir / FILE) as partial:
        partial.write_bytes(msgspec.json.encode(SoftValues(settings.beta or 0.0, found)))
    progress.note(f"soft values: mean {mean:.3f}, {min(found.values()):.3f} to {max(found.values()):.3f}")
    return found
