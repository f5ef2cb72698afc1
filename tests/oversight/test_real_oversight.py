"""A real server's model as agent and judge: killed at random moments the evaluation ends with the same bytes.

`pytest --soak -n 0 tests/oversight/test_real_oversight.py` runs it and prints what it found. The model is
the quickstart's before any training, so nothing but the pipeline is shown.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.serve.command import Command, untrained_model

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]
FILES = ("games.jsonl", "results.json", "summary.md", "report.html")
KILLS = 3


def launch(url: str, out: Path) -> subprocess.Popen[bytes]:
    """The evaluation in a process of its own."""
    player = f"tiny@{url}/v1"
    arguments = ["stories", "logic", "--agents", player, "--judges", player, "--out", str(out), "--questions", "2",
                 "--facts", "3", "--rounds", "2", "--best-of", "2", "--max-tokens", "60", "--judge-tokens", "16",
                 "--concurrency", "1"]  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "oversight", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )  # fmt: skip


def lines(out: Path) -> int:
    """Games on the disk."""
    file = out / "games.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def test_killed_and_the_same_bytes(tmp_path: Path) -> None:
    model = untrained_model(tmp_path / "runs", max_position_embeddings=8192)
    command = Command(model, tmp_path / "log")
    try:
        whole, killed, rng = tmp_path / "whole", tmp_path / "killed", random.Random(0)
        process = launch(command.url, whole)
        assert process.wait() == 0, process.communicate()[1].decode()[-2000:]
        killed.mkdir()
        (killed / "oversight.json").write_bytes((whole / "oversight.json").read_bytes())  # the same secret
        for number in range(KILLS):
            process = launch(command.url, killed)
            wanted = rng.randint(lines(killed) + 1, lines(whole) * (number + 1) // (KILLS + 1))
            while lines(killed) < wanted and process.poll() is None:
                time.sleep(0.002)
            process.send_signal(signal.SIGKILL)
            process.wait()
            print(f"killed with {lines(killed)} of {lines(whole)} games")
        assert launch(command.url, killed).wait() == 0
        for name in FILES:
            assert (killed / name).read_bytes() == (whole / name).read_bytes(), name
    finally:
        command.close()
    found = json.loads((whole / "results.json").read_text())["contests"]
    for one in found:
        print({name: one[name] for name in ("task", "protocol", "games", "accuracy", "position", "invalid", "tokens")})
    assert {one["protocol"] for one in found} >= {"qa", "votes", "consultancy", "debate"}
    assert "<details>" in (whole / "report.html").read_text()
