"""Computes how long the parts of a step take: decoding, sampling a batch, training, a weight update.

A decode step reads the weights and the cached keys and values of all running completions, once:

    read     (W + b c k) / (bandwidth share)       W weight bytes, b running completions, c their mean tokens, k cache
    compute  b (2 N + 4 a c) / (peak mfu)          bytes a token; N weights in products; a = layers heads head_dim
    step     max(read, compute) + overhead         each on one of the engine's GPUs, which share the work

step(b) is the larger of two straight lines, neither negative at b = 0, so step(b) / b falls with b, and
step(k b) <= k step(b): a step of `Split` is never longer asynchronous than synchronous because of these two.

    forward of a sequence of s tokens    2 N s + 2 a s^2        a token attends to s / 2 others on average
    forward and backward                 6 N s + 6 a s^2        with recomputation a third more

FSDP2 gathers the weights twice per micro-batch (forward, backward) in the compute dtype and reduces float32 gradients;
transfers overlap with computation, so the longer of both counts. A small model is gathered and reduced once per step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lab.plan.scenario import Machine, Workload
from shared.model.config import DecoderConfig
from trainer import memory
from trainer.memory import Recomputation
from trainer.step.flops import forward_flops

WIDTH = memory.DTYPE_BYTES["bfloat16"]
OPTIMISER_BYTES = 4 + 4 + 8 + 4 + 8
"""bytes that AdamW moves per parameter: weight, gradient and moments read, weight and moments written"""
SEND_BYTES = 4 + WIDTH
"""bytes per parameter that a trainer moves to write an update: float32 read, cast and written to its buffer"""
HOST_BANDWIDTH = 55e9
"""bytes/s between a card and pinned memory of its host, one direction; of a PCIe 5 card (docs/gpu.md)"""
MESSAGE_BYTES = 32 << 20
"""size of a message in the chain of engines on several nodes (rollout/weights/network.py)"""


# ---- engines -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineModel:
    """One engine: a decoder on `tensor_parallel` GPUs of a machine."""

    decoder: DecoderConfig
    machine: Machine
    tensor_parallel: int
    lora_rank: int = 0
    """rank of adapters; above 0 an update sends these alone"""

    @property
    def weight_bytes(self) -> float:
        """Bytes of the weights on each GPU."""
        return memory.weight_bytes(self.decoder.parameters, WIDTH, self.tensor_parallel)

    @property
    def spare_bytes(self) -> float:
        """Bytes left for the cache on each GPU; negative if the weights do not fit."""
        return self.machine.usable_bytes - self.weight_bytes - self.arriving_bytes

    @property
    def arriving_bytes(self) -> float:
        """Bytes of an update's tensors on their way, on an engine's first GPU."""
        return memory.arriving_bytes(self.decoder, WIDTH, not self.machine.one_node, self.lora_rank)

    @property
    def token_bytes(self) -> float:
        """Bytes of a token's keys and values on each GPU."""
        return memory.cache_bytes_per_token(self.decoder, WIDTH, self.tensor_parallel)

    def completions_in(self, cache_bytes: float, tokens: float) -> float:
        """Return how many completions of `tokens` tokens a cache of `cache_bytes` on each GPU holds."""
        return memory.cache_tokens(self.decoder, WIDTH, self.tensor_parallel, cache_bytes) / tokens

    def decode_s(self, running: float, context: float) -> float:
        """Return the time of a decode step of `running` completions with `context` tokens on average, with prompt."""
        machine, decoder = self.machine, self.decoder
        read = (self.weight_bytes + running * context * self.token_bytes) / (
            machine.bandwidth * machine.bandwidth_share
        )
        compute = machine.compute_s(running * forward_flops(decoder, 1, 1, 2 * context), self.tensor_parallel)
        reductions = 2 * decoder.layers if self.tensor_parallel > 1 else 0
        return max(read, compute) + machine.step_overhead_s + reductions * machine.reduction_s

    def prefill_s(self, prompt_tokens: float) -> float:
        """Return the time of prefilling one prompt: compute-bound, with attention over half of it on average."""
        flops = forward_flops(self.decoder, prompt_tokens, prompt_tokens, prompt_tokens**2)
        return self.machine.compute_s(flops, self.tensor_parallel)


@dataclass(frozen=True)
class SamplingTimes:
    """Times of sampling one batch, in seconds."""

    together_s: float
    """time of a batch started together, until the longest completion is done (synchronous)"""
    full_s: float
    """time of a batch at the rate of engines whose slots are always taken"""
    longest_s: float
    """time of the longest completion of a batch, at the load of the asynchronous engines"""
    decode_s: float
    """time of a decode step of those engines"""
    slots: float
    """number of completions that an engine runs at once if it has enough"""


def sampling_times(
    engine: EngineModel, work: Workload, engines: int, slots: float, async_level: int = 1
) -> SamplingTimes:
    """Return the times of one batch on `engines` engines of `slots` slots each (at least 1); `async_level` at least 1.

    The ledger's slots of one batch let completions / engines be open at once; sampled / engines are due.
    """
    mean, longest, context = work.lengths.mean, work.longest, work.context
    share, due = work.completions / engines, work.sampled / engines
    prefill = math.ceil(due) * engine.prefill_s(work.prompt_tokens)
    at_once = min(slots, share)  # synchronous: waves while more are due than may be open, then the last ones run out
    waves = (due - at_once) * mean * engine.decode_s(at_once, context) / at_once
    left = at_once * mean / longest  # on average, while the longest runs (Little's law)
    together = waves + longest * engine.decode_s(left, context) + prefill
    ahead = min(slots, async_level * share)
    full = due * mean * engine.decode_s(ahead, context) / ahead + prefill
    running = min(ahead, (async_level + 2) * due * mean / longest)
    decode = engine.decode_s(running, context)
    return SamplingTimes(together, full, longest * decode + engine.prefill_s(work.prompt_tokens), decode, ahead)


