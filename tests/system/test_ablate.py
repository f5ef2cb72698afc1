"""A real ablation: a start, a variant that is interrupted and goes on, a variant that fails, and what is told of it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from shared.metrics import read_rows
from tests.system.launch import HANG_S, ROOT, TINY

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]  # in make test: tests/lab/ablate, without launches
STEPS = 24
"""enough that Ctrl-C at the first one comes before the last"""
SETTINGS = {**TINY, "steps": STEPS, "sft.steps": 2, "evaluate.greedy": "false", "evaluate.problems": 4,
            "checkpoint.every": 0}  # fmt: skip
FILE = """
about = "Tiny"
config = "configs/quickstart.toml"
seeds = [7]
settings = {settings}

[start]
[variants.fine]
label = "as it is"
[variants.broken]
settings = ["--data.train=there_is_none.jsonl"]

[[claims]]
says = "one run cannot say"
variant = "fine"
metric = "entropy"
relation = "below"
than = "broken"
"""


@pytest.fixture
def begin(tmp_path):
    """begin() starts the command; whatever still runs at the end is killed."""
    begun: list[subprocess.Popen[str]] = []
    settings = [f"--{key}={value}" for key, value in SETTINGS.items()]
    (tmp_path / "tiny.toml").write_text(FILE.replace("{settings}", json.dumps(settings)))
    line = [sys.executable, "-m", "lab.ablate", str(tmp_path / "tiny.toml"), f"--runs-dir={tmp_path}"]

    def start() -> subprocess.Popen[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        begun.append(
            subprocess.Popen(
                line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
            )
        )
        return begun[-1]

    yield start
    for process in begun:
        process.kill()  # its launch dies with it
        process.communicate()


def steps(run_dir: Path) -> list[int]:
    return sorted(row["step"] for row in read_rows(run_dir / "metrics.jsonl") if row["kind"] == "train")


def test_an_ablation_is_interrupted_goes_on_and_reports_a_failed_run(tmp_path, begin):
    folder = tmp_path / "tiny"
    run_dir, export = folder / "fine-7", folder / "start" / "latest" / "model.safetensors"
    first, end = begin(), time.monotonic() + HANG_S
    while not steps(run_dir):
        assert first.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    children = psutil.Process(first.pid).children(recursive=True)
    first.send_signal(signal.SIGINT)
    output, _ = first.communicate(timeout=HANG_S)
    assert first.returncode == 130 and "the same command goes on from" in output, output
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert not (folder / "table.md").exists() and not (run_dir / "latest").exists()
    exported = export.stat().st_mtime_ns

    second = begin()
    output, _ = second.communicate(timeout=HANG_S)
    assert second.returncode == 1, output
    assert "1 of 3 runs are finished already" in output and export.stat().st_mtime_ns == exported
    assert "resuming" in run_dir.with_name("fine-7.log").read_text(), "nor are the steps before Ctrl-C repeated"
    assert steps(run_dir) == list(range(1, STEPS + 1))
    table = (folder / "table.md").read_text(encoding="utf-8")
    assert "| as it is | - | 1 |" in table and "**unclear** (no seed has both)" in table
    assert "broken, seed 7: exit code 2; error: data.train = 'there_is_none.jsonl': there is no such file" in table
    assert (folder / "plot.png").is_file()
    codes = [json.loads(line)["code"] for line in (folder / "launches.jsonl").read_text().splitlines()]
    assert codes[0] == 0 and codes[1] != 0 and codes[2:] == [0, 2], "start, interrupted, gone on, broken"
