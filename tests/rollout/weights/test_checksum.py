"""The checksum sees what can go wrong in a transfer, and its parts add up."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout.weights.checksum import (
    MODULUS,
    add_parts,
    checksum_columns,
    checksum_rows,
    choose_columns,
    random_weights,
    row_sums,
)  # fmt: skip

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
WEIGHTS = random_weights(9, torch.device("cpu"))


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def whole(tensor: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> int:
    return checksum_rows(tensor, 0, dtype)


def test_by_hand():
    ones = torch.ones(2, 2, dtype=torch.int32)  # a row is one 64-bit word: 1 + 2**32
    assert row_sums(ones).tolist() == [1 + 2**32] * 2
    assert checksum_rows(ones, 0, torch.int32) == (1 + 3) * (1 + 2**32)
    assert checksum_rows(ones, 2, torch.int32) == (5 + 7) * (1 + 2**32)
    assert whole(torch.tensor(1.0)) == 0x3F80
    assert 0 <= whole(torch.full((64, 64), -float("inf"))) < MODULUS


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.sampled_from(DTYPES), st.integers(0, 9))
def test_parts_of_row_shards_add_up(shape, dtype, border):
    tensor, parts = randn(*shape), []
    for first, last in ((0, min(border, shape[0])), (min(border, shape[0]), shape[0])):
        parts += [{"t": checksum_rows(tensor[first:last], first, dtype)}] if first < last else []
    assert add_parts(parts)["t"] == whole(tensor, dtype) < MODULUS


def test_it_is_taken_after_the_cast_and_does_not_depend_on_chunks_or_address(monkeypatch):
    tensor = randn(1000, 6)
    reference = whole(tensor)
    assert whole(tensor.to(torch.bfloat16)) == reference
    monkeypatch.setattr("rollout.weights.checksum.CHUNK_BYTES", 100)
    assert whole(tensor) == reference
    shifted = torch.zeros(6001, dtype=torch.bfloat16)
    shifted[1:] = tensor.to(torch.bfloat16).flatten()
    assert whole(shifted[1:].view(1000, 6)) == reference


def test_one_flipped_bit_swapped_rows_and_shifted_rows_are_seen():
    tensor = randn(16, 8).to(torch.bfloat16)
    flipped = tensor.clone()
    flipped.view(torch.int16)[7, 3] ^= 1
    swapped = tensor[[1, 0, *range(2, 16)]]
    assert len({whole(each) for each in (tensor, flipped, swapped, tensor.roll(1, 0), torch.zeros(16, 8))}) == 5


@pytest.mark.parametrize("border", [4, 8])
def test_parts_of_columns_add_up_where_a_row_is_cut_too(border):
    """As a tensor-parallel worker has them, whose rows may divide by other words than whole ones."""
    tensor = randn(6, 8).to(torch.bfloat16)
    parts = (tensor[:, :border], tensor[:, border:])
    sums = [checksum_rows(part, 0, torch.bfloat16, of_bytes=16) for part in parts if part.numel()]
    assert sum(sums) % MODULUS == whole(tensor)


@pytest.mark.parametrize("place", [0, 16, 17, 575])
def test_the_column_whose_turn_it_is_is_compared_and_the_next_that_changed(place):
    now = randn(9, 576)
    before = now.to(torch.bfloat16)
    same = choose_columns(now, 4, 592, torch.bfloat16, before)
    assert same.numbers == [16] and same.checksum == same.before
    before.view(torch.int16)[3, place] += 1
    changed = choose_columns(now, 4, 592, torch.bfloat16, before)
    assert changed.numbers == ([16] if place == 16 else [16, place]) and changed.checksum != changed.before
    assert choose_columns(now, 4, 592, torch.bfloat16, None).numbers == [16]


def test_checksums_of_columns_by_hand_add_up_and_see_one_bit():
    assert len(set(WEIGHTS.tolist())) == 9 and bool((WEIGHTS % 2 == 1).all())
    ones = torch.ones(2, 3, dtype=torch.bfloat16)
    assert checksum_columns(ones, WEIGHTS[:2]) == sum(WEIGHTS[:2].tolist()) * 3 * 0x3F80 % MODULUS
    chosen = randn(9, 2).to(torch.bfloat16)
    total = checksum_columns(chosen, WEIGHTS)
    assert total == (checksum_columns(chosen[:4], WEIGHTS[:4]) + checksum_columns(chosen[4:], WEIGHTS[4:])) % MODULUS
    changed = chosen.clone()
    changed.view(torch.int16)[8, 1] ^= 1
    assert checksum_columns(changed, WEIGHTS) != total == checksum_columns(chosen.t().clone().t(), WEIGHTS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_a_product_may_give_as_zero_counts_as_zero(dtype):
    tiny = torch.finfo(dtype).tiny
    for values, counts in (([0.0, -0.0, tiny / 2, -tiny / 4], False), ([tiny], True), ([-tiny], True)):
        assert bool(checksum_columns(torch.tensor([values], dtype=dtype), WEIGHTS[:1])) == counts
