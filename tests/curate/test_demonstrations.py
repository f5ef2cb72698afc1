"""Demonstrations out of a run's rollouts and out of graded files."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from curate.__main__ import main
from curate.demonstrations import DemonstrationsStage, GradedCompletion
from shared.types import Completion, Group, Problem, Prompt, Reward, Verdict
from trainer.data.demonstration_rows import completion_of
from trainer.data.problem_file import read_problems
from verify.__main__ import main as grade


def reward(verdict: Verdict) -> Reward:
    return Reward(total=1.0, format=0.1, correctness=0.9, length=0.0, language=0.0, verdict=verdict)


def group(name: str, right: list[int], wrong: list[int], failed: int = 0) -> Group:
    """A group with completions of these lengths."""
    verdicts = [Verdict.CORRECT] * len(right) + [Verdict.WRONG] * len(wrong) + [Verdict.TIMEOUT] * failed
    lengths = [*right, *wrong, *[9] * failed]
    completions = [
        Completion(0, index, 0, token_ids=[1] * length, finish_reason="stop") for index, length in enumerate(lengths)
    ]
    problem = Problem(name, f"Problem {name}?", "4", language="de")
    texts = [f"<think>{name} {index} {length}</think>" for index, length in enumerate(lengths)]
    return Group(Prompt(0, problem, [1, 2]), completions, [reward(verdict) for verdict in verdicts], texts)


@pytest.fixture
def run_folder(tmp_path):
    folder = tmp_path / "run"
    (folder / "rollouts").mkdir(parents=True)
    steps = {
        1: [group("early", [5, 6], [])],
        2: [group("a", [10, 100], [50])],
        3: [group("a", [110], [50], failed=2), group("hard", [120], [9, 9, 9])],
        10: [group("a", [130, 140, 150], []), group("never", [], [7, 8])],
    }
    for step, groups in steps.items():
        lines = b"".join(msgspec.json.encode(each) + b"\n" for each in groups)
        (folder / "rollouts" / f"step_{step}.jsonl").write_bytes(lines)
    return folder


def select(source: Path, out: Path, *options: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    assert main(["demonstrations", str(source), "--out", str(out), "--restart", *options]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    return rows, json.loads(out.with_suffix(".report.json").read_text())


def test_right_completions_of_a_run(run_folder, tmp_path):
    rows, report = select(run_folder, tmp_path / "out.jsonl", "--skip-steps=1", "--per-problem=9", "--early=0.34")
    of_a = [row for row in rows if row["id"] == "a"]
    assert len(of_a) == 5 and all("a 0 10" not in row["completion"] for row in of_a)  # short and early
    assert {row["pass_rate"] for row in of_a} == {6 / 8}  # of graded ones; timeouts are none
    hard = [row for row in rows if row["id"] == "hard"]
    assert hard == [{"id": "hard", "problem": "Problem hard?", "completion": "<think>hard 0 120</think>",
                     "language": "de", "domain": "math", "pass_rate": 0.25}] * 2  # fmt: skip
    assert len(rows) == 7 and completion_of(hard[0], "x") == "<think>hard 0 120</think>"
    assert report["counts"] == {
        "demonstrations": 7, "completions not right": 7, "completions not graded": 2,
        "completions of a skipped step": 2, "completions short and early": 1,
    }  # fmt: skip
    assert report["rejected"] == {"no completion to imitate": 2} and report["rows_in"] == 6
    assert [file["file"] for file in report["inputs"]] == [f"step_{step}.jsonl" for step in (1, 2, 3, 10)]


def test_caps_and_copies(run_folder, tmp_path):
    options = ("--skip-steps=1", "--per-problem=2", "--copies=3", "--hard=0.8", "--early=0")
    rows, report = select(run_folder, tmp_path / "out.jsonl", *options)
    of_a = [row["completion"] for row in rows if row["id"] == "a"]
    assert len(of_a) == 6 and len(set(of_a)) == 2
    assert report["counts"]["completions above --per-problem"] == 4
    other, _ = select(run_folder, tmp_path / "out.jsonl", *options, "--seed=5")
    assert {row["completion"] for row in other if row["id"] == "a"} != set(of_a)


def test_a_demonstration_asks_as_its_problem_did(tmp_path):
    source = tmp_path / "graded.jsonl"
    row = {"problem": "1+1=?", "answer": "2", "reasoning_language": "fr", "response": "<think>Oui</think>2",
           "verdict": "correct"}  # fmt: skip
    source.write_text(json.dumps(row))
    rows, _ = select(source, tmp_path / "out.jsonl")
    assert {row["reasoning_language"] for row in rows} == {"fr"}


def test_repeated_texts_count_once(tmp_path):
    source = tmp_path / "in.jsonl"
    right = "<think>Two.</think>\\boxed{4}"
    row = {"id": "x", "problem": "2+2?", "answer": "4", "response": right, "verdict": "correct"}
    source.write_text("".join(json.dumps(each) + "\n" for each in (row, row, {**row, "verdict": "wrong"})))
    rows, report = select(source, tmp_path / "out.jsonl")
    assert len(rows) == 1 and rows[0]["pass_rate"] == 2 / 3
    assert report["counts"]["completions that repeat another"] == 1


@pytest.mark.slow
def test_verdicts_of_the_verifier_are_joined(tmp_path, capsys):
    source, verdicts = tmp_path / "responses.jsonl", tmp_path / "verdicts.jsonl"
    row = {"id": "x", "problem": "2+2?", "answer": "4"}
    answers = ["<think>Two and two are four.</think>It is \\boxed{4}.", "<think>No.</think>\\boxed{5}", "4"]
    source.write_text("".join(json.dumps({**row, "response": answer}) + "\n" for answer in answers))
    assert grade([str(source), "--out", str(verdicts)]) == 0
    rows, _ = select(source, tmp_path / "out.jsonl", "--verdicts", str(verdicts))
    assert [row["completion"] for row in rows] == answers[:1] and rows[0]["pass_rate"] == 1 / 3
    source.write_text(source.read_text().replace("2+2?", "3+1?"))
    arguments = ["demonstrations", str(source), "--out", str(tmp_path / "other.jsonl"), "--verdicts", str(verdicts)]
    capsys.readouterr()
    assert main(arguments) == 2 and "responses.jsonl:1: --verdicts has none" in capsys.readouterr().err


def test_open_answers_are_not_called_wrong():
    problem, verdicts = Problem("p", "?", "prose", domain="open", hidden=True), (Verdict.OPEN, Verdict.NO_ANSWER)
    graded = [GradedCompletion(0, problem, str(n), 5, verdict, 1) for n, verdict in enumerate(verdicts)]
    assert DemonstrationsStage().choose(graded) == ([], {0: {"of open problems": 2}})


def test_bad_input_is_one_line(tmp_path, capsys):
    source, out = tmp_path / "in.jsonl", str(tmp_path / "out.jsonl")
    source.write_text('{"problem": "2+2?", "answer": "4", "response": "4"}\n')
    for arguments, words in (
        ([str(source)], "no verdict: give --verdicts"),
        ([str(tmp_path)], "no folder of a run"),
        ([str(source), "--copies=0"], "--copies = 0"),
        ([str(source), "--hard=2"], "--hard = 2: must be less than or equal to 1"),
        ([str(source), "--seed=many"], "--seed = many: must be a valid integer"),
        ([str(source), str(source), "--verdicts", str(source)], "one input file"),
        ([str(source), "--verdicts", str(tmp_path / "none")], "cannot be read"),
    ):
        assert main(["demonstrations", *arguments, "--out", out]) == 2
        shown = capsys.readouterr().err
        assert words in shown and shown.count("\n") == 1


def test_starts_from_prefixes_of_right_completions(run_folder, tmp_path):
    """Reasoning "<think>hard 0 120" of 17 letters: 0.8 of it is 13, where the blank before the last word stands."""
    options = ("--skip-steps=1", "--per-problem=9", "--early=0", "--start=0.8")
    rows, _ = select(run_folder, tmp_path / "out.jsonl", *options)
    [hard] = [row for row in rows if row["problem"] == "Problem hard?"]
    assert hard.pop("id").startswith("hard@0.8/")
    assert hard == {"problem": "Problem hard?", "answer": "4", "language": "de", "domain": "math",
                    "prefix": "<think>hard 0"}  # fmt: skip
    of_a = [row["prefix"] for row in rows if row["problem"] == "Problem a?"]
    assert sorted(of_a) == ["<think>a 0", "<think>a 1", "<think>a 2"], "one of each beginning"
    assert len(read_problems(tmp_path / "out.jsonl", "data.train").problems) == len(rows) == 4
    assert select(run_folder, tmp_path / "short.jsonl", *options[:3], "--start=0.1")[0] == []
