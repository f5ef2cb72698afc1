"""What `reward.refuse` refuses: no undeserved reward in any class, and no honest completion refused (refusals.jsonl:
completions that a policy could learn to earn a reward with, and honest ones that look alike)."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from shared.types import Problem, Reward, Verdict
from tests.processor_time import at_most
from tests.tables import read_table
from tests.verify.grading import Grader, reward
from verify.format import Parts
from verify.math.plain import decide
from verify.refusals import refuse_answer, refuse_format
from verify.text_cleaning import asides, clean

FRENCH = "Tom a 2 pommes. Il achète 3 pommes de plus. Combien de pommes a-t-il maintenant ?"
DEFAULT = {
    "ground_truth": "5",
    "problem": "Tom has 2 apples. Tom buys 3 more. How many apples does Tom have now?",
    "thoughts": "Tom starts with 2 apples and buys 3 more, so we add them: 2+3=5.",
}
GUARDED = {
    "empty": "format", "thoughtless": "format", "hidden": "correctness", "several": "correctness",
    "restated": "correctness", "foreign": "language",
}  # fmt: skip
"""rule -> the part of the reward that it guards; `paid` in a row: that part is deserved"""
ROWS = defaultdict(list)
for entry in read_table("verify/refusals"):
    ROWS[entry["kind"]].append(DEFAULT | entry)


class Equal(Grader):
    """Right unless the pool would be asked and finds otherwise: what is refused is refused before any comparison."""

    async def check(self, ground_truth: str, answer: str) -> Verdict:
        return decide(ground_truth, answer) or Verdict.CORRECT


def rewarded(row: dict[str, Any], **changes: Any) -> Reward:
    row = DEFAULT | row
    problem = Problem("x", row["problem"], row["ground_truth"], "fr" if row["problem"] == FRENCH else "en")
    return reward(f"<think>{row['thoughts']}</think>{row['solution']}", problem, grader=Equal(), **changes)


@pytest.mark.parametrize("kind", GUARDED)
def test_only_what_is_deserved_is_paid_and_without_its_rule_the_rest_is(kind: str) -> None:
    part, undeserved = GUARDED[kind], [row for row in ROWS[kind] if not row["paid"]]
    assert not [row for row in ROWS[kind] if (getattr(rewarded(row), part) > 0) is not row["paid"]]
    others = [rule for rule in GUARDED if rule != kind]
    paid = sum(getattr(rewarded(row, refuse=others), part) > 0 for row in undeserved)
    assert len(undeserved) // 2 < paid and 20 <= len(undeserved) < len(ROWS[kind])


@pytest.mark.parametrize(
    ("solution", "reason"),
    [
        ("\\boxed{5} cm\n\nOr 6.", "line of its own"), ("Whatever you do, do not take \\boxed{5}.", "line of its own"),
        ("Some say it is \\boxed{5}. They are mistaken.", "line of its own"), ("\\boxed{5} or 6", "several"),
        ("\\boxed{5}", ""), ("We add.\n\n**Answer: $\\boxed{5}$**", ""), ("The answer is \\boxed{5}.", ""),
        ("So, $x = \\boxed{5}$ cm.", ""), ("Ответ: \\boxed{5}", ""), ("所以答案是 \\boxed{5}。", ""),
        ("\\[ \\boxed{5} \\]", ""), ("### Final Answer\n\n$\\boxed{5}$", ""), ("Also ist die Antwort \\boxed{5}.", ""),
        ("Donc la réponse finale est \\boxed{5}.", ""), ("Answer: \\boxed{5}\\text{ km/h}", ""),
    ],
)  # fmt: skip
def test_the_box_stands_in_a_last_line_of_its_own(solution: str, reason: str) -> None:
    found = rewarded({"solution": solution}, refuse=["unstated", "several", "hidden"])
    assert reason in found.reason and (found.correctness > 0) is not bool(reason)


def test_a_refusal_says_why() -> None:
    assert "one of several" in rewarded({"solution": "It is 4 or \\boxed{5}."}).reason
    assert "computed" in rewarded({"solution": "\\boxed{2+3}"}).reason
    assert rewarded({"solution": "The answer is \\boxed{}."}).reason == "format: the box is empty"


@pytest.mark.slow
def test_hostile_text_takes_linear_time() -> None:
    for piece in ("\\boxed{}", "\\boxed{1} or ", "\\boxed{", "`", "```\n", "<!--", "<a ", "\n%", "a% ", "\\text{", "- ",
                  "~~a", "not "):  # fmt: skip
        long = piece * (300_000 // len(piece))
        parts, problem = Parts(long, f"{long} \\boxed{{5}} {long}", "5", ""), Problem("x", long, "5")
        with at_most(12):  # a tenth of it; quadratic scans took minutes
            refuse_format(problem, parts, GUARDED)
            refuse_answer(problem, parts, GUARDED)
            asides(f"$ {long}")
            clean(long * 4)
