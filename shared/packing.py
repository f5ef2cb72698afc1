"""Sequences of different lengths laid end to end: one flat stream of tokens, no padding.

    sequences  [5 6 7] [8 9]        first_targets  1 1
    token_ids  5 6 7 8 9            positions  0 1 2 0 1        lengths  3 2
    the hidden state at 0 predicts 6, at 1 predicts 7, at 3 predicts 9:
    loss_positions  0 1 3           targets  6 7 9

What it does not: choose which sequences go together (trainer), or run the model. Who calls this: trainer, tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch as the decoder takes it."""

    token_ids: Tensor
    """[tokens] int64"""
    positions: Tensor
    """[tokens] int64, each sequence counts from 0"""
    lengths: tuple[int, ...]
    """[sequences], all positive, their sum is tokens"""
    loss_positions: Tensor
    """[loss_tokens] int64 index into the stream: the hidden state there predicts the target"""
    targets: Tensor
    """[loss_tokens] int64"""

    def __post_init__(self) -> None:
        tokens = sum(self.lengths)
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(f"lengths = {self.lengths}: a packed batch needs sequences of at least one token")
        for name in ("token_ids", "positions"):
            tensor = getattr(self, name)
            if tensor.shape != (tokens,) or tensor.dtype != torch.int64:
                raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected int64 ({tokens},)")
        if self.loss_positions.dim() != 1 or self.loss_positions.shape != self.targets.shape:
            raise ValueError(
                f"loss_positions {tuple(self.loss_positions.shape)} and targets {tuple(self.targets.shape)} "
                "must be two lists of one length"
            )

    @property
    def tokens(self) -> int:
        """Length of the stream."""
        return self.token_ids.shape[0]


def pack(
    sequences: Sequence[Sequence[int]], first_targets: Sequence[int], device: torch.device | str = "cpu"
) -> PackedBatch:
    """Lay `sequences` end to end; of sequence s with first target f, the targets are s[f:].

    first_targets: [sequences], 1 <= f <= len(s) (nothing predicts token 0; f = len(s): no target).
    No sequences at all give a stand-in of one token without target: it runs through the model with gradients of zero,
    so that a rank without work stays in step with the others. Raises ValueError for what breaks the contract.
    """
    if len(sequences) != len(first_targets):
        raise ValueError(f"{len(sequences)} sequences but {len(first_targets)} first_targets")
    if not sequences:
        sequences, first_targets = [[0]], [1]
    token_ids: list[int] = []
    positions: list[int] = []
    loss_positions: list[int] = []
    targets: list[int] = []
    for number, (sequence, first) in enumerate(zip(sequences, first_targets, strict=True)):
        if not 1 <= first <= len(sequence):
            raise ValueError(f"sequence {number}: first target {first} is not in 1..{len(sequence)} (its length)")
        start = len(token_ids)
        loss_positions.extend(range(start + first - 1, start + len(sequence) - 1))
        targets.extend(sequence[first:])
        token_ids.extend(sequence)
        positions.extend(range(len(sequence)))
    on_device = (torch.tensor(column, dtype=torch.int64) for column in (token_ids, positions, loss_positions, targets))
    flat_ids, flat_positions, flat_loss, flat_targets = (column.to(device, non_blocking=True) for column in on_device)
    return PackedBatch(flat_ids, flat_positions, tuple(map(len, sequences)), flat_loss, flat_targets)
