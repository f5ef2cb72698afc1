"""What the decoder does on CPUs: attention in padded rows, rows rounded up.

There are two kinds of padded attention (`Block.backend`), equal up to rounding:
    bmm     rows in cache-sized blocks, matrix products with a hand-written backward: short sequences
    sdpa    rows through torch's scaled_dot_product_attention: long sequences, and CUDA in float32
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.model.packing import PackedBatch

LONGEST_BMM_TOKENS = 512
"""on the CPU, longer rows go through SDPA (measured: faster from there on, forward and backward together)"""
BLOCK_SCORES = 1 << 18
"""rows of about this many query-key pairs and heads are attended at once: their scores stay in a core's cache"""
ROWS = 64
"""rows come in multiples of this: each number of rows makes kernels of its own, which stay in memory"""


# ---- attention ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """Segments with one prefix (or none), padded to one length. Indices point into the stream seen as
    [tokens * (heads + 2 key_heads)] vectors, the folded order is (row, key head, query of that head, time)."""

    rows: int
    length: int
    """tokens of the longest segment"""
    prefix: slice
    """tokens of the common prefix in the stream, empty for none"""
    query: Tensor
    """[rows * heads * length] int64; padding repeats the segment's last token (causality hides it)"""
    key: Tensor
    """[rows * key_heads * (prefix + length)] int64, the prefix first; the value is key_heads further"""
    out: Tensor
    """[rows * heads * length] int64 into [tokens * heads]"""
    kept_queries: Tensor | None
    """entries of `query` that are no padding, None when all"""
    kept_keys: Tensor | None
    """the same for the own part of `key`"""
    padding: Tensor | None
    """entries of `query` that are padding"""
    mask: Tensor | None
    """0 or -inf in the compute type, [heads / key_heads * length, prefix + length] for bmm, [length, prefix + length]
    for sdpa; None for sdpa without a prefix, which knows causality itself"""
    backend: str


@dataclass(frozen=True)
class PaddedPlan:
    """How the segments of one packed batch are attended in padded rows; the same for all layers."""

    heads: int
    key_heads: int
    blocks: tuple[Block, ...]
    """those without prefix come first"""


