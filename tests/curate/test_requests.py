"""Which rows ask for a reasoning language, and for which one."""

import json
from collections import Counter
from typing import Any

import pytest

from curate.__main__ import main
from curate.languages import RequestStage
from curate.stage import Kept
from shared.errors import ConfigError, DataError
from tests.curate.deciding import decide_rows
from trainer.data.problem_file import read_problems

PROBLEMS = {"en": "How many apples does Tom have now?", "fr": "Combien de pommes a maintenant Paul ?",
            "de": "Wie viele Äpfel hat Hans jetzt?"}  # fmt: skip


def rows_of(count: int) -> list[dict[str, Any]]:
    return [
        {"id": f"{number}/{language}", "problem": f"{number}: {text}", "answer": "3", "language": language}
        for number in range(count)
        for language, text in PROBLEMS.items()
    ]


def asking(stage: RequestStage, rows: list[dict[str, Any]]) -> dict[str, str]:
    """id -> the language that its row asks for, "" for none; nothing else of a row has changed."""
    found: dict[str, str] = {}
    for row, decision in zip(rows, decide_rows(stage, rows), strict=True):
        assert isinstance(decision, Kept) and len(decision.rows) == 1
        new = dict(decision.rows[0])
        found[row["id"]] = new.pop("reasoning_language", "")
        assert new == {name: value for name, value in row.items() if name != "reasoning_language"}
    return found


def test_shares_ask_for_their_own_and_for_other_languages():
    rows = rows_of(100)
    found = asking(RequestStage(languages=["en", "fr", "de", "zh"], share=0.1, crossed=0.2), rows)
    own = [id for id, asked in found.items() if asked and id.endswith(asked)]
    crossed = Counter(asked for id, asked in found.items() if asked and not id.endswith(asked))
    assert len(own) == 30 and crossed.total() == 60 and crossed == dict.fromkeys(("en", "fr", "de", "zh"), 15)
    assert asking(RequestStage(languages=["en", "fr", "de", "zh"], share=0.1, crossed=0.2), rows[::-1]) == found
    assert asking(RequestStage(languages=["en", "fr", "de", "zh"], share=0.1, crossed=0.2, seed=1), rows) != found
    alone = asking(RequestStage(crossed=0.0, share=1.0), rows)
    assert all(id.endswith(f"/{asked}") for id, asked in alone.items())
    assert not any(asking(RequestStage(crossed=0.0, share=0.0), rows).values())


def test_every_kind_of_problem_asks_and_what_asks_already_stays():
    rows = [
        {"id": "a", "problem": PROBLEMS["fr"], "answer": "3"},
        {"id": "b", "problem": "Write a program that adds.", "domain": "code", "tests": {}, "language": "en"},
        {"id": "c", "problem": "Erzähle mir eine Geschichte von einem Hund.", "domain": "open", "language": "de"},
        {"id": "d", "problem": PROBLEMS["en"], "language": "en", "reasoning_language": "sw"},
    ]  # fmt: skip
    assert asking(RequestStage(share=1.0, crossed=0.0), rows) == {"a": "fr", "b": "en", "c": "de", "d": "sw"}
    crossed = asking(RequestStage(languages=["en", "pt"], share=0.0, crossed=1.0), rows)
    assert crossed["b"] == "pt" and {crossed["a"], crossed["c"]} <= {"en", "pt"} and crossed["d"] == "sw"


def test_a_response_that_is_there_is_never_asked_for_in_another_language():
    german = "Hans hat am Anfang zwölf Äpfel, und dann kauft er noch drei davon dazu."
    rows = [
        {"id": "a", "problem": PROBLEMS["de"], "language": "de", "completion": f"<think>{german}</think>3"},
        {"id": "b", "problem": PROBLEMS["fr"], "language": "fr", "completion": [
            {"role": "user", "content": PROBLEMS["fr"]}, {"role": "assistant", "content": german}]},
        {"id": "c", "problem": PROBLEMS["en"], "language": "en", "prefix": f"<think>{german}"},
    ]  # fmt: skip
    assert asking(RequestStage(share=1.0, crossed=0.0), rows) == {"a": "de", "b": "", "c": ""}
    assert not any(asking(RequestStage(share=0.0, crossed=1.0), rows).values())


def test_the_command_reports_by_language_and_its_rows_are_read(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in [*rows_of(10), {
        "id": "x", "problem": "1+1=?", "answer": "2", "reasoning_language": "it"}]))  # fmt: skip
    assert main(["request", str(source), "--out", str(out), "--languages", "ja", "--share", "0.5"]) == 0
    counts = json.loads(out.with_suffix(".report.json").read_text())["counts"]
    assert counts["ask for ja, another than the problem"] == 3 and counts["asked for it before"] == 1
    assert sum(count for name, count in counts.items() if name.endswith("that of the problem")) == 15
    problems = read_problems(out, "data.train")
    assert Counter(one.reasoning_language for one in problems.problems)["ja"] == 3


@pytest.mark.parametrize(("options", "row", "words"), [
    ({"share": 0.8, "crossed": 0.3}, {}, "--share = 0.8, --crossed = 0.3: must be at most 1 together"),
    ({"languages": ["klingon"]}, {}, "--languages: language 'klingon' is no code that the language detector knows"),
    ({}, {"language": "German"}, "file:1: language 'German' is no code that the language detector knows"),
    ({}, {"reasoning_language": "auto"}, "file:1: reasoning_language 'auto' is no code that the language detector"),
])  # fmt: skip
def test_bad_input_names_what_is_wrong(options, row, words):
    with pytest.raises((ConfigError, DataError)) as raised:
        decide_rows(RequestStage.of(options), [{"id": "1", "problem": "1+1=?", "answer": "2", **row}])
    assert words in str(raised.value)
