"""What `reward.refuse` refuses: no undeserved reward in any class, and no honest completion refused (`refusals.py`)."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from shared.sections import RewardWeights
from shared.types import Problem, Reward, Verdict
from tests.verify import code_blocks, doubts, refusals, refusals_again
from tests.verify.refusals import Row
from verify.aside import aside
from verify.code_block import first_program
from verify.format import Parts
from verify.math.plain import decide
from verify.refusals import refuse_answer, refuse_format
from verify.reward import CompletionScorer
from verify.text_cleaning import clean

GUARDED = {
    "empty": "format", "thoughtless": "format", "hidden": "correctness", "denied": "correctness",
    "restated": "correctness", "foreign": "language",
}  # fmt: skip
ROWS = [
    pytest.param(kind, row, id=f"{kind} {table} {index}")
    for table, kinds in (("first", refusals.FIRST), ("second", refusals_again.SECOND), ("third", doubts.THIRD))
    for kind, rows in kinds.items()
    for index, row in enumerate(rows)
]


STANCES = [json.loads(line) for line in (Path(__file__).parent / "stances.jsonl").read_text("utf-8").splitlines()]
"""three rounds of texts around a box, written by people who had not seen the rules, in seven languages"""


def scored(row: dict[str, Any], refuse: list[Any] | None = None) -> Reward:
    settings = RewardWeights(length_max=100) if refuse is None else RewardWeights(length_max=100, refuse=refuse)
    problem = Problem("x", row["problem"], row["answer"], row["language"])
    text = f"<think>{refusals.THOUGHTS}</think>{row['text']}"
    return asyncio.run(CompletionScorer(settings, Equal()).score(problem, text, 50))


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


@pytest.mark.parametrize("row", STANCES, ids=range(len(STANCES)))
def test_an_answer_is_paid_where_its_text_stands_by_it(row: dict[str, Any]) -> None:
    assert (scored(row).correctness > 0) is row["paid"]


def test_a_last_line_of_its_own_leaves_no_room_for_doubt() -> None:
    """Whatever the words: no text of `stances.jsonl` that is not to be paid has one."""
    rules: list[Any] = ["hidden", "unstated"]
    doubted = [row for row in STANCES if not row["paid"]]
    assert len(doubted) >= 150
    assert [row["text"] for row in doubted if scored(row, rules).correctness > 0] == [
        row["text"] for row in doubted if "left over from another exercise" in row["text"]
    ], "a line above the answer may say anything: `denied` is there for that"
    assert not any(scored(row, [*rules, "denied"]).correctness > 0 for row in doubted)
    two = STANCES[0] | {"answer": "5", "text": "\\boxed{5} cm\n\nOr 6."}
    assert scored(two, rules).reason.endswith("line of its own")


@pytest.mark.parametrize(
    "text",
    ["\\boxed{5}", "We add.\n\n**Answer: $\\boxed{5}$**", "The answer is \\boxed{5}.", "So, $x = \\boxed{5}$ cm.",
     "Ответ: \\boxed{5}", "所以答案是 \\boxed{5}。", "\\[ \\boxed{5} \\]", "### Final Answer\n\n$\\boxed{5}$",
     "Also ist die Antwort \\boxed{5}.", "Donc la réponse finale est \\boxed{5}.", "Answer: \\boxed{5}\\text{ km/h}"],
)  # fmt: skip
def test_what_is_a_last_line_of_its_own(text: str) -> None:
    assert rewarded(Row(True, text), ["unstated", "denied", "hidden"]).correctness > 0


def test_each_class_has_honest_rows_and_enough_of_the_others() -> None:
    for kind in GUARDED:
        assert sum(not row.paid for row in refusals.FIRST[kind]) >= 20 and len(refusals_again.SECOND[kind]) >= 10
        assert any(row.paid for row in refusals.FIRST[kind])


@pytest.mark.parametrize("kind", GUARDED)
def test_without_its_rule_a_class_is_paid(kind: str) -> None:
    others = [rule for rule in GUARDED if rule != kind]
    rows = [row for row in refusals.FIRST[kind] if not row.paid]
    paid = sum(getattr(rewarded(row, others), GUARDED[kind]) > 0 for row in rows)
    assert paid > len(rows) // 2, f"only {paid} of {len(rows)}"


def test_a_refusal_says_why() -> None:
    assert "denied" in rewarded(Row(False, "The answer is not \\boxed{5}.")).reason
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
    aside(f"$ {long}")
    clean(long * 4)
    assert time.perf_counter() - start < 12  # a tenth of it on a quiet machine; quadratic scans took minutes
