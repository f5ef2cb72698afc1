"""A run that is killed and started again ends with the same bytes as one that was not."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.evaluation.conftest import Plain, evaluate, prompt_of, records, write_rows
from tests.serve.conftest import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(360)]

ROWS = [{"id": f"p{number}", "problem": f"Wie viel ist {number} und zwei, mein Freund?", "answer": str(number + 2),
         "language": "de"} for number in range(12)]  # fmt: skip
SAMPLES = 5


def answer(body: dict[str, Any], call: int) -> dict[str, Any]:
    """A server that draws: its answer depends on problem and seed, in nothing on order or time."""
    number = int(prompt_of(body).split("Wie viel ist ")[1].split()[0])
    draw = hashlib.sha256(f"{number} {body['seed']}".encode()).digest()[0]
    said = number + 2 if draw < 128 else draw % 5
    time.sleep(0.02)
    return {"reasoning": "Ich rechne das kurz im Kopf aus und schreibe es dann auf.",
            "content": rf"\boxed{{{said}}}" if draw % 7 else "Das weiß ich nicht.",
            "finish_reason": "length" if draw % 11 == 0 else "stop"}  # fmt: skip


class Launch:
    """The command in a process of its own."""

    def __init__(self, url: str, file: Path, out: Path):
        command = [sys.executable, "-m", "evaluation", str(file), "--url", url, "--out", str(out),
                   "--samples", str(SAMPLES), "--concurrency", "3"]  # fmt: skip
        self.out = out
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        )  # fmt: skip

    def lines(self) -> int:
        """Samples on the disk."""
        file = self.out / "samples.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def end(self, number: int, after: int) -> tuple[int, str]:
        """Send a signal once so many samples are there; exit code and what was printed."""
        try:
            eventually(lambda: self.lines() >= after or self.process.poll() is not None, 150)
            self.process.send_signal(number)
            told, _ = self.process.communicate(timeout=90)
        finally:
            self.process.kill()
        return self.process.returncode, told


def test_killed_and_resumed_as_if_nothing_had_happened(plain: Plain, tmp_path: Path) -> None:
    server, file = plain(answer), write_rows(tmp_path / "sums.jsonl", *ROWS)
    evaluate(server.url, tmp_path / "whole", file, "--samples", str(SAMPLES))
    out, total = tmp_path / "killed", len(ROWS) * SAMPLES
    code, _ = Launch(server.url, file, out).end(signal.SIGKILL, 15)
    assert code == -signal.SIGKILL
    with (out / "samples.jsonl").open("ab") as stream:
        stream.write(b'{"benchmark": "sums", "id": "p')  # what a kill inside of a write leaves
    code, told = Launch(server.url, file, out).end(signal.SIGINT, 35)
    assert code == 130 and "the same command goes on" in told and f" of {total} samples: going on" in told
    assert not (out / "results.json").exists() and 35 <= len(records(out)) < total
    found = evaluate(server.url, out, file, "--samples", str(SAMPLES))
    assert (out / "results.json").read_bytes() == (tmp_path / "whole" / "results.json").read_bytes()
    assert (out / "summary.md").read_bytes() == (tmp_path / "whole" / "summary.md").read_bytes()
    keys = [(record["id"], record["sample"]) for record in records(out)]
    assert len(keys) == len(set(keys)) == total, "nothing was drawn twice"
    sums = found["benchmarks"]["sums"]
    assert 0.3 < sums["pass_at"]["1"] < 0.7 < sums["pass_at"]["5"] and 0 < sums["truncated"] < sums["pass_at"]["1"]
    launches = [json.loads(line)["missing"] for line in (out / "launches.jsonl").read_text().splitlines()]
    assert launches[0] == total and launches[0] > launches[1] > launches[2] > 0