# ---- trainers and the update -------------------------------------------------------------------------------------


def training_flops(
    decoder: DecoderConfig, tokens: float, square_tokens: float, recompute: bool = False, extra_forwards: int = 0,
    frozen: bool = False,
) -> float:  # fmt: skip
    """Return the FLOPs of a batch's forward and backward; tokens: sum of sequence lengths s, square_tokens: of s^2.

    extra_forwards: passes without gradient, e.g. of a reference model. frozen: the weights have no gradients (adapters,
    whose own products are left out). Source: Kaplan et al. 2020, section 2.1.
    """
    forward = forward_flops(decoder, tokens, tokens, square_tokens)
    return forward * (3 + recompute - frozen + extra_forwards)


def traffic_s(
    decoder: DecoderConfig, machine: Machine, trainers: int, micro_batches: int, rest: int = 0, adapters: int = 0,
    replicas: int = 1, steps: int = 1,
) -> float:  # fmt: skip
    """Return the time of a step's collectives: 2 gathers in bfloat16 and a float32 reduction (of what is trained) per
    micro-batch, and one gather in each of `rest` passes without gradient; each rank receives all but its own part. This
    is within a replica; in each of `steps` optimiser steps they add up gradients, each rank over its own link."""
    if memory.whole_bytes(decoder.parameters):
        micro_batches = 1
    shards, trained = trainers // replicas, adapters or decoder.parameters
    others = (shards - 1) / shards
    gathered = decoder.parameters * (micro_batches * 2 * WIDTH + rest * WIDTH)
    within = others * (gathered + 4 * micro_batches * trained) / machine.ring_bandwidth(shards)
    return within + 2 * (replicas - 1) / replicas * steps * 4 * trained / shards / machine.network_bandwidth


def moved_s(parameters: int, machine: Machine, trainers: int, width: int) -> float:
    """Return the time in which a rank's memory moves `width` bytes of each parameter of its shard."""
    return width * parameters / trainers / (machine.bandwidth * machine.bandwidth_share)


def train_s(
    decoder: DecoderConfig, machine: Machine, work: Workload, trainers: int, again: Recomputation, replicas: int = 1,
    tensor: int = 1, context: int = 1,
) -> float:  # fmt: skip
    """Return the time of forward, backward and optimiser steps of one batch, seconds."""
    adapters = memory.adapter_parameters(decoder, work.lora_rank)
    flops = training_flops(
        decoder, work.tokens, work.square_tokens, again.layers > 0, work.extra_forwards, frozen=adapters > 0
    )
    count = work.optimiser_steps
    shares = trainers // (tensor * context)
    each = max(1, math.ceil(work.tokens / count / (shares * work.micro_batch_most))) * count
    part, held = memory.part_of(decoder, tensor), trainers // tensor
    traffic = traffic_s(part, machine, held, each, each * work.extra_forwards, adapters // tensor, replicas, count)
    steps = count * moved_s(adapters or decoder.parameters, machine, trainers // replicas, OPTIMISER_BYTES)
    tokens = math.ceil(work.tokens / trainers)
    inputs = memory.input_bytes(decoder, tokens * tensor, WIDTH, again.layers * again.inputs_on_host)
    passes = 2 + (again.layers > 0) + work.extra_forwards
    peers = peers_s(decoder, machine, tokens * tensor, passes, tensor, context)
    return max(machine.compute_s(flops, trainers), traffic) + peers + 2 * inputs / HOST_BANDWIDTH + steps


def peers_s(
    decoder: DecoderConfig, machine: Machine, tokens: int, passes: int, tensor: int = 1, context: int = 1
) -> float:
    """Return the time in which layers wait for their peers, seconds. tokens: of a rank in a step; passes: forward,
    backward and each further one. A pass adds up hidden states twice a layer over tensor peers (each sum passes a rank
    twice), and exchanges queries, keys, values and the mixture over context peers."""
    sums = 2 * 2 * decoder.hidden_size * (tensor - 1) / tensor / machine.ring_bandwidth(tensor)
    heads = 2 * decoder.heads + 2 * max(decoder.key_heads, context * tensor)
    exchanged = heads * decoder.head_dim / tensor * (context - 1) / context / machine.ring_bandwidth(context * tensor)
    return tokens * passes * decoder.layers * WIDTH * (sums + exchanged)


def delivery_s(
    trained: int, machine: Machine, trainers: int, engines: int, tensor_parallel: int, links: int = 1
) -> float:
    """Return the time of so many parameters from the trainers' buffers into the engines, in which these pause; the
    busiest link counts.

    Within a node each GPU of an engine reads every tensor whole, and each trainer's shard leaves it as often. Between
    nodes weights come over `links` links of each engine (Maestrale: one) from the engine before it, and the last one is
    as many messages behind.
    """
    total = WIDTH * trained
    if machine.one_node:
        return max(total, total * engines * tensor_parallel / trainers) / machine.node_bandwidth
    return (total / links + (engines - 1) * MESSAGE_BYTES) / machine.network_bandwidth
