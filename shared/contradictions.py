"""Finds settings that contradict each other: one line each, naming the settings, their values and the repair."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import ValidationError

from shared.metrics import METRICS, kind_of

if TYPE_CHECKING:
    from shared.config import Config

CONDITION = re.compile(r"\s*(?P<metric>[\w/]+)\s*(?P<sign>[<>])\s*(?P<number>-?\d+(?:\.\d+)?(?:e-?\d+)?)\s*")
"""form of `Stage.until`"""
STAGED: dict[str, tuple[str, ...]] = {
    "data": ("pass_rate", "domains", "drop_solved_after"),
    "rollout": ("prompts_per_step", "group_size", "max_async_level", "reorder_window", "max_completion_tokens"),
    "reward": ("length", "length_max", "overlong_buffer", "language"),
    "optimiser": ("minibatches", "learning_rate"),
}
"""section -> settings that a stage may change: those that only the controller reads"""


def contradictions(config: Config) -> Iterator[str]:
    """Yield every contradiction in the settings of a run."""
    yield from sampling_contradictions(config)
    yield from reward_contradictions(config)
    yield from data_contradictions(config)
    yield from stage_contradictions(config)


def sampling_contradictions(config: Config) -> Iterator[str]:
    """Yield contradictions of sampling and the model's length."""
    rollout, most = config.rollout, config.model.max_tokens
    if rollout.max_completion_tokens >= most:
        yield (
            f"rollout.max_completion_tokens = {rollout.max_completion_tokens} leaves no room for a prompt in "
            f"model.max_tokens = {most}: lower the first or raise the second"
        )
    if rollout.max_async_level == 0 and rollout.reorder_window > rollout.prompts_per_step:
        yield (
            f"rollout.reorder_window = {rollout.reorder_window} exceeds rollout.prompts_per_step = "
            f"{rollout.prompts_per_step}, but with rollout.max_async_level = 0 only one step's groups are open: set "
            "rollout.reorder_window = 0, or raise rollout.max_async_level"
        )
    if rollout.fixed_staleness and rollout.max_async_level == 0:
        yield (
            "rollout.fixed_staleness = true has no effect with rollout.max_async_level = 0: raise it, or remove "
            "fixed_staleness"
        )
    elif rollout.fixed_staleness and rollout.reorder_window not in (0, rollout.prompts_per_step):
        yield (
            f"rollout.reorder_window = {rollout.reorder_window} has no effect with rollout.fixed_staleness = true, "
            "which trains the oldest groups first: set rollout.reorder_window = 0, or remove fixed_staleness"
        )
    if rollout.tensor_parallel > 1 and rollout.transport == "shm":
        yield (
            f'rollout.tensor_parallel = {rollout.tensor_parallel} needs GPUs, but rollout.transport = "shm" is the '
            'CPU\'s: set rollout.transport = "auto" or rollout.tensor_parallel = 1'
        )


def reward_contradictions(config: Config) -> Iterator[str]:
    """Yield contradictions of the rewards."""
    reward = config.reward
    full = reward.length_max or config.rollout.max_completion_tokens
    name = "reward.length_max" if reward.length_max else "rollout.max_completion_tokens"
    if reward.correctness == 0 and reward.language == 0 and reward.format == 0 and not any(reward.extra.values()):
        yield "reward.format = 0, reward.correctness = 0 and reward.language = 0: nothing is rewarded, set one of them"
    for extra in sorted(reward.log_sigmoid.keys() - reward.extra.keys()):
        yield f"reward.log_sigmoid.{extra} transforms nothing: give reward.extra.{extra} a weight, or remove it"
    if reward.length and reward.overlong_buffer > full:
        yield (
            f"reward.overlong_buffer = {reward.overlong_buffer} exceeds {name} = {full}: the length penalty would "
            "begin below zero tokens; lower the first"
        )
    if reward.length and full - reward.overlong_buffer >= config.rollout.max_completion_tokens:
        yield (
            f"reward.length_max = {full} less reward.overlong_buffer = {reward.overlong_buffer} is not below "
            f"rollout.max_completion_tokens = {config.rollout.max_completion_tokens}: the length penalty could never "
            "apply; lower reward.length_max, or set reward.length = 0"
        )


