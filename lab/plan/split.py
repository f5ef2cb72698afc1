"""Searches the split of GPUs into trainers and engines that fits into memory and has the shortest step.

Searched: GPUs per engine (1, 2, 4, ... of a node, dividing the heads), number of engines, async level. The trainers get
the remaining GPUs. Activations are recomputed only if they would not fit. Times of a step:

    synchronous (async level 0)   sample_s + train_s + update_s, sampling the whole batch down to its longest completion
    asynchronous (async_level > 0) the longest of
        engines    full_s + delivery_s                            engines whose slots are always taken
        trainers   train_s + write_s                              a batch is always ready
        update     update_s                                       the next optimiser step waits for it
        straggler  (longest_s + train_s + update_s) / (L + 2) a group may take L + 2 steps from its start to the release
                                                              of its slot: L + 1 with its slot, one more by being
                                                              overtaken (window of one batch, ledger.py)
    one GPU, shared               full_s + train_s + update_s     trainer and engine are both in its memory
                              together_s + train_s + update_s     they take turns, with async level 0
where L is the async level (rollout.max_async_level).

The straggler bound with async level 0 and nothing overtaken is the synchronous time, so the asynchronous step is the
synchronous one with more freedom: it is never longer (the constraint-optimisation argument of LlamaRL, 2505.24034,
section on theory: what may be done synchronously may be done asynchronously too).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from lab.plan import times
from lab.plan.scenario import Scenario
from lab.plan.times import WIDTH, EngineModel, SamplingTimes
from shared.errors import ConfigError
from trainer import memory
from trainer.memory import Recomputation, TrainerMemory

ASYNC_LEVELS = (1, 2)
"""async levels that are tried if none is given: async level 1 keeps to Magistral's rule (open completions at most twice
a batch), async level 2 is the default of a run; a larger async level means older data, and must be chosen explicitly"""
BOTH_BYTES = 4 << 30
"""what two processes on one GPU take in addition (trainer/colocate.py): contexts, prefill, CUDA graphs"""
CLOSE = 1.05
"""a smaller async_level is chosen if its step is at most this factor longer"""


@dataclass(frozen=True)
class Split:
    """A placement with its memory and its times, in seconds."""

    trainers: int
    replicas: int
    """copies of the model among the trainers"""
    engines: int
    tensor_parallel: int
    async_level: int
    again: Recomputation
    trainer_memory: TrainerMemory
    weight_bytes: float
    """weights on one GPU of an engine"""
    arriving_bytes: float
    """tensors of an update on their way, on an engine's first GPU"""
    cache_bytes: int
    """KV cache on one GPU of an engine (rollout.cache_bytes)"""
    max_sequences: int
    sampling: SamplingTimes
    train_s: float
    write_s: float
    delivery_s: float
    sharing: str = ""
    """how trainer and engine share a single GPU: "resident", "turns"; "" where they have GPUs of their own"""

    @property
    def update_s(self) -> float:
        """Time of a whole weight update: written and delivered."""
        return self.write_s + self.delivery_s

    @cached_property
    def bounds(self) -> dict[str, float]:
        """Possible bottleneck of the asynchronous step -> the step time if it were the only one."""
        if self.sharing:
            sampled = self.sampling.full_s if self.sharing == "resident" else self.sampling.together_s
            return {"the GPU, which trainer and engine share": sampled + self.train_s + self.update_s}
        return {
            "engines": self.sampling.full_s + self.delivery_s,
            "trainers": self.train_s + self.write_s,
            "weight update": self.update_s,
            "longest completion": (self.sampling.longest_s + self.train_s + self.update_s) / (self.async_level + 2),
        }

    @property
    def asynchronous_s(self) -> float:
        """Step time with async_level > 0."""
        return max(self.bounds.values())

    @property
    def synchronous_s(self) -> float:
        """Step time with async level 0 on the same placement."""
        return self.sampling.together_s + self.train_s + self.update_s

    @property
    def bottleneck(self) -> str:
        """Name of the bound that determines the asynchronous step time."""
        return max(self.bounds.items(), key=lambda bound: bound[1])[0]


# ---- one placement -----------------------------------------------------------------------------------------------


