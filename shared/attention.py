"""Causal attention over packed sequences: a token sees the earlier tokens of its own sequence and no others.

One contract, three ways (`BACKENDS`), all equal up to rounding:
    bmm     padded rows in cache-sized blocks, matrix products with a hand-written backward: short sequences on CPU
    sdpa    padded rows through torch's scaled_dot_product_attention: long sequences on CPU, float32 on CUDA
    varlen  torch.nn.attention.varlen (FlashAttention, no padding): CUDA in bfloat16 or float16
"auto" picks by device, dtype and length. A segment that continues another reads that one's keys besides its own; so
does, in bmm, each piece of a long segment, which continues the pieces before it.
What it does not: projections, position embedding, caches for decoding. Who calls this: model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BACKENDS = ("auto", "bmm", "sdpa", "varlen")
LONGEST_BMM_TOKENS = 1024
"""on the CPU, longer rows go through SDPA (measured: equal from there on, forward and backward together)"""
PIECE_TOKENS = 256
"""queries of a segment that bmm attends at once: of 128, 256, 512 the fastest for rows of 600 tokens and more"""
BLOCK_SCORES = 1 << 18
"""rows of about this many query-key pairs and heads are attended at once: their scores stay in a core's cache"""


@dataclass(frozen=True)
class Block:
    """Segments with the same tokens before them (or none), padded to one length. Indices point into the stream seen as
    [tokens * (heads + 2 key_heads)] vectors, the folded order is (row, key head, query of that head, time)."""

    rows: int
    length: int
    """tokens of the longest segment"""
    before: tuple[slice, ...]
    """tokens in the stream that stand before each of the segments: a common prefix, earlier pieces"""
    query: Tensor
    """[rows * heads * length] int64; padding repeats the segment's last token (causality hides it)"""
    key: Tensor
    """[rows * key_heads * (before + length)] int64, in order; the value is key_heads further"""
    out: Tensor
    """[rows * heads * length] int64 into [tokens * heads]"""
    kept_queries: Tensor | None
    """entries of `query` that are no padding, None when all"""
    kept_keys: Tensor | None
    """the same for the own part of `key`"""
    padding: Tensor | None
    """entries of `query` that are padding"""
    mask: Tensor
    """[heads / key_heads * length, before + length] 0 or -inf, in the compute type"""
    backend: str


@dataclass(frozen=True)
class Ragged:
    """What varlen needs."""

    query_offsets: Tensor
    """[segments + 1] int32"""
    key_offsets: Tensor
    key_tokens: Tensor | None
    """[keys] int64 stream position of every segment's keys, prefix first; None without prefixes"""
    longest_query: int
    longest_key: int


@dataclass(frozen=True)
class AttentionPlan:
    """How the segments of one packed batch are attended; the same for all layers."""

    heads: int
    key_heads: int
    blocks: tuple[Block, ...]
    """for bmm and sdpa; what stands before a block's segments is in earlier blocks"""
    ragged: Ragged | None
    """for varlen"""


