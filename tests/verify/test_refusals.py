"""What `reward.refuse` refuses: no undeserved reward in any class, and no honest completion refused (`refusals.py`)."""

from __future__ import annotations

import asyncio
import time

import pytest

from shared.sections import RewardWeights
from shared.types import Problem, Reward, Verdict
from tests.verify import code_blocks, refusals, refusals_again
from tests.verify.refusals import Row
from verify.code_block import first_program
from verify.format import Parts
from verify.math.plain import decide
from verify.refusals import refuse_answer, refuse_format
from verify.reward import CompletionScorer
from verify.text_cleaning import asides, clean

GUARDED = {
    "empty": "format", "thoughtless": "format", "hidden": "correctness", "several": "correctness",
    "restated": "correctness", "foreign": "language",
}  # fmt: skip
ROWS = [
    pytest.param(kind, row, id=f"{kind} {table} {index}")
    for table, kinds in (("first", refusals.FIRST), ("second", refusals_again.SECOND))
    for kind, rows in kinds.items()
    for index, row in enumerate(rows)
]


class Equal:
    """Right unless the pool would be asked and finds otherwise: what is refused is refused before any comparison."""

    async def check(self, ground_truth: str, answer: str) -> Verdict:
        found = decide(ground_truth, answer)
        return Verdict.CORRECT if found is None else found


def rewarded(row: Row, refuse: list[str] | None = None) -> Reward:
    settings = RewardWeights(length_max=100) if refuse is None else RewardWeights(length_max=100, refuse=refuse)  # type: ignore[arg-type]
    problem = Problem("x", row.problem, row.ground_truth, "fr" if row.problem == refusals.FR else "en")
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
        assert (
            sum(not row.paid for row in refusals.FIRST[kind]) >= 20
            and len(refusals_again.SECOND.get(kind, refusals.FIRST[kind])) >= 10
        )
        assert any(row.paid for row in refusals.FIRST[kind])


@pytest.mark.parametrize("kind", GUARDED)
def test_without_its_rule_a_class_is_paid(kind: str) -> None:
    others = [rule for rule in GUARDED if rule != kind]
    rows = [row for row in refusals.FIRST[kind] if not row.paid]
    paid = sum(getattr(rewarded(row, others), GUARDED[kind]) > 0 for row in rows)
    assert paid > len(rows) // 2, f"only {paid} of {len(rows)}"


def test_a_refusal_says_why() -> None:
    assert "one of several" in rewarded(Row(False, "It is 4 or \\boxed{5}.")).reason
    assert "computed" in rewarded(Row(False, "\\boxed{2+3}")).reason
    assert rewarded(Row(False, "The answer is \\boxed{}.")).reason == "format: the box is empty"


@pytest.mark.parametrize(("solution", "found"), [*code_blocks.FIRST, *code_blocks.SECOND])
def test_programs_in_lists_quotations_and_other_fences(solution: str, found: tuple[str, str] | None) -> None:
    assert first_program(solution) == found


@pytest.mark.parametrize(
    "piece",
    [
        "\\boxed{}",
        "\\boxed{1} or ",
        "\\boxed{",
        "`",
        "```\n",
        "<!--",
        "<a ",
        "\n%",
        "a% ",
        "\\text{",
        "- ",
        "~~a",
        "not ",
    ],
)
@pytest.mark.slow
def test_hostile_text_takes_linear_time(piece: str) -> None:
    long = piece * (300_000 // len(piece))
    start = time.perf_counter()
    parts = Parts(long, f"{long} \\boxed{{5}} {long}", "5", "")
    problem = Problem("x", long, "5")
    refuse_format(problem, parts, GUARDED)
    refuse_answer(problem, parts, GUARDED)
    asides(f"$ {long}")
    clean(long * 4)
    assert time.perf_counter() - start < 12  # a tenth of it on a quiet machine; quadratic scans took minutes
