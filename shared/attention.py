"""Causal attention over packed sequences: a token sees only earlier tokens of its own sequence.

One contract, three ways (`BACKENDS`), all equal up to rounding:
    bmm     padded rows in cache-sized chunks, matrix products with a hand-written backward: short sequences on CPU
    sdpa    padded rows through torch's scaled_dot_product_attention: long sequences on CPU, float32 on CUDA
    varlen  torch.nn.attention.varlen (FlashAttention, no padding): CUDA in bfloat16 or float16
"auto" picks by device, dtype and length. What it does not: projections, position embedding, caches for decoding.
Who calls this: model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BACKENDS = ("auto", "bmm", "sdpa", "varlen")
LONGEST_BMM_TOKENS = 512
"""on the CPU, longer rows go through SDPA (measured: faster from there on, forward and backward together)"""
CHUNK_SCORES = 1 << 18
"""rows of about this many query-key pairs and heads are attended at once: their scores stay in a core's cache"""


@dataclass(frozen=True)
class Rows:
    """Some sequences as a padded block."""

    length: int
    """tokens of the longest"""
    index: Tensor
    """[rows * length] int64 position in the stream; padding repeats the last token (causality hides it)"""
    valid: Tensor | None
    """[rows * length] bool, None when nothing is padding"""
    places: Tensor
    """[valid_tokens] int64: `index` without the padding"""
    backend: str


@dataclass(frozen=True)
class AttentionPlan:
    """How the sequences of one packed batch are attended; the same for all layers."""

    lengths: tuple[int, ...]
    rows: tuple[Rows, ...]
    """blocks for bmm and sdpa; empty for varlen"""
    offsets: Tensor | None
    """[sequences + 1] int32 start of each sequence (varlen only)"""


