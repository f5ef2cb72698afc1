"""Completion lengths: moments by hand on two atoms, the lognormal against its definition and a simulation."""

from __future__ import annotations

import math
import random
from statistics import NormalDist, fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.plan.lengths import Lengths, lognormal, measured
from shared.errors import ConfigError

TWO = Lengths((1.0, 3.0), (0.5, 0.5))


def test_moments_of_two_lengths_by_hand() -> None:
    assert TWO.mean == 2 and TWO.mean_square == 5
    assert TWO.position == 5 / (2 * 2)
    assert TWO.longest(1) == 2 and TWO.longest(2) == 1 / 4 + 3 * 3 / 4


def test_share_of_tokens_behind_a_position() -> None:
    # four tokens in two completions: positions 0 | 0 1 2
    assert [TWO.tail(y) for y in (-1, 0, 1, 2, 3, 9)] == [1, 1, 0.5, 0.25, 0, 0]


@given(mean=st.floats(10, 10_000), ratio=st.floats(1.01, 12))
def test_a_lognormal_has_the_mean_and_the_percentile_that_were_asked_for(mean: float, ratio: float) -> None:
    lengths = lognormal(mean, ratio * mean)
    assert math.isclose(sum(lengths.weights), 1, rel_tol=1e-9)
    assert math.isclose(lengths.mean, mean, rel_tol=1e-6)
    reached = zip(lengths.tokens, lengths.cumulated, strict=True)
    p99 = next(length for length, below in reached if below >= 0.99)
    assert math.isclose(p99, ratio * mean, rel_tol=0.06), "bins are 5 % of the tail wide"
    assert list(lengths.tokens) == sorted(lengths.tokens)


def test_the_second_moment_and_the_longest_agree_with_a_simulation() -> None:
    mean, p99 = 1000.0, 4000.0
    z = NormalDist().inv_cdf(0.99)
    spread = z - math.sqrt(z * z - 2 * math.log(p99 / mean))
    draw = random.Random(0)
    batches = [[draw.lognormvariate(math.log(mean) - spread**2 / 2, spread) for _ in range(200)] for _ in range(400)]
    lengths = lognormal(mean, p99)
    assert math.isclose(lengths.longest(200), fmean(max(batch) for batch in batches), rel_tol=0.04)
    assert math.isclose(lengths.mean_square, fmean(x * x for batch in batches for x in batch), rel_tol=0.05)


def test_long_ones_are_cut() -> None:
    cut = lognormal(1000, 4000, limit=2000)
    assert cut.tokens[-1] == 2000 and math.isclose(cut.longest(10_000), 2000) and cut.mean < 1000


def test_equal_lengths() -> None:
    assert lognormal(100, 100) == Lengths((100.0,), (1.0,))


@pytest.mark.parametrize(
    ("mean", "p99", "told"), [(100, 50, "at least the mean"), (0.5, 5, "at least 1"), (100, 1500, "at most 1497")]
)
def test_impossible_lengths_are_refused(mean: float, p99: float, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        lognormal(mean, p99)


def test_measured_lengths() -> None:
    assert measured([3, 1, 0]) == TWO
    with pytest.raises(ConfigError, match="no completion"):
        measured([0])
