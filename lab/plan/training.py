"""Models the time that trainers take for one optimiser step, and for writing the weights.

    forward of a sequence of s tokens    2 N s + 2 a s^2        N weights in products, a = layers heads head_dim;
    forward and backward                 6 N s + 6 a s^2        a token attends to s / 2 others on average
    with recomputation                   a third more

FSDP2 gathers the weights twice per micro-batch (forward, backward) in the compute dtype and reduces float32 gradients;
transfers overlap with computation, so the longer of both counts. A small model is gathered and reduced once per step.
"""

from __future__ import annotations

import math

from lab.plan.machine import Machine
from shared.model.config import DecoderConfig
from trainer import memory

WIDTH = memory.DTYPE_BYTES["bfloat16"]
OPTIMISER_BYTES = 4 + 4 + 8 + 4 + 8
"""bytes moved per parameter: weight, gradient and moments read, weight and moments written"""


def training_flops(
    decoder: DecoderConfig, tokens: float, square_tokens: float, recompute: bool = False, extra_forwards: int = 0
) -> float:
    """Return the FLOPs of a batch's forward and backward; tokens: sum of sequence lengths s, square_tokens: of s^2.

    extra_forwards: passes without gradient, e.g. of a reference model. Source: Kaplan et al. 2020, section 2.1.
    """
    attention = 2 * decoder.layers * decoder.heads * decoder.head_dim * square_tokens
    forward = 2 * decoder.products * tokens + attention
    return forward * (4 if recompute else 3) + forward * extra_forwards


def traffic_s(decoder: DecoderConfig, machine: Machine, trainers: int, micro_batches: int, rest: int = 0) -> float:
    """Return the time of a step's collectives: 2 gathers in bfloat16 and a float32 reduction per micro-batch, and one
    gather in each of `rest` passes without gradient; each rank receives all but its own part."""
    if memory.whole_bytes(decoder.parameters):
        micro_batches = 1
    received = decoder.parameters * (trainers - 1) / trainers
    sent = received * (micro_batches * (2 * WIDTH + 4) + rest * WIDTH)
    return sent / machine.ring_bandwidth(trainers)


def optimiser_s(decoder: DecoderConfig, machine: Machine, trainers: int) -> float:
    """Return the time of AdamW on a rank's shard, bound by memory bandwidth."""
    return OPTIMISER_BYTES * decoder.parameters / trainers / (machine.bandwidth * machine.bandwidth_share)


def micro_batches_of(tokens: float, trainers: int, budget: int) -> int:
    """Return the number of micro-batches of each trainer rank."""
    return max(1, math.ceil(tokens / (trainers * budget)))


def write_s(decoder: DecoderConfig, machine: Machine, trainers: int) -> float:
    """Return the time of casting a rank's shard into its buffer: 4 bytes per parameter read, 2 written."""
    return (4 + WIDTH) * decoder.parameters / trainers / (machine.bandwidth * machine.bandwidth_share)


def transfer_s(
    decoder: DecoderConfig, machine: Machine, trainers: int, engines: int, receivers: int, bandwidth: float
) -> float:
    """Return the time from the trainers' buffers to the engines: every engine receives all weights over the links of
    `receivers` ranks, every trainer sends its shard to every engine; the busier side counts. `bandwidth` bytes/s of one
    link."""
    total = WIDTH * decoder.parameters
    return max(total / receivers, total * engines / trainers) / bandwidth


def stall_s(decoder: DecoderConfig, machine: Machine, tensor_parallel: int) -> float:
    """Return how long an engine pauses while each of its GPUs receives its part over the links of its node."""
    return memory.weight_bytes(decoder.parameters, WIDTH, tensor_parallel) / machine.node_bandwidth