def plan_attention(
    lengths: Sequence[int], heads: int, device: torch.device, dtype: torch.dtype, backend: str = "auto"
) -> AttentionPlan:
    """Choose the way and lay out the blocks. Raises ValueError for an unknown backend or one that cannot run here."""
    if backend not in BACKENDS:
        raise ValueError(f"attention backend '{backend}' is unknown: one of {', '.join(BACKENDS)}")
    half = dtype in (torch.bfloat16, torch.float16)
    if backend == "varlen" and not (device.type == "cuda" and half):
        raise ValueError(f"attention backend 'varlen' needs CUDA and bfloat16 or float16, not {device.type}, {dtype}")
    if backend == "varlen" or (backend == "auto" and device.type == "cuda" and half):
        offsets = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
        return AttentionPlan(tuple(lengths), (), offsets)
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    blocks: list[Rows] = []
    while order:
        longest = lengths[order[-1]]
        kind = backend
        if backend == "auto":
            kind = "bmm" if device.type == "cpu" and longest <= LONGEST_BMM_TOKENS else "sdpa"
        count = max(1, CHUNK_SCORES // (heads * longest * longest))
        chosen, order = order[-count:], order[:-count]
        blocks.append(_block([(starts[i], lengths[i]) for i in chosen], longest, device, kind))
    return AttentionPlan(tuple(lengths), tuple(blocks), None)


def _block(sequences: list[tuple[int, int]], longest: int, device: torch.device, backend: str) -> Rows:
    start, length = torch.tensor(sequences).T[:, :, None]
    column = torch.arange(longest)
    index = (start + torch.minimum(column, length - 1)).flatten()
    valid = (column < length).flatten()
    return Rows(
        length=longest,
        index=index.to(device),
        valid=None if bool(valid.all()) else valid.to(device),
        places=index[valid].to(device),
        backend=backend,
    )


def attend(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan) -> Tensor:
    """query [tokens, heads, head_dim], key and value [tokens, key_heads, head_dim] -> [tokens, heads, head_dim].

    heads is a multiple of key_heads (grouped queries: head h reads key head h // (heads / key_heads)); scores are
    scaled by head_dim ** -0.5.
    """
    if plan.offsets is not None:
        return _attend_varlen(query, key, value, plan)
    bmm_rows = tuple(rows for rows in plan.rows if rows.backend == "bmm")
    sdpa_rows = [rows for rows in plan.rows if rows.backend == "sdpa"]
    attended: Tensor = torch.zeros_like(query)
    if bmm_rows:
        attended = _BmmAttention.apply(query, key, value, bmm_rows, not sdpa_rows)
    if sdpa_rows:
        parts = torch.cat([_attend_sdpa(query, key, value, rows) for rows in sdpa_rows])
        attended = attended.index_copy(0, torch.cat([rows.places for rows in sdpa_rows]), parts)
    return attended


def _attend_varlen(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    longest = max(plan.lengths)
    grouped = query.shape[1] != key.shape[1]
    attended = varlen_attn(
        query, key, value, plan.offsets, plan.offsets, longest, longest, window_size=(-1, 0), enable_gqa=grouped
    )
    assert isinstance(attended, Tensor)
    return attended


def _attend_sdpa(query: Tensor, key: Tensor, value: Tensor, rows: Rows) -> Tensor:
    """The block's valid tokens, [valid_tokens, heads, head_dim], in the block's order."""
    q, k, v = (
        tensor[rows.index].view(-1, rows.length, *tensor.shape[1:]).transpose(1, 2) for tensor in (query, key, value)
    )
    grouped = query.shape[1] != key.shape[1]
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    flat = attended.transpose(1, 2).flatten(0, 1)
    return flat if rows.valid is None else flat[rows.valid]


class _BmmAttention(torch.autograd.Function):
    """softmax(q k^T / sqrt(d)) v block by block; the backward forms the probabilities again (they cost less to
    compute in cache than to write to memory and read back)."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: tuple[Rows, ...], whole: bool) -> Tensor:
        attended = _make(query, whole)
        for rows in blocks:
            q, k, v = _fold(query, rows, key.shape[1]), _fold(key, rows, key.shape[1]), _fold(value, rows, key.shape[1])
            probabilities = _probabilities(q, k, rows.length)
            _scatter(attended, torch.bmm(probabilities, v), rows, key.shape[1])
        ctx.save_for_backward(query, key, value, attended)
        ctx.blocks, ctx.whole = blocks, whole
        return attended

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:  # type: ignore[override]
        query, key, value, attended = ctx.saved_tensors
        key_heads, scale = key.shape[1], query.shape[2] ** -0.5
        grads = [_make(tensor, ctx.whole) for tensor in (query, key, value)]
        # d softmax: P * (dP - sum(P dP)), and sum(P dP) = sum(out d_out) per query
        inner = (attended * gradient).sum(-1, keepdim=True)
        for rows in ctx.blocks:
            q, k, v = _fold(query, rows, key_heads), _fold(key, rows, key_heads), _fold(value, rows, key_heads)
            d_out, d_sum = _fold(gradient, rows, key_heads, zero=True), _fold(inner, rows, key_heads, zero=True)
            probabilities = _probabilities(q, k, rows.length)
            d_value = torch.bmm(probabilities.transpose(1, 2), d_out)
            d_scores = torch.bmm(d_out, v.transpose(1, 2)).sub_(d_sum).mul_(probabilities)
            d_query = torch.bmm(d_scores, k).mul_(scale)
            d_key = torch.bmm(d_scores.transpose(1, 2), q).mul_(scale)
            for whole, part in zip(grads, (d_query, d_key, d_value), strict=True):
                _scatter(whole, part, rows, key_heads)
        return grads[0], grads[1], grads[2], None, None


def _make(like: Tensor, whole: bool) -> Tensor:
    """A contiguous stream to fill: zeros where the blocks do not cover the whole of it."""
    return (torch.empty if whole else torch.zeros)(like.shape, dtype=like.dtype, device=like.device)


def _probabilities(q: Tensor, k: Tensor, length: int) -> Tensor:
    """[rows * key_heads, repeat * length, length] causal softmax; queries are ordered (repeat, time)."""
    mask = torch.full((length, length), -math.inf, dtype=q.dtype, device=q.device).triu_(1)
    mask = mask.repeat(q.shape[1] // length, 1)
    scores = torch.baddbmm(mask.expand(q.shape[0], -1, -1), q, k.transpose(1, 2), alpha=q.shape[2] ** -0.5)
    return torch.softmax(scores, -1)


def _fold(stream: Tensor, rows: Rows, key_heads: int, zero: bool = False) -> Tensor:
    """Stream [tokens, heads, width] -> block [rows * key_heads, repeat * length, width]; `zero` clears padding."""
    heads, channels = stream.shape[1:]
    block = stream.index_select(0, rows.index)
    if zero and rows.valid is not None:
        block *= rows.valid[:, None, None]
    block = block.view(-1, rows.length, key_heads, heads // key_heads, channels)
    return block.permute(0, 2, 3, 1, 4).reshape(-1, heads // key_heads * rows.length, channels)


def _scatter(stream: Tensor, block: Tensor, rows: Rows, key_heads: int) -> None:
    """The inverse of `_fold`: write the block's valid tokens to their places in the stream."""
    heads, channels = stream.shape[1:]
    block = block.view(-1, key_heads, heads // key_heads, rows.length, channels).permute(0, 3, 1, 2, 4)
    flat = block.reshape(-1, heads, channels)
    stream.index_copy_(0, rows.places, flat if rows.valid is None else flat[rows.valid])
