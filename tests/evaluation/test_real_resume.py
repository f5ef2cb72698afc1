"""Evaluations of a real server: killed at random moments they end with the same bytes as one that was not.

`pytest --soak -n 0 tests/evaluation/test_real_resume.py` runs it and prints its counts.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.evaluation.conftest import records, write_rows
from tests.serve.command import QUESTION, Command, untrained_model

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]
PROBLEMS, SAMPLES, KILLS = 12, 3, 3
FILES = ("samples.jsonl", "results.json", "summary.md", "report.html")


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    """A server of the quickstart's model before any training, in float32."""
    running = Command(untrained_model(tmp_path_factory.mktemp("runs")), tmp_path_factory.mktemp("serve") / "log")
    yield running
    running.close()


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Problems."""
    found = [{"id": str(number), "problem": QUESTION.replace("3", str(number)), "answer": str(number + 2),
              "language": "en"} for number in range(PROBLEMS)]  # fmt: skip
    return write_rows(tmp_path_factory.mktemp("rows") / "apples.jsonl", *found)


def launch(command: Command, rows: Path, out: Path, concurrency: int) -> subprocess.Popen[bytes]:
    """The evaluation in a process of its own. Every second response is tried again for its language."""
    arguments = [str(rows), "--url", f"{command.url}/v1", "--out", str(out), "--samples", str(SAMPLES),
                 "--max-tokens", "100", "--no-ask-form", "--concurrency", str(concurrency),
                 "--reasoning-language", "en", "--reasoning-language-enforcement", "retry"]  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "evaluation", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )  # fmt: skip


def lines(out: Path) -> int:
    """Samples on the disk."""
    file = out / "samples.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def kill_at_random(command: Command, rows: Path, out: Path, concurrency: int, rng: random.Random) -> list[int]:
    """Kill a launch at three random moments, then let one end; the samples that each kill found."""
    total, found = PROBLEMS * SAMPLES, []
    for number in range(KILLS):
        process = launch(command, rows, out, concurrency)
        wanted = rng.randint(lines(out) + 1, total * (number + 1) // (KILLS + 1))
        while lines(out) < wanted and process.poll() is None:
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        process.wait()
        found.append(lines(out))
        print(f"  killed with {found[-1]} of {total} samples", flush=True)
    assert launch(command, rows, out, concurrency).wait() == 0
    return found


def responses(command: Command) -> int:
    """That the server has sampled to their end."""
    text = command.client.get("/metrics").text.splitlines()
    found = [line for line in text if line.startswith("maestrale_responses_total{") and "aborted" not in line]
    return sum(int(float(line.rsplit(" ", 1)[1])) for line in found)


def test_killed_three_times_and_the_same_bytes(command: Command, rows: Path, tmp_path: Path) -> None:
    assert launch(command, rows, tmp_path / "whole", 1).wait() == 0
    retried = [one for one in records(tmp_path / "whole") if one["server_language"]["tries"] > 1]
    print(f"undisturbed: {lines(tmp_path / 'whole')} samples, {len(retried)} of them tried again for their language")
    for seed in range(3):
        out = tmp_path / f"killed {seed}"
        killed = kill_at_random(command, rows, out, 1, random.Random(seed))
        for name in FILES:
            assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), (name, killed)
        print(f"seed {seed}: killed with {killed} samples, {', '.join(FILES)} are the same bytes")


def test_eight_clients_ask_and_count_each_sample_once(command: Command, rows: Path, tmp_path: Path) -> None:
    total, before = PROBLEMS * SAMPLES, responses(command)
    assert launch(command, rows, tmp_path / "whole", 8).wait() == 0
    assert responses(command) - before == total == lines(tmp_path / "whole"), "each was asked once"
    killed = kill_at_random(command, rows, tmp_path / "killed", 8, random.Random(8))
    for name in ("whole", "killed"):
        keys = [(one["id"], one["sample"]) for one in records(tmp_path / name)]
        found = json.loads((tmp_path / name / "results.json").read_text())["benchmarks"]["apples"]
        assert len(keys) == len(set(keys)) == found["responses"] == total and found["errors"] == 0
    print(f"8 clients, killed with {killed} of {total}: each sample is there once")
