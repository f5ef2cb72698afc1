"""Decides, before anything is loaded, how trainers and engines share the GPUs of a node, by arithmetic on their memory.

Per GPU, of its memory less RESERVED:

    resident   a trainer (states, gathered weights, frozen models, buffers, activations) + an engine (weights, KV cache)
    turns      the trainer alone, then the engine with the buffers of the weight transfer

each with PROCESS_BYTES for a process's CUDA context, CONTEXT_BYTES for each GPU of another engine that reads the
trainer's buffers, what an update has on its way into the engine, and ENGINE_WORK_BYTES for its prefill and CUDA graphs.
A rank on a GPU of its own is refused only where what it surely takes, without activations, is more than the GPU has.
Estimates: both ways ran on one card with the quickstart's model only (docs/gpu.md).
"""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from rollout.vllm_config import CPU_CACHE_BYTES
from shared.config import Config
from shared.errors import ConfigError
from shared.launch.ranks import shares_gpus
from shared.model.config import DecoderConfig
from shared.model.folder import load_config
from shared.model.implementation import read_shape
from trainer import memory
from trainer.memory import DTYPE_BYTES, TrainerMemory
from trainer.objectives.objective import LocalTeacher, Need
from trainer.objectives.registry import needs, objective_of

RESERVED = 0.05
"""share of a GPU's memory that is left to drivers, displays and fragments"""
PROCESS_BYTES, ENGINE_WORK_BYTES = 1 << 30, 2 << 30
MOVED_BYTES = 4 + 8
"""bytes for each parameter: float32 weight, two moments"""
PINNED_SHARE = 0.8
"""share of the host's memory for the tensors that trainers move there"""
GIB = 1 << 30


def shards_of(config: Config) -> int:
    """Trainers that share one replica of the model."""
    return config.placement.trainers // (config.placement.replicas or 1)


def frozen_models(config: Config, shape: DecoderConfig, on_gpu: bool) -> dict[str, float]:
    """Bytes of the frozen models on a trainer rank: "reference", and "teacher" where its folder is here."""
    objective, shards = objective_of(config), shards_of(config)
    in_place = memory.works_in_place(config.placement.trainers, config.optimiser.compute_dtype, on_gpu)
    sizes = {}
    if Need.REFERENCE in needs(config):
        adapters = adapters_of(config, shape)
        alone = memory.FROZEN_BYTES * adapters / shards
        sizes["reference"] = alone if adapters else memory.frozen_bytes(shape.parameters, shards, in_place)
    local = objective.teacher.path if isinstance(objective.teacher, LocalTeacher) else ""
    if Need.TEACHER in needs(config) and local and Path(local).is_dir():
        teacher = read_shape(load_config(Path(local)))
        sizes["teacher"] = memory.frozen_bytes(teacher.parameters, shards, in_place)
    return sizes


def adapters_of(config: Config, shape: DecoderConfig) -> int:
    """Parameters of the adapters that are trained; 0 where all weights are."""
    return memory.adapter_parameters(shape, config.lora.rank, config.lora.targets)


def sent_rank(config: Config) -> int:
    """Rank of the adapters that engines receive; 0 where they receive weights."""
    return config.lora.rank if config.sends_adapters else 0


def streams(config: Config) -> bool:
    """Whether the engines of one node get their weights over the network."""
    return config.rollout.transport == "network"


