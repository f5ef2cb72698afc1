"""Elo ratings and the paired permutation test, against values by hand."""

from __future__ import annotations

import math

import pytest

from shared.statistics import elo, elo_intervals, paired_permutation


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
