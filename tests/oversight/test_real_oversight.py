"""A real server's model as agent and judge: killed at random moments the evaluation ends with the same bytes.

The model is the quickstart's before any training, so nothing but the pipeline is shown.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.serve.command import Command, untrained_model

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


def launch(url: str, out: Path) -> subprocess.Popen[bytes]:
    """The evaluation in a process of its own."""
    player = f"tiny@{url}/v1"
    command = [sys.executable, "-m", "oversight", "stories", "logic", "--agents", player, "--judges", player,
               "--out", str(out), "--questions", "2", "--facts", "3", "--rounds", "2", "--best-of", "2",
               "--max-tokens", "60", "--judge-tokens", "16", "--concurrency", "1"]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)


def lines(out: Path) -> int:
    """Games on the disk."""
    file = out / "games.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def test_killed_and_the_same_bytes(tmp_path: Path) -> None:
    model = untrained_model(tmp_path / "runs", max_position_embeddings=8192)
    command = Command(model, tmp_path / "log")
    try:
        whole, killed, rng, kills = tmp_path / "whole", tmp_path / "killed", random.Random(0), 3
        process = launch(command.url, whole)
        assert process.wait() == 0, process.communicate()[1].decode()[-2000:]
        killed.mkdir()
        (killed / "oversight.json").write_bytes((whole / "oversight.json").read_bytes())  # the same secret
        for number in range(kills):
            process = launch(command.url, killed)
            wanted = rng.randint(lines(killed) + 1, lines(whole) * (number + 1) // (kills + 1))
            while lines(killed) < wanted and process.poll() is None:
                time.sleep(0.002)
            process.kill()
            process.wait()
        assert launch(command.url, killed).wait() == 0
        for name in ("games.jsonl", "results.json", "summary.md", "report.html"):
            assert (killed / name).read_bytes() == (whole / name).read_bytes(), name
    finally:
        command.close()
    contests = json.loads((whole / "results.json").read_text())["contests"]
    assert {row["protocol"] for row in contests} >= {"qa", "votes", "consultancy", "debate"}
    assert "<details>" in (whole / "report.html").read_text()
