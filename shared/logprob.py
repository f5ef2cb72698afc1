"""From hidden states or logits to log-probabilities of given tokens, the sampling temperature applied. Always float32.

    log p(t) = z_t / T - logsumexp(z / T),      z = hidden . weight^T

`logprobs_from_logits` is the definition; `chunked_logprobs` is the same with the language-model head fused in, so that
no tensor of tokens x vocabulary ever exists: forward and backward form the logits a chunk at a time.
What it does not: choose the temperature, or truncate (top-p, top-k). Who calls this: model, tests.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}
"""size of a chunk's float32 logits: fits a core's cache on the CPU, keeps a GPU busy"""
LEAST_TOKENS = 256
"""of a chunk, whatever the vocabulary: each chunk adds to the whole head gradient, which must not dominate (measured on
one core with a vocabulary of 49,152: 90 tokens/s with chunks of 16, 336 with 256)"""


def logprobs_from_logits(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """logits [n, vocab], targets [n] int64 -> [n] float32 log-probabilities at `temperature` > 0."""
    scaled = logits.float() / temperature
    return scaled.gather(-1, targets[:, None]).squeeze(-1) - scaled.logsumexp(-1)


def entropy_from_logits(logits: Tensor, temperature: float) -> Tensor:
    """logits [n, vocab] -> [n] float32 entropy in nats at `temperature`: logsumexp(z/T) - sum p z/T."""
    scaled = logits.float() / temperature
    return scaled.logsumexp(-1) - (scaled.softmax(-1) * scaled).sum(-1)


def chunked_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk_tokens: int | None = None
) -> tuple[Tensor, Tensor]:
    """hidden [n, d], weight [vocab, d], targets [n] int64 -> ([n] log-probabilities, [n] entropy), float32.

    Gradients flow to hidden and weight through both; that of the entropy costs nothing where it is not asked for.
    hidden and weight are of one type; in bfloat16 the logits and all sums are still float32, only the two products of
    the backward pass take bfloat16 inputs. n = 0 works.
    `chunk_tokens` rows are done at once (default: by CHUNK_BYTES).
    """
    if chunk_tokens is None:
        budget = CHUNK_BYTES.get(hidden.device.type, CHUNK_BYTES["cuda"])
        chunk_tokens = max(LEAST_TOKENS, budget // (4 * weight.shape[0]))
    logprobs, entropy = _ChunkedLogprobs.apply(hidden, weight, targets, temperature, chunk_tokens)
    return logprobs, entropy


def _scaled_logits(rows: Tensor, weight: Tensor, full: Tensor, temperature: float) -> Tensor:
    """[n, vocab] logits / temperature in float32 (float64 for float64), exact for half-precision inputs too."""
    if rows.is_cuda and rows.dtype in (torch.bfloat16, torch.float16):
        # products of half-precision numbers are exact in float32: same result as upcasting, at tensor-core speed
        return torch.mm(rows, weight.T, out_dtype=torch.float32).div_(temperature)
    return torch.mm(rows.to(full.dtype) / temperature, full.T)


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk_tokens: int
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        full = weight if hidden.is_cuda else weight.to(dtype)
        logprobs, entropy, normaliser = (hidden.new_empty(targets.shape, dtype=dtype) for _ in range(3))
        for start in range(0, len(targets), chunk_tokens):
            part = slice(start, start + chunk_tokens)
            logits = _scaled_logits(hidden[part], weight, full, temperature)
            top = logits.amax(-1)
            odds = (logits - top[:, None]).exp_()
            total = odds.sum(-1)
            normaliser[part] = top + total.log()
            logprobs[part] = logits.gather(-1, targets[part, None]).squeeze(-1) - normaliser[part]
            entropy[part] = normaliser[part] - torch.linalg.vecdot(odds, logits) / total
        ctx.save_for_backward(hidden, weight, targets, normaliser, entropy)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor | None, d_entropy: Tensor | None
    ) -> tuple[Tensor, Tensor, None, None, None]:
        hidden, weight, targets, normaliser, entropy = ctx.saved_tensors
        full = weight if hidden.is_cuda else weight.to(normaliser.dtype)
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros(weight.shape, dtype=normaliser.dtype, device=weight.device)
        scaled = (torch.zeros_like(normaliser) if gradient is None else gradient) / ctx.temperature
        for start in range(0, len(targets), ctx.chunk_tokens):
            part = slice(start, start + ctx.chunk_tokens)
            # d logp_t / d z = (onehot(t) - p) / T,     d H / d z = -p (log p + H) / T
            logprobs = _scaled_logits(hidden[part], weight, full, ctx.temperature).sub_(normaliser[part, None])
            slope = -scaled[part, None]
            if d_entropy is not None:
                slope = (logprobs + entropy[part, None]).mul_(-d_entropy[part, None] / ctx.temperature).add_(slope)
            d_logits = logprobs.exp_().mul_(slope)
            d_logits.scatter_add_(-1, targets[part, None], scaled[part, None])
            # in the inputs' type (their rounding is that of every gradient below); sums over chunks in float32
            d_logits = d_logits.to(weight.dtype)
            d_hidden[part] = torch.mm(d_logits, weight)
            if weight.dtype == d_weight.dtype:
                d_weight.addmm_(d_logits.T, hidden[part])
            else:
                d_weight += torch.mm(d_logits.T, hidden[part])
        return d_hidden, d_weight.to(weight.dtype), None, None, None
