"""Each formula against values computed by hand, and against all choices one by one where that can be done."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import pytest

from shared.statistics import (
    cluster_bootstrap,
    elo,
    elo_intervals,
    majority_at_k,
    mean_and_half_width,
    paired_difference,
    paired_permutation,
    pass_at_k,
)


@pytest.mark.parametrize(
    ("completions", "right", "k", "expected"),
    [
        (4, 1, 1, 0.25),
        (4, 1, 2, 0.5),  # 3 of the 6 pairs hold it
        (5, 2, 3, 0.9),  # 1 of the 10 triples holds neither
        (64, 0, 64, 0.0),
        (64, 1, 64, 1.0),
        (3, 3, 1, 1.0),
        (2000, 1, 1000, 0.5),  # binomials beyond any float
    ],
)
def test_pass_at_k(completions: int, right: int, k: int, expected: float) -> None:
    assert pass_at_k(completions, right, k) == pytest.approx(expected, abs=1e-15)


def test_pass_at_k_is_unbiased_for_every_k_up_to_the_completions() -> None:
    """pass@1 does not fall with the number of completions, and the mean over draws is 1 - (1 - p)^k."""
    p, n, k = 0.3, 6, 3
    mean = sum(math.comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1))
    assert mean == pytest.approx(1 - (1 - p) ** k)
    assert [pass_at_k(n, n // 2, 1) for n in (2, 4, 64)] == [0.5, 0.5, 0.5]


@pytest.mark.parametrize(("right", "k"), [(2, 0), (2, 5), (5, 1), (-1, 1)])
def test_what_cannot_be_estimated_is_refused(right: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(4, right, k)


@pytest.mark.parametrize(
    ("right", "wrong", "silent", "k", "expected"),
    [
        (2, [1], 0, 3, 1.0),
        (1, [1, 1], 0, 3, 1 / 3),
        (1, [2], 0, 3, 0.0),
        (1, [1], 2, 4, 0.5),
        (0, [], 2, 2, 0.0),
        (2, [2, 1], 0, 5, 0.5),
        (1, [3], 0, 1, 0.25),
        (2, [1, 1], 0, 2, 1 / 6 + 4 / 6 / 2),  # six pairs: one of both right, four of one right (a tie), one of none
        (2, [2], 0, 3, 0.5),  # four triples: two with two right, two with two wrong
        (1, [1], 2, 2, 1 / 6 / 2 + 2 / 6),  # right with wrong; right with silence, twice
    ],
)
def test_majority_at_k(right: int, wrong: list[int], silent: int, k: int, expected: float) -> None:
    assert majority_at_k(right, wrong, silent, k) == pytest.approx(expected)


def test_majority_at_k_is_the_mean_over_all_choices() -> None:
    draw = random.Random(5)
    for _ in range(60):
        wrong = [draw.randint(1, 3) for _ in range(draw.randint(0, 3))]
        right, silent = draw.randint(0, 3), draw.randint(0, 2)
        votes = ["right"] * right + [f"w{i}" for i, many in enumerate(wrong) for _ in range(many)] + [""] * silent
        for k in range(1, len(votes) + 1):
            scores = []
            for chosen in itertools.combinations(votes, k):
                counts = Counter(vote for vote in chosen if vote)
                first = [vote for vote, count in counts.items() if count == max(counts.values())]
                scores.append(1 / len(first) if "right" in first else 0.0)
            assert majority_at_k(right, wrong, silent, k) == pytest.approx(sum(scores) / len(scores))


def test_majority_of_many_completions_is_quick() -> None:
    assert majority_at_k(20, [1] * 44, 0, 64) == 1.0
    assert 0.9 < majority_at_k(20, [1] * 44, 0, 32) < 1.0
    assert majority_at_k(100, [100, 100], 100, 32) == pytest.approx(1 / 3), "by symmetry"
    assert majority_at_k(3000, [2999], 0, 5999) == 1.0


def test_the_half_width_of_a_mean() -> None:
    mean, half = mean_and_half_width([1.0, 0.0, 0.5, 0.5])
    assert mean == 0.5
    assert half == pytest.approx(1.96 * math.sqrt((0.25 + 0.25) / 3 / 4))
    assert mean_and_half_width([0.25]) == (0.25, 0.0)


def test_the_bootstrap_agrees_with_the_normal_interval_where_problems_are_many() -> None:
    draw = random.Random(1)
    values = [float(draw.random() < 0.3) for _ in range(900)]
    mean, half = mean_and_half_width(values)
    low, high = cluster_bootstrap(values, seed=3)
    assert low == pytest.approx(mean - half, abs=0.003) and high == pytest.approx(mean + half, abs=0.003)
    assert cluster_bootstrap(values, seed=3) == (low, high), "one seed, one interval"


def test_intervals_of_values_that_do_not_vary() -> None:
    assert cluster_bootstrap([1.0] * 7) == (1.0, 1.0)
    assert cluster_bootstrap([0.0]) == (0.0, 0.0)
    low, high = cluster_bootstrap([0.0, 1.0])  # of two problems a quarter of the resamples is 0, a quarter is 1
    assert (low, high) == (0.0, 1.0)


def test_a_paired_difference_knows_that_problems_are_the_same() -> None:
    draw = random.Random(2)
    first = [draw.random() for _ in range(200)]
    second = [value + 0.01 for value in first]
    found = paired_difference(first, second)
    assert found.mean == pytest.approx(0.01)
    assert found.interval == pytest.approx((0.01, 0.01)), "how hard the problems are does not widen it"
    with pytest.raises(ValueError):
        paired_difference([1.0], [1.0, 0.0])


@pytest.mark.parametrize(("count", "seed", "low", "high"), [
    (7, 0, 0.10714285714285714, 0.5714285714285714), (7, 1, 0.07142857142857142, 0.6071428571428571),
    (50, 0, 0.34, 0.535), (600, 0, 0.3954166666666667, 0.45625), (600, 1, 0.3954166666666667, 0.45666666666666667),
])  # fmt: skip
def test_intervals_are_those_of_earlier_versions_bit_for_bit(count: int, seed: int, low: float, high: float) -> None:
    """Values of our own resampling, written down before scipy took its place: published intervals stay."""
    dice = random.Random(count)
    values = [dice.choice([0, 0.25, 0.5, 1]) for _ in range(count)]
    assert cluster_bootstrap(values, seed) == (low, high)


# ---- ratings and permutations -----------------------------------------------------------------------------------


def test_ratings_are_those_of_maximum_likelihood() -> None:
    """Of two players it is greatest where the expected score is the mean score, 1 / (1 + 10^(-100 / 500)) = 0.6131 with
    a hundred points more: 500 log10(.6131 / .3869) = 100."""
    games = [("a", "b", 1.0)] * 6131 + [("b", "a", 1.0)] * 3869
    found = elo(games)
    assert found["a"] - found["b"] == pytest.approx(100, abs=0.1) and found["a"] == -found["b"]


def test_a_circle_of_equals_and_a_chain() -> None:
    circle = elo([("a", "b", 1.0), ("b", "c", 1.0), ("c", "a", 1.0)])
    assert all(abs(points) < 1e-3 for points in circle.values())
    chain = [(one, other, score) for one, other in (("a", "b"), ("b", "c")) for score in [1.0] * 3000 + [0.0] * 1000]
    found = elo(chain)
    step = 500 * math.log10(3)
    assert [found[name] for name in "abc"] == pytest.approx([step, 0, -step], abs=0.2)


def test_a_player_that_always_wins_has_a_finite_rating() -> None:
    found = elo([("a", "b", 1.0)] * 10)
    assert found["a"] - found["b"] == pytest.approx(500 * math.log10(10.25 / 0.25), abs=0.1)


def test_intervals_hold_the_rating_and_narrow_with_games() -> None:
    """The standard error of 500 log10(p / (1 - p)) is 500 / ln 10 / sqrt(n p (1 - p)), a half for each player."""
    games = [("a", "b", 1.0)] * 240 + [("a", "b", 0.0)] * 160
    low, high = elo_intervals(games)["a"]
    assert low < elo(games)["a"] < high
    assert (high - low) / 2 == pytest.approx(1.96 * 250 / math.log(10) / math.sqrt(400 * 0.24), rel=0.15)
    assert elo_intervals(games) == elo_intervals(games)


def test_exact_permutations() -> None:
    """Five differences of 1: of the 32 exchanges 2 are as far out, p = 1/16."""
    assert paired_permutation([1.0] * 5, [0.0] * 5) == pytest.approx(2 / 32)
    assert paired_permutation([0.5, 1.0], [0.5, 1.0]) == 1.0
    assert paired_permutation([1.0, 0.0] * 50, [0.0, 1.0] * 50) > 0.9