def trainer_memory(scenario: Scenario, trainers: int, again: Recomputation, replicas: int = 1) -> TrainerMemory:
    """Return the memory of one trainer rank."""
    decoder, work = scenario.decoder, scenario.work
    readers = scenario.machine.gpus - trainers if scenario.machine.one_node else 0
    adapters, shards = scenario.adapters, trainers // replicas
    frozen = memory.FROZEN_BYTES * adapters / shards or memory.frozen_bytes(decoder.parameters, shards)
    frozen = frozen if work.extra_forwards else 0.0
    return memory.trainer_rank(
        decoder, trainers, shards, -(-work.micro_batch_most // scenario.context), again, WIDTH, WIDTH, frozen, adapters,
        readers=readers, tensor=scenario.tensor,
    )  # fmt: skip


def fitting(scenario: Scenario, trainers: int) -> tuple[Recomputation, TrainerMemory]:
    """Return what layers keep, and the memory of a rank: everything if that fits, else the inputs of all layers, else
    these on the host, even if that does not fit."""
    for again in recomputations(scenario):
        rank = trainer_memory(scenario, trainers, again)
        if rank.total <= scenario.machine.usable_bytes:
            break
    return again, rank


def recomputations(scenario: Scenario) -> list[Recomputation]:
    """Return what may be recomputed: nothing; all layers; and these with their inputs on the host."""
    layers = scenario.decoder.layers
    return [memory.WHOLE, Recomputation(layers), Recomputation(layers, inputs_on_host=True)]


def replicas_of(scenario: Scenario, trainers: int, again: Recomputation) -> int:
    """Return how many replicas a launch chooses (trainer/colocate.py): one on each node, or on as few as hold it."""
    nodes, rest = divmod(trainers, scenario.machine.node_gpus)
    sharers = scenario.tensor * scenario.context
    counts = (count for count in range(0 if rest else nodes, 1, -1) if nodes % count == 0)
    for replicas in (count for count in counts if trainers // count % sharers == 0):
        if trainer_memory(scenario, trainers, again, replicas).total <= scenario.machine.usable_bytes:
            return replicas
    return 1


def place(
    scenario: Scenario, engines: int, tensor_parallel: int, async_level: int, links: int = 1, sharing: str = "",
    again: Recomputation | None = None,
) -> Split | None:  # fmt: skip
    """Return the split of a placement; None if it does not fit. The trainers get all GPUs that the engines leave.

    links: over which an engine gets its weights between nodes; one in rollout/weights. sharing: of a single GPU.
    again: what is recomputed, None for no more than has to be.
    """
    decoder, machine, work = scenario.decoder, scenario.machine, scenario.work
    trainers = machine.gpus - engines * tensor_parallel + bool(sharing)
    if trainers < 1 or trainers % (scenario.tensor * scenario.context):
        return None
    again = again or fitting(scenario, trainers)[0]
    replicas = replicas_of(scenario, trainers, again)
    rank = trainer_memory(scenario, trainers, again, replicas)
    engine = EngineModel(decoder, machine, tensor_parallel, work.lora_rank)
    trained = scenario.adapters or decoder.parameters
    kept = {"": 0.0, "resident": rank.total + BOTH_BYTES, "turns": rank.buffers + BOTH_BYTES}[sharing]
    spare = engine.spare_bytes - kept
    if rank.total > machine.usable_bytes or spare <= 0 or engine.completions_in(spare, work.max_tokens) < 1:
        return None
    open_at_once = math.ceil((async_level + 1) * (work.completions / engines))
    slots = min(engine.completions_in(spare, work.context), open_at_once)
    if sharing:  # a launch wants room for a quarter of them at their full length
        slots = min(slots, 4 * engine.completions_in(spare, work.max_tokens))
    return Split(
        trainers, replicas, engines, tensor_parallel, async_level, again, rank,
        weight_bytes=engine.weight_bytes,
        arriving_bytes=engine.arriving_bytes,
        cache_bytes=int(min(spare, spare * open_at_once / engine.completions_in(spare, work.max_tokens))),
        max_sequences=max(1, int(slots)) if sharing else math.ceil(slots),
        sampling=times.sampling_times(engine, work, engines, slots, max(async_level, 1)),
        train_s=times.train_s(decoder, machine, work, trainers, again, replicas, scenario.tensor, scenario.context),
        write_s=times.moved_s(trained, machine, trainers, times.SEND_BYTES),
        delivery_s=times.delivery_s(trained, machine, trainers, engines, tensor_parallel, links),
        sharing=sharing,
    )  # fmt: skip


# ---- the search --------------------------------------------------------------------------------------------------


def widths(scenario: Scenario) -> list[int]:
    """Return the numbers of GPUs that an engine can have: powers of two within a node that divide the heads."""
    most = min(scenario.machine.node_gpus, scenario.machine.gpus)
    powers = (1 << exponent for exponent in range(most.bit_length()))
    return [width for width in powers if scenario.decoder.heads % width == 0]


def splits(scenario: Scenario, async_level: int, tensor_parallel: int = 0) -> Iterator[Split]:
    """Yield every placement that fits; tensor_parallel 0 for all widths. A single GPU is shared in both ways; turns
    only where no async level is asked for."""
    if scenario.machine.gpus == 1:
        ways = [("resident", async_level), *([] if scenario.async_level else [("turns", 0)])]
        for (sharing, level), again in product(ways, (None, *recomputations(scenario)[1:])):
            if split := place(scenario, 1, max(tensor_parallel, 1), level, sharing=sharing, again=again):
                yield split
        return
    for width in [tensor_parallel] if tensor_parallel else widths(scenario):
        for engines in range(1, min(scenario.machine.gpus // width, scenario.work.completions) + 1):
            if split := place(scenario, engines, width, async_level):
                yield split


def best(scenario: Scenario) -> Split:
    """Return the split with the shortest asynchronous step among those that the scenario leaves open.

    Without an async level it has the smallest async level close to the fastest. Raises ConfigError if nothing fits.
    """
    machine, width = scenario.machine, scenario.tensor_parallel
    if scenario.engines * width > 1 or (scenario.engines and machine.gpus > 1):
        if placed := place(scenario, scenario.engines, width, scenario.async_level or 1):
            return placed
        raise ConfigError(
            f"--engines {scenario.engines} of {width} GPUs leave {machine.gpus - scenario.engines * width} of "
            f"{machine.gpus} GPUs to train: that does not fit. Without --engines the best split that fits is found"
        )
    levels = ASYNC_LEVELS if scenario.async_level is None else [scenario.async_level]
    fastest = [
        min(fitting, key=lambda split: (split.asynchronous_s, split.tensor_parallel))
        for async_level in levels if (fitting := list(splits(scenario, async_level, width)))
    ]  # fmt: skip
    if not fastest:
        raise ConfigError(why_nothing_fits(scenario))
    limit = CLOSE * min(split.asynchronous_s for split in fastest)
    return next(split for split in fastest if split.asynchronous_s <= limit)


def why_nothing_fits(scenario: Scenario) -> str:
    """Return one line that says how much memory the roomiest placement would need."""
    machine, width = scenario.machine, max(widths(scenario))
    sharers = scenario.tensor * scenario.context
    trainers = max((machine.gpus - width) // sharers, 1) * sharers
    _, rank = fitting(scenario, trainers)
    engine = EngineModel(scenario.decoder, machine, width, scenario.work.lora_rank)
    completion = scenario.work.max_tokens * engine.token_bytes
    needed = engine.weight_bytes + engine.arriving_bytes + completion

    def gib(count: float) -> str:
        return f"{count / 2**30:.1f}"

    return (
        f"--gpus {machine.gpus} of {gib(machine.usable_bytes)} GiB to use hold no split: a trainer rank of {trainers} "
        f"needs {gib(rank.total)} GiB with recomputation (master weights, gradients, moments {gib(rank.states)} + "
        f"gathered {gib(rank.gathered)} + frozen {gib(rank.frozen)} + weight buffers {gib(rank.buffers)} + activations "
        f"{gib(rank.activations)}), a GPU of an engine of {width} needs {gib(needed)} GiB (weights "
        f"{gib(engine.weight_bytes)} + tensors on their way {gib(engine.arriving_bytes)} + one completion "
        f"{gib(completion)}). More --gpus, more --memory, a smaller --micro-batch or a shorter --max-completion"
    )
