"""Exact arithmetic, and its bounds."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.processor_time import at_most
from tests.tables import read_table
from verify.math.number import TooLarge, exact_value


@pytest.mark.parametrize("row", read_table("verify/arithmetic", kind="value"), ids=lambda row: row["text"])
def test_hand_computed_values(row: dict[str, str]) -> None:
    assert exact_value(row["text"]) == Fraction(row["value"])


@pytest.mark.parametrize("row", read_table("verify/arithmetic", kind="none"), ids=lambda row: row["text"])
def test_everything_else_is_no_number(row: dict[str, str]) -> None:
    assert exact_value(row["text"]) is None


@pytest.mark.parametrize("row", read_table("verify/arithmetic", kind="huge"), ids=lambda row: row["text"][:20])
def test_huge_values_are_refused_before_they_are_computed(row: dict[str, str]) -> None:
    with at_most(1.0), pytest.raises(TooLarge):
        exact_value(row["text"])


@settings(max_examples=100)
@given(st.integers(-(10**12), 10**12), st.integers(1, 10**6))
def test_every_fraction_is_read_back(top: int, bottom: int) -> None:
    value = Fraction(top, bottom)
    assert exact_value(f"\\frac{{{top}}}{{{bottom}}}") == value
    assert exact_value(f"{top}/{bottom}") == value
    assert exact_value(f"{top:,}") == top


@settings(max_examples=300)
@given(st.text(alphabet="0123456789+-*/^!(){}., \\fracsqrtbinome", max_size=60))
def test_any_text_is_answered(text: str) -> None:
    try:
        exact_value(text)
    except TooLarge:
        pass  # an answer as well; any other exception fails
