"""Two evaluations side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evaluation.__main__ import main
from tests.evaluation.conftest import Plain, evaluate, prompt_of, write_rows

ROWS = [{"id": f"p{number}", "problem": f"How much is {number} and two?", "answer": str(number + 2), "language": "en"}
        for number in range(10)]  # fmt: skip


def knows(*numbers: int) -> Any:
    """A model that solves these problems."""

    def answer(body: dict[str, Any], call: int) -> str:
        number = int(prompt_of(body).split("How much is ")[1].split()[0])
        return rf"\boxed{{{number + 2 if number in numbers else -1}}}"

    return answer


def test_the_difference_and_what_flipped(plain: Plain, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_rows(tmp_path / "sums.jsonl", *ROWS)
    for name, numbers in (("before", (0, 1, 2, 9)), ("after", range(8))):
        evaluate(plain(knows(*numbers)).url, tmp_path / name, file, "--samples", "2", "--model", name)
    capsys.readouterr()
    folders = [str(tmp_path / "before"), str(tmp_path / "after")]
    assert main(["--compare", *folders, "--out", str(tmp_path / "difference")]) == 0
    told = " ".join(capsys.readouterr().out.split())  # without the terminal's line breaks
    found = json.loads((tmp_path / "difference" / "compare.json").read_text())
    sums = found["benchmarks"]["sums"]
    assert (sums["before"], sums["after"], sums["difference"], sums["problems"]) == (0.4, 0.8, 0.4, 10)
    assert sums["now_right"] == ["p3", "p4", "p5", "p6", "p7"] and sums["now_wrong"] == ["p9"]
    low, high = sums["interval"]
    # five problems +1, four 0, one -1: the mean of ten draws of these has a standard deviation of 0.21
    assert low == pytest.approx(0.4 - 1.96 * 0.21, abs=0.12) and high == pytest.approx(0.4 + 1.96 * 0.21, abs=0.12)
    assert found["warnings"] == [] and "warning" not in told
    assert "= before -> " in told and "= after (*" in told, "other models are what is compared, no reason to warn"
    assert "+40.0" in told and "now wrong: p9" in told
    assert "| sums | 10 | 40.0 | 80.0 | +40.0" in (tmp_path / "difference" / "compare.md").read_text()


def test_what_is_not_the_same_is_told(plain: Plain, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = plain(knows(1, 2, 3))
    evaluate(server.url, tmp_path / "a", write_rows(tmp_path / "s.jsonl", *ROWS[:6]), "--samples", "1")
    changed = [{**ROWS[1], "problem": "Now: How much is 1 and two?"}, *ROWS[2:]]
    evaluate(server.url, tmp_path / "b", write_rows(tmp_path / "s.jsonl", *changed), "--samples", "1",
             "--temperature", "1")  # fmt: skip
    capsys.readouterr()
    assert main([str(tmp_path / "a"), str(tmp_path / "b"), "--compare"]) == 0
    told = capsys.readouterr().out
    assert "s.temperature = 0.7, now 1.0" in told
    assert "s: 1 of 5 problems were asked in other words" in told and "s: 6 and 9 problems, 5 in both" in told


def test_nothing_in_common_is_refused(plain: Plain, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = plain(knows(1))
    for name in ("a", "b"):
        evaluate(server.url, tmp_path / name, write_rows(tmp_path / f"{name}.jsonl", *ROWS[:2]), "--samples", "1")
    assert main(["--compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert "no problem in common" in capsys.readouterr().err
