"""`python -m verify`: verdicts, table, bad lines, going on after Ctrl-C and after a crash, help."""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from verify.__main__ import main

EN = "Tom starts with 5 apples and buys 3 more, so we add them."
ROW = {"id": "t1", "problem": "Tom has 5 apples. Tom buys 3 more. How many has he?", "answer": "8", "language": "en"}
GOOD = f"<think>{EN}</think>The answer is \\boxed{{8}}."
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


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


class Done(NamedTuple):
    """How the command ended, and what it printed."""

    code: int
    out: str
    err: str


Verify = Callable[..., Done]


@pytest.fixture
def verify(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Verify:
    """`python -m verify` in this process."""
    monkeypatch.setenv("COLUMNS", "100")

    def run(*arguments: object) -> Done:
        capsys.readouterr()
        try:
            code = main([*map(str, arguments)])
        except SystemExit as end:
            code = int(end.code or 0)
        return Done(code, *capsys.readouterr())

    return run


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
def test_verdicts_and_table(verify: Verify, tmp_path: Path) -> None:
    rows = [
        {**ROW, "response": GOOD},
        {"problem": ROW, "response": GOOD.replace("{8}", "{9}")},
        {**ROW, "response": "8"},
        {**ROW, "answer": 8, "response": GOOD, "tokens": 90},
        {**ROW, "response": "<think>\ud83d\ude42 \x00 \ud800</think>\\boxed{\\sqrt{64}}", "id": "sympy"},
    ]
    out = tmp_path / "out.jsonl"
    done = verify(write(tmp_path / "in.jsonl", rows), "--out", out, "--reward.length_max=100",
                  "--reward.overlong_buffer=20", "--reward.extra.repetition=0.3", "--reward.refuse=[]")  # fmt: skip
    assert done.code == 0, done.err
    found = read(out)
    assert [record["line"] for record in found] == [1, 2, 3, 4, 5]
    assert [record["id"] for record in found] == ["t1", "t1", "t1", "t1", "sympy"]
    rewards = [record["reward"] for record in found]
    assert [reward["total"] for reward in rewards] == pytest.approx([1.1, 0.2, -0.3, 1.05, 1.0])
    assert [reward["verdict"] for reward in rewards] == ["correct", "wrong", "no answer", "correct", "correct"]
    assert rewards[0]["languages"] == ["en", "en", "en"] and rewards[2]["extra"] == {"repetition": -0.3}
    for word in ("correct", "60.0%", "answer differs from the true one (1)", "80.0%", "repetition", "5 verdicts in"):
        assert word in done.out


@pytest.mark.slow
def test_zipped_input_and_settings_of_a_run(verify: Verify, root: Path, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps({**ROW, "response": GOOD[7:], "tokens": 64}).encode()))
    run = root / "configs" / "quickstart.toml"
    done = verify(path, "--out", tmp_path / "o", "--config", run, "--opened", "--workers", 1)
    assert done.code == 0, done.err
    assert read(tmp_path / "o")[0]["reward"]["length"] == -0.1  # the quickstart's limit is 64 tokens


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not json", ":2 is not JSON"),
        ("[1]", ":2 is not a JSON object"),
        (json.dumps(ROW), ":2 lacks 'response'"),
        (json.dumps({**ROW, "completion": GOOD}), "is it 'completion'? Rename it"),
        (json.dumps({"answer": "8", "response": GOOD}), ":2 lacks 'problem'"),
        (json.dumps({**ROW, "answer": "", "response": GOOD}), ":2 lacks 'answer'"),
        (json.dumps({**ROW, "response": GOOD, "tokens": -1}), ":2: 'tokens' is -1"),
        ("[" * 100_000, ":2 is nested too deeply"),
    ],
)
def test_bad_line_is_one_error_before_anything_is_graded(
    verify: Verify, tmp_path: Path, line: str, message: str
) -> None:
    path = write(tmp_path / "in.jsonl", [{**ROW, "response": GOOD}])
    path.write_text(path.read_text() + line + "\n")
    done = verify(path, "--out", tmp_path / "out.jsonl")
    assert done.code == 2 and not (tmp_path / "out.jsonl").exists()
    assert done.err.startswith(f"error: {path}:2") and message in done.err
    assert len(done.err.splitlines()) == 1


def test_wrong_options_and_settings_name_the_repair(verify: Verify, tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", [{**ROW, "response": GOOD, "tokens": 5}])
    out = tmp_path / "out.jsonl"
    for arguments, message in (
        (["--reward.extra.repetitoin=1", "--reward.length=0"], "did you mean repetition?"),
        (["--reward.lenght=0"], "did you mean reward.length"),
        ([], "--reward.length_max=N"),
        (["--weird"], "unknown option --weird"),
    ):
        done = verify(path, "--out", out, *arguments)
        assert done.code == 2 and message in done.err
    done = verify(tmp_path / "none.jsonl", "--out", out)
    assert done.code == 2 and "there is no such file" in done.err


@pytest.mark.slow
def test_goes_on_after_ctrl_c(verify: Verify, root: Path, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    rows = [{**ROW, "id": str(index), "response": GOOD} for index in range(120)]
    path, out = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    arguments = [path, "--out", out, f'--reward.plugins=["{tmp_path}/slow.py"]', "--reward.extra.slow=1"]
    command = [sys.executable, "-m", "verify", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    with subprocess.Popen(command, cwd=root, env=environment, stderr=subprocess.PIPE, text=True) as process:
        while not out.exists() or out.read_bytes().count(b"\n") < 10:
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert process.returncode == 130 and "the same command goes on" in errors
    before = out.read_bytes()
    assert 10 <= before.count(b"\n") < 120 and before.endswith(b"\n")
    out.write_bytes(before + before[:50])  # as a crash in the middle of a line leaves it
    done = verify(*arguments)
    assert done.code == 0 and f"holds {before.count(10)} of 120 verdicts: going on" in done.err
    assert out.read_bytes().startswith(before)
    assert [record["id"] for record in read(out)] == [str(index) for index in range(120)]


@pytest.mark.slow
def test_verdicts_of_other_input_or_rewards_are_not_mixed(verify: Verify, tmp_path: Path) -> None:
    path, out = write(tmp_path / "in.jsonl", [{**ROW, "response": GOOD}] * 2), tmp_path / "out.jsonl"
    assert verify(path, "--out", out).code == 0
    changed = verify(path, "--out", out, "--reward.language=0.2")
    assert changed.code == 2 and "other rewards" in changed.err
    write(path, [{**ROW, "response": GOOD}, {**ROW, "response": "8"}])
    other = verify(path, "--out", out)
    assert other.code == 2 and f"{out}:2 is the verdict of another input line" in other.err
    assert verify(path, "--out", out, "--restart").code == 0
    assert [record["reward"]["total"] for record in read(out)] == pytest.approx([1.1, 0.0])
    out.write_text("{}\n")
    assert "is no verdict" in verify(path, "--out", out).err
    with out.open("ab") as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        assert "another process is writing it" in verify(path, "--out", out, "--restart").err


def test_help_teaches(verify: Verify) -> None:
    done = verify("--help")
    assert done.code == 0
    for word in ('"response"', "Ctrl-C", "exit codes", "--reward.extra.repetition=0.1", "--opened", "verdicts.jsonl"):
        assert word in done.out
    assert verify().code == 2
