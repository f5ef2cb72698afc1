"""`python -m verify`: verdicts, tables, bad lines, going on after Ctrl-C and after a crash."""

import fcntl
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shared.errors import run_command
from tests.tables import read_table
from tests.verify.grading import GOOD
from verify.__main__ import main

ROW = {"id": "t1", "problem": "Tom has 5 apples. Tom buys 3 more. How many has he?", "answer": "8", "response": GOOD}
ICE = {"problem": "Why does ice float?", "answer": "It is less dense than water.", "domain": "open"}
DOUBLE = {"problem": "Print the double.", "domain": "code", "tests": [{"input": "1", "output": "2"}]}
SLOW = """
import asyncio
from verify.plugins import reward
gate = asyncio.Lock()

@reward("slow")
async def slow(case):
    async with gate:
        await asyncio.sleep(0.02)
    return 0.5
"""


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


Verify = Callable[..., tuple[int, str]]


@pytest.fixture
def verify(capsys, monkeypatch):
    """`python -m verify` in this process, with one worker: its exit code, and what it printed or said was wrong."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr("verify.__main__.worker_count", lambda _: 1)

    def run(*arguments: object) -> tuple[int, str]:
        capsys.readouterr()
        try:
            code = run_command(lambda: main([*map(str, arguments)]))
        except SystemExit as end:
            code = int(end.code or 0)
        return code, "".join(capsys.readouterr())

    return run


@pytest.mark.slow
def test_verdicts_and_tables(verify, tmp_path):
    program = "<think>I double it at once.</think>So:\n```python\nprint(2 * int(input()))\n```"
    out, path = tmp_path / "out.jsonl", write(
        tmp_path / "in.jsonl",
        ROW,
        {"problem": {key: ROW[key] for key in ("id", "problem", "answer")}, "response": GOOD.replace("{8}", "{9}")},
        {**ROW, "response": "8"},
        {**ROW, "answer": 8, "tokens": 90},
        {**ROW, "response": "<think>\ud83d\ude42 \x00 \ud800</think>\\boxed{\\sqrt{64}}", "id": "sympy"},
        {**ICE, "response": "<think>It takes more room.</think>So \\boxed{\\text{it is light}}."},
        {**ICE, "response": "no"},
        {**DOUBLE, "response": program},
    )  # fmt: skip
    code, printed = verify(path, "--out", out, "--reward.length_max=100", "--reward.overlong_buffer=20",
                           "--reward.extra.repetition=0.3", "--reward.refuse=[]")  # fmt: skip
    assert code == 0, printed
    records = read(out)
    assert [record["line"] for record in records] == [*range(1, 9)]
    assert [record["id"] for record in records[:5]] == ["t1", "t1", "t1", "t1", "sympy"]
    rewards = [record["reward"] for record in records]
    verdicts = ["correct", "wrong", "no answer", "correct", "correct", "open", "no answer", "correct"]
    assert [reward["verdict"] for reward in rewards] == verdicts
    assert [reward["total"] for reward in rewards[:5]] == pytest.approx([1.1, 0.2, -0.3, 1.05, 1.0])
    assert rewards[0]["languages"] == ["en", "en", "en"] and rewards[2]["extra"] == {"repetition": -0.3}
    rows = [tuple(re.split(r"\s*│\s*", line)[1:4]) for line in printed.splitlines() if "│" in line]
    assert {("correct", "4", "50.0%"), ("open", "1", "12.5%")} <= {*rows}, "verdicts"
    assert {("all", "8", "66.7%"), ("math", "5", "60.0%"), ("open", "2", "-")} <= {*rows}, "of verified ones are right"
    assert "answer differs from the true one (1)" in printed


@pytest.mark.slow
def test_zipped_input_and_settings_of_a_run(verify, root, tmp_path):
    path = tmp_path / "in.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps({**ROW, "response": GOOD[7:], "tokens": 64}).encode()))
    settings = root / "configs" / "quickstart.toml"
    assert verify(path, "--out", tmp_path / "o", "--config", settings, "--opened")[0] == 0
    assert read(tmp_path / "o")[0]["reward"]["length"] == -0.1  # the quickstart's limit is 64 tokens


@pytest.mark.parametrize("row", read_table("verify/bad_input"), ids=lambda row: row["message"])
def test_bad_input_is_one_error_with_the_repair_before_anything_is_graded(verify, tmp_path, row):
    path = write(tmp_path / "in.jsonl", ROW | {"tokens": 5})
    path.write_text(path.read_text() + row.get("line", "") * row.get("times", 1) + "\n")
    code, error = verify(path, "--out", tmp_path / "out.jsonl", *row.get("arguments", []))
    assert code == 2 and not (tmp_path / "out.jsonl").exists() and row["message"] in error
    if "line" in row:
        assert error.startswith(f"error: {path}:2") and error.count("\n") == 1
    assert verify(tmp_path / "none.jsonl", "--out", path)[0] == verify()[0] == 2


@pytest.mark.slow
def test_goes_on_after_ctrl_c(verify, root, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    path = write(tmp_path / "in.jsonl", *({**ROW, "id": str(index)} for index in range(80)))
    out = tmp_path / "out.jsonl"
    arguments = [path, "--out", out, f'--reward.plugins=["{tmp_path}/slow.py"]', "--reward.extra.slow=1"]
    command = [sys.executable, "-m", "verify", *map(str, arguments), "--workers=1"]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    with subprocess.Popen(command, cwd=root, env=environment, stderr=subprocess.PIPE, text=True) as process:
        while not out.exists() or out.read_bytes().count(b"\n") < 10:
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert process.returncode == 130 and "the same command goes on" in errors
    before = out.read_bytes()
    assert 10 <= before.count(b"\n") < 80 and before.endswith(b"\n")
    out.write_bytes(before + before[:50])  # as a crash in the middle of a line leaves it
    code, printed = verify(*arguments)
    assert code == 0 and f"holds {before.count(10)} of 80 verdicts: going on" in printed
    assert out.read_bytes().startswith(before)
    assert [record["id"] for record in read(out)] == [str(index) for index in range(80)]


@pytest.mark.slow
def test_verdicts_of_other_input_or_rewards_are_not_mixed(verify, tmp_path):
    path, out = write(tmp_path / "in.jsonl", ROW, ROW), tmp_path / "out.jsonl"
    assert verify(path, "--out", out)[0] == 0
    code, error = verify(path, "--out", out, "--reward.language=0.2")
    assert code == 2 and "other rewards" in error
    write(path, ROW, {**ROW, "response": "8"})
    code, error = verify(path, "--out", out)
    assert code == 2 and f"{out}:2 is the verdict of another input line" in error
    assert verify(path, "--out", out, "--restart")[0] == 0
    assert [record["reward"]["total"] for record in read(out)] == pytest.approx([1.1, 0.0])
    out.write_text("{}\n")
    assert "is no verdict" in verify(path, "--out", out)[1]
    with out.open("ab") as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        assert "another process is writing it" in verify(path, "--out", out, "--restart")[1]
