"""The last balanced box, in linear time, without guessing."""

from __future__ import annotations

import pytest

from tests.processor_time import at_most
from verify.extract import extract_answer, within_limits


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("\\boxed{5}", "5"),
        ("\\boxed{ 5 }", "5"),
        ("\\boxed {5}", "5"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{\\{1,2\\}}", "\\{1,2\\}"),
        ("\\boxed{a\\}b}", "a\\}b"),
        ("\\boxed{1} and \\boxed{2}", "1, 2"),
        ("$\\boxed{1}$, $\\boxed{2}$", "1, 2"),
        ("\\boxed{1}, \\boxed{2} and \\boxed{3}", "1, 2, 3"),
        ("\\boxed{2}\n\\boxed{2}", "2"),
        ("First \\boxed{1}. Then \\boxed{2}", "2"),
        ("\\boxed{4} no, \\boxed{5}", "5"),
        ("\\boxed{1} and \\boxed{2", "1"),
        ("\\boxed{\\boxed{5}}", "5"),
        ("{\\boxed{5}", "5"),
        ("}}\\boxed{5}", "5"),
        ("\\boxed{}", ""),
        ("\\boxed{5", None),
        ("\\boxed5", None),
        ("5", None),
        ("", None),
        ("\\boxed{5\\}", None),
    ],
)
def test_last_balanced_box(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    "text", ["{" * 1_000_000, "\\boxed{" * 200_000, "\\boxed{" + "}" * 1_000_000, "\\" * 1_000_000]
)
def test_hostile_text_takes_no_time(text: str) -> None:
    with at_most(0.5):
        extract_answer("\\boxed{1}" + text)


def test_limits() -> None:
    assert within_limits("1" * 400) and not within_limits("1" * 401)
    assert within_limits("x " * 1000) and not within_limits("x " * 1001)
    assert within_limits("{" * 200) and not within_limits("{" * 201)
    assert within_limits("{}" * 300)
