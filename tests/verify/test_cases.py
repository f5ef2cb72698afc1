r"""The large table: hand-written pairs by category (`cases.tsv`), and the answers that peers get wrong.

A row says what mathematicians would say, not what the code does; a rule that needs a row changed is a wrong rule. One
row was changed: five of seven languages write 1,23 for 1.23, and where the true answer is one number no list equals it.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from shared.types import Verdict
from verify.extract import extract_answer
from verify.math.algebra import equal
from verify.math.plain import decide


def read_cases(name: str = "cases.tsv") -> list[tuple[str, bool, str, str]]:
    """(category, equal, ground_truth, answer) of every row."""
    lines = (Path(__file__).parent / name).read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines if line and not line.startswith("#")]
    return [(category, sign == "=", ground_truth, answer) for category, sign, ground_truth, answer in rows]


CASES = read_cases()


def judge(ground_truth: str, answer: str) -> Verdict:
    """Both stages of `is_equivalent` without its process."""
    ground_truth, answer = extract_answer(ground_truth) or ground_truth, extract_answer(answer) or answer
    return decide(ground_truth, answer) or equal(ground_truth, answer)


Judged = tuple[bool, str, str]
BY_CATEGORY: dict[str, list[Judged]] = {}
for kind, *row in CASES:
    BY_CATEGORY.setdefault(kind, []).append(tuple(row))  # type: ignore[arg-type]


@pytest.mark.parametrize("category", BY_CATEGORY)
def test_verdicts(category: str) -> None:
    rows = BY_CATEGORY[category]
    wrong = [row for row in rows if (judge(row[1], row[2]) is Verdict.CORRECT) is not row[0]]
    assert not wrong, "(equal, true answer, answer)"


ONE_WAY = ("decimal", "condition", "unsolved")


@pytest.mark.parametrize("category", [one for one in BY_CATEGORY if one not in ONE_WAY])
def test_verdicts_the_other_way_round(category: str) -> None:
    """Meaning is symmetric, but for decimals that stand for an exact number only as an answer, and for conditions."""
    wrong = [row for row in BY_CATEGORY[category] if (judge(row[2], row[1]) is Verdict.CORRECT) is not row[0]]
    assert not wrong, "(equal, answer, true answer)"


def test_a_condition_is_no_answer_where_its_solution_is_asked_for() -> None:
    """Else a policy would be paid for repeating the problem."""
    rows = BY_CATEGORY["condition"]
    assert rows and not [row for row in rows if judge(row[2], row[1]) is Verdict.CORRECT]


def test_every_category_has_both_kinds_and_no_row_twice() -> None:
    counts = Counter((category, same) for category, same, _, _ in CASES)
    categories = {category for category, _ in counts}
    assert len(CASES) >= 1_200 and len(categories) >= 20
    assert all(counts[category, False] >= 3 for category in categories)
    assert counts["unsolved", True] == 0
    assert len({case[2:] for case in CASES}) == len(CASES)


def test_answers_as_models_and_data_sets_write_them() -> None:
    """Names, parts, choices, currencies and dress of `written.tsv`, both ways round."""
    rows = read_cases("written.tsv")
    wrong = [row for row in rows for pair in (row[2:], row[:1:-1]) if (judge(*pair) is Verdict.CORRECT) is not row[1]]
    assert not wrong, "(category, equal, true answer, answer)"
    assert {row[0] for row in rows if row[1]} == {row[0] for row in rows if not row[1]}
