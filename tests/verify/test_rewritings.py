"""Every kind of real answer: equal to itself and to its rewritings, different from near misses."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from shared.jsonl import read_rows
from shared.types import Verdict
from tests.verify.blocking import judge
from tests.verify.rewritings import DIFFERENT, SAME

SAMPLES = ["12", "-3400", "\\frac{3}{4}", "-\\frac{7}{2}", "(1,2)", "(1,-2,3)", "x^2 + 3x - 2", "2\\pi", "[0,\\infty)"]


def count_errors(answers: list[str]) -> tuple[Counter[str], Counter[str], list[tuple[str, str, str]]]:
    """How often each change was applied, how often judged wrongly, and what was judged wrongly."""
    tried: Counter[str] = Counter()
    wrong: Counter[str] = Counter()
    examples = []
    for answer in answers:
        for same, changes in ((True, SAME), (False, DIFFERENT)):
            for change in changes:
                changed = change(answer)
                if changed is None:
                    continue
                tried[change.__name__] += 1
                if (judge(answer, changed) is Verdict.CORRECT) is not same:
                    wrong[change.__name__] += 1
                    examples.append((change.__name__, answer, changed))
    return tried, wrong, examples


def test_every_change_applies_and_is_judged_right() -> None:
    tried, wrong, examples = count_errors(SAMPLES)
    assert not wrong, examples
    assert {change.__name__ for change in [*SAME, *DIFFERENT]} == set(tried)


@pytest.mark.soak  # in make test: the same rewritings of written answers
@pytest.mark.slow
def test_real_answers(data_folder: Path) -> None:
    rows = [row.fields for path in sorted(data_folder.glob("*.jsonl*")) for row in read_rows(path)]
    answers = {row["answer"] for row in rows if row.get("domain") == "math" and isinstance(row.get("answer"), str)}
    assert [answer for answer in answers if judge(answer, answer) is not Verdict.CORRECT] == []
    tried, wrong, examples = count_errors(sorted(answers))
    assert sum(tried.values()) > 20_000
    assert not wrong, examples[:20]