def plan_padded(
    lengths: Sequence[int],
    prefixes: Sequence[int],
    heads: int,
    key_heads: int,
    device: torch.device,
    dtype: torch.dtype,
    backend: str,
) -> PaddedPlan:
    """Lay out the blocks for segments as in `PackedBatch`. backend: "bmm", "sdpa", or "auto" by device and length."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    members: dict[int, list[int]] = {-1: []}
    for segment, prefix in enumerate(prefixes):
        members.setdefault(prefix, []).append(segment)
    blocks = []
    for prefix, segments in members.items():
        common = slice(starts[prefix], starts[prefix + 1]) if prefix >= 0 else slice(0, 0)
        segments.sort(key=lengths.__getitem__)
        while segments:
            longest = lengths[segments[-1]]
            width = longest + common.stop - common.start
            kind = backend
            if backend == "auto":
                kind = "bmm" if device.type == "cpu" and width <= LONGEST_BMM_TOKENS else "sdpa"
            count = max(1, BLOCK_SCORES // (heads * longest * width))
            chosen, segments = segments[-count:], segments[:-count]
            spans = [(starts[segment], lengths[segment]) for segment in chosen]
            blocks.append(_lay_out(spans, common, heads, key_heads, device, dtype, kind))
    return PaddedPlan(heads, key_heads, tuple(blocks))


def _lay_out(
    spans: list[tuple[int, int]],
    common: slice,
    heads: int,
    key_heads: int,
    device: torch.device,
    dtype: torch.dtype,
    backend: str,
) -> Block:
    start, length = torch.tensor(spans).T[:, :, None]
    longest, before = int(length.max()), common.stop - common.start
    time = torch.arange(longest)
    own = start + torch.minimum(time, length - 1)
    keys = torch.cat([torch.arange(common.start, common.stop).expand(len(spans), -1), own], 1)
    head = torch.arange(heads)[:, None]
    valid = (time < length)[:, None].expand(-1, heads, -1).flatten()
    valid_keys = (time < length)[:, None].expand(-1, key_heads, -1).flatten()
    padded = not bool(valid.all())
    mask = None
    if backend == "bmm" or before:
        square = torch.full((longest, longest), -math.inf, dtype=dtype).triu_(1)
        repeat = heads // key_heads if backend == "bmm" else 1
        mask = torch.cat([square.new_zeros(longest, before), square], 1).repeat(repeat, 1).to(device)
    width = heads + 2 * key_heads
    return Block(
        rows=len(spans),
        length=longest,
        prefix=common,
        query=(own[:, None] * width + head).flatten().to(device),
        key=(keys[:, None] * width + heads + head[:key_heads]).flatten().to(device),
        out=(own[:, None] * heads + head).flatten().to(device),
        kept_queries=valid.nonzero()[:, 0].to(device) if padded else None,
        kept_keys=valid_keys.nonzero()[:, 0].to(device) if padded else None,
        padding=(~valid).nonzero()[:, 0].to(device) if padded else None,
        mask=mask,
        backend=backend,
    )


def attend_padded(joined: Tensor, plan: PaddedPlan) -> Tensor:
    """joined [tokens, heads + 2 key_heads, head_dim]: queries, keys, values -> [tokens, heads, head_dim]."""
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


def _heads(joined: Tensor, plan: PaddedPlan, block: Block) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of a block, each [rows, heads, tokens, head_dim]."""
    vectors, head_dim = joined.reshape(-1, joined.shape[2]), joined.shape[2]
    query = vectors.index_select(0, block.query).view(block.rows, plan.heads, block.length, head_dim)
    key, value = (
        vectors.index_select(0, block.key + shift).view(block.rows, plan.key_heads, -1, head_dim)
        for shift in (0, plan.key_heads)
    )
    return query, key, value


def _attend_sdpa(joined: Tensor, plan: PaddedPlan, block: Block) -> Tensor:
    """The block's vectors without padding, [kept, head_dim], in folded order."""
    query, key, value = _heads(joined, plan, block)
    attended = F.scaled_dot_product_attention(
        query, key, value, attn_mask=block.mask, is_causal=block.mask is None, enable_gqa=plan.heads != plan.key_heads
    )
    return _kept(attended.reshape(-1, joined.shape[2]), block.kept_queries)


def attend_masked(
    joined: Tensor, plan: PaddedPlan, window: int | None, cap: float | None, sinks: Tensor | None
) -> Tensor:
    """`attend_padded` for layers that see only the last `window` tokens, cap their scores or have sinks [heads]
    (`AttentionPlans.attend`): the scores exist as a whole, in float32 where they are capped or have sinks."""
    grouped, head_dim, parts = plan.heads // plan.key_heads, joined.shape[2], list[Tensor]()
    for block in plan.blocks:
        query, key, value = _heads(joined, plan, block)
        positions = torch.arange(key.shape[2], device=joined.device)
        behind = positions[-block.length :, None] - positions
        allowed = behind >= 0 if window is None else (behind >= 0) & (behind < window)
        if cap is None and sinks is None:
            same = plan.heads == plan.key_heads
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=allowed, enable_gqa=not same)
        else:
            key, value = key.repeat_interleave(grouped, 1), value.repeat_interleave(grouped, 1)
            scores = (query @ key.transpose(2, 3)).float() * head_dim**-0.5
            scores = scores if cap is None else cap * (scores / cap).tanh()
            scores = scores.masked_fill(~allowed, -math.inf)
            if sinks is not None:
                aside = sinks.float().view(1, -1, 1, 1).expand(block.rows, -1, block.length, 1)
                scores = torch.cat([scores, aside], -1)
            mixed = scores.softmax(-1)[..., : key.shape[2]].to(value.dtype) @ value
        parts.append(_kept(mixed.reshape(-1, head_dim), block.kept_queries))
    places = torch.cat([_kept(block.out, block.kept_queries) for block in plan.blocks])
    empty = joined.new_zeros(len(joined) * plan.heads, head_dim)
    return empty.index_copy(0, places, torch.cat(parts)).view(len(joined), plan.heads, head_dim)


