"""A fast checksum of tensors whose parts can be computed by different ranks and added up.

checksum(T) = sum over rows r of (2 r + 1) * (sum of the row's bit patterns as integers), modulo 2**64.
The weights are odd, so every change of a single row is detected; they differ, so rows that changed places are too.
Values that changed places within one row are not (no transport moves part of a row), and it is no cryptographic hash.
Works on any device.

A linear that an engine keeps packed shows its weight only by products: the product with a unit vector is a column of
the weight, exactly. A few columns are summed up in the same way; PERIOD versions in succession take all of them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from rollout.weights.layout import Slice

MODULUS = 1 << 64
CHUNK_BYTES = 2 << 20
"""on the CPU: a chunk of rows that stays in the cache between the cast and the sum"""
PERIOD = 20
"""versions within which every column of a packed weight is compared once"""
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def row_sums(rows: torch.Tensor, of_bytes: int = 0) -> torch.Tensor:
    """Sum of bit patterns of each row. rows: [rows, columns] of any dtype, contiguous -> [rows] int64 (wrapping).

    A row is read in the widest words that divide its length, so the result depends on the row's bytes only. of_bytes:
    length of the whole rows of which these are parts (0: these are whole); sums of parts add up to those of the whole.
    """
    row_bytes = rows.shape[1] * rows.element_size()
    word = next(WORDS[size] for size in (8, 4, 2, 1) if (of_bytes or row_bytes) % size == 0)
    if rows.storage_offset() * rows.element_size() % word.itemsize:
        rows = rows.clone()
    return rows.view(word).sum(dim=1, dtype=torch.int64)


def checksum_rows(local: torch.Tensor, first_row: int, dtype: torch.dtype, of_bytes: int = 0) -> int:
    """Part of the checksum for rows first_row .. first_row + len(local) of a tensor, taken after a cast to `dtype`.

    local: [rows, ...] of any dtype; 1-D tensors have one value per row. of_bytes: see `row_sums`. Returns an integer in
    [0, 2**64).
    """
    rows = local.detach().reshape(local.shape[0] if local.ndim else 1, -1)
    count, row_bytes = rows.shape[0], rows.shape[1] * dtype.itemsize
    step = max(1, CHUNK_BYTES // row_bytes) if rows.device.type == "cpu" else count
    total = torch.zeros((), dtype=torch.int64, device=rows.device)
    for start in range(0, count, step):
        part = rows[start : start + step].to(dtype).contiguous()
        weights = torch.arange(start, start + part.shape[0], device=rows.device).add_(first_row).mul_(2).add_(1)
        total += (row_sums(part, of_bytes) * weights).sum()
    return int(total.item()) % MODULUS


def probed_columns(version: int, columns: int) -> slice:
    """Which of so many columns are compared after the update to `version`: evenly spaced ones, at least one."""
    return slice(version % min(PERIOD, columns), columns, PERIOD)


def checksum_columns(values: torch.Tensor, first_row: int) -> int:
    """The same sum for a few columns. values: [rows, columns] in the dtype of the wire, of rows from `first_row` on.

    A product gives 0 for -0 and may give 0 for numbers too small to be normal, so these count as 0. Returns an integer
    in [0, 2**64).
    """
    kind = torch.finfo(values.dtype)
    normal = torch.nn.functional.hardshrink(values, kind.tiny * (1 - kind.eps))
    sums = normal.view(WORDS[values.element_size()]).sum(dim=1, dtype=torch.int64)
    weights = torch.arange(first_row, first_row + values.shape[0], device=values.device).mul_(2).add_(1)
    return int((sums * weights).sum().item()) % MODULUS


def column_parts(pieces: Iterable[Slice], version: int, dtype: torch.dtype) -> dict[str, int]:
    """tensor -> this rank's part of the checksum of the columns of `version`, for each tensor with two dimensions."""
    return {
        piece.name: checksum_columns(
            piece.local[:, probed_columns(version, piece.local.shape[1])].to(dtype), piece.first_row
        )
        for piece in pieces
        if piece.local.ndim == 2
    }


def add_parts(parts: Iterable[dict[str, int]]) -> dict[str, int]:
    """Checksums of whole tensors from the parts of all trainer ranks (addition modulo 2**64)."""
    total: dict[str, int] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = (total.get(name, 0) + value) % MODULUS
    return total
