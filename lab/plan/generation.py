"""Models the time that engines take for a decode step, a batch of completions, and its longest one.

A decode step reads the weights and the cached keys and values of all running completions, once:

    read     (W + b c k) / (bandwidth share)       W weight bytes, b running completions, c their mean tokens, k cache
    compute  b (2 N + 4 a c) / (peak mfu)          bytes a token; N weights in products; a = layers heads head_dim
    step     max(read, compute) + overhead         each on one of the engine's GPUs, which share the work

step(b) is the larger of two straight lines, neither negative at b = 0, so step(b) / b falls with b, and
step(k b) <= k step(b): `asynchronous <= synchronous` (step.py) follows from these two.
"""

from __future__ import annotations

from dataclasses import dataclass

from lab.plan.machine import Machine
from shared.model.config import DecoderConfig
from trainer import memory

WIDTH = memory.DTYPE_BYTES["bfloat16"]


@dataclass(frozen=True)
class Engine:
    """One engine: a decoder on `tensor_parallel` GPUs of a machine."""

    decoder: DecoderConfig
    machine: Machine
    tensor_parallel: int

    def decode_s(self, running: float, context: float) -> float:
        """Return the time of a decode step of `running` completions with `context` tokens on average, with prompt."""
        machine, decoder = self.machine, self.decoder
        weights = memory.weight_bytes(decoder.parameters, WIDTH, self.tensor_parallel)
        token = memory.cache_bytes_per_token(decoder.cached_values, WIDTH)
        cached = running * context * token / memory.cache_shards(decoder.key_heads, self.tensor_parallel)
        read = (weights + cached) / (machine.bandwidth * machine.bandwidth_share)
        compute = machine.compute_s(running * forward_flops(decoder, context), self.tensor_parallel)
        reductions = 2 * decoder.layers if self.tensor_parallel > 1 else 0
        return max(read, compute) + machine.step_overhead_s + reductions * machine.reduction_s

    def prefill_s(self, prompt_tokens: float) -> float:
        """Return the time of prefilling one prompt: compute-bound, with attention over half of it on average."""
        flops = prompt_tokens * forward_flops(self.decoder, prompt_tokens / 2)
        return self.machine.compute_s(flops, self.tensor_parallel)

    def spare_bytes(self) -> float:
        """Return the bytes left for the cache on each GPU of the engine; negative if the weights do not fit."""
        weights = memory.weight_bytes(self.decoder.parameters, WIDTH, self.tensor_parallel)
        return self.machine.usable_bytes - weights

    def held(self, cache_bytes: float, tokens: float) -> float:
        """Return how many completions of `tokens` tokens a cache of `cache_bytes` on each GPU holds."""
        token = memory.cache_bytes_per_token(self.decoder.cached_values, WIDTH)
        return memory.cache_tokens(cache_bytes, token, self.decoder.key_heads, self.tensor_parallel) / tokens


def forward_flops(decoder: DecoderConfig, context: float) -> float:
    """Return the FLOPs of a token's forward pass with `context` tokens before it: 2 per weight, and for each channel of
    a head and each token 2 for the scores and 2 for the mixture."""
    return 2 * decoder.products + 4 * decoder.layers * decoder.heads * decoder.head_dim * context


def full_s(completions: float, mean: float, seats: float, step_s: float) -> float:
    """Return the time to decode `completions` of `mean` tokens if `seats` are always taken: seats / step_s tokens/s."""
    return completions * mean * step_s / seats


def running_on_average(completions: float, mean: float, longest: float, seats: float) -> float:
    """Return how many completions run on average while the longest of a batch does, if all start together:
    completions x mean / longest (Little's law), at most the seats."""
    return min(seats, completions * mean / longest)
