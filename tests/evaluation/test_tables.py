"""Shares of responses and what their denominators are, texts that seem to hold the answer, and two evaluations side by
side."""

import asyncio
import json
import re
from types import SimpleNamespace
from typing import Any, cast

import pytest

from evaluation.__main__ import main
from evaluation.client import ParsedResponse
from evaluation.grading import ResponseGrader
from evaluation.results import Votes, figures
from evaluation.samples import SampleRecord, label
from evaluation.tasks import BenchmarkSampling
from shared.types import Problem, Verdict
from tests.evaluation.conftest import evaluate, prompt_of, write_rows

ROWS = [{"id": f"p{number}", "problem": f"How much is {number} and two?", "answer": str(number + 2), "language": "en"}
        for number in range(10)]  # fmt: skip


def record(sample: int, **fields: Any) -> SampleRecord:
    sampling = BenchmarkSampling(samples=3, temperature=0.7, top_p=0.95, max_tokens=99)
    return SampleRecord(benchmark="sums", id="1", sample=sample, settings="", kind="answer", source="", language="en",
                        prompt_sha="", seed=0, sampling=sampling, model="m", **fields)  # fmt: skip


def test_samples_without_a_response_are_in_no_share_but_their_own():
    samples = [
        record(0, correct=True, answer="3", verdict=Verdict.CORRECT),
        record(1, correct=False, answer="so 3", verdict=Verdict.NO_ANSWER, missed=True),
        record(2, error="status 503"),
    ]
    shares = figures([samples], [Votes(1, [], 1)], 3, seed=0)
    assert shares["responses"] == 2 and shares["errors"] == pytest.approx(1 / 3)
    assert shares["missed"] == shares["unextracted"] == shares["pass_at"]["1"] == 0.5
    assert shares["pass_at"]["2"] == 1 and shares["pass_at"]["3"] is None, "two responses are not three"


@pytest.mark.parametrize(("text", "missed"), [
    ("so it is 3", True), ("so it is 3.", True), ("it is 3, I think", True),
    ("so it is 3.5", False), ("so it is 13", False), ("so it is 2.3", False), ("3 " + "x" * 2000, False),
])  # fmt: skip
def test_a_text_seems_to_hold_the_answer_where_it_is_no_piece_of_another_number(text, missed):
    task = cast(Any, SimpleNamespace(kind="answer", tools=None, problem=Problem(id="1", text="1 + 2", answer="3")))
    grader = ResponseGrader(cast(Any, None), cast(Any, None))
    grade = asyncio.run(grader.grade(task, ParsedResponse("", text, [])))
    assert (grade.verdict, grade.missed) == (Verdict.NO_ANSWER, missed)


def knows(*numbers: int) -> Any:
    def answer(body: dict[str, Any], call: int) -> str:
        number = int(prompt_of(body).split("How much is ")[1].split()[0])
        return rf"\boxed{{{number + 2 if number in numbers else -1}}}"

    return answer