def trainer_memory(config: Config, shape: DecoderConfig, on_gpu: bool, readers: int = 0) -> TrainerMemory:
    """Memory of one trainer rank of this run: all that it holds at the peak of a step. readers: GPUs of engines whose
    processes open its buffers, in addition to one that shares its GPU; none where weights are streamed."""
    trainers, settings, placement = config.placement.trainers, config.optimiser, config.placement
    width = DTYPE_BYTES[settings.compute_dtype]
    in_place = memory.works_in_place(trainers, settings.compute_dtype, on_gpu)
    tokens = -(-max(settings.micro_batch_tokens, config.model.max_tokens) // placement.context)
    part = memory.part_of(shape, placement.tensor)
    return memory.trainer_rank(
        shape, trainers, shards_of(config), tokens,
        memory.recomputation_within(part, tokens, width, settings.activation_bytes, on_gpu), width,
        DTYPE_BYTES[config.model.dtype], sum(frozen_models(config, shape, on_gpu).values()),
        adapters_of(config, shape), config.sends_adapters, in_place, 0 if streams(config) else readers,
        placement.tensor, placement.experts,
    )  # fmt: skip


def share(config: Config, shape: DecoderConfig, gpu_bytes: float, host_bytes: float) -> Config:
    """The settings with the way to share GPUs of `gpu_bytes` each, and the bytes for keys and values on each.
    host_bytes: memory of the node. Raises ConfigError, naming what to lower, if nothing fits."""
    usable, asked, width = (1 - RESERVED) * gpu_bytes, config.placement.colocate, DTYPE_BYTES[config.model.dtype]
    trainer = trainer_memory(config, shape, on_gpu=True, readers=config.engine_gpus - 1)
    parallel = config.rollout.tensor_parallel
    arriving = memory.arriving_bytes(shape, width, streams(config), sent_rank(config))
    engine = memory.weight_bytes(shape.parameters, width, parallel) + arriving + PROCESS_BYTES + ENGINE_WORK_BYTES
    a_sequence = config.model.max_tokens * memory.cache_bytes_per_token(shape, width, parallel)
    cache = config.rollout.cache_bytes or open_sequences(config) * a_sequence
    least = config.rollout.cache_bytes or max(a_sequence, cache / 4)
    spare = {
        "resident": usable - trainer.total - PROCESS_BYTES - engine,
        "turns": usable - trainer.buffers - PROCESS_BYTES - engine,
    }
    if spare["resident"] >= least and asked != "turns":
        return with_sharing(config, "resident", int(min(cache, spare["resident"])))
    alone = trainer.total + 2 * PROCESS_BYTES + (arriving if streams(config) else 0)
    lower = (
        "lower optimiser.micro_batch_tokens, model.max_tokens or rollout.cache_bytes, set optimiser.activation_bytes = "
        "0, or train on more GPUs (placement.trainers)"
    )
    sums = (
        f"a trainer takes {trainer.total / GIB:.1f} GiB ({parts(trainer)}, activations "
        f"{trainer.activations / GIB:.1f}), an engine {engine / GIB:.1f} GiB ({arriving / GIB:.1f} of it for tensors "
        f"of an update on their way) and at least {least / GIB:.1f} for keys and values, a GPU has "
        f"{usable / GIB:.1f} GiB for them"
    )
    if asked == "resident":
        raise ConfigError(f'placement.colocate = "resident": {sums}: {lower}, or set placement.colocate = "turns"')
    least = config.rollout.cache_bytes or a_sequence
    if alone > usable or spare["turns"] < least:
        raise ConfigError(f"trainers and engines share GPUs, but not even in turns do they fit: {sums}: {lower}")
    adapters, width_bytes = adapters_of(config, shape), DTYPE_BYTES[config.optimiser.compute_dtype]
    states = MOVED_BYTES * adapters + width_bytes * shape.parameters if adapters else MOVED_BYTES * shape.parameters
    moved = states * (config.placement.replicas or 1) + config.placement.trainers * trainer.frozen
    if moved > PINNED_SHARE * host_bytes:
        raise ConfigError(
            f"trainers and engines share GPUs in turns, but this node's memory of {host_bytes / GIB:.0f} GiB does not "
            f"hold the {moved / GIB:.0f} GiB of weights and moments that trainers move there: take a smaller model, or "
            "GPUs for both (placement.trainers, placement.engines)"
        )
    if ahead := max(stage.rollout.max_async_level for stage in config.every_stage):
        raise ConfigError(
            f"trainers and engines share GPUs and do not fit together ({sums}), only in turns, which samples and "
            f"trains one after the other, but rollout.max_async_level = {ahead}: set it to 0 (in every stage), or "
            f"{lower}"
        )
    return with_sharing(config, "turns", int(min(cache, spare["turns"])))


def parts(trainer: TrainerMemory) -> str:
    """What a trainer takes without activations, GiB by part, for an error."""
    return (
        f"master weights, gradients, moments {trainer.states / GIB:.1f}, gathered {trainer.gathered / GIB:.1f}, frozen "
        f"models {trainer.frozen / GIB:.1f}, buffers of the weight transfer {trainer.buffers / GIB:.1f}"
    )


def check_own_gpus(config: Config, shape: DecoderConfig, gpu_bytes: float, gpus: int) -> None:
    """Raise ConfigError if a rank with GPUs of its own takes more than `gpu_bytes` each. gpus: of the node."""
    width, parallel = DTYPE_BYTES[config.model.dtype], config.rollout.tensor_parallel
    readers = max(0, min(config.engine_gpus, gpus - config.placement.trainers))
    trainer = trainer_memory(config, shape, on_gpu=True, readers=readers)
    if (surely := trainer.total - trainer.activations) > gpu_bytes:
        raise ConfigError(
            f"a trainer takes {surely / GIB:.1f} GiB before activations ({parts(trainer)}), a GPU has "
            f"{gpu_bytes / GIB:.1f} GiB: train on more GPUs (placement.trainers), or train a smaller model"
            + (", or lower placement.replicas" if (config.placement.replicas or 1) > 1 else "")
        )
    weights = memory.weight_bytes(shape.parameters, width, parallel)
    arriving = memory.largest_tensor(shape, sent_rank(config)) * width
    cache = config.rollout.cache_bytes or config.model.max_tokens * memory.cache_bytes_per_token(shape, width, parallel)
    if (surely := weights + arriving + cache) > gpu_bytes:
        raise ConfigError(
            f"an engine takes {surely / GIB:.1f} GiB of each of its GPUs (weights {weights / GIB:.1f}, the largest "
            f"tensor of an update {arriving / GIB:.1f}, keys and values {cache / GIB:.1f}), a GPU has "
            f"{gpu_bytes / GIB:.1f} GiB: raise rollout.tensor_parallel, or lower model.max_tokens or "
            "rollout.cache_bytes"
        )


def held_tokens(config: Config, shape: DecoderConfig) -> int:
    """Tokens that the KV cache of an engine holds; rollout.cache_bytes is what each of its GPUs sets aside."""
    rollout, width = config.rollout, DTYPE_BYTES[config.model.dtype]
    return memory.cache_tokens(shape, width, rollout.tensor_parallel, rollout.cache_bytes or CPU_CACHE_BYTES)


def open_sequences(config: Config) -> int:
    """Completions that an engine decodes at once, at most."""
    rollout = config.rollout
    opened = (rollout.max_async_level + 1) * rollout.prompts_per_step * rollout.group_size
    return min(rollout.max_sequences, -(-opened // config.placement.engines))


def with_replicas(config: Config, shape: DecoderConfig, node_trainers: int, rank_bytes: float, on_gpu: bool) -> Config:
    """The settings with placement.replicas as this launch has it, where it is not given: one on each node if it fits,
    else on as few nodes as hold it. node_trainers: of each node; rank_bytes: memory of each of them."""
    trainers, most, sharers = config.placement.trainers, 1, config.sharers
    if node_trainers and trainers % node_trainers == 0:
        most = trainers // node_trainers
    if config.placement.experts > 1:  # not offered with replicas
        most = 1
    for replicas in (count for count in range(most, 0, -1) if most % count == 0 and trainers // count % sharers == 0):
        placement = config.placement.model_copy(update={"replicas": config.placement.replicas or replicas})
        settings = config.model_copy(update={"placement": placement})
        if trainer_memory(settings, shape, on_gpu).total + PROCESS_BYTES <= (1 - RESERVED) * rank_bytes:
            break
    return settings


def settle(config: Config, model_dir: Path, gpus: int, one_node: bool, node_trainers: int = 0) -> Config:
    """The settings with placement.colocate, placement.replicas and rollout.cache_bytes as this launch has them: "never"
    where each rank has a GPU of its own. gpus, node_trainers: of this node. Raises ConfigError if no way fits."""
    if gpus or not one_node:
        shape = read_shape(load_config(model_dir), config.model.implementation, config.model.max_tokens)
        cards = [float(torch.cuda.get_device_properties(index).total_memory) for index in range(gpus)]
        least = min(cards, default=psutil.virtual_memory().total / max(1, node_trainers))
    if not one_node:
        config = with_replicas(config, shape, node_trainers, least, gpus > 0)
    if gpus == 0:
        way = "turns" if config.placement.colocate == "turns" else "never"
        return with_sharing(config, way, config.rollout.cache_bytes)
    if not (one_node and shares_gpus(config, gpus)):
        check_own_gpus(config, shape, least, gpus)
        return with_sharing(config, "never", config.rollout.cache_bytes)
    if streams(config):
        raise ConfigError(
            'rollout.transport = "network" needs a GPU for each trainer and engine, since NCCL takes no two ranks on '
            f'one; this node has {gpus}: leave it "auto", or give the launch more GPUs'
        )
    return share(config, shape, least, psutil.virtual_memory().total)


def with_sharing(config: Config, way: str, cache_bytes: int | None) -> Config:
    """The settings with these two replaced."""
    placement = config.placement.model_copy(update={"colocate": way})
    rollout = config.rollout.model_copy(update={"cache_bytes": cache_bytes})
    return config.model_copy(update={"placement": placement, "rollout": rollout})
