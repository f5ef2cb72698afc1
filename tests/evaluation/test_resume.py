"""A run that is killed and started again ends with the same bytes as one that was not; `pytest --soak` kills launches
that ask the real engine, at random moments."""

import hashlib
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.evaluation.conftest import evaluate, prompt_of, records, write_rows
from tests.serve.command import QUESTION, Command, untrained_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
SAMPLES, KILLS = 5, 3
ROWS = [{"id": f"p{number}", "problem": f"Wie viel ist {number} und zwei, mein Freund?", "answer": str(number + 2),
         "language": "de"} for number in range(12)]  # fmt: skip
APPLES = [{**row, "problem": QUESTION.replace("3", str(number)), "language": "en"} for number, row in enumerate(ROWS)]
TOTAL = len(ROWS) * SAMPLES
FILES = ("results.json", "summary.md")


def answer(body: dict[str, Any], call: int) -> dict[str, Any]:
    """A server that draws: its answer depends on problem and seed, in nothing on order or time."""
    number = int(prompt_of(body).split("Wie viel ist ")[1].split()[0])
    draw = hashlib.sha256(f"{number} {body['seed']}".encode()).digest()[0]
    time.sleep(0.02)
    return {"reasoning": "Ich rechne das kurz im Kopf aus und schreibe es dann auf.",
            "content": rf"\boxed{{{number + 2 if draw < 128 else draw % 5}}}" if draw % 7 else "Das weiß ich nicht.",
            "finish_reason": "length" if draw % 11 == 0 else "stop"}  # fmt: skip


def lines(out: Path) -> int:
    file = out / "samples.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def launch(
    url: str, file: Path, out: Path, number: int, after: int, *arguments: str, pause_s: float = 0.0
) -> tuple[int, str]:
    """Run the command in a process of its own, and send it a signal a moment after so many samples are there; exit code
    and what was printed."""
    command = [sys.executable, "-m", "evaluation", str(file), "--url", url, "--out", str(out)]
    process = subprocess.Popen([*command, "--samples", str(SAMPLES), *arguments], stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True)  # fmt: skip
    try:
        while lines(out) < after and process.poll() is None:
            time.sleep(0.002)
        time.sleep(pause_s)
        process.send_signal(number)
        output, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    return process.returncode, output


def test_killed_and_resumed_as_if_nothing_had_happened(plain, tmp_path):
    server, file = plain(answer), write_rows(tmp_path / "sums.jsonl", *ROWS)
    whole, out = tmp_path / "whole", tmp_path / "killed"
    evaluate(server.url, whole, file, "--samples", str(SAMPLES))
    assert len(server.requests) == TOTAL, "each was asked once"
    code, _ = launch(server.url, file, out, signal.SIGKILL, 15, "--concurrency", "3")
    assert code == -signal.SIGKILL
    with (out / "samples.jsonl").open("ab") as stream:
        stream.write(b'{"benchmark": "sums", "id": "p')  # what a kill inside of a write leaves
    code, outputs = launch(server.url, file, out, signal.SIGINT, 35, "--concurrency", "3")
    assert code == 130 and "the same command goes on" in outputs and f" of {TOTAL} samples: going on" in outputs
    assert not (out / "results.json").exists() and 35 <= len(records(out)) < TOTAL
    sums = evaluate(server.url, out, file, "--samples", str(SAMPLES))["benchmarks"]["sums"]
    assert [(out / name).read_bytes() for name in FILES] == [(whole / name).read_bytes() for name in FILES]
    keys = [(record["id"], record["sample"]) for record in records(out)]
    assert len(keys) == len(set(keys)) == TOTAL, "nothing was drawn twice"
    assert 0.3 < sums["pass_at"]["1"] < 0.7 < sums["pass_at"]["5"] and 0 < sums["truncated"] < sums["pass_at"]["1"]
    launches = [json.loads(line)["missing"] for line in (out / "launches.jsonl").read_text().splitlines()]
    assert launches[0] == TOTAL and launches[0] > launches[1] > launches[2] > 0


@pytest.mark.soak
def test_killed_three_times_and_the_same_bytes(tmp_path):
    """Of the quickstart's model before any training; every second response is tried again for its language."""
    file, whole = write_rows(tmp_path / "apples.jsonl", *APPLES), tmp_path / "whole"
    options = ["--max-tokens", "100", "--no-ask-form", "--concurrency", "1", "--reasoning-language", "en",
               "--reasoning-language-enforcement", "retry"]  # fmt: skip
    command = Command(untrained_model(tmp_path / "runs"), tmp_path / "log")
    try:
        evaluate(f"{command.url}/v1", whole, file, "--samples", str(SAMPLES), *options)
        assert any(record["server_language"]["tries"] > 1 for record in records(whole))
        for seed in range(3):
            out, rng = tmp_path / f"killed {seed}", random.Random(seed)
            for number in range(KILLS):
                least, most = lines(out) + 1, TOTAL * (number + 1) // (KILLS + 1)
                after, pause_s = rng.randint(least, max(least, most)), rng.uniform(0, 0.3)
                launch(f"{command.url}/v1", file, out, signal.SIGKILL, after, *options, pause_s=pause_s)
                print(f"seed {seed}: killed with {lines(out)} of {TOTAL} samples", flush=True)
            evaluate(f"{command.url}/v1", out, file, "--samples", str(SAMPLES), *options)
            for name in (*FILES, "samples.jsonl", "report.html"):
                assert (out / name).read_bytes() == (whole / name).read_bytes(), name
    finally:
        command.close()
