"""The checksum sees what can go wrong in a transfer, and its parts add up."""

from __future__ import annotations

import pytest
import torch

from rollout.weights.checksum import MODULUS, add_parts, checksum_rows, row_sums


def whole(tensor: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> int:
    return checksum_rows(tensor, 0, dtype)


def test_by_hand() -> None:
    ones = torch.ones(2, 2, dtype=torch.int32)  # a row is one 64-bit word: 1 + 2**32
    assert row_sums(ones).tolist() == [1 + 2**32] * 2
    assert checksum_rows(ones, 0, torch.int32) == (1 + 3) * (1 + 2**32)
    assert checksum_rows(ones, 2, torch.int32) == (5 + 7) * (1 + 2**32)


@pytest.mark.parametrize("shape", [(37, 64), (37, 3), (37,), (1, 8), (4, 2, 6)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_parts_of_row_shards_add_up(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    cut = max(1, shape[0] // 3)
    parts = [{"t": checksum_rows(tensor[:cut], 0, dtype)}]
    if cut < shape[0]:
        parts.append({"t": checksum_rows(tensor[cut:], cut, dtype)})
    assert add_parts(parts)["t"] == whole(tensor, dtype) < MODULUS


def test_it_is_taken_after_the_cast_and_does_not_depend_on_chunks_or_address(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(1000, 6, generator=torch.Generator().manual_seed(0))
    reference = whole(tensor)
    assert whole(tensor.to(torch.bfloat16)) == reference
    monkeypatch.setattr("rollout.weights.checksum.CHUNK_BYTES", 100)
    assert whole(tensor) == reference
    shifted = torch.zeros(6001, dtype=torch.bfloat16)
    shifted[1:] = tensor.to(torch.bfloat16).flatten()
    assert whole(shifted[1:].view(1000, 6)) == reference


def test_one_flipped_bit_swapped_rows_and_shifted_rows_are_seen() -> None:
    tensor = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    flipped = tensor.clone()
    flipped.view(torch.int16)[7, 3] ^= 1
    swapped = tensor[[1, 0, *range(2, 16)]]
    seen = {whole(tensor), whole(flipped), whole(swapped), whole(tensor.roll(1, 0)), whole(torch.zeros(16, 8))}
    assert len(seen) == 5


def test_a_scalar_and_the_full_range_of_bits() -> None:
    assert whole(torch.tensor(1.0)) == 0x3F80
    assert 0 <= whole(torch.full((64, 64), -float("inf"))) < MODULUS
