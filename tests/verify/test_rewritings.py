"""Every kind of real answer: equal to itself and to its rewritings, different from near misses."""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from shared.types import Verdict
from verify.math.algebra import equal
from verify.math.plain import decide

sys.path.insert(0, str(Path(__file__).parent))
from rewritings import DIFFERENT, SAME

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
FILES = ["gsm8k_test", "math_train", "math500", "aime_1983_2023", "deepmath_sample"]
SAMPLES = ["12", "-3400", "\\frac{3}{4}", "-\\frac{7}{2}", "(1,2)", "(1,-2,3)", "x^2 + 3x - 2", "2\\pi", "[0,\\infty)"]


def judge(gold: str, answer: str) -> Verdict:
    """Both stages of `is_equivalent` without its process."""
    return decide(gold, answer) or equal(gold, answer)


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


@pytest.mark.slow
def test_real_answers() -> None:
    answers: set[str] = set()
    for name in FILES:
        path = DATA / f"{name}.jsonl.gz"
        if not path.is_file():
            pytest.skip(f"{path} is not there: the shared data folder lies beside the checkout")
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            answers |= {json.loads(line)["answer"] for line in lines}
    assert all(judge(answer, answer) is Verdict.CORRECT for answer in answers)
    tried, wrong, examples = count_errors(sorted(answers))
    assert sum(tried.values()) > 20_000
    assert not wrong, examples[:20]
