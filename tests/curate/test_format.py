"""The stage format on rows of every kind, and how multiple choice is read."""

import json

import pytest

from curate.__main__ import main as curate
from curate.format import FormatStage, count_words, find_choices, letter_of, needs_options, position_of
from shared.jsonl import read_rows
from tests.curate.deciding import reasons_of
from tests.published import SETS
from tests.tables import read_table

pytestmark = pytest.mark.usefixtures("quick_checkers")
FORMATS = read_table("curate/formats")
CHOICES = "curate/choices"


def test_reasons():
    reasons = reasons_of(FormatStage(workers=1), [case["row"] for case in FORMATS])
    assert reasons == [case["reason"] for case in FORMATS]


def test_published_sets_and_other_files_are_read_as_a_launch_reads_them(tmp_path):
    """All sets in one JSON list, and a table whose columns the option names."""
    rows = [each.row for name in SETS for each in SETS[name][:5]]
    bad = [{"query": "1+1?", "reply": "2"}, {"question": "1+1?", "prompt": "2+2?", "answer": "2"}]
    (tmp_path / "rows.json").write_text(json.dumps([*rows, *bad]))
    out = tmp_path / "out.jsonl"
    assert curate(["format", str(tmp_path / "rows.json"), "--out", str(out), "--workers=1"]) == 0
    kept = [row.fields for row in read_rows(out)]
    assert len(kept) == len(rows) and all(row["problem"] and (row.get("answer") or row["tests"]) for row in kept)
    rejected = [row.fields["rejected"] for row in read_rows(tmp_path / "out.rejected.jsonl")]
    assert [why["reason"] for why in rejected] == ["no problem text", "shape not readable"]
    assert 'data.columns = { problem = "query", answer = "reply" }' in rejected[0]["detail"]
    (tmp_path / "rows.csv").write_text("frage,zahl\n1+1?,2\n")
    columns = ["--columns", "problem=frage,answer=zahl"]
    assert curate(["format", str(tmp_path / "rows.csv"), "--out", str(tmp_path / "a.jsonl"), *columns]) == 0
    assert [row.fields for row in read_rows(tmp_path / "a.jsonl")] == [{"problem": "1+1?", "answer": "2"}]
    assert curate(["format", str(tmp_path / "rows.csv"), "--out", str(tmp_path / "a.jsonl")]) == 2, "another job"
    assert curate(["format", str(tmp_path / "rows.csv"), "--out", str(tmp_path / "b.jsonl"), "--columns", "x=y"]) == 2


def test_words_of_an_answer():
    answers = ["4 \\text{ feet}", "\\frac{abc}{2}", "$x^2 + ab$", "三十个苹果", "every prime except 2"]
    assert [count_words(answer) for answer in answers] == [1, 1, 0, 3, 3]


@pytest.mark.parametrize("case", read_table(CHOICES, kind="options"))
def test_options_are_taken_out(case):
    choices = find_choices(case["text"], "B")
    assert choices is not None
    assert (choices.stem, choices.options) == ("How many?", ["477", "482", "487"])
    assert position_of(choices, "\\text{(B)}") == 1 and not needs_options(choices, "482")


def test_an_open_end_is_marked_and_drawings_stay():
    asy = '[asy] draw((0,0)); label("(A)"); [/asy]'
    for text, stem in ((f"If $x>0$, then $x^2$= {asy}", f"If $x>0$, then $x^2$= ____.\n{asy}"),
                       ("The number of pairs $(f,m)$ is", "The number of pairs $(f,m)$ is ____.")):  # fmt: skip
        choices = find_choices(f"{text}\n(A) 1 (B) 2 (C) 4", "4")
        assert choices is not None and choices.stem == stem and not needs_options(choices, "4")


@pytest.mark.parametrize("case", read_table(CHOICES, kind="needs"))
def test_problems_that_need_their_options(case):
    choices = find_choices(f"{case['stem']}\n(A) 1 (B) {case['option']} (C) 3 (D) 4", "B")
    assert choices is not None and needs_options(choices, case["option"]) == case["why"]


@pytest.mark.parametrize("case", read_table(CHOICES, kind="none"))
def test_labels_that_are_no_options(case):
    assert find_choices(case["text"], case["answer"]) is None


def test_letters():
    assert [letter_of(text) for text in ("B", "(b)", "\\text{(B)}", "$\\textbf{B}$", "B.", "B) 5")] == list("BbBBBB")
    assert [letter_of(text) for text in ("BC", "5", "x", "AB=3", "B=2")] == [""] * 5
