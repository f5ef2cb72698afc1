"""Rows of public sets, under their own columns, become our rows; rows that could be two things are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from shared.errors import DataError
from shared.sections import Data
from tests.published import READ_AS, SETS
from tests.tables import read_table
from trainer.data.problem_file import read_problems
from verify.__main__ import main as verify
from verify.published import NATIVE, READERS, renamed, to_native
from verify.verifiers import read_problem

QUESTION = "How many are three and three?"


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", SETS)
def test_each_published_set_is_read_as_it_is(name, tmp_path):
    rows = SETS[name]
    result = read_problems(write(tmp_path / "rows.jsonl", [each.row for each in rows]), "data.train")
    assert len(result.problems) == len(rows) and not result.warnings
    if name != "aime":
        assert result.shapes == {READ_AS[name]: len(rows)}
    for problem, each in zip(result.problems, rows, strict=True):
        assert "Answer:" not in problem.text and "[ASSESS]" not in problem.text and "####" not in problem.answer
        assert problem.tests if problem.domain == "code" else f"{{{int(problem.answer)}}}" in each.right
        assert sum(reader.fits(each.row) for reader in READERS) <= 1, "no row is of two shapes"
        native, _ = to_native(each.row, "row 1")
        assert to_native(native, "row 1") == (native, NATIVE), "what was read is in our own form"


def test_the_launch_says_which_reader_read_the_file(tmp_path):
    path = write(tmp_path / "rows.jsonl", [SETS[name][0].row for name in ("gsm8k", "numina", "mbpp")] * 2)
    line = "data.train: 6 problems read: 2 as worked solutions (GSM8K, MATH), 2 as our own form, 2 as MBPP"
    assert read_problems(path, "data.train").read_as == line
    path = write(tmp_path / "rows.jsonl", [SETS["numina"][0].row])
    assert read_problems(path, "data.train").read_as == "data.train: 1 problems read"


@pytest.mark.slow
@pytest.mark.usefixtures("quick_checkers")
def test_the_right_solution_of_each_set_is_paid_and_a_wrong_one_is_not(tmp_path):
    chosen = [(name, each) for name in sorted(SETS) for each in SETS[name][2:4]]
    asked = [each.row | {"response": response} for _, each in chosen for response in (each.right, each.wrong)]
    out = tmp_path / "out.jsonl"
    assert verify([str(write(tmp_path / "in.jsonl", asked)), "--out", str(out), "--workers=1"]) == 0
    verdicts = [json.loads(line)["reward"]["verdict"] for line in out.read_text().splitlines()]
    pairs = zip(verdicts[::2], verdicts[1::2], strict=True)
    names = [name for name, _ in chosen]
    assert [*zip(names, pairs, strict=True)] == [(name, ("correct", "wrong")) for name in names]


@pytest.mark.parametrize("case", read_table("verify/published_rows"), ids=lambda case: str(case)[:90])
def test_neighbours_of_the_shapes(case):
    """Those that are read, those in our own form, which wins, and those that are not beyond doubt."""
    if case["kind"] == "own form":
        assert to_native(case["row"], "row 1") == (case["row"], NATIVE)
    elif case["kind"] == "read":
        problem = read_problem(case["row"], "rows.jsonl:1")
        assert (problem.text, problem.answer, problem.domain) == (QUESTION, case["answer"], "math")
    else:
        with pytest.raises(DataError, match=case["message"]) as error:
            read_problem(case["row"], "rows.jsonl:1")
        assert str(error.value).count("rows.jsonl:1") == 1, "the place is told once"


def test_columns_of_the_users_own(tmp_path):
    rows = [{"q": QUESTION, "truth": {"value": "6"}, "rate": 0.5, "answer": "not this"}]
    data = Data(columns={"problem": "q", "answer": "truth.value", "pass_rate": "rate"})
    [problem] = read_problems(write(tmp_path / "rows.jsonl", rows), "data.train", data).problems
    assert (problem.text, problem.answer, problem.pass_rate) == (QUESTION, "6", 0.5)
    path = write(tmp_path / "native.jsonl", [{"problem": QUESTION, "answer": "6"}])
    assert read_problems(path, "data.validation", data).problems, "a file in our own form needs none of them"
    with pytest.raises(DataError, match="data.columns names 'q', and no row of .* has this column: they have 'answer'"):
        read_problems(path, "data.train", data)
    with pytest.raises(DataError, match=r"data\.columns\.problem = 'queston', .* is 'question' meant\?"):
        renamed({"question": QUESTION}, {"problem": "queston"}, "rows.jsonl:1")
    gsm8k = SETS["gsm8k"][0].row
    assert to_native(renamed(gsm8k, {"problem": "question"}, ""), "")[0] == to_native(gsm8k, "")[0]


def test_a_system_message_stays_before_the_words_of_the_user():
    prompt = [{"role": "system", "content": "Count in dozens."}, {"role": "user", "content": QUESTION}]
    assert read_problem({"prompt": prompt, "answer": "6"}, "").text == f"Count in dozens.\n\n{QUESTION}"


def test_missing_cells_of_pandas_are_missing():
    row = {"problem": QUESTION, "answer": "6", "pass_rate": float("nan"), "language": float("nan"), "id": float("nan")}
    problem = read_problem(row, "rows.jsonl:1")
    assert (problem.pass_rate, problem.language, problem.id) == (None, "en", "rows.jsonl:1")
    with pytest.raises(DataError, match="'answer' is nan"):
        read_problem(row | {"answer": float("nan")}, "rows.jsonl:1")


@pytest.mark.parametrize("name", SETS)
def test_a_cell_of_any_type_is_read_or_refused_with_the_place(name):
    odd: list[Any] = [None, 1, 0.5, True, "", "x", "[", "{}", [], {}, [None], [[]], {"a": 1}, [{"role": 1}], "\ud800"]
    for column in SETS[name][1].row:
        for cell in odd:
            try:
                read_problem(SETS[name][1].row | {column: cell}, "rows.jsonl:1")
            except DataError as error:
                assert str(error).startswith("rows.jsonl:1") and str(error).count("rows.jsonl:1") == 1, error
