"""The settings of a run: its sections (sections.py), what contradicts across them, and what follows from them."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from shared import sections
from shared.chat_template import READY
from shared.environment_settings import EnvironmentSettings
from shared.errors import ConfigError
from shared.json_reader import parse_json
from shared.model.config import EXPERTS
from shared.section import Section, merged


class Config(Section):
    name: str = "run"
    """the run's folder is runs_dir/name"""
    runs_dir: str = "runs"
    """parent of run folders"""
    seed: int = 0
    """seeds of data order, sampling and initial weights derive from this"""
    mode: Literal["rl", "sft"] = "rl"
    """"rl": SFT, if any, then reinforcement learning; "sft": only the SFT steps of [sft],
    evaluated on the way"""
    steps: int = Field(60, ge=0)
    """policy versions of reinforcement learning: batches trained, each with optimiser.minibatches optimiser steps"""
    trackers: list[Literal["wandb", "tensorboard", "trackio", "mlflow"]] = []
    """experiment trackers that get the metrics and some completions, e.g. ["wandb", "tensorboard"]; docs/trackers.md"""
    model: sections.Model = sections.Model()
    data: sections.Data = sections.Data()
    placement: sections.Placement = sections.Placement()
    rollout: sections.Rollout = sections.Rollout()
    reward: sections.RewardWeights = sections.RewardWeights()
    environment: EnvironmentSettings = EnvironmentSettings()
    objective: dict[str, Any] = {}
    """settings of the objective, which reads and checks them itself (trainer/objectives); docs/objectives.md"""
    optimiser: sections.Optimiser = sections.Optimiser()
    lora: sections.Lora = sections.Lora()
    sft: sections.Sft = sections.Sft()
    checkpoint: sections.Checkpoint = sections.Checkpoint()
    evaluate: sections.Evaluate = sections.Evaluate()
    sync: sections.Sync = sections.Sync()
    deadlines: sections.Deadlines = sections.Deadlines()
    prepare: sections.Prepare = sections.Prepare()
    stages: list[sections.Stage] = []
    """[[stages]]: parts of the run with settings of their own; none for a run of one stage"""

    @model_validator(mode="after")
    def refuse_contradictions(self) -> Config:
        """Raise ValueError with every contradiction, one line each."""
        values = (getattr(self, name) for name in type(self).model_fields)
        parts = [*(value for value in values if isinstance(value, Section)), *self.stages, self]
        contradictions = [line for section in parts for line in section.own_contradictions()]
        if contradictions:
            raise ValueError("\n".join(contradictions))
        return self

    def own_contradictions(self) -> Iterator[str]:
        """Yield what several sections contradict together."""
        yield from self._run_contradictions()
        yield from self._length_contradictions()
        yield from self._stage_contradictions()

    def _run_contradictions(self) -> Iterator[str]:
        """Contradictions of names, mode and counts."""
        if self.placement.colocate == "turns" and self.rollout.max_async_level:
            yield (
                'placement.colocate = "turns" samples and trains in turns, but rollout.max_async_level = '
                f"{self.rollout.max_async_level} samples ahead of training: set rollout.max_async_level = 0"
            )
        yield from self._placement_contradictions()
        if "/" in self.name or self.name in ("", ".", ".."):
            yield f'name = "{self.name}" must be the name of one folder inside runs_dir = "{self.runs_dir}"'
        if self.evaluate.every and not self.data.validation:
            yield f'evaluate.every = {self.evaluate.every} needs problems, but data.validation = "": set one of them'
        if self.rollout.prompts_per_step % self.optimiser.minibatches:
            yield (
                f"optimiser.minibatches = {self.optimiser.minibatches} must divide rollout.prompts_per_step = "
                f"{self.rollout.prompts_per_step}: a minibatch holds whole groups"
            )
        if self.mode == "sft" and not self.sft.steps:
            yield 'mode = "sft" trains for sft.steps = 0 steps: set it, and sft.demonstrations'
        if self.mode == "sft" and self.stages:
            yield '[[stages]] are of reinforcement learning, but mode = "sft": remove them, or set mode = "rl"'

    def _placement_contradictions(self) -> Iterator[str]:
        """Contradictions of the ways to split a model and a batch over trainers."""
        placement = self.placement
        for names in (("replicas", "tensor", "context"), ("experts",)):
            parts = {f"placement.{name}": count for name in names if (count := getattr(placement, name) or 1) > 1}
            if placement.trainers % math.prod(parts.values()):
                factors = " x ".join(f"{name} = {count}" for name, count in parts.items())
                yield f"{factors} must divide placement.trainers = {placement.trainers}: a part needs as many trainers"
        if placement.experts > 1 and (placement.replicas or 1) > 1:
            yield (
                f"placement.experts = {placement.experts} is not offered with placement.replicas = "
                f"{placement.replicas}: set one of them to 1"
            )

    def _length_contradictions(self) -> Iterator[str]:
        """Contradictions of the lengths of completions, of the penalty on them and of the model."""
        reward, longest = self.reward, self.rollout.max_completion_tokens
        if longest >= self.model.max_tokens:
            yield (
                f"rollout.max_completion_tokens = {longest} leaves no room for a prompt in model.max_tokens = "
                f"{self.model.max_tokens}: lower the first or raise the second"
            )
        full = reward.length_max or longest
        name = "reward.length_max" if reward.length_max else "rollout.max_completion_tokens"
        if reward.length and reward.overlong_buffer > full:
            yield (
                f"reward.overlong_buffer = {reward.overlong_buffer} exceeds {name} = {full}: the length penalty would "
                "begin below zero tokens; lower the first"
            )
        if reward.length and full - reward.overlong_buffer >= longest:
            yield (
                f"reward.length_max = {full} less reward.overlong_buffer = {reward.overlong_buffer} is not below "
                f"rollout.max_completion_tokens = {longest}: the length penalty could never apply; lower "
                "reward.length_max, or set reward.length = 0"
            )

    def _stage_contradictions(self) -> Iterator[str]:
        """Contradictions of the names and ends of the stages, and of the settings in force in each."""
        names = [stage.name for stage in self.stages]
        if len(set(names)) < len(names):
            yield f"stages are named {', '.join(names)}: give each a name of its own"
        last_step = 0
        for number, stage in enumerate(self.stages):
            where = f"stages.{stage.name}"
            if number < len(self.stages) - 1 and not stage.until_step and not stage.until:
                yield f"{where} never ends: give it until_step or until (only the last goes on to the end of the run)"
            if stage.until_step and stage.until_step <= last_step:
                yield f"{where}.until_step = {stage.until_step} must be above the stage before ({last_step})"
            last_step = stage.until_step or last_step
            try:
                self.at_stage(number)
            except ValidationError as error:
                for mistake in error.errors():
                    setting = ".".join(map(str, mistake["loc"]))
                    yield f"{where}: {setting + ': ' if setting else ''}{mistake['msg'].removeprefix('Value error, ')}"

    def at_stage(self, number: int) -> Config:
        """The settings in force in stage `number` (0-based): those of the file, changed by the stages up to it."""
        table = self.model_dump()
        for stage in self.stages[: number + 1]:
            for section in sections.STAGED:
                table[section] |= getattr(stage, section)
            table["objective"] = merged({} if "name" in stage.objective else table["objective"], stage.objective)
        return Config.model_validate({**table, "stages": []})

    @property
    def every_stage(self) -> list[Config]:
        """The settings in force in each stage; those of the file where there are none."""
        return [self.at_stage(number) for number in range(len(self.stages))] or [self]

    @property
    def run_dir(self) -> Path:
        """Folder of the run."""
        return Path(self.runs_dir) / self.name

    def locate(self, path: str, setting: str = "data.train") -> str:
        """The path that a setting names: one that begins with made/ is in the run's folder, and so do the problems
        that reasoning-gym generates and the rows of data sets that are no JSON lines, by what they are made of."""
        generated = path.startswith("reasoning_gym:")
        if generated or path.startswith("hub:") or path.endswith(".parquet"):
            made_of = f"{path} {self.data.generate} {self.seed}" if generated else path
            if generated and setting == "data.validation":  # without the problems that are trained on
                made_of += f" {self.data.train} {self.evaluate.problems}"
            path = f"generated/{setting.removeprefix('data.')}-{zlib.crc32(made_of.encode()):08x}.jsonl"
        return str(self.run_dir / path) if path.startswith(("made/", "generated/")) else path

    def with_template(self) -> Config:
        """The settings with the text of model.chat_template in place of its file. Raises ConfigError."""
        text = READY.get(self.model.chat_template, self.model.chat_template)
        if text in READY.values():
            return self.model_copy(update={"model": self.model.model_copy(update={"chat_template": text})})
        if not text or re.search(r"{[{%]", text):
            return self
        path = Path(self.locate(text))
        try:
            if path.exists() and not path.is_file():
                raise ValueError("it is no file")
            text = path.read_text(encoding="utf-8")
            text = str(parse_json(text)["chat_template"]) if path.suffix == ".json" else text
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"model.chat_template = '{path}' is no template that can be read: {error}") from error
        return self.model_copy(update={"model": self.model.model_copy(update={"chat_template": text})})

    @property
    def last_version(self) -> int:
        """Policy version at the end of the run."""
        return self.sft.steps if self.mode == "sft" else self.steps

    @property
    def sharers(self) -> int:
        """Trainers that have the same share of a batch."""
        return self.placement.tensor * self.placement.context

    @property
    def shares(self) -> int:
        """Parts into which a batch is cut, one for each trainer or for `sharers` of them."""
        return self.placement.trainers // self.sharers

    @property
    def world_size(self) -> int:
        """Ranks of the launch: controller, trainers, engines."""
        return 1 + self.placement.trainers + self.placement.engines

    @property
    def engine_gpus(self) -> int:
        """GPUs of all engines; on a CPU their number."""
        return self.placement.engines * self.rollout.tensor_parallel

    @property
    def sends_adapters(self) -> bool:
        """Whether engines keep the model and receive adapters alone. With adapters of experts they receive weights."""
        return self.lora.rank > 0 and EXPERTS not in self.lora.targets

    @property
    def window(self) -> int:
        """Take-window in groups."""
        return self.rollout.reorder_window or self.rollout.prompts_per_step

    @property
    def max_staleness(self) -> int:
        """Bound of a trained token's age in versions: max_async_level + ceil((window - 1) / prompts_per_step), with
        fixed_staleness max_async_level."""
        level = self.rollout.max_async_level
        if self.rollout.fixed_staleness:
            return level
        return level + -(-(self.window - 1) // self.rollout.prompts_per_step) if level else 0
