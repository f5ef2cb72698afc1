"""Log-probabilities of given tokens from hidden states, at the sampling temperature. Always float32.

    log p(t) = z_t / T - logsumexp(z / T),      z = hidden . weight^T

Some families change the product first: z = cap tanh(scale product / cap), or scale times the product (`HeadScale`).

`chunked_logprobs` has the language-model head fused in, so that no tensor of tokens x vocabulary ever exists: forward
and backward form the logits a tile at a time (some tokens, some words), and sums over the vocabulary are carried from
tile to tile (online softmax, Milakov and Gimelshein 2018).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from shared.model.cpu.fused_layers import fuse
from shared.model.cpu.processor import exact_products
from shared.model.parallel import Peers, merge_sums


class Tile(NamedTuple):
    """Size of the logits that exist at a time."""

    tokens: int
    words: int


TILES = {"cpu": Tile(1024, 4096), "cuda": Tile(1024, 65_536)}
"""tile of each device. CPU: measured on two cores, 576 hidden, 4,096 tokens, 49,152 words; a tile is 16 MiB of float32.
Other devices take that of cuda: 256 MiB, large products"""


class HeadScale(NamedTuple):
    """What a family does to the head's products: cap * tanh(scale * product / cap); a cap of 0 leaves out the tanh."""

    scale: float = 1.0
    cap: float = 0.0

    def apply(self, products: Tensor, temperature: float = 1.0) -> Tensor:
        """The logits over the temperature, in the memory of `products`."""
        if self.cap:
            return products.mul_(self.scale / self.cap).tanh_().mul_(self.cap / temperature)
        divisor = temperature / self.scale
        return products if divisor == 1 else products.div_(divisor)


PLAIN = HeadScale()


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    tile: Tile | None = None,
    d_weight: Tensor | None = None,
    scale: HeadScale = PLAIN,
    peers: Peers | None = None,
) -> tuple[Tensor, Tensor]:
    """hidden [n, d], weight [vocab, d], targets [n] int64 -> ([n] log-probabilities, [n] entropy), float32.

    Gradients flow to hidden and weight through both; that of the entropy costs nothing where it is not asked for.
    weight is of hidden's type, or wider and rounded to it tile by tile. In bfloat16 the logits and all sums are still
    float32, only the two products of the backward pass take gradients of logits that are rounded to bfloat16. n = 0
    works. A target that is no word has the log-probability NaN.

    d_weight [vocab, d], of the weights' type, float32 or float64: the backward pass adds the weight's gradient to it
    and hands autograd none. Autograd would keep a tied weight's until the embedding's is there too, at the very end.

    peers: they have the other words, and `targets` count from this rank's first one; the gradient of hidden is then
    this rank's part of it.
    """
    tile = tile or TILES.get(hidden.device.type, TILES["cuda"])
    logprobs, entropy = _ChunkedLogprobs.apply(hidden, weight, targets, temperature, tile, d_weight, scale, peers)
    return logprobs, entropy


def _logits(rows: Tensor, words: Tensor, temperature: float, scale: HeadScale) -> Tensor:
    """[n, words] logits / temperature in float32 (float64 for float64), exact for half-precision inputs too."""
    if rows.is_cuda and rows.dtype in (torch.bfloat16, torch.float16):
        # products of half-precision numbers are exact in float32: same result as upcasting, at tensor-core speed
        logits = torch.mm(rows, words.T, out_dtype=torch.float32)
    else:
        logits = torch.mm(rows, words.T)
    return scale.apply(logits, temperature)


def _wide(half: Tensor) -> Tensor:
    """As float32, except on a GPU, whose products take half precision and sum in float32."""
    return half if half.is_cuda or half.dtype == torch.float64 else half.float()


class _Place(NamedTuple):
    """Where the targets of some tokens are in a tile of words."""

    column: Tensor
    """[tokens, 1], 0 where the target is in another tile"""
    inside: Tensor
    """[tokens, 1] bool"""


def _place(targets: Tensor, first: int, words: int) -> _Place:
    column = targets[:, None] - first
    inside = (column >= 0) & (column < words)
    return _Place(column.where(inside, 0), inside)