def plan_attention(
    lengths: Sequence[int],
    prefixes: Sequence[int],
    heads: int,
    key_heads: int,
    device: torch.device,
    dtype: torch.dtype,
    backend: str = "auto",
) -> AttentionPlan:
    """Choose the way and lay out the blocks for segments as in `PackedBatch`.

    Raises ValueError for an unknown backend or one that cannot run here.
    """
    if backend not in BACKENDS:
        raise ValueError(f"attention backend '{backend}' is unknown: one of {', '.join(BACKENDS)}")
    half = dtype in (torch.bfloat16, torch.float16)
    if backend == "varlen" and not (device.type == "cuda" and half):
        raise ValueError(f"attention backend 'varlen' needs CUDA and bfloat16 or float16, not {device.type}, {dtype}")
    if backend == "varlen" or (backend == "auto" and device.type == "cuda" and half):
        return AttentionPlan(heads, key_heads, (), _plan_ragged(lengths, prefixes, device))
    starts = list(accumulate(lengths, initial=0))
    segments: dict[str, dict[int, list[tuple[int, int]]]] = {"bmm": {}, "sdpa": {}}  # way -> prefix -> spans
    for start, length, prefix in zip(starts, lengths, prefixes, strict=False):
        width = length + (lengths[prefix] if prefix >= 0 else 0)
        short = device.type == "cpu" and width <= LONGEST_BMM_TOKENS
        way = backend if backend != "auto" else "bmm" if short else "sdpa"
        segments[way].setdefault(prefix, []).append((start, length))
    blocks = []
    for way, members in segments.items():
        for prefix in sorted(members):  # those without one first
            common = (slice(starts[prefix], starts[prefix + 1]),) if prefix >= 0 else ()
            for before, spans in _pieces(common, members[prefix], PIECE_TOKENS if way == "bmm" else max(lengths)):
                spans.sort(key=lambda span: span[1])
                while spans:
                    longest = spans[-1][1]
                    rows = max(1, BLOCK_SCORES // (heads * longest * (longest + _count(before))))
                    chosen, spans = spans[-rows:], spans[:-rows]
                    blocks.append(_lay_out(chosen, before, heads, key_heads, device, dtype, way))
    return AttentionPlan(heads, key_heads, tuple(blocks), None)


def _pieces(
    common: tuple[slice, ...], spans: list[tuple[int, int]], longest: int
) -> Iterator[tuple[tuple[slice, ...], list[tuple[int, int]]]]:
    """Yield (what stands before them, [(first token in the stream, tokens)]) of pieces of at most `longest` tokens,
    each after those that stand before it. spans: segments, all with `common` before them."""
    yield common, [(start, min(length, longest)) for start, length in spans]
    for start, length in spans:
        for done in range(longest, length, longest):
            yield (*common, slice(start, start + done)), [(start + done, min(longest, length - done))]


def _count(before: tuple[slice, ...]) -> int:
    return sum(part.stop - part.start for part in before)


def _lay_out(
    spans: list[tuple[int, int]],
    before: tuple[slice, ...],
    heads: int,
    key_heads: int,
    device: torch.device,
    dtype: torch.dtype,
    backend: str,
) -> Block:
    start, length = torch.tensor(spans).T[:, :, None]
    longest, repeat = int(length.max()), heads // key_heads
    time = torch.arange(longest)
    own = start + torch.minimum(time, length - 1)
    earlier = [torch.arange(part.start, part.stop).expand(len(spans), -1) for part in before]
    keys = torch.cat([*earlier, own], 1)
    head = torch.arange(heads)[:, None]
    valid = (time < length)[:, None].expand(-1, heads, -1).flatten()
    valid_keys = (time < length)[:, None].expand(-1, key_heads, -1).flatten()
    padded = not bool(valid.all())
    mask = torch.full((longest, longest), -math.inf, dtype=dtype).triu_(1)
    mask = torch.cat([mask.new_zeros(longest, _count(before)), mask], 1).repeat(repeat, 1)
    width = heads + 2 * key_heads
    return Block(
        rows=len(spans),
        length=longest,
        before=before,
        query=(own[:, None] * width + head).flatten().to(device),
        key=(keys[:, None] * width + heads + head[:key_heads]).flatten().to(device),
        out=(own[:, None] * heads + head).flatten().to(device),
        kept_queries=valid.nonzero()[:, 0].to(device) if padded else None,
        kept_keys=valid_keys.nonzero()[:, 0].to(device) if padded else None,
        padding=(~valid).nonzero()[:, 0].to(device) if padded else None,
        mask=mask.to(device),
        backend=backend,
    )


def _plan_ragged(lengths: Sequence[int], prefixes: Sequence[int], device: torch.device) -> Ragged:
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
    return Ragged(
        query_offsets=query.to(device, torch.int32),
        key_offsets=torch.tensor([0, *widths]).cumsum(0).to(device, torch.int32),
        key_tokens=key_tokens,
        longest_query=max(lengths),
        longest_key=max(widths),
    )


def attend(joined: Tensor, plan: AttentionPlan) -> Tensor:
    """joined [tokens, heads + 2 key_heads, head_dim]: queries, keys, values -> [tokens, heads, head_dim].

    Grouped queries: head h reads key head h // (heads / key_heads). Scores are scaled by head_dim ** -0.5.
    """
    if plan.ragged is not None:
        return _attend_varlen(joined, plan, plan.ragged)
    by_hand = [block for block in plan.blocks if block.backend == "bmm"]
    by_torch = [block for block in plan.blocks if block.backend == "sdpa"]
    attended: Tensor
    if by_hand:
        attended = _BmmAttention.apply(joined, plan, by_hand)
    else:
        attended = joined.new_zeros(len(joined), plan.heads, joined.shape[2])
    if by_torch:
        vectors = torch.cat([_attend_sdpa(joined, plan, block) for block in by_torch])
        places = torch.cat([_kept(block.out, block.kept_queries) for block in by_torch])
        attended = attended.flatten(0, 1).index_copy(0, places, vectors).view(attended.shape)
    return attended


def _kept(folded: Tensor, kept: Tensor | None) -> Tensor:
    return folded if kept is None else folded.index_select(0, kept)


def _attend_varlen(joined: Tensor, plan: AttentionPlan, ragged: Ragged) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = joined.split([plan.heads, plan.key_heads, plan.key_heads], 1)
    if ragged.key_tokens is not None:
        key, value = key.index_select(0, ragged.key_tokens), value.index_select(0, ragged.key_tokens)
    attended = varlen_attn(
        query,
        key,
        value,
        ragged.query_offsets,
        ragged.key_offsets,
        ragged.longest_query,
        ragged.longest_key,
        window_size=(-1, 0),  # causal, the last query aligned with the last key
        enable_gqa=plan.heads != plan.key_heads,
    )
    assert isinstance(attended, Tensor)
    return attended


def _attend_sdpa(joined: Tensor, plan: AttentionPlan, block: Block) -> Tensor:
    """The block's vectors without padding, [kept, head_dim], in folded order."""
    vectors, head_dim = joined.reshape(-1, joined.shape[2]), joined.shape[2]
    query = vectors.index_select(0, block.query).view(block.rows, plan.heads, block.length, head_dim)
    key, value = (
        vectors.index_select(0, block.key + shift).view(block.rows, plan.key_heads, -1, head_dim)
        for shift in (0, plan.key_heads)
    )
    whole = not block.before
    mask = None if whole else block.mask[: block.length]
    attended = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=whole, enable_gqa=plan.heads != plan.key_heads
    )
    return _kept(attended.reshape(-1, head_dim), block.kept_queries)


