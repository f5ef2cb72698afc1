"""The checksum sees what can go wrong in a transfer, and its parts add up."""

from __future__ import annotations

import pytest
import torch

from rollout.weights.checksum import (
    MODULUS,
    add_parts,
    checksum_columns,
    checksum_rows,
    choose_columns,
    random_weights,
    row_sums,
)  # fmt: skip


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


def test_parts_of_columns_add_up_where_a_row_is_cut_too() -> None:
    """As a tensor-parallel worker has them, whose rows may divide by other words than whole ones."""
    tensor = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    for cut in (4, 8):
        parts = (tensor[:, :cut], tensor[:, cut:])
        sums = [checksum_rows(part, 0, torch.bfloat16, of_bytes=16) for part in parts if part.numel()]
        assert sum(sums) % MODULUS == whole(tensor)


@pytest.mark.parametrize("place", [0, 1, 16, 17, 30, 575])
def test_the_column_whose_turn_it_is_is_compared_and_the_next_that_changed(place: int) -> None:
    now = torch.randn(9, 576, generator=torch.Generator().manual_seed(0))
    before = now.to(torch.bfloat16)
    kept = choose_columns(now, 4, 592, torch.bfloat16, before)
    assert kept.numbers == [16] and kept.checksum == kept.before
    before.view(torch.int16)[3, place] += 1
    found = choose_columns(now, 4, 592, torch.bfloat16, before)
    assert found.numbers == ([16] if place == 16 else [16, place]) and found.checksum != found.before
    assert choose_columns(now, 4, 592, torch.bfloat16, None).numbers == [16]


def test_checksums_of_columns_by_hand_add_up_and_see_one_bit() -> None:
    weights = random_weights(9, torch.device("cpu"))
    assert len(set(weights.tolist())) == 9 and bool((weights % 2 == 1).all())
    ones = torch.ones(2, 3, dtype=torch.bfloat16)
    assert checksum_columns(ones, weights[:2]) == sum(weights[:2].tolist()) * 3 * 0x3F80 % MODULUS
    chosen = torch.randn(9, 2, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    whole = checksum_columns(chosen, weights)
    assert whole == (checksum_columns(chosen[:4], weights[:4]) + checksum_columns(chosen[4:], weights[4:])) % MODULUS
    changed = chosen.clone()
    changed.view(torch.int16)[8, 1] ^= 1
    assert checksum_columns(changed, weights) != whole == checksum_columns(chosen.t().clone().t(), weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_what_a_product_may_give_as_zero_counts_as_zero(dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).tiny
    assert (
        checksum_columns(
            torch.tensor([[0.0, -0.0, tiny / 2, -tiny / 4]], dtype=dtype), random_weights(1, torch.device("cpu"))
        )
        == 0
    )
    assert checksum_columns(torch.tensor([[tiny]], dtype=dtype), random_weights(1, torch.device("cpu"))) != 0
    assert checksum_columns(torch.tensor([[-tiny]], dtype=dtype), random_weights(1, torch.device("cpu"))) != 0
