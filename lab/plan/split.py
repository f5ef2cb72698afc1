"""Searches the split of GPUs into trainers and engines that fits into memory and has the shortest step.

Searched: GPUs per engine (1, 2, 4, ... of a node, dividing the heads), number of engines, lead. The trainers get the
remaining GPUs. Activations are recomputed only if they would not fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from lab.plan import step, training
from lab.plan.generation import WIDTH, Engine
from lab.plan.machine import Machine
from lab.plan.step import Sampling, Workload
from shared.errors import ConfigError
from shared.model.config import DecoderConfig
from trainer import memory

LEADS = (1, 2)
"""leads that are tried if none is given: lead 1 keeps to Magistral's rule (open completions at most twice a batch),
lead 2 is the default of a run; a larger lead means older data, and must be chosen explicitly"""
CLOSE = 1.05
"""a smaller lead is chosen if its step is at most this factor longer"""


@dataclass(frozen=True)
class TrainerMemory:
    """Memory of one trainer rank, bytes."""

    states: float
    """master weights, gradients, moments"""
    gathered: float
    frozen: float
    """reference and other models without gradient"""
    buffers: float
    activations: float

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return self.states + self.gathered + self.frozen + self.buffers + self.activations


@dataclass(frozen=True)
class Plan:
    """A placement with its memory and its times, in seconds."""

    trainers: int
    engines: int
    tensor_parallel: int
    lead: int
    recompute: bool
    trainer_memory: TrainerMemory
    weight_bytes: float
    """weights on one GPU of an engine"""
    cache_bytes: int
    """KV cache on one GPU of an engine (rollout.cache_bytes)"""
    max_sequences: int
    sampling: Sampling
    train_s: float
    write_s: float
    transfer_s: float
    stall_s: float
    bounds: dict[str, float]
    """possible bottleneck of the asynchronous step -> the step time if it were the only one"""

    @property
    def update_s(self) -> float:
        """Time of a whole weight update: written, sent, loaded."""
        return self.write_s + self.transfer_s + self.stall_s

    @property
    def asynchronous_s(self) -> float:
        """Step time with lead > 0."""
        return max(self.bounds.values())

    @property
    def synchronous_s(self) -> float:
        """Step time with lead 0 on the same placement."""
        return self.sampling.together_s + self.train_s + self.update_s

    @property
    def bottleneck(self) -> str:
        """Name of the bound that determines the asynchronous step time."""
        return max(self.bounds, key=lambda name: self.bounds[name])

    @property
    def ideal_s(self) -> float:
        """Step time if GPUs could be divided arbitrarily and nothing had to wait: GPU-seconds of both sides over all
        GPUs (LlamaRL's T_async at theta* = t / (t + g))."""
        sampling = self.engines * self.tensor_parallel
        return ideal_s(self.train_s * self.trainers, self.sampling.full_s * sampling, self.trainers + sampling)


def ideal_s(train_gpu_s: float, sample_gpu_s: float, gpus: int) -> float:
    """Return (t + g) / G, the minimum of max(t / (theta G), g / ((1 - theta) G)), reached at theta = t / (t + g)."""
    return (train_gpu_s + sample_gpu_s) / gpus


def trainer_memory(decoder: DecoderConfig, work: Workload, trainers: int, recompute: bool) -> TrainerMemory:
    """Return the memory of one trainer rank."""
    tokens = max(work.micro_batch_tokens, work.max_tokens)
    frozen = memory.frozen_bytes(decoder.parameters, trainers) if work.extra_forwards else 0.0
    return TrainerMemory(
        states=memory.states_bytes(decoder.parameters, trainers),
        gathered=memory.gathered_bytes(decoder, WIDTH),
        frozen=frozen,
        buffers=memory.buffer_bytes(decoder.parameters, trainers, WIDTH),
        activations=memory.activation_bytes(decoder, tokens, WIDTH, decoder.layers if recompute else 0),
    )


def fitting(decoder: DecoderConfig, machine: Machine, work: Workload, trainers: int) -> tuple[bool, TrainerMemory]:
    """Return (recompute?, memory of a rank): without recomputation if that fits, else with it, even if it does not."""
    plain = trainer_memory(decoder, work, trainers, recompute=False)
    if plain.total <= machine.usable_bytes:
        return False, plain
    return True, trainer_memory(decoder, work, trainers, recompute=True)


def place(
    decoder: DecoderConfig, machine: Machine, work: Workload, engines: int, tensor_parallel: int, lead: int,
    receivers: int | None = None,
) -> Plan | None:  # fmt: skip
    """Return the plan of a placement; None if it does not fit. The trainers get all GPUs that the engines leave.

    receivers: links over which an engine gets its weights; by default as in rollout/weights: each of its GPUs within
    one node, one rank for all of them between nodes.
    """
    trainers = machine.gpus - engines * tensor_parallel
    if trainers < 1:
        return None
    recompute, held = fitting(decoder, machine, work, trainers)
    engine = Engine(decoder, machine, tensor_parallel)
    spare = engine.spare_bytes()
    if held.total > machine.usable_bytes or spare <= 0 or engine.held(spare, work.max_tokens) < 1:
        return None
    share = work.completions / engines
    wanted = math.ceil((lead + 1) * share)
    seats = min(engine.held(spare, work.context), wanted)
    cache = int(min(spare, spare * wanted / engine.held(spare, work.max_tokens)))
    sampled = step.sampling(engine, work, engines, seats, lead)
    train = step.train_s(decoder, machine, work, trainers, recompute)
    write = training.write_s(decoder, machine, trainers)
    stall = training.stall_s(decoder, machine, tensor_parallel)
    link = machine.node_bandwidth if machine.one_node else machine.network_bandwidth
    receivers = receivers or (tensor_parallel if machine.one_node else 1)
    transfer = training.transfer_s(decoder, machine, trainers, engines, receivers, link)
    update = write + transfer + stall
    bounds = {
        "engines": sampled.full_s + stall,
        "trainers": train + write,
        "weight update": update,
        "longest completion": step.straggler_s(sampled.longest_s, train, update, lead),
    }
    return Plan(
        trainers, engines, tensor_parallel, lead, recompute, held, engine.machine.usable_bytes - spare, cache,
        math.ceil(seats), sampled, train, write, transfer, stall, bounds,
    )  # fmt: skip


def widths(decoder: DecoderConfig, machine: Machine) -> Iterator[int]:
    """Yield the numbers of GPUs that an engine can have: powers of two within a node that divide the heads."""
    width = 1
    while width <= min(machine.node_gpus, machine.gpus):
        if decoder.heads % width == 0:
            yield width
        width *= 2


def splits(
    decoder: DecoderConfig, machine: Machine, work: Workload, lead: int, tensor_parallel: int = 0
) -> Iterator[Plan]:
    """Yield every placement that fits; tensor_parallel 0 for all widths."""
    for width in [tensor_parallel] if tensor_parallel else widths(decoder, machine):
        for engines in range(1, min(machine.gpus // width, work.completions) + 1):
            if plan := place(decoder, machine, work, engines, width, lead):
                yield plan


def best(
    decoder: DecoderConfig, machine: Machine, work: Workload, lead: int | None = None, tensor_parallel: int = 0
) -> Plan:
    """Return the split with the shortest asynchronous step; without a lead, the smallest lead close to the fastest.

    Raises ConfigError if nothing fits.
    """
    found = []
    for ahead in LEADS if lead is None else [lead]:
        candidates = splits(decoder, machine, work, ahead, tensor_parallel)
        found.append(min(candidates, key=lambda plan: (plan.asynchronous_s, plan.tensor_parallel), default=None))
    plans = [plan for plan in found if plan is not None]
    if not plans:
        raise ConfigError(why_nothing_fits(decoder, machine, work))
    limit = CLOSE * min(plan.asynchronous_s for plan in plans)
    return next(plan for plan in plans if plan.asynchronous_s <= limit)


def why_nothing_fits(decoder: DecoderConfig, machine: Machine, work: Workload) -> str:
    """Return one line that says how much memory the roomiest placement would need."""
    width = max(widths(decoder, machine))
    trainers = max(machine.gpus - width, 1)
    _, held = fitting(decoder, machine, work, trainers)
    token = memory.cache_bytes_per_token(decoder.cached_values, WIDTH)
    engine = memory.weight_bytes(decoder.parameters, WIDTH, width)
    engine += work.max_tokens * token / memory.cache_shards(decoder.key_heads, width)
    return (
        f"{machine.gpus} GPUs with {machine.usable_bytes / 2**30:.0f} GiB to use hold no split: a trainer rank of "
        f"{trainers} needs {held.total / 2**30:.0f} GiB with recomputation, a GPU of an engine of {width} needs "
        f"{engine / 2**30:.0f} GiB for weights and one completion. More --gpus, more --memory, a smaller --micro-batch "
        "or a shorter --max-completion"
    )


def together_s(
    decoder: DecoderConfig, machine: Machine, work: Workload, tensor_parallel: int, resident: bool = True
) -> float | None:
    """Return the time of a step that alternates on the same GPUs: all sample, then all train, weights stay in nodes.

    resident: both sides stay in memory, as in the synchronous baseline of LlamaRL's theory; else the idle one takes no
    memory (and moving it takes no time). None if it does not fit. For comparison only: Maestrale does not do this.
    """
    engine = Engine(decoder, machine, tensor_parallel)
    for recompute in (False, True):
        held = trainer_memory(decoder, work, machine.gpus, recompute).total
        spare = engine.spare_bytes() - (held if resident else 0.0)
        if held <= machine.usable_bytes and spare > 0 and engine.held(spare, work.context) >= 1:
            break
    else:
        return None
    engines = machine.gpus // tensor_parallel
    seats = min(engine.held(spare, work.context), max(1.0, work.completions / engines))
    sampled = step.sampling(engine, work, engines, seats)
    update = training.stall_s(decoder, machine, tensor_parallel)
    return sampled.together_s + step.train_s(decoder, machine, work, machine.gpus, recompute) + update
