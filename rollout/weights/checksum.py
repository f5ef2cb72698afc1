"""A fast checksum of tensors whose parts can be computed by different ranks and added up.

checksum(T) = sum over rows r of (2 r + 1) * (sum of the row's bit patterns as integers), modulo 2**64.
The weights are odd, so every change of a single row is detected; they differ, so rows that changed places are too.
Values that changed places within one row are not (no transport moves part of a row), and it is no cryptographic hash.
Works on any device.

A linear that an engine keeps packed shows its weight only by products: the product with a unit vector is a column of
the weight, exactly. So few columns are compared, one of each rank's rows or two: that whose turn it is, and the next in
which something changed since the version before, since weights that stayed old differ there. Few bits change there, by
one step of the dtype; the rows' weights are random numbers, so that changes do not cancel.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import torch

MODULUS = 1 << 64
CHUNK_BYTES = 2 << 20
"""on the CPU: a chunk of rows that stays in the cache between the cast and the sum"""
FIRST_COLUMNS, MORE_COLUMNS = 8, 4
"""columns of a matrix that are searched first for changes; the factor for the number of columns of each next search"""
MIX = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
"""odd numbers of the generator splitmix64, as signed ones"""
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
        chunk = rows[start : start + step].to(dtype).contiguous()
        weights = torch.arange(start, start + chunk.shape[0], device=rows.device).add_(first_row).mul_(2).add_(1)
        total += (row_sums(chunk, of_bytes) * weights).sum()
    return int(total.item()) % MODULUS


class Columns(msgspec.Struct):
    """Some columns of a rank's rows of a matrix."""

    numbers: list[int]
    checksum: int
    before: int
    """their checksum in the version before, if it is known, else the same"""


def random_weights(count: int, device: torch.device) -> torch.Tensor:
    """[count] int64 odd random numbers, always the same: of splitmix64 (Steele, Lea and Flood, "Fast splittable
    pseudorandom number generators", 2014), but for the sign that its shifts keep here."""
    weights = torch.arange(1, count + 1, device=device).mul_(MIX[0])
    for shift, factor in ((30, MIX[1]), (27, MIX[2])):
        weights = (weights ^ (weights >> shift)).mul_(factor)
    return (weights ^ (weights >> 31)) | 1


def bits(values: torch.Tensor) -> torch.Tensor:
    """The values' bit patterns as int64. A product gives 0 for -0 and may give 0 for numbers too small to be normal, so
    these count as 0."""
    kind = torch.finfo(values.dtype)
    normal = torch.nn.functional.hardshrink(values, kind.tiny * (1 - kind.eps))
    return normal.view(WORDS[values.element_size()]).to(torch.int64)


def checksum_columns(values: torch.Tensor, weights: torch.Tensor) -> int:
    """Checksum of columns. values: [rows, columns] in the dtype of the wire; weights: `random_weights` of the rows.
    Returns an integer in [0, 2**64)."""
    return int((bits(values).sum(dim=1) * weights).sum().item()) % MODULUS


def next_changed(values: torch.Tensor, before: torch.Tensor, start: int) -> int | None:
    """The first column from `start` on, and then from 0, in which a value differs. values, before: [rows, columns]; the
    first are compared after a cast to the dtype of the second."""
    for low, high in ((start, values.shape[1]), (0, start)):
        width = FIRST_COLUMNS
        while low < high:
            span = slice(low, min(high, low + width))
            differ = (values[:, span].to(before.dtype) != before[:, span]).any(dim=0)
            if (changed := differ.nonzero()).numel():
                return low + int(changed[0])
            low, width = span.stop, width * MORE_COLUMNS
    return None


def choose_columns(
    local: torch.Tensor, first_row: int, version: int, dtype: torch.dtype, before: torch.Tensor | None
) -> Columns:
    """The columns of a rank's rows that are compared after the update to `version`. local: [rows, columns] of any
    dtype; before: the same rows of the version before, in the dtype of the wire."""
    turn = version % local.shape[1]
    changed = None if before is None else next_changed(local, before, turn)
    numbers = [turn] if changed in (None, turn) else [turn, changed]
    weights = random_weights(first_row + local.shape[0], local.device)[first_row:]
    checksum = checksum_columns(local[:, numbers].to(dtype), weights)
    return Columns(numbers, checksum, checksum if before is None else checksum_columns(before[:, numbers], weights))


def add_parts(parts: Iterable[dict[str, int]]) -> dict[str, int]:
    """Checksums of whole tensors from the parts of all trainer ranks (addition modulo 2**64)."""
    total: dict[str, int] = {}
    for checksums in parts:
        for name, value in checksums.items():
            total[name] = (total.get(name, 0) + value) % MODULUS
    return total
