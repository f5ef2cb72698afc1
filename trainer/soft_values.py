"""Soft values of prompts under the policy that reinforcement learning starts with, for SPO (arXiv 2503.05453).

    V(x) = beta log E_{y ~ ref}[exp(r(x, y) / beta)], estimated by value_samples completions

The engines hold the reference before the first step and never again, so the prompts of the whole run are sampled then.
The draws of a run are known beforehand (data.py). Values are kept in the run's folder as they come, with the
settings that they hold for, so that a resumed run goes on with them.
With few samples a rare success is missed and V is too low: then every success is pushed up by more, which errs on the
side of learning; larger beta and more samples help.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from rollout.client import EngineClient
from shared.atomic_write import write_whole
from shared.config import Config
from shared.errors import ConfigError, DataError, NonFinite
from shared.json_reader import decode_json
from shared.progress import Progress
from shared.types import Problem
from trainer.data.data_source import DataSource
from trainer.evaluation import Evaluator
from trainer.objectives.registry import objective_of
from trainer.objectives.regularised import Spo
from trainer.stages import Stages
from verify.scorer import RewardScorer

FILE = "values.json"
SPARE = 1.25
"""draws that are valued for each one that is trained: some groups may have nothing that could be graded"""
PART = 512
"""prompts that are sampled between two writes of the file"""


class SoftValues(msgspec.Struct):
    """The file values.json of a run folder."""

    settings: dict[str, Any]
    """settings that the values hold for, by `settings_of`"""
    values: dict[str, float | None]
    """problem id -> soft value; None where nothing could be graded"""
    sha256: str = ""
    """hash of the values, so that damage is noticed"""

    def content(self) -> bytes:
        """Set `sha256` and return the bytes of the file."""
        self.sha256 = hashlib.sha256(msgspec.json.encode(self.values)).hexdigest()
        return msgspec.json.encode(self)


def spo_of(config: Config) -> Spo:
    """The objective of a run that needs soft values. Raises TypeError for another."""
    objective = objective_of(config)
    if not isinstance(objective, Spo):
        raise TypeError(f"objective {objective.name} needs soft values and is not derived from Spo")
    return objective


def settings_of(config: Config) -> dict[str, Any]:
    """name -> value of the settings that soft values depend on."""
    objective, rollout, data = spo_of(config), config.rollout, config.data
    return {
        "objective.beta": objective.beta, "objective.value_samples": objective.value_samples,
        "rollout.temperature": rollout.temperature, "rollout.max_completion_tokens": rollout.max_completion_tokens,
        "data.system_prompt": data.system_prompt, "data.templates": data.templates,
        **{f"reward.{name}": value for name, value in config.reward.model_dump(mode="json").items()},
    }  # fmt: skip


def soft_value(rewards: Sequence[float], beta: float, log_weights: Sequence[float] = ()) -> float:
    """beta log (sum w exp(r / beta) / sum w) of one prompt's rewards, without overflow. log_weights: log ref / mu of
    each completion where another policy sampled them (the mean under ref by self-normalised importance sampling); none
    where ref did, and then rewards of 0 and 1, p of them 1, give beta log(1 - p + p e^(1 / beta)). Raises NonFinite."""
    weights = log_weights or [0.0] * len(rewards)
    if not all(map(math.isfinite, (*rewards, *weights))):
        raise NonFinite(f"a reward is not a finite number: {list(rewards)}")

    def log_sum(values: list[float]) -> float:
        return (top := max(values)) + math.log(math.fsum(math.exp(value - top) for value in values))

    tilted = [weight + reward / beta for weight, reward in zip(weights, rewards, strict=True)]
    return beta * (log_sum(tilted) - log_sum(list(weights)))


def draws_of(stage: Config) -> int:
    """Draws that a stage may need if it lasts for the whole run."""
    return math.ceil(SPARE * stage.rollout.prompts_per_step * (stage.steps + stage.rollout.max_async_level + 1))


def drawn_problems(source: DataSource, config: Config) -> list[Problem]:
    """The different problems of as many draws as the run may need, in order of their first draw.

    A stage draws anew from the order of its own problems, and how many steps it has need not be known: so each has the
    draws of the whole run, and all its problems where some may be left out as solved by then, which changes the order.
    Raises DataError for different problems with one id.
    """
    problems: dict[str, Problem] = {}
    dropping = False
    for number, stage in enumerate(config.every_stage):
        if stage.data.order == "prioritised":  # any may come
            stage, dropping = stage.model_copy(update={"data": stage.data.model_copy(update={"order": "file"})}), True
        drawn = DataSource(source.all, Stages(stage), source.prompt_format)
        dropping = dropping or number > 0 and stage.data.drop_solved_after > 0
        index = 0
        for _ in range(len(drawn.problems) if dropping else draws_of(stage)):
            prompt = drawn.draw(index)
            if prompt.index >= len(drawn.problems):
                break  # the second epoch: all that fit are there
            problem, index = prompt.problem, prompt.index + 1
            if problems.setdefault(problem.id, problem) != problem:
                raise DataError(
                    f'data.train: two different problems have the id "{problem.id}", and objective.name = "spo" keeps '
                    "a soft value for each id: give every row its own"
                )
    return list(problems.values())


def read_values(config: Config) -> dict[str, float | None]:
    """Problem id -> soft value, as kept in the run's folder so far.

    Raises DataError for a damaged file, ConfigError where it is of other settings.
    """
    path = config.run_dir / FILE
    if not path.is_file():
        return {}
    try:
        content = path.read_bytes()
        kept = decode_json(content, SoftValues)
        if msgspec.structs.replace(kept).content() != content:
            raise ValueError("it was changed after it was written")
    except ValueError as error:  # also of what is not JSON, or not UTF-8
        raise DataError(f"{path} is damaged ({error}): restore it, or start again with another --name") from error
    for name, value in settings_of(config).items():
        if kept.settings.get(name) != value:
            raise ConfigError(
                f"{name} = {value}, but the soft values in {path} were sampled with {kept.settings.get(name)}: set "
                "that, or start another run (--name=...)"
            )
    return kept.values


def forget_values(run_dir: Path) -> None:
    """Remove the soft values that a run which never began has left."""
    (run_dir / FILE).unlink(missing_ok=True)


async def soft_values(
    config: Config, engines: EngineClient, scorer: RewardScorer, source: DataSource, progress: Progress, begun: bool
) -> dict[str, float]:
    """Problem id -> soft value: those kept in the run's folder, the others sampled with the engines' policy, scored and
    kept, a part of the prompts at a time.

    begun: the policy is no longer the reference, so that none can be sampled any more. A prompt of which nothing could
    be graded has the mean of the others. Raises ConfigError, DataError, NonFinite.
    """
    settings, path = spo_of(config), config.run_dir / FILE
    samples, beta = settings.value_samples, settings.beta
    problems, kept = await asyncio.to_thread(drawn_problems, source, config), read_values(config)
    missing = {one.id for one in problems if (one.id not in kept if begun else kept.get(one.id) is None)}
    if missing and begun:
        raise ConfigError(
            f'{path} lacks the soft values of {len(missing)} problems, "{min(missing)}" among them, which '
            'objective.name = "spo" samples before the first step: go on with the objective, steps, stages and '
            "data.train that this run began with, or start another one (--name=...)"
        )
    if missing:
        progress.phase(f"soft values of {len(problems)} prompts ({samples} completions each)")
    evaluator, before = Evaluator(engines, scorer, source, problems), 0
    parts = [range(first, min(first + PART, len(problems))) for first in range(0, len(problems), PART)]
    waiting = [part for part in parts if any(problems[place].id in missing for place in part)]
    for span in waiting:
        ended = partial(_tell, progress, before, sum(map(len, waiting)) * samples)
        sampled = await evaluator.sample(config.rollout.temperature, samples, span, ended)
        before += len(span) * samples
        for index, group in zip(span, sampled, strict=True):
            rewards = [one.reward.total for one in group if one.reward.verdict.graded]
            kept[problems[index].id] = soft_value(rewards, beta) if rewards else None
        write_whole(path, SoftValues(settings_of(config), kept).content())
    known = [value for value in kept.values() if value is not None]
    if not known:
        raise DataError('objective.name = "spo": no completion of any prompt could be graded; see the verifier')
    mean = math.fsum(known) / len(known)
    if missing:
        progress.note(f"soft values: mean {mean:.3f}, {min(known):.3f} to {max(known):.3f}")
    return {name: mean if value is None else value for name, value in kept.items()}


def _tell(progress: Progress, before: int, total: int, done: int) -> None:
    progress.sampled(before + done, total)
