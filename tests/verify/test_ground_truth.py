"""Which ground truths are refused before a run, which are told with a count, and which are answers."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from shared.types import Verdict
from tests.tables import read_table
from tests.verify.blocking import judge
from verify.ground_truth import may_be_placeholder, not_an_answer
from verify.math.dress import dress_of

ROWS = read_table("verify/ground_truths")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["answer"])
def test_what_no_completion_equals_is_named_and_an_answer_is_one(row: dict[str, Any]) -> None:
    assert not_an_answer(row["answer"]) == row.get("what", "")
    if row["kind"] != "refused":
        assert may_be_placeholder(row["answer"]) is (row["kind"] == "doubtful")


@pytest.mark.parametrize("row", read_table("verify/ground_truths", kind="dressed"), ids=lambda row: row["answer"])
def test_what_stands_around_a_value_is_taken_away_and_told(row: dict[str, Any]) -> None:
    assert dress_of(row["answer"]) and judge(row["answer"], row["value"]) is Verdict.CORRECT


def test_answers_of_real_sets(data_folder: Path) -> None:
    told = []
    for name in ("math_train.jsonl.gz", "gsm8k_train.jsonl.gz", "deepmath_sample.jsonl.gz", "reasoning_gym.jsonl.gz"):
        with gzip.open(data_folder / name, "rt", encoding="utf-8") as file:
            answers = [row["answer"] for row in map(json.loads, file) if row["domain"] == "math" and "answer" in row]
        assert [answer for answer in answers if not_an_answer(answer)] == []
        told += [answer for answer in answers if may_be_placeholder(answer)]
    assert told == ["None", "None"]
