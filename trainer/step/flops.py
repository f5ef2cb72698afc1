"""Floating-point operations of a decoder's passes: the one count that metrics, plans and benchmarks share. No torch.

    forward      2 * weights of the layers' matrices * tokens
    head         2 * vocabulary * hidden * tokens that have a loss
    attention    2 * layers * heads * head_dim * length^2 of each sequence: the causal half of 4; a completion that
                 reads a prompt stored before it has length^2 + 2 length * prompt in place of length^2
    backward     twice the forward (Kaplan et al. 2001.08361, 2.1; PaLM 2204.02311, appendix B)

The last layer's output projection and feed-forward count only for tokens that have a loss: nothing else needs them.
Norms, rotations, softmax and the optimiser count nothing. Model FLOPs utilisation (MFU) is these operations over time
and peak; what is computed twice (the head's logits, recomputed activations) counts once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from shared.model.config import DecoderConfig

PEAKS = (
    (r"B[23]00", 2250e12), (r"H[12]00 NVL", 835e12), (r"H100 PCIe", 756e12), (r"H[128]00", 989e12), (r"H20\b", 148e12),
    (r"A[18]00", 312e12), (r"L40S", 362e12), (r"L4\b", 121e12), (r"RTX A6000", 155e12), (r"RTX 5090", 209e12),
    (r"RTX 4090", 165e12), (r"RTX 3090", 71e12),
)  # fmt: skip
"""(pattern of a card's name, FLOP/s of dense bfloat16 products summed in float32), of the vendor's data sheets"""


def peak_of(card: str) -> float:
    """Return the dense bfloat16 peak of a card by the name that CUDA gives it, FLOP/s; 0 where it is not known."""
    return next((peak for pattern, peak in PEAKS if re.search(pattern, card)), 0.0)


def forward_flops(decoder: DecoderConfig, tokens: float, loss_tokens: float, squares: float) -> float:
    """Return the operations of one forward pass of `tokens`, `loss_tokens` of them with a loss.

    squares: sum of length^2 of the sequences, which is twice the pairs of tokens that attend to each other."""
    late = decoder.hidden_size * (decoder.heads * decoder.head_dim + 3 * decoder.intermediate_size)
    late += decoder.vocab_size * decoder.hidden_size
    weights = decoder.products * tokens - late * (tokens - loss_tokens)
    return 2.0 * (weights + decoder.layers * decoder.heads * decoder.head_dim * squares)


def packed_flops(decoder: DecoderConfig, lengths: Sequence[int], prefixes: Sequence[int], loss_tokens: int) -> float:
    """Return the operations of one forward pass of packed segments (`PackedBatch`): a prompt that is stored once for
    several completions is computed once."""
    before = [lengths[prefix] if prefix >= 0 else 0 for prefix in prefixes]
    squares = sum(length * (length + 2 * more) for length, more in zip(lengths, before, strict=True))
    return forward_flops(decoder, sum(lengths), loss_tokens, squares)