class _BmmAttention(torch.autograd.Function):
    """softmax(q k^T / sqrt(d)) v block by block; the backward forms the probabilities again (they cost less to
    compute in cache than to write to memory and read back)."""

    @staticmethod
    def forward(ctx: Any, joined: Tensor, plan: PaddedPlan, blocks: list[Block]) -> Tensor:
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
            for shift, gradients in ((0, d_key), (plan.key_heads, d_value)):
                _return_keys(d_joined, gradients, plan, block, shift)
        return d_joined, None, None


def _gather(vectors: Tensor, plan: PaddedPlan, block: Block) -> tuple[Tensor, Tensor, Tensor]:
    """[rows * key_heads, queries of a key head, head_dim], and keys and values [rows * key_heads, keys, head_dim]."""
    pairs, head_dim = block.rows * plan.key_heads, vectors.shape[1]
    return (
        vectors.index_select(0, block.query).view(pairs, -1, head_dim),
        vectors.index_select(0, block.key).view(pairs, -1, head_dim),
        vectors.index_select(0, block.key + plan.key_heads).view(pairs, -1, head_dim),
    )


def _probabilities(query: Tensor, key: Tensor, block: Block) -> Tensor:
    """[rows * key_heads, queries of a key head, keys] causal softmax."""
    assert block.mask is not None
    mask = block.mask.expand(len(query), -1, -1)
    return torch.baddbmm(mask, query, key.transpose(1, 2), alpha=query.shape[2] ** -0.5).softmax(-1)


def _return_keys(d_joined: Tensor, gradients: Tensor, plan: PaddedPlan, block: Block, shift: int) -> None:
    """Write gradients of a block's own keys (or values) to their places, and add those of the prefix, which all rows
    share; the prefix's own block is earlier in the plan and has written there already."""
    before, head_dim = block.prefix.stop - block.prefix.start, gradients.shape[2]
    folded = gradients.view(block.rows, plan.key_heads, -1, head_dim)
    places = block.key.view(block.rows, plan.key_heads, -1)[:, :, before:].flatten() + shift
    own = folded[:, :, before:].reshape(-1, head_dim)
    kept = block.kept_keys
    d_joined.view(-1, head_dim).index_copy_(0, _kept(places, kept), _kept(own, kept))
    if before:
        first = plan.heads + shift
        d_joined[block.prefix, first : first + plan.key_heads] += folded[:, :, :before].sum(0).transpose(0, 1)


# ---- rows -----------------------------------------------------------------------------------------------------------


def round_up(batch: PackedBatch, multiple: int) -> PackedBatch:
    """Pad the batch at the end, so that tokens and targets are multiples of `multiple`: with a segment of its own, and
    with targets at the first position, whose results are to be cut off."""
    tokens, targets = (-count % multiple for count in (batch.tokens, len(batch.targets)))
    if not tokens and not targets:
        return batch
    own = torch.arange(tokens, device=batch.positions.device)
    return PackedBatch(
        token_ids=torch.cat([batch.token_ids, torch.zeros_like(own)]),
        positions=torch.cat([batch.positions, own]),
        lengths=(*batch.lengths, tokens) if tokens else batch.lengths,
        prefixes=(*batch.prefixes, -1) if tokens else batch.prefixes,
        loss_positions=torch.cat([batch.loss_positions, batch.loss_positions.new_zeros(targets)]),
        targets=torch.cat([batch.targets, batch.targets.new_zeros(targets)]),
        routes=None if batch.routes is None else F.pad(batch.routes, (0, 0, 0, tokens), value=255),
    )
