"""The last balanced box, in linear time, without guessing."""

from __future__ import annotations

import pytest

from tests.processor_time import at_most
from tests.tables import read_table
from verify.extract import extract_answer, within_limits


@pytest.mark.parametrize("row", read_table("verify/formats", kind="box"), ids=lambda row: row["text"])
def test_last_balanced_box(row: dict[str, str]) -> None:
    assert extract_answer(row["text"]) == row["answer"]


@pytest.mark.parametrize(
    "text", ["{" * 1_000_000, "\\boxed{" * 200_000, "\\boxed{" + "}" * 1_000_000, "\\" * 1_000_000]
)
def test_hostile_text_takes_no_time(text: str) -> None:
    with at_most(0.5):
        extract_answer("\\boxed{1}" + text)


def test_limits() -> None:
    assert within_limits("1" * 400) and not within_limits("1" * 401) and not within_limits("x = " + "1" * 401)
    assert within_limits("x " * 1000) and not within_limits("x " * 1001)
    assert within_limits("{" * 200) and not within_limits("{" * 201)
    assert within_limits("{}" * 300)
