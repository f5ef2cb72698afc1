"""Causal attention over packed sequences: a token sees the earlier tokens of its own sequence and no others.

On CUDA in bfloat16 or float16 it is torch.nn.attention.varlen (FlashAttention, no padding), the backend "varlen". CPUs,
and CUDA in float32, attend in padded rows ("bmm", "sdpa": cpu_decoder.py). "auto" picks by device, dtype and length;
all are equal up to rounding. A segment that continues another reads that one's keys besides its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.model.cpu.cpu_decoder import PaddedPlan, attend_masked, attend_padded, plan_padded
from shared.model.parallel import HeadExchange, Peers

BACKENDS = ("auto", "bmm", "sdpa", "varlen")


@dataclass(frozen=True)
class RaggedPlan:
    """Offsets and key positions of all segments of one packed batch, for varlen; the same for all layers."""

    heads: int
    key_heads: int
    query_offsets: Tensor
    """[segments + 1] int32"""
    key_offsets: Tensor
    key_tokens: Tensor | None
    """[keys] int64 stream position of every segment's keys, prefix first; None without prefixes"""
    longest_query: int
    longest_key: int


AttentionPlan = RaggedPlan | PaddedPlan


def plan_attention(
    lengths: Sequence[int],
    prefixes: Sequence[int],
    heads: int,
    key_heads: int,
    device: torch.device,
    dtype: torch.dtype,
    backend: str = "auto",
) -> AttentionPlan:
    """Choose the backend and lay out segments as in `PackedBatch` for it.

    Raises ValueError for an unknown backend or one that cannot run here.
    """
    if backend not in BACKENDS:
        raise ValueError(f"attention backend '{backend}' is unknown: one of {', '.join(BACKENDS)}")
    half = dtype in (torch.bfloat16, torch.float16)
    if backend == "varlen" and not (device.type == "cuda" and half):
        raise ValueError(f"attention backend 'varlen' needs CUDA and bfloat16 or float16, not {device.type}, {dtype}")
    if backend == "varlen" or (backend == "auto" and device.type == "cuda" and half):
        return _plan_ragged(lengths, prefixes, heads, key_heads, device)
    return plan_padded(lengths, prefixes, heads, key_heads, device, dtype, backend)


def _plan_ragged(
    lengths: Sequence[int], prefixes: Sequence[int], heads: int, key_heads: int, device: torch.device
) -> RaggedPlan:
    query = torch.tensor([0, *lengths]).cumsum(0)
    before = [lengths[prefix] if prefix >= 0 else 0 for prefix in prefixes]
    widths = [length + more for length, more in zip(lengths, before, strict=True)]
    key_tokens = None
    if any(before):
        starts = query.tolist()
        parts = []
        for segment, prefix in enumerate(prefixes):
            if prefix >= 0:
                parts.append(torch.arange(starts[prefix], starts[prefix + 1]))
            parts.append(torch.arange(starts[segment], starts[segment + 1]))
        key_tokens = torch.cat(parts).to(device)
    return RaggedPlan(
        heads=heads,
        key_heads=key_heads,
        query_offsets=query.to(device, torch.int32),
        key_offsets=torch.tensor([0, *widths]).cumsum(0).to(device, torch.int32),
        key_tokens=key_tokens,
        longest_query=max(lengths),
        longest_key=max(widths),
    )


class AttentionPlans:
    """The plans of one packed batch for a model whose layers differ in heads and in what they do to scores."""

    def __init__(
        self, lengths: Sequence[int], prefixes: Sequence[int], backend: str = "auto", peers: Peers | None = None
    ) -> None:
        """peers: they have the other tokens of the batch."""
        self.lengths, self.prefixes, self.backend, self.peers = lengths, prefixes, backend, peers
        before = [lengths[prefix] if prefix >= 0 else 0 for prefix in prefixes]
        self.longest = max(length + more for length, more in zip(lengths, before, strict=True))
        """tokens of the longest sequence, its prefix included"""
        self._found: dict[tuple[object, ...], AttentionPlan] = {}

    def plan(self, heads: int, key_heads: int, like: Tensor, padded: bool) -> AttentionPlan:
        """The plan for layers of so many heads on the device and in the type of `like`; `padded`: as rows."""
        key = heads, key_heads, like.dtype, padded
        if key not in self._found:
            arguments = self.lengths, self.prefixes, heads, key_heads, like.device, like.dtype
            plan = plan_padded(*arguments, "sdpa") if padded else plan_attention(*arguments, self.backend)
            self._found[key] = plan
        return self._found[key]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None = None, window: int | None = None,
        cap: float | None = None, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """query [tokens, heads, head_dim], key [tokens, key_heads, head_dim], value [tokens, key_heads, value_dim] ->
        [tokens, heads, value_dim].

        scaling: of the scores, else head_dim ** -0.5. window: tokens that a token sees, itself included. cap: scores
        are cap * tanh(score / cap). sinks [heads]: a score that takes its share of the softmax and gives nothing.
        """
        heads, head_dim, value_dim = query.shape[1], query.shape[2], value.shape[2]
        if scaling is not None and abs(scaling * head_dim**0.5 - 1) > 1e-6:
            query = query * (scaling * head_dim**0.5)
        if value_dim < head_dim:
            value = F.pad(value, (0, head_dim - value_dim))
        window = window if window is not None and window < self.longest else None
        joined = torch.cat([query, key, value], 1)
        if self.peers is None:
            return self._attend(joined, heads, key.shape[1], window, cap, sinks)[..., :value_dim]
        exchange = HeadExchange(heads, key.shape[1], joined.device, self.peers)
        first, heads = self.peers.rank * exchange.heads, exchange.heads
        sinks = None if sinks is None else sinks[first : first + heads]
        own = partial(self._attend, heads=heads, key_heads=exchange.key_heads, window=window, cap=cap, sinks=sinks)
        return exchange.attend(joined, own)[..., :value_dim]

    def _attend(
        self, joined: Tensor, heads: int, key_heads: int, window: int | None, cap: float | None, sinks: Tensor | None
    ) -> Tensor:
        plan = self.plan(heads, key_heads, joined, padded=cap is not None or sinks is not None)
        if isinstance(plan, RaggedPlan):
            return _attend_varlen(joined, plan, window)
        if window is None and cap is None and sinks is None:
            return attend_padded(joined, plan)
        return attend_masked(joined, plan, window, cap, sinks)


def attend(joined: Tensor, plan: AttentionPlan, exchange: HeadExchange | None = None) -> Tensor:
    """joined [tokens, heads + 2 key_heads, head_dim]: queries, keys, values -> [tokens, heads, head_dim].

    Grouped queries: head h reads key head h // (heads / key_heads). Scores are scaled by head_dim ** -0.5.
    """
    if exchange is not None:
        return exchange.attend(joined, partial(attend, plan=plan))
    return attend_padded(joined, plan) if isinstance(plan, PaddedPlan) else _attend_varlen(joined, plan)


def _attend_varlen(joined: Tensor, plan: RaggedPlan, window: int | None = None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = joined.split([plan.heads, plan.key_heads, plan.key_heads], 1)
    if plan.key_tokens is not None:
        key, value = key.index_select(0, plan.key_tokens), value.index_select(0, plan.key_tokens)
    attended = varlen_attn(
        query, key, value, plan.query_offsets, plan.key_offsets, plan.longest_query, plan.longest_key,
        window_size=(-1 if window is None else window - 1, 0),  # causal, the last query aligned with the last key
        enable_gqa=plan.heads != plan.key_heads,
    )  # fmt: skip
    assert isinstance(attended, Tensor)
    return attended
