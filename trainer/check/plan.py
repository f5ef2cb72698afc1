"""The text that `--dry-run` prints: settings, role and device of each rank, derived numbers, memory by kind of rank.

Nothing is started or made, no weight is read; data and chat template are read as a launch reads them (inspection.py).
Memory figures are those by which a launch is refused (colocate.py), without the libraries themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from rollout.vllm_config import CPU_CACHE_BYTES
from shared import settings_file
from shared.config import Config
from shared.launch.ranks import count_gpus, gpus_of, kind_of, shares_gpus
from shared.model.config import DecoderConfig
from shared.model.folder import load_config
from shared.model.implementation import adapted_names, read_shape
from trainer import memory
from trainer.check.inspection import inspect
from trainer.check.remarks import remark_lines
from trainer.colocate import adapters_of, frozen_models, held_tokens, sent_rank, settle, streams, trainer_memory
from trainer.data.environment_rows import environment_lines, room_lines
from trainer.memory import DTYPE_BYTES, FROZEN_BYTES, size
from trainer.objectives.objective import LocalTeacher, Need, moves
from trainer.objectives.registry import needs, objective_of
from trainer.soft_values import draws_of


def plan_text(config: Config) -> str:
    """The whole text of `--dry-run`. Raises what a launch would be refused for because of its model or its data."""
    shape, inspection = model_shape(config), inspect(config)
    inspection.raise_first()
    rows = inspection.environments
    room = list(room_lines(config, rows, inspection.added))
    parts = [
        "placement (all ranks on this machine; on several nodes the order of ranks is the same)",
        *indent(placement_lines(config)), "", "derived", *indent(derived_lines(config)), "", "read",
        *indent(f"{one.name:<14} {text}" for one in inspection.results.values() for text in one.texts),
        *(["", "environments", *indent([*environment_lines(config, rows), *room[:1]])] if room else []), "", "memory",
        *indent(memory_lines(config, shape)),
    ]  # fmt: skip
    warnings = [warning for result in inspection.results.values() for warning in result.warnings]
    remarks = [*warnings, *remark_lines(config, shape), *room[1:]]
    if remarks:
        parts += ["", "worth a look", *indent(remarks)]
    parts += ["", "settings that are not the default (`--help` tells all)", settings_file.to_toml(config, changed=True)]
    return "\n".join(parts)


def indent(lines: Iterable[str]) -> list[str]:
    """Put two spaces before each line."""
    return [f"  {line}" for line in lines]


def model_shape(config: Config) -> DecoderConfig | None:
    """The shape of the model, from its folder's config.json; None where there is no folder yet ("made/...", a Hub id).

    Raises ModelError, and ConfigError for lora.targets that it lacks."""
    folder = Path(config.locate(config.model.path))
    settings = config.model
    if not folder.is_dir():
        return None
    shape = read_shape(described := load_config(folder), settings.implementation, settings.max_tokens)
    if config.lora.rank:
        adapted_names(shape, described, config.lora.rank, config.lora.targets)
    return shape


def placement_lines(config: Config) -> Iterator[str]:
    """One line for each rank: its number, role and device."""
    gpus, ranks = count_gpus(config.placement.device), range(config.world_size)
    for rank in ranks:
        kind, own = kind_of(rank, config.placement.trainers), gpus_of(rank, ranks, config, gpus)
        device = "CPU"
        if own and gpus:
            device = f"GPU {own.start}" if len(own) == 1 else f"GPUs {own.start}-{own.stop - 1}"
            device += "" if own.stop <= gpus else f" (this machine has {gpus}: more nodes are needed)"
        yield f"rank {rank}  {kind:10}  {device}"


def derived_lines(config: Config) -> Iterator[str]:
    """Numbers that follow from several settings."""
    rollout, trainers = config.rollout, config.placement.trainers
    completions = rollout.prompts_per_step * rollout.group_size
    tokens = completions * config.model.max_tokens
    slots = (rollout.max_async_level + 1) * rollout.prompts_per_step
    micro_batches = -(-tokens // (config.optimiser.micro_batch_tokens * config.shares))
    engines = config.placement.engines
    yield f"ranks                      1 controller + {trainers} trainers + {engines} engines"
    yield f"completions in a step      {completions:,} = {rollout.prompts_per_step} prompts x {rollout.group_size}"
    yield f"completions in the run     {completions * config.steps:,} in {config.steps} steps"
    sampled = completions * rollout.max_completion_tokens
    yield f"tokens in a step           at most {tokens:,}, of them sampled at most {sampled:,}"
    yield f"micro-batches of a trainer at most about {micro_batches} of {config.optimiser.micro_batch_tokens:,} tokens"
    yield f"open groups (slots)        {slots} = {slots * rollout.group_size:,} completions"
    why = (
        f"held back: that of every token from step {rollout.max_async_level + 1} on" if rollout.fixed_staleness else ""
    )
    why = why or f"async level {rollout.max_async_level}, window {config.window}"
    yield f"largest age of a token     {config.max_staleness} versions ({why})"
    yield from stage_lines(config)
    if config.mode == "rl":
        yield f"objective                  {objective_of(config).describe()}"
    if Need.START_VALUES in needs(config):
        samples = objective_of(config).in_force["value_samples"]
        dropping = any(stage.data.drop_solved_after for stage in config.every_stage[1:])
        dropping = dropping or any(stage.data.order == "prioritised" for stage in config.every_stage)
        prompts = "every problem" if dropping else f"at most {sum(map(draws_of, config.every_stage)):,} prompts"
        yield (f"soft values                {samples} completions of {prompts}, before the first step")
    yield f"decoded at once            at most {config.placement.engines * rollout.max_sequences:,} completions"


def stage_lines(config: Config) -> Iterator[str]:
    """One line a stage: how it ends, and its sizes."""
    for number, stage in enumerate(config.stages):
        now, ends = config.at_stage(number), [f"step {stage.until_step}"] if stage.until_step else []
        ends += [stage.until] if stage.until else []
        rollout = now.rollout
        sizes = f"{rollout.prompts_per_step} x {rollout.group_size} completions of {rollout.max_completion_tokens}"
        until = " or ".join(ends) or "the end"
        yield f"stage {stage.name:<20} {sizes} tokens, async level {rollout.max_async_level}; until {until}"


def memory_lines(config: Config, shape: DecoderConfig | None) -> Iterator[str]:
    """Memory of each kind of rank and size of a checkpoint, one line each; no estimate where there is no shape."""
    if shape is None:
        made = "is made at the start" if config.model.path.startswith("made/") else "is not a folder here"
        yield f"model.path = {config.model.path!r} {made}: no estimate"
        return
    width, gpus = DTYPE_BYTES[config.model.dtype], count_gpus(config.placement.device)
    objective, frozen = objective_of(config), frozen_models(config, shape, gpus > 0)
    reference, teacher = frozen.get("reference", 0.0), frozen.get("teacher", 0.0)
    together = shares_gpus(config, gpus)
    if gpus:
        config = settle(config, Path(config.locate(config.model.path)), gpus, one_node=True)
    if together:
        way = config.placement.colocate
        yield f"shared GPUs    {'both stay in GPU memory' if way == 'resident' else 'in turns'} ({way})"
    readers = min(config.engine_gpus, gpus) - together
    trainer = trainer_memory(config, shape, gpus > 0, readers)
    adapters = adapters_of(config, shape)
    trained = adapters or shape.parameters
    moved = FROZEN_BYTES * trained if reference and moves(objective) else 0
    weights = memory.weight_bytes(shape.parameters, width, config.rollout.tensor_parallel)
    cache = config.rollout.cache_bytes or (0 if gpus else CPU_CACHE_BYTES)
    cache_tokens = held_tokens(config, shape)
    yield f"parameters     {shape.parameters / 1e6:,.2f} M" + (f", {trained / 1e6:,.2f} M trained" if adapters else "")
    yield (
        f"trainer rank   {size(trainer.total)} = {'frozen weights, ' if adapters else ''}master weights, gradients, "
        f"moments {size(trainer.states)} + "
        + (f"gathered weights and gradients {size(trainer.gathered)} + " if trainer.gathered else "")
        + (f"reference model {size(reference)} + " if reference else "")
        + (f"teacher model {size(teacher)} + " if teacher else "")
        + f"weight buffers {size(trainer.buffers)} + activations {size(trainer.activations)}"
    )
    if cache:
        yield (
            f"engine rank    {size(weights + cache)} = weights {size(weights)} + KV cache {size(cache)} "
            f"({cache_tokens:,} tokens, {cache_tokens // config.model.max_tokens} full sequences)"
        )
    else:
        yield f"engine rank    weights {size(weights)} + KV cache in what is free of each GPU"
    where = "an engine rank" + ("" if streams(config) else " on another node than the trainers")
    if gpus:
        arriving = memory.arriving_bytes(shape, width, streams(config), sent_rank(config))
        yield f"on their way   {size(arriving)} more in an engine rank"
    if streams(config) or config.rollout.transport == "auto":
        slots = memory.arriving_bytes(shape, width, True, sent_rank(config)) - (0 if gpus else memory.CONTEXT_BYTES)
        yield f"streamed       {size(slots)} more in {where}: two slots of the largest tensor"
    if Need.TEACHER in needs(config) and isinstance(objective.teacher, LocalTeacher) and not teacher:
        path = objective.teacher.path
        yield f"teacher        objective.teacher.path = {path!r} is not a folder here: on top of a trainer"
    checkpoint = 3 * 4 * trained + moved
    yield f"a checkpoint   {size(checkpoint)} on disk, an export {size(width * shape.parameters)}"
