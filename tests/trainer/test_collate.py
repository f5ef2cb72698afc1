import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.types import TrainSequence
from trainer.collate import collate, first_fit_decreasing, spread


def sequences(lengths: list[int]) -> list[TrainSequence]:
    return [TrainSequence([number] * length, 1, [], 0.0, 0.0) for number, length in enumerate(lengths)]


def test_longest_first_each_into_the_first_bin_with_room() -> None:
    # by length: 6 (index 1), 5 (2), 4 (0), 4 (4), 1 (3) into bins of 10
    assert first_fit_decreasing([4, 6, 5, 1, 4], 10) == [[1, 0], [2, 4, 3]]
    assert first_fit_decreasing([30, 4], 10) == [[0], [1]]
    assert first_fit_decreasing([], 10) == []


@pytest.mark.parametrize(("kind", "next_fit", "decreasing"), [("lognormal", 0.171, 0.002), ("uniform", 0.252, 0.015)])
def test_collation_saves_padding_against_filling_in_order_of_arrival(
    kind: str, next_fit: float, decreasing: float
) -> None:
    """2048 sequences into 32768-token micro-batches; the paper reports 19 % less padding."""
    budget, draw = 32768, np.random.default_rng(1)
    lognormal = np.clip(draw.lognormal(8.6, 0.8, 2048), 64, budget).astype(int)
    lengths = (lognormal if kind == "lognormal" else draw.integers(64, budget, 2048)).tolist()
    arrival, room = 1, budget
    for length in lengths:
        if length > room:
            arrival, room = arrival + 1, budget
        room -= length
    found = collate(sequences(lengths), 1, budget)
    assert 1 - sum(lengths) / (arrival * budget) == pytest.approx(next_fit, abs=5e-4)
    assert found.padding_share == pytest.approx(decreasing, abs=5e-4)


lengths_lists = st.lists(st.integers(2, 60), max_size=60)


@given(lengths_lists, st.integers(1, 8), st.integers(1, 100))
def test_every_sequence_is_in_one_micro_batch_within_the_budget_and_ranks_have_equal_counts(
    lengths: list[int], ranks: int, budget: int
) -> None:
    found = collate(sequences(lengths), ranks, budget)
    assert len(found.micro_batches) == ranks
    assert len({len(share) for share in found.micro_batches}) == 1 and found.micro_batches[0]
    batches = [batch.sequences for share in found.micro_batches for batch in share]
    placed = sorted(sequence.token_ids[0] for batch in batches for sequence in batch)
    assert placed == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) <= 1 or sum(len(sequence.token_ids) for sequence in batch) <= budget
    assert found.tokens == sum(lengths)
    assert 0 <= found.padding_share <= 1 and found.imbalance > -1e-9
    assert found == collate(sequences(lengths), ranks, budget)


@given(lengths_lists, st.integers(1, 8), st.integers(60, 200))
def test_ranks_need_no_more_rounds_than_first_fit_bins_ask_for(lengths: list[int], ranks: int, budget: int) -> None:
    bins = len(first_fit_decreasing(lengths, budget))
    assert len(collate(sequences(lengths), ranks, budget).micro_batches[0]) == max(1, -(-bins // ranks))


def test_work_is_balanced_over_ranks_where_bins_would_leave_some_idle() -> None:
    found = collate(sequences([10] * 8), 4, 100)
    assert [[len(batch.sequences) for batch in share] for share in found.micro_batches] == [[2]] * 4
    assert found.imbalance == 0


def test_adversarial_lengths_give_empty_micro_batches_to_ranks_without_work() -> None:
    found = collate(sequences([500, 3]), 4, 100)
    assert [len(share) for share in found.micro_batches] == [1] * 4
    assert sorted(len(share[0].sequences) for share in found.micro_batches) == [0, 0, 1, 1]


def test_the_largest_micro_batch_runs_first() -> None:
    found = collate(sequences([90, 10, 50, 45, 30]), 1, 100)
    sizes = [sum(len(sequence.token_ids) for sequence in batch.sequences) for batch in found.micro_batches[0]]
    assert sizes == sorted(sizes, reverse=True)


def test_spread_gives_up_where_the_budget_does_not_allow_it() -> None:
    assert spread([6, 6, 6], 10, 2) is None
    assert spread([6, 6, 4], 10, 2) == [[0, 2], [1]]


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="ranks = 0"):
        collate([], 0, 10)