def data_contradictions(config: Config) -> Iterator[str]:
    """Yield contradictions of names, files and counts."""
    data, start = config.data, config.sft
    if "/" in config.name or config.name in ("", ".", ".."):
        yield f'name = "{config.name}" must be the name of one folder inside runs_dir = "{config.runs_dir}"'
    if data.train and data.train == data.validation:
        yield (
            f'data.train and data.validation are both "{data.train}": evaluation would be on training problems; give '
            'another file, or data.validation = ""'
        )
    if config.evaluate.every and not data.validation:
        yield f'evaluate.every = {config.evaluate.every} needs problems, but data.validation = "": set one of them'
    if start.steps and not start.demonstrations:
        yield (
            f'sft.steps = {start.steps} needs demonstrations, but sft.demonstrations = "": set a file, or sft.steps = 0'
        )
    if not 0 <= data.pass_rate[0] <= data.pass_rate[1] <= 1:
        yield f"data.pass_rate = {list(data.pass_rate)} must be [least, most] with 0 <= least <= most <= 1"
    for domain, template in data.templates.items():
        if template.count("{problem}") != 1:
            yield f'data.templates.{domain} = "{template}" must hold {{problem}} exactly once'
    if config.rollout.prompts_per_step % config.optimiser.minibatches:
        yield (
            f"optimiser.minibatches = {config.optimiser.minibatches} must divide rollout.prompts_per_step = "
            f"{config.rollout.prompts_per_step}: a minibatch holds whole groups"
        )
    if config.evaluate.best in ("majority", "pass_at_k") and config.evaluate.samples < 2:
        yield (
            f'evaluate.best = "{config.evaluate.best}" needs several completions a problem, but evaluate.samples = '
            f"{config.evaluate.samples}: raise it, or choose another metric"
        )
    if config.mode == "sft" and not start.steps:
        yield 'mode = "sft" trains for sft.steps = 0 steps: set it, and sft.demonstrations'
    if config.mode == "sft" and config.stages:
        yield '[[stages]] are of reinforcement learning, but mode = "sft": remove them, or set mode = "rl"'


def stage_contradictions(config: Config) -> Iterator[str]:
    """Yield contradictions of [[stages]]: their names, ends, and the settings in force in each."""
    names = [stage.name for stage in config.stages]
    if len(set(names)) < len(names):
        yield f"stages are named {', '.join(names)}: give each a name of its own"
    last_step = 0
    for number, stage in enumerate(config.stages):
        where = f"stages.{stage.name}"
        is_last = number == len(config.stages) - 1
        if not is_last and not stage.until_step and not stage.until:
            yield f"{where} never ends: give it until_step or until (only the last stage goes on to the end of the run)"
        if stage.until_step and stage.until_step <= last_step:
            yield f"{where}.until_step = {stage.until_step} must be above the stage before ({last_step})"
        last_step = stage.until_step or last_step
        condition = CONDITION.fullmatch(stage.until)
        if stage.until and condition is None:
            yield f'{where}.until = "{stage.until}" must read "METRIC > NUMBER" or "METRIC < NUMBER"'
        if condition is not None and condition["metric"] not in METRICS:
            near = difflib.get_close_matches(condition["metric"], METRICS, n=1, cutoff=0)[0]
            yield f'{where}.until = "{stage.until}": no metric has this name; did you mean {near}?'
        elif condition is not None and kind_of({condition["metric"]: 0.0}) != "train":
            yield f'{where}.until = "{stage.until}": a stage can only end by a metric that every training step has'
        for section, allowed in STAGED.items():
            for name in getattr(stage, section):
                if name not in allowed:
                    choices = ", ".join(f"{section}.{other}" for other in allowed)
                    yield f"{where}.{section}.{name} cannot change during a run; a stage may set {choices}"
        try:
            config.at_stage(number)
        except ValidationError as error:
            for found in error.errors():
                place = ".".join(map(str, found["loc"]))
                yield f"{where}: {place + ': ' if place else ''}{found['msg'].removeprefix('Value error, ')}"
