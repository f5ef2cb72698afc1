"""A fast checksum of tensors whose parts can be computed by different ranks and added up.

checksum(T) = sum over rows r of (2 r + 1) * (sum of the row's bit patterns as integers), modulo 2**64.
The weights are odd, so every change of a single row is detected; they differ, so rows that changed places are too.
Values that changed places within one row are not (no transport moves part of a row), and it is no cryptographic hash.
Works on any device.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

MODULUS = 1 << 64
CHUNK_BYTES = 2 << 20
"""on the CPU: a chunk of rows that stays in the cache between the cast and the sum"""


def row_sums(rows: torch.Tensor) -> torch.Tensor:
    """Sum of bit patterns of each row. rows: [rows, columns] of any dtype, contiguous -> [rows] int64 (wrapping).

    A row is read in the widest words that divide its length, so the result depends on the row's bytes only.
    """
    row_bytes = rows.shape[1] * rows.element_size()
    word = next(w for w in (torch.int64, torch.int32, torch.int16, torch.uint8) if row_bytes % w.itemsize == 0)
    if rows.storage_offset() * rows.element_size() % word.itemsize:
        rows = rows.clone()
    return rows.view(word).sum(dim=1, dtype=torch.int64)


def checksum_rows(local: torch.Tensor, first_row: int, dtype: torch.dtype) -> int:
    """Part of the checksum for rows first_row .. first_row + len(local) of a tensor, taken after a cast to `dtype`.

    local: [rows, ...] of any dtype; 1-D tensors have one value per row. Returns an integer in [0, 2**64).
    """
    rows = local.detach().reshape(local.shape[0] if local.ndim else 1, -1)
    count, row_bytes = rows.shape[0], rows.shape[1] * dtype.itemsize
    step = max(1, CHUNK_BYTES // row_bytes) if rows.device.type == "cpu" else count
    total = torch.zeros((), dtype=torch.int64, device=rows.device)
    for start in range(0, count, step):
        part = rows[start : start + step].to(dtype).contiguous()
        weights = torch.arange(start, start + part.shape[0], device=rows.device).add_(first_row).mul_(2).add_(1)
        total += (row_sums(part) * weights).sum()
    return int(total.item()) % MODULUS


def add_parts(parts: Iterable[dict[str, int]]) -> dict[str, int]:
    """Checksums of whole tensors from the parts of all trainer ranks (addition modulo 2**64)."""
    total: dict[str, int] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = (total.get(name, 0) + value) % MODULUS
    return total
