"""Machines, workloads and draws of them that the plan's tests share."""

import math

from hypothesis import strategies as st

from lab.plan.scenario import Lengths, Machine, Workload
from shared.model.config import DecoderConfig

ROUND = Machine(
    gpus=4, memory_bytes=80e9, flops_per_s=1e15, bandwidth=1e12, node_bandwidth=4e11, network_bandwidth=5e10,
    mfu=0.5, bandwidth_share=0.5, step_overhead_s=0.001, reduction_s=1e-5,
)  # fmt: skip
"""round numbers: 5e14 FLOP/s and 5e11 bytes/s are reached"""


def decoder(layers: int = 2, hidden: int = 8, heads: int = 4, key_heads: int = 2, wide: int = 12) -> DecoderConfig:
    """A shape; heads have hidden / heads channels."""
    return DecoderConfig(
        family="llama", vocab_size=100, hidden_size=hidden, intermediate_size=wide, layers=layers, heads=heads,
        key_heads=key_heads, head_dim=hidden // heads, norm_epsilon=1e-5, max_positions=64,
    )  # fmt: skip


def work(lengths: Lengths, prompts: int = 2, group: int = 2, prompt_tokens: int = 1, kept: float = 1.0) -> Workload:
    """A small step."""
    return Workload(lengths, int(lengths.limit), prompts, group, prompt_tokens, micro_batch_tokens=64, kept=kept)


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    """Any cluster, from slow to fast."""
    return Machine(
        gpus=draw(st.integers(2, 24)),
        memory_bytes=draw(st.floats(40e9, 200e9)),
        flops_per_s=draw(st.floats(1e13, 2e15)),
        bandwidth=draw(st.floats(1e11, 8e12)),
        node_bandwidth=draw(st.floats(1e10, 9e11)),
        network_bandwidth=draw(st.floats(1e9, 1e11)),
        node_gpus=draw(st.sampled_from([1, 2, 4, 8])),
        mfu=draw(st.floats(0.1, 1)),
        bandwidth_share=draw(st.floats(0.1, 1)),
        step_overhead_s=draw(st.floats(0, 0.05)),
        reduction_s=draw(st.floats(0, 1e-3)),
    )


@st.composite
def decoders(draw: st.DrawFn) -> DecoderConfig:
    """Some tens of millions to some billions of parameters."""
    key_heads = draw(st.sampled_from([1, 2, 4, 8]))
    heads = key_heads * draw(st.sampled_from([1, 2, 4]))
    return decoder(draw(st.integers(1, 40)), 128 * heads, heads, key_heads, draw(st.integers(64, 12_000)))


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Lengths from all equal to heavy tails, batches from one group to many."""
    mean = draw(st.floats(2, 5000))
    p99 = mean * draw(st.floats(1, 14))
    lengths = Lengths(mean, p99, math.ceil(p99))
    return Workload(
        prompts_per_step=draw(st.integers(1, 256)), group_size=draw(st.integers(2, 32)),
        prompt_tokens=draw(st.integers(1, 2000)), lengths=lengths, max_completion_tokens=math.ceil(p99),
        micro_batch_tokens=draw(st.sampled_from([512, 8192])), optimiser_steps=draw(st.integers(1, 4)),
        extra_forwards=draw(st.integers(0, 2)), kept=draw(st.floats(0.1, 1)),
    )  # fmt: skip
