"""Padding and imbalance as the benchmark counts them are those of `plan_batch`."""

from __future__ import annotations

import pytest

from benchmarks.packing import draw_lengths, first_fit, imbalance, make_sequences, next_fit, padding
from trainer.step.batching import plan_batch


def test_next_fit_closes_a_bin_that_has_no_room_and_first_fit_does_not() -> None:
    assert next_fit([6, 5, 4, 5, 10, 1], 10) == [6, 9, 5, 10, 1]
    assert first_fit([6, 5, 4, 5, 10, 1], 10) == [10, 10, 10, 1]


def test_padding_and_imbalance_by_hand() -> None:
    assert padding([6, 9, 5], 1, 10) == pytest.approx(1 - 20 / 30)
    assert padding([6, 9, 5], 2, 10) == pytest.approx(1 - 20 / 40), "an empty micro-batch fills the round up"
    assert imbalance([6, 9, 5], 1) == 0
    assert imbalance([6, 9, 5], 2) == pytest.approx((9 + 5) * 2 / 20 - 1)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_they_agree_with_those_of_a_plan(ranks: int) -> None:
    sequences = make_sequences([min(length, 4096) for length in draw_lengths(200, seed=1)])
    plan = plan_batch(sequences, ranks, 4096)
    rounds = [[sum(len(one.token_ids) for one in share[number].sequences) for share in plan.micro_batches]
              for number in range(len(plan.micro_batches[0]))]  # fmt: skip
    fills = [fill for row in rounds for fill in row]
    assert padding(fills, ranks, 4096) == pytest.approx(plan.padding_share)
    assert imbalance(fills, ranks) == pytest.approx(plan.imbalance)


def test_lengths_are_heavy_tailed_repeatable_and_within_the_budget() -> None:
    lengths = draw_lengths(5000, seed=3)
    assert lengths == draw_lengths(5000, seed=3) != draw_lengths(5000, seed=4)
    assert min(lengths) >= 1 and max(lengths) <= 32_768
    assert sum(lengths) / len(lengths) > 1.3 * sorted(lengths)[2500]
