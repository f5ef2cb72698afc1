"""Open problems: an answer of any text that no verifier checks; what completions earn and how they are counted."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shared.errors import DataError
from shared.metrics import METRICS
from shared.sections import RewardWeights
from shared.types import Problem, Reward, Verdict
from trainer.data.problem_file import read_problems
from verify.__main__ import group_table, verdict_table
from verify.records import Record, make_record, read_items
from verify.reward import CompletionScorer, score
from verify.scorer import FailureWindow
from verify.verifiers import read_problem

ROW = {"problem": "Why does ice float on water?", "answer": "Because it is less dense than water.", "domain": "open"}
OPEN = read_problem(ROW, "row")
EN, FR = "Ice is made of water, but it takes more room.", "La glace est faite d'eau, mais elle prend plus de place."
BOX = "Water grows when it freezes: \\boxed{\\text{it is lighter}}."
GOOD = f"<think>{EN}</think>{BOX}"


class Nobody:
    """A grader and a runner of programs that must not be asked."""

    async def check(self, ground_truth: str, answer: str) -> Verdict:
        raise AssertionError("the answer of an open problem was compared")

    async def run(self, problem: Problem, source: str, language: str, group: int) -> Any:
        raise AssertionError("a program was run for an open problem")


def reward(response: str, tokens: int = 10, **changes: Any) -> Reward:
    settings = RewardWeights.model_validate({"length_max": 100, "overlong_buffer": 20, **changes})
    return asyncio.run(CompletionScorer(settings, Nobody(), Nobody()).score(OPEN, response, tokens))


@pytest.mark.parametrize(
    ("response", "tokens", "parts"),
    [
        (GOOD, 10, (0.1, 0.0, 0.0, 0.1)),
        (GOOD, 90, (0.1, 0.0, -0.05, 0.1)),
        (GOOD, 100, (0.1, 0.0, -0.1, 0.1)),
        (f"<think>{FR}</think>{BOX}", 10, (0.1, 0.0, 0.0, 0.0)),
        (f"<think>{EN}</think>\\boxed{{{ROW['answer']}}}", 10, (0.1, 0.0, 0.0, 0.1)),
    ],
)
def test_form_length_and_language_count_and_correctness_does_not(
    response: str, tokens: int, parts: tuple[float, ...]
) -> None:
    found = reward(response, tokens)
    assert (found.format, found.correctness, found.length, found.language) == pytest.approx(parts)
    assert found.total == pytest.approx(sum(parts)) and found.reason.startswith("no verifier is asked")
    assert found.verdict is Verdict.OPEN and found.verdict.graded and found.share is None


@pytest.mark.parametrize("response", [BOX, f"<think>{EN}</think>It is lighter.", f"<think>{EN}", "```python\n1\n```"])
def test_a_broken_form_is_no_answer_as_everywhere(response: str) -> None:
    found = reward(response)
    assert (found.verdict, found.total) == (Verdict.NO_ANSWER, 0.0) and found.reason.startswith("format: ")


def test_further_rewards_see_neither_right_nor_wrong() -> None:
    found = reward(GOOD, extra={"tests_passed": 1.0, "cosine_length": 1.0, "repetition": 1.0})
    assert found.extra == {"tests_passed": 0.0, "cosine_length": 0.0, "repetition": 0.0}
    assert found.verdict is Verdict.OPEN and found.total == pytest.approx(0.2)


def test_a_row_is_scored_without_a_process() -> None:
    assert score(ROW, GOOD).verdict is Verdict.OPEN


@pytest.mark.parametrize(
    ("answer", "told"),
    [(None, " lacks"), ("", " lacks"), ("  ", " lacks"), (["a"], ": 'answer' is a list"), (True, ": 'answer' is true")],
)
def test_an_open_row_needs_an_answer(tmp_path: Path, answer: Any, told: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + json.dumps({**ROW, "answer": answer}) + "\n")
    with pytest.raises(DataError, match=rf"rows.jsonl:2{told}"):
        read_problems(path, "data.train")


def test_open_rows_load_beside_others(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + json.dumps({"problem": "1+1?", "answer": 2}) + "\n")
    one, other = read_problems(path, "data.train").problems
    assert (one.domain, one.answer, one.verified) == ("open", ROW["answer"], False) and other.verified


def test_open_verdicts_are_no_failures() -> None:
    window = FailureWindow(0.05, size=200)
    for _ in range(400):
        window.add(Verdict.OPEN)
    assert window.share == 0.0 and window.counts["open"] == 200


def test_every_verdict_has_a_metric() -> None:
    assert {f"verify/{verdict.value.replace(' ', '_')}" for verdict in Verdict} <= METRICS.keys()


def records(tmp_path: Path, rows: list[dict[str, Any]]) -> list[Record]:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [make_record(item, score(item.problem, item.completion), "s") for item in read_items(path)]


def cells(table: Any) -> dict[str, list[str]]:
    stream = io.StringIO()
    Console(file=stream, width=200).print(table)
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in stream.getvalue().splitlines()]
    return {line[0]: line[1:] for line in lines if line}


def test_the_table_of_verdicts_counts_only_verified_problems_as_right(tmp_path: Path) -> None:
    right = {"problem": "What is 1+1?", "answer": "2", "response": f"<think>{EN}</think>So \\boxed{{2}}."}
    wrong, broken = {**right, "response": f"<think>{EN}</think>So \\boxed{{3}}."}, {**ROW, "response": "no"}
    made = records(tmp_path, [{**ROW, "response": GOOD}, broken, right, wrong])
    found = cells(group_table(made))
    assert found["all"][:3] == ["4", "50.0%", "75.0%"]
    assert found["math"][:3] == ["2", "50.0%", "100.0%"] and found["open"][:3] == ["2", "-", "50.0%"]
    assert cells(verdict_table(made))["open"][:2] == ["1", "25.0%"]
