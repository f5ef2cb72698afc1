"""What `reward.refuse` refuses: no undeserved reward in any class, and no honest completion refused (refusals.jsonl:
completions that a policy could learn to earn a reward with, and honest ones that look alike)."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import pytest

from shared.sections import RewardWeights
from shared.types import Problem, Reward, Verdict
from tests.processor_time import at_most
from tests.tables import read_table
from verify.format import Parts
from verify.math.plain import decide
from verify.refusals import refuse_answer, refuse_format
from verify.reward import CompletionScorer
from verify.text_cleaning import asides, clean

FRENCH = "Tom a 2 pommes. Il achète 3 pommes de plus. Combien de pommes a-t-il maintenant ?"


class Row(NamedTuple):
    """One completion. `paid`: the part of the reward that the rule guards is deserved."""

    paid: bool
    solution: str
    ground_truth: str = "5"
    problem: str = "Tom has 2 apples. Tom buys 3 more. How many apples does Tom have now?"
    thoughts: str = "Tom starts with 2 apples and buys 3 more, so we add them: 2+3=5."


GUARDED = {
    "empty": "format", "thoughtless": "format", "hidden": "correctness", "several": "correctness",
    "restated": "correctness", "foreign": "language",
}  # fmt: skip
ROWS = [
    (row["kind"], Row(**{field: row[field] for field in Row._fields if field in row}))
    for row in read_table("verify/refusals")
]


class Equal:
    """Right unless the pool would be asked and finds otherwise: what is refused is refused before any comparison."""

    async def check(self, ground_truth: str, answer: str) -> Verdict:
        found = decide(ground_truth, answer)
        return Verdict.CORRECT if found is None else found


def rewarded(row: Row, refuse: list[str] | None = None) -> Reward:
    settings = RewardWeights(length_max=100) if refuse is None else RewardWeights(length_max=100, refuse=refuse)  # type: ignore[arg-type]
    problem = Problem("x", row.problem, row.ground_truth, "fr" if row.problem == FRENCH else "en")
    return asyncio.run(
        CompletionScorer(settings, Equal()).score(problem, f"<think>{row.thoughts}</think>{row.solution}", 50)
    )


@pytest.mark.parametrize(("kind", "row"), ROWS)
def test_only_what_is_deserved_is_paid(kind: str, row: Row) -> None:
    found = rewarded(row)
    assert (getattr(found, GUARDED[kind]) > 0) is row.paid, found.reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [("\\boxed{5} cm\n\nOr 6.", "line of its own"), ("Whatever you do, do not take \\boxed{5}.", "line of its own"),
     ("Some say it is \\boxed{5}. They are mistaken.", "line of its own"), ("\\boxed{5} or 6", "several")],
)  # fmt: skip
def test_what_is_no_last_line_of_its_own(text: str, reason: str) -> None:
    assert reason in rewarded(Row(False, text), ["unstated", "several", "hidden"]).reason


@pytest.mark.parametrize(
    "text",
    ["\\boxed{5}", "We add.\n\n**Answer: $\\boxed{5}$**", "The answer is \\boxed{5}.", "So, $x = \\boxed{5}$ cm.",
     "Ответ: \\boxed{5}", "所以答案是 \\boxed{5}。", "\\[ \\boxed{5} \\]", "### Final Answer\n\n$\\boxed{5}$",
     "Also ist die Antwort \\boxed{5}.", "Donc la réponse finale est \\boxed{5}.", "Answer: \\boxed{5}\\text{ km/h}"],
)  # fmt: skip
def test_what_is_a_last_line_of_its_own(text: str) -> None:
    assert rewarded(Row(True, text), ["unstated", "several", "hidden"]).correctness > 0


def test_each_class_has_honest_rows_and_enough_of_the_others() -> None:
    for kind in GUARDED:
        rows = [row for of, row in ROWS if of == kind]
        assert sum(not row.paid for row in rows) >= 20 and any(row.paid for row in rows)


@pytest.mark.parametrize("kind", GUARDED)
def test_without_its_rule_a_class_is_paid(kind: str) -> None:
    others = [rule for rule in GUARDED if rule != kind]
    rows = [row for of, row in ROWS if of == kind and not row.paid]
    paid = sum(getattr(rewarded(row, others), GUARDED[kind]) > 0 for row in rows)
    assert paid > len(rows) // 2, f"only {paid} of {len(rows)}"


def test_a_refusal_says_why() -> None:
    assert "one of several" in rewarded(Row(False, "It is 4 or \\boxed{5}.")).reason
    assert "computed" in rewarded(Row(False, "\\boxed{2+3}")).reason
    assert rewarded(Row(False, "The answer is \\boxed{}.")).reason == "format: the box is empty"


@pytest.mark.parametrize(
    "piece",
    ["\\boxed{}", "\\boxed{1} or ", "\\boxed{", "`", "```\n", "<!--", "<a ", "\n%", "a% ", "\\text{", "- ", "~~a",
     "not "],
)  # fmt: skip
@pytest.mark.slow
def test_hostile_text_takes_linear_time(piece: str) -> None:
    long = piece * (300_000 // len(piece))
    parts = Parts(long, f"{long} \\boxed{{5}} {long}", "5", "")
    problem = Problem("x", long, "5")
    with at_most(12):  # a tenth of it; quadratic scans took minutes
        refuse_format(problem, parts, GUARDED)
        refuse_answer(problem, parts, GUARDED)
        asides(f"$ {long}")
        clean(long * 4)
