"""Floating-point operations of a training step, and the fastest matrix product that this machine does.

    projections   6 * parameters of a layer's matrices * tokens: 2 forward, 4 backward (Kaplan et al. 2001.08361, 2.1)
    head          6 * vocabulary * hidden * tokens that have a loss
    attention     6 * heads * head_dim * length^2 of each sequence: the causal half of 12 (PaLM 2204.02311, appendix B);
                  a completion that reads a prompt stored before it has 2 length * prompt more in place of length^2

The last layer's output projection and feed-forward count only for tokens that have a loss: nothing else needs them.
Norms, rotations, softmax and the optimiser count nothing. Model FLOPs utilisation (MFU) is these operations over time
and peak; what is computed twice (the head's logits, recomputed activations) counts once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from shared.model.config import DecoderConfig

SIZES = ((2048, 2048, 2048), (4096, 4096, 4096), (8192, 1024, 4096))
"""(rows, inner, columns) of the products that are tried"""


def attention_parameters(config: DecoderConfig) -> tuple[int, int]:
    """Return (query, key and value projections; output projection) of one layer."""
    width = config.heads * config.head_dim
    return config.hidden_size * (width + 2 * config.key_heads * config.head_dim), width * config.hidden_size


def step_flops(
    config: DecoderConfig, lengths: Sequence[int], loss_tokens: int, before: Sequence[int] | None = None
) -> float:
    """Forward and backward of packed segments of these lengths, `loss_tokens` of all their tokens with a loss.

    before: [segments] tokens of the prompt, stored once for several, that a segment continues (none without).
    """
    continued = before or [0] * len(lengths)
    pairs = sum(length * (length + 2 * more) for length, more in zip(lengths, continued, strict=True))
    joined, output = attention_parameters(config)
    rest = output + 3 * config.hidden_size * config.intermediate_size
    tokens = sum(lengths)
    projections = config.layers * joined * tokens + rest * ((config.layers - 1) * tokens + loss_tokens)
    head = config.vocab_size * config.hidden_size * loss_tokens
    attention = config.layers * config.heads * config.head_dim * pairs
    return 6.0 * (projections + head + attention)


class Peak:
    """FLOP/s of the fastest large matrix product in one type, with the threads in force."""

    def __init__(self, dtype: torch.dtype, device: torch.device, repeats: int = 3):
        """Tries every size and keeps the fastest."""
        self.dtype, self.device = dtype, device
        found = {size: statistics.median(self._rates(size, repeats)) for size in SIZES}
        self.size = max(found, key=lambda size: found[size])

    def measure(self, repeats: int = 3) -> float:
        """Return FLOP/s now: the best of some products, since whatever disturbs one only makes it slower."""
        return max(self._rates(self.size, repeats))

    def _rates(self, size: tuple[int, int, int], repeats: int) -> list[float]:
        rows, inner, columns = size
        left = torch.randn(rows, inner, device=self.device).to(self.dtype)
        right = torch.randn(columns, inner, device=self.device).to(self.dtype)
        out = torch.mm(left, right.T)
        rates = []
        for _ in range(repeats):
            wait(self.device)
            start = time.perf_counter()
            torch.mm(left, right.T, out=out)
            wait(self.device)
            rates.append(2.0 * rows * inner * columns / (time.perf_counter() - start))
        return rates


def wait(device: torch.device) -> None:
    """Until a GPU has done what it was given; a CPU has already."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
