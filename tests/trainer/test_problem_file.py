"""A data file is checked whole before a run: what would make the run wrong is refused, with file, line and repair."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from shared.config import Config
from shared.errors import DataError
from shared.sections import Data
from tests.trainer.test_data import LetterChat
from trainer.data.data_source import DataSource, PromptFormat
from trainer.data.problem_file import ProblemFile, check_answers, read_problems, without_long
from trainer.stages import Stages
from verify.answer_checker import AnswerChecker

GOOD = {"problem": "1+1?", "answer": "2"}
TABLE = [json.loads(line) for line in Path(__file__).with_name("refused_rows.jsonl").read_text("utf-8").splitlines()]
"""lines of a file, and what is said of the last one"""


def write(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("answer", ["see solution", "The answer is 42", "Both sides are equal since x is positive"])
def test_ground_truth_answers_that_nothing_equals_are_refused(tmp_path: Path, answer: str):
    path = write(tmp_path / "rows.jsonl", GOOD, {**GOOD, "answer": answer})
    with pytest.raises(DataError, match=r'rows\.jsonl:2: the answer .* every completion would be wrong.*"open"'):
        read_problems(path, "data.train")
    assert read_problems(write(path, {**GOOD, "answer": answer, "domain": "open"}), "data.train").problems


@pytest.mark.parametrize("case", TABLE, ids=lambda case: case["message"][:40])
def test_rows_that_mean_something_else_are_refused(tmp_path: Path, case: dict[str, Any]):
    with pytest.raises(DataError, match=case["message"]):
        read_problems(write(tmp_path / "rows.jsonl", *case["lines"]), "data.train")


def test_an_error_shows_the_first_faults_and_counts_all(tmp_path: Path):
    path = write(tmp_path / "rows.jsonl", *[{"problem": "1+1?", "anwser": "2"}] * 8, GOOD, "{oops")
    with pytest.raises(DataError) as told:
        read_problems(path, "data.train")
    lines = str(told.value).splitlines()
    assert lines[0].startswith("data.train: 9 rows of ") and lines[0].endswith("cannot be used:")
    assert len(lines) == 8 and lines[-2].strip() == "... and 3 more like these", "five of a kind"
    assert "is not JSON" in lines[-1]


def test_what_is_meant_is_taken(tmp_path: Path):
    """Numbers, null for what may be absent, further columns, a mark before UTF-8, whole characters in two halves."""
    path = tmp_path / "rows.jsonl"
    rows = [
        {**GOOD, "answer": 2, "id": 7, "level": 3, "type": "sum", "subject": None, "problem_id": 1, "answers": ["2"]},
        {**GOOD, "answer": 0.0000001, "language": None, "domain": None, "id": None, "source": None, "idx": 3},
    ]
    path.write_bytes(
        b"\xef\xbb\xbf" + "\n".join(map(json.dumps, rows)).encode() + b'\n{"problem": "\\ud83d\\ude00", "answer": "1"}'
    )
    one, other, smiling = read_problems(path, "data.train").problems
    assert (one.id, one.answer, other.language, other.domain, smiling.text) == ("7", "2", "en", "math", "😀")
    path.write_text(json.dumps(GOOD), encoding="utf-16")
    with pytest.raises(DataError, match=r"rows\.jsonl:1 is UTF-16.*save the file as UTF-8"):
        read_problems(path, "data.train")
    with pytest.raises(DataError, match="it is no file"):
        read_problems(tmp_path, "data.train")


def source_of(found: ProblemFile, **settings: object) -> DataSource:
    data = {"system_prompt": ""}
    tokens = {"rollout": {"max_completion_tokens": 100}, "model": {"max_tokens": 120}, "data": data}
    config = Config.model_validate({**tokens, **settings})
    return DataSource(found.problems, Stages(config), PromptFormat(LetterChat(), config.data))  # type: ignore[arg-type]


def test_prompts_that_are_too_long_are_told_before_the_run_with_their_share(tmp_path: Path):
    """A megabyte of text is one of them: it is looked at in a thread, and never again while the run draws."""
    rows = [{"problem": "x" * size, "answer": "1"} for size in (5, 20, 21, 1 << 20, 3)]
    found = read_problems(write(tmp_path / "rows.jsonl", *rows), "data.train")
    source = source_of(found)
    long = source.measure(found.problems)
    assert [found.where(one).rpartition(":")[2] for one in long] == ["4", "3"]
    assert [len(one.text) for one in without_long(found, found.problems, long, source.room)] == [5, 20, 3]
    (line,) = found.warnings
    assert "data.train: 2 of 5 problems are longer than 20 tokens" in line and "(40.0%)" in line and ":4)" in line
    drawn = [source.draw(index) for index in range(200)]
    assert {len(prompt.token_ids) for prompt in drawn} == {5, 20, 3}
    with pytest.raises(DataError, match=r"data\.train: every problem .*raise model\.max_tokens"):
        without_long(found, long, long, source.room)


def test_answers_that_the_verifier_does_not_understand_are_counted_or_refused(tmp_path: Path):
    answers = ["2", "x^2", "E(Y|X)", "f \\colon X \\to Y", "Monday", "\\frac{1}{2}", *map(str, range(100))]
    found = read_problems(write(tmp_path / "rows.jsonl", *({**GOOD, "answer": one} for one in answers)), "data.train")

    async def check(share: float) -> None:
        async with AnswerChecker(1) as checker:
            config = Config.model_validate({"reward": {"max_failure_share": share}})
            await check_answers(found, found.problems, checker, config)

    asyncio.run(check(0.05))
    (line,) = found.warnings
    assert "2 of 106 problems have a ground truth that the verifier does not understand" in line and ":3)" in line
    with pytest.raises(DataError, match=r"does not understand 2 of 106 ground truths.*\n.*rows\.jsonl:3: 'E\(Y\|X\)'"):
        asyncio.run(check(0.001))


def test_what_may_be_meant_is_a_warning_with_count_and_first_line(tmp_path: Path):
    rows = [GOOD, {**GOOD, "domain": "physics"}, {**GOOD, "answer": "opposite sides are parallel"}]
    path = write(tmp_path / "rows.jsonl", *rows)
    domain, words = read_problems(path, "data.train").warnings
    assert "1 of 3 problems are of domain 'physics'" in domain and f"(first: {path}:2)" in domain
    assert "1 of 3 problems have an answer of several words" in words and f"(first: {path}:3)" in words
    assert len(read_problems(path, "data.train", Data(domains=["physics"])).warnings) == 1


def test_the_real_sets_are_taken_without_a_false_alarm(data_folder: Path):
    """28,589 rows, of which those with an answer or a program are problems; ifeval and bfcl have neither."""
    count, told = 0, []
    for path in sorted(data_folder.glob("*.jsonl*")):
        if path.name.startswith(("ifeval", "bfcl")):
            with pytest.raises(DataError, match="lacks 'answer'"):
                read_problems(path, "data.train")
            continue
        found = read_problems(path, "data.train")
        count += len(found.problems)
        told += found.warnings
    assert count == 27408
    (none,) = [line for line in told if "reasoning_gym" not in line]
    assert '2 of 7,395 problems have an answer such as "None"' in none
    assert len(told) == 3, '100 answers in sentences (knights and knaves), a domain of its own, and MATH\'s two "None"'