@fuse
def _absorb(
    logits: Tensor, column: Tensor, inside: Tensor, top: Tensor, total: Tensor, moment: Tensor, chosen: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Carry the sums over the vocabulary on by a tile of logits z [tokens, words], whose memory may be used.

    top [tokens, 1]: the largest z so far; total, moment: sums of exp(z - top), and of (z - top) exp(z - top); chosen:
    the target's z once its tile has come. Returns the four.
    """
    chosen = logits.gather(-1, column).where(inside, chosen)
    highest = torch.maximum(top, logits.amax(-1, keepdim=True))
    drop = top - highest
    compiling = torch.compiler.is_compiling()
    below = logits - highest if compiling else logits.sub_(highest)
    odds = below.exp()
    shrink = drop.exp()
    weighted = below * odds if compiling else below.mul_(odds)
    moment = (moment + drop * total) * shrink + weighted.sum(-1, keepdim=True)
    total = total * shrink + odds.sum(-1, keepdim=True)
    return highest, total, moment, chosen


@fuse
def _pull_logits(
    logits: Tensor, column: Tensor, inside: Tensor, pull: Tensor, normaliser: Tensor, entropy: Tensor,
    moving: Tensor | None, divisor: float, damped: float,
) -> Tensor:  # fmt: skip
    """The gradient of a tile of logits z [tokens, words], whose memory may be used, from that of the log-probs over T,
    pull [tokens, 1], and of the entropy, moving [tokens, 1]:

        d logp_t / d z = (onehot(t) - p) / T,     d H / d z = -p (log p + H) / T

    damped: T over the cap of `HeadScale`, 0 for none: d cap tanh(z / cap) / d z = 1 - tanh(z / cap)^2.
    """
    compiling = torch.compiler.is_compiling()
    damping = 1 - (logits * damped).square_() if damped else None
    logprobs = logits - normaliser if compiling else logits.sub_(normaliser)
    slope = -pull
    if moving is not None:
        slope = (logprobs + entropy).mul_(-moving / divisor).add_(slope)
    d_logits = logprobs.exp_().mul_(slope)
    if compiling:
        hit = torch.arange(logits.shape[1], device=logits.device) == column
        d_logits = d_logits + pull.where(inside & hit, 0)
    else:
        d_logits.scatter_add_(-1, column, pull.where(inside, 0))
    return d_logits if damping is None else d_logits.mul_(damping)


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, tile: Tile,
        d_weight: Tensor | None, scale: HeadScale, peers: Peers | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        logprobs, entropy, normaliser = (hidden.new_empty(targets.shape, dtype=dtype) for _ in range(3))
        with exact_products(hidden):
            for start in range(0, len(targets), tile.tokens):
                span = slice(start, start + tile.tokens)
                rows, aims = _wide(hidden[span]), targets[span]
                # of exp(z - top): its sum, and that of z - top weighted with it; top is the largest z so far
                top = torch.full((len(aims), 1), torch.finfo(dtype).min / 2, dtype=dtype, device=hidden.device)
                total, moment = torch.zeros_like(top), torch.zeros_like(top)
                chosen = torch.full_like(top, torch.nan)  # stays so for a target that is no word
                for first in range(0, len(weight), tile.words):
                    words = _wide(weight[first : first + tile.words].to(hidden.dtype))
                    logits = _logits(rows, words, temperature, scale)
                    located = _place(aims, first, logits.shape[1])
                    top, total, moment, chosen = _absorb(logits, *located, top, total, moment, chosen)
                if peers is not None:
                    top, total, moment, chosen = merge_sums(top, total, moment, chosen, peers)
                spread = total.log()
                normaliser[span] = (top + spread)[:, 0]
                logprobs[span] = (chosen - top - spread)[:, 0]
                entropy[span] = (spread - moment / total)[:, 0]
        ctx.save_for_backward(hidden, weight, targets, normaliser, entropy)
        ctx.temperature, ctx.tile, ctx.d_weight, ctx.scale = temperature, tile, d_weight, scale
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, d_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normaliser, entropy = ctx.saved_tensors
        tile, temperature, dtype = ctx.tile, ctx.temperature, normaliser.dtype
        d_hidden = torch.empty_like(hidden)
        given: Tensor | None = ctx.d_weight
        d_weight = given
        if given is None and ctx.needs_input_grad[1]:
            d_weight = torch.zeros(weight.shape, dtype=dtype, device=weight.device)
        scale: HeadScale = ctx.scale
        divisor = temperature / scale.scale
        scaled = (torch.zeros_like(normaliser) if gradient is None else gradient) / divisor
        with exact_products(hidden):
            for start in range(0, len(targets), tile.tokens):
                span = slice(start, start + tile.tokens)
                rows, aims, pull = _wide(hidden[span]), targets[span], scaled[span, None]
                d_rows = torch.zeros(rows.shape, dtype=dtype, device=rows.device)
                for first in range(0, len(weight), tile.words):
                    chunk = slice(first, first + tile.words)
                    words = _wide(weight[chunk].to(hidden.dtype))
                    logits = _logits(rows, words, temperature, scale)
                    moving = None if d_entropy is None else d_entropy[span, None]
                    located = _place(aims, first, logits.shape[1])
                    d_logits = _pull_logits(logits, *located, pull, normaliser[span, None], entropy[span, None], moving,
                                            divisor, temperature / scale.cap if scale.cap else 0.0)  # fmt: skip
                    # inputs of the products in the weights' type (their rounding is that of every gradient below)
                    _add_product(d_rows, d_logits, words)
                    if d_weight is not None:
                        _add_product(d_weight[chunk], d_logits.T, rows)
                d_hidden[span] = d_rows
        returned = None if d_weight is None or given is not None else d_weight.to(weight.dtype)
        return d_hidden, returned, *[None] * 6


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left . right, summed in the type of `total`."""
    if right.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += torch.mm(left.to(right.dtype), right, out_dtype=total.dtype)
