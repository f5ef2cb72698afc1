"""Completion lengths: the lognormal against its definition and a simulation."""

import math
import random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.plan.scenario import Lengths
from shared.errors import ConfigError


@given(mean=st.floats(10, 10_000), ratio=st.floats(1.01, 12))
def test_mean_and_percentile_are_those_that_were_asked_for(mean, ratio):
    lengths = Lengths(mean, ratio * mean, 1e9)
    assert math.isclose(lengths.mean, mean, rel_tol=1e-6)
    assert math.isclose(lengths.quantile(0.99), ratio * mean, rel_tol=1e-9)


def test_moments_and_the_longest_agree_with_a_simulation():
    lengths, draw = Lengths(1000, 4000, 6000), random.Random(0)
    middle = math.log(1000) - lengths.spread**2 / 2
    batches = [[min(draw.lognormvariate(middle, lengths.spread), 6000) for _ in range(200)] for _ in range(400)]
    assert math.isclose(lengths.longest(200), fmean(max(batch) for batch in batches), rel_tol=0.04)
    assert math.isclose(lengths.mean, fmean(length for batch in batches for length in batch), rel_tol=0.02)
    assert math.isclose(lengths.mean_square, fmean(x * x for batch in batches for x in batch), rel_tol=0.03)


def test_long_ones_are_cut():
    cut = Lengths(1000, 4000, 2000)
    assert math.isclose(cut.longest(10_000), 2000) and cut.mean < 1000


def test_equal_lengths():
    equal = Lengths(100, 100, 1000)
    assert (equal.mean, equal.mean_square) == (100, 100**2) and math.isclose(equal.longest(1000), 100)


@pytest.mark.parametrize(
    ("mean", "p99", "told"), [(100, 50, "at least the mean"), (0.5, 5, "at least 1"), (100, 1500, "at most 1497")]
)
def test_impossible_lengths_are_refused(mean, p99, told):
    with pytest.raises(ConfigError, match=told):
        Lengths(mean, p99, 1e9)