class _BmmAttention(torch.autograd.Function):
    """softmax(q k^T / sqrt(d)) v block by block; the backward forms the probabilities again (they cost less to
    compute in cache than to write to memory and read back)."""

    @staticmethod
    def forward(ctx: Any, joined: Tensor, plan: AttentionPlan, blocks: list[Block]) -> Tensor:
        vectors = joined.reshape(-1, joined.shape[2])
        whole = len(blocks) == len(plan.blocks)
        shape = (len(joined), plan.heads, joined.shape[2])
        attended = joined.new_empty(shape) if whole else joined.new_zeros(shape)
        flat = attended.view(-1, joined.shape[2])
        for block in blocks:
            query, key, value = _gather(vectors, plan, block)
            mixed = torch.bmm(_probabilities(query, key, block), value).view(-1, joined.shape[2])
            flat.index_copy_(0, _kept(block.out, block.kept_queries), _kept(mixed, block.kept_queries))
        ctx.save_for_backward(joined, attended)
        ctx.plan, ctx.blocks = plan, blocks
        return attended

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        joined, attended = ctx.saved_tensors
        plan, head_dim = ctx.plan, joined.shape[2]
        vectors, d_out = joined.reshape(-1, head_dim), gradient.reshape(-1, head_dim)
        whole = len(ctx.blocks) == len(plan.blocks)
        d_joined = torch.empty_like(joined) if whole else torch.zeros_like(joined)
        # d softmax = P * (dP - sum(P dP)), and sum(P dP) = sum(out d_out) for each query
        inner = torch.linalg.vecdot(attended.view(-1, head_dim), d_out).unsqueeze_(-1)
        for block in ctx.blocks:
            query, key, value = _gather(vectors, plan, block)
            d_mixed, d_sum = d_out.index_select(0, block.out), inner.index_select(0, block.out)
            if block.padding is not None:
                d_mixed.index_fill_(0, block.padding, 0)
                d_sum.index_fill_(0, block.padding, 0)
            d_mixed = d_mixed.view(query.shape)
            probabilities = _probabilities(query, key, block)
            d_value = torch.bmm(probabilities.transpose(1, 2), d_mixed)
            d_scores = torch.bmm(d_mixed, value.transpose(1, 2)).sub_(d_sum.view(len(query), -1, 1))
            d_scores.mul_(probabilities)
            d_query = torch.bmm(d_scores, key).mul_(head_dim**-0.5).view(-1, head_dim)
            d_key = torch.bmm(d_scores.transpose(1, 2), query).mul_(head_dim**-0.5)
            places = _kept(block.query, block.kept_queries)
            d_joined.view(-1, head_dim).index_copy_(0, places, _kept(d_query, block.kept_queries))
            for shift, part in ((0, d_key), (plan.key_heads, d_value)):
                _return_keys(d_joined, part, plan, block, shift)
        return d_joined, None, None


