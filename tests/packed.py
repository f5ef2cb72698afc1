"""Packed batches by the place of each sequence's first target, and what log-probs and entropies are by definition."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from shared.model.packing import PackedBatch, pack


def pack_from(sequences: Sequence[Sequence[int]], firsts: Sequence[int], *device: Any, **options: Any) -> PackedBatch:
    """Pack sequences whose tokens are targets from `firsts` on."""
    masks = [bytes(first) + b"\1" * (len(ids) - first) for ids, first in zip(sequences, firsts, strict=True)]
    return pack(sequences, masks, *device, **options)


def logprobs_from_logits(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """logits [n, vocab], targets [n] int64 -> [n] float32 log-probabilities at `temperature` > 0."""
    scaled = logits.float() / temperature
    return scaled.gather(-1, targets[:, None]).squeeze(-1) - scaled.logsumexp(-1)


def entropy_from_logits(logits: Tensor, temperature: float) -> Tensor:
    """logits [n, vocab] -> [n] float32 entropy in nats at `temperature`: logsumexp(z/T) - sum p z/T."""
    scaled = logits.float() / temperature
    return scaled.logsumexp(-1) - (scaled.softmax(-1) * scaled).sum(-1)