def test_the_difference_and_what_flipped(plain, tmp_path, capsys):
    file, difference = write_rows(tmp_path / "sums.jsonl", *ROWS), tmp_path / "difference"
    for name, numbers in (("before", (0, 1, 2, 9)), ("after", range(8))):
        evaluate(plain(knows(*numbers)).url, tmp_path / name, file, "--samples", "2", "--model", name)
    capsys.readouterr()
    assert main(["--compare", str(tmp_path / "before"), str(tmp_path / "after"), "--out", str(difference)]) == 0
    words = " ".join(capsys.readouterr().out.split())  # without the terminal's line breaks
    compared = json.loads((difference / "compare.json").read_text())
    sums = compared["benchmarks"]["sums"]
    assert (sums["before"], sums["after"], sums["difference"], sums["problems"]) == (0.4, 0.8, 0.4, 10)
    assert sums["now_right"] == ["p3", "p4", "p5", "p6", "p7"] and sums["now_wrong"] == ["p9"]
    # five problems +1, four 0, one -1: the mean of ten draws of these has a standard deviation of 0.21
    assert sums["interval"] == pytest.approx([0.4 - 1.96 * 0.21, 0.4 + 1.96 * 0.21], abs=0.12)
    assert compared["warnings"] == [] and "warning" not in words
    # the mean of ten draws of 0.4 and of 0.8: a normal interval of 0.30 and 0.25 on each side
    assert sums["before_interval"] == pytest.approx([0.1, 0.7], abs=0.11)
    assert sums["after_interval"] == pytest.approx([0.55, 1], abs=0.11)
    assert "= before -> " in words and "= after (*" in words, "other models are what is compared, no reason to warn"
    page = (difference / "compare.html").read_text()
    whiskers = re.findall(r'class="whisker" x1="([0-9.]+)" .*? x2="([0-9.]+)"', page)
    assert [float(right) - float(left) > 90 for left, right in whiskers] == [True, True], "300 pixels are 1.0"
    assert page.count("<figcaption>pass@1") == 2 and "The line across a bar is its 95 % interval" in page
    assert "<title>Comparison of two evaluations: " in page and "<script" not in page
    assert "+40.0 (" in page and "sums, now wrong: p9" in page and "pass@1 after, with its 95 % interval: after" in page
    assert "+40.0" in words and "now wrong: p9" in words
    assert "| sums | 10 | 40.0 | 80.0 | +40.0" in (difference / "compare.md").read_text()


def test_what_is_not_the_same_is_told_and_nothing_in_common_refused(plain, tmp_path, capsys):
    url = plain(knows(1, 2, 3)).url
    file, other = write_rows(tmp_path / "s.jsonl", *ROWS[:6]), write_rows(tmp_path / "t.jsonl", *ROWS[:2])
    evaluate(url, tmp_path / "a", file, "--samples", "1")
    write_rows(file, {**ROWS[1], "problem": "Now: How much is 1 and two?"}, *ROWS[2:])
    evaluate(url, tmp_path / "b", file, "--samples", "1", "--temperature", "1")
    evaluate(url, tmp_path / "c", other, "--samples", "1")
    capsys.readouterr()
    assert main([str(tmp_path / "a"), str(tmp_path / "b"), "--compare"]) == 0
    output = capsys.readouterr().out
    assert "s.temperature = 0.7, now 1.0" in output
    assert "s: 1 of 5 problems were asked in other words" in output and "s: 6 and 9 problems, 5 in both" in output
    assert main(["--compare", str(tmp_path / "a"), str(tmp_path / "c")]) == 2
    assert "no problem in common (they have s and t): give" in capsys.readouterr().err
    assert main(["--compare", str(tmp_path / "a"), str(tmp_path / "d")]) == 2
    assert f"evaluations in {tmp_path}: {', '.join(str(tmp_path / name) for name in 'abc')}" in capsys.readouterr().err


def test_two_steps_of_a_run_have_names_of_their_own(serve, tmp_path, capsys, monkeypatch):
    """Both are served as "plus", the name of their run."""
    monkeypatch.chdir(tmp_path)
    served, file = serve(r"\boxed{3}", name="plus"), write_rows(tmp_path / "sums.jsonl", *ROWS[:3])
    for step in (0, 56):
        served.engine.version = f"plus, step {step}"
        assert main([str(file), "--url", f"{served.url}/v1", "--samples", "1"]) == 0
    folders = [f"runs/evaluations/plus_step_{step}" for step in (0, 56)]
    for folder, step in zip(folders, (0, 56), strict=True):
        assert (tmp_path / folder / "summary.md").read_text().startswith(f"# Evaluation of plus, step {step}\n")
        assert f"<title>Evaluation: plus, step {step}</title>" in (tmp_path / folder / "report.html").read_text()
    capsys.readouterr()
    assert main(["--compare", *folders]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert f"{folders[0]} = plus, step 0 -> {folders[1]} = plus, step 56 (*" in words
    assert label({"model": "mine", "weights": "plus, step 56"}) == "mine, plus, step 56"
    assert label({"model": "plain", "weights": ""}) == "plain"
