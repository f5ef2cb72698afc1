"""Packed batches for tests, by the place of each sequence's first target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shared.model.packing import PackedBatch, pack


def pack_from(sequences: Sequence[Sequence[int]], firsts: Sequence[int], *device: Any, **options: Any) -> PackedBatch:
    """Pack sequences whose tokens are targets from `firsts` on."""
    masks = [bytes(first) + b"\1" * (len(ids) - first) for ids, first in zip(sequences, firsts, strict=True)]
    return pack(sequences, masks, *device, **options)