def _gather(vectors: Tensor, plan: AttentionPlan, block: Block) -> tuple[Tensor, Tensor, Tensor]:
    """[rows * key_heads, queries of a key head, head_dim], and keys and values [rows * key_heads, keys, head_dim]."""
    pairs, head_dim = block.rows * plan.key_heads, vectors.shape[1]
    return (
        vectors.index_select(0, block.query).view(pairs, -1, head_dim),
        vectors.index_select(0, block.key).view(pairs, -1, head_dim),
        vectors.index_select(0, block.key + plan.key_heads).view(pairs, -1, head_dim),
    )


def _probabilities(query: Tensor, key: Tensor, block: Block) -> Tensor:
    """[rows * key_heads, queries of a key head, keys] causal softmax."""
    mask = block.mask.expand(len(query), -1, -1)
    return torch.baddbmm(mask, query, key.transpose(1, 2), alpha=query.shape[2] ** -0.5).softmax(-1)


def _return_keys(d_joined: Tensor, part: Tensor, plan: AttentionPlan, block: Block, shift: int) -> None:
    """Write gradients of a block's own keys (or values) to their places, and add those of what stands before, which
    all rows share; its own blocks stand earlier in the plan and have written there already."""
    before, head_dim = _count(block.before), part.shape[2]
    folded = part.view(block.rows, plan.key_heads, -1, head_dim)
    places = block.key.view(block.rows, plan.key_heads, -1)[:, :, before:].flatten() + shift
    own = folded[:, :, before:].reshape(-1, head_dim)
    kept = block.kept_keys
    d_joined.view(-1, head_dim).index_copy_(0, _kept(places, kept), _kept(own, kept))
    first, done = plan.heads + shift, 0
    for tokens in block.before:
        count = tokens.stop - tokens.start
        d_joined[tokens, first : first + plan.key_heads] += folded[:, :, done : done + count].sum(0).transpose(0, 1)
        done += count
