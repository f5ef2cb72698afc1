"""Counts the rank of a token among all others row by row: what vLLM's compiled function does, without a compiler.

Our engines on a CPU do not compile vLLM's small sampler functions (vllm_config.py). Uncompiled, its
`batched_count_greater_than` widens a truth value for every token and word to 64 bits: with SmolLM2-135M's 49,152 words
a decode step of 64 sequences took 442 ms; row by row it takes 392 (one thread, bfloat16, a CPU without matrix units).
"""

from __future__ import annotations

import os

import torch
from torch import Tensor


def count_at_least(x: Tensor, values: Tensor) -> Tensor:
    """[rows] int64: how many elements of each row of x [rows, words] are at least the row's value [rows, 1]."""
    counts = [torch.count_nonzero(row >= value) for row, value in zip(x.unbind(), values.unbind(), strict=True)]
    return torch.stack(counts)


def count_ranks_by_row() -> None:
    """Make vLLM in this process, and those it forks, use `count_at_least`, unless its own function is compiled."""
    if os.environ.get("TORCHDYNAMO_DISABLE") != "1":
        return
    from vllm.v1.sample import sampler

    sampler.batched_count_greater_than = count_at_least
