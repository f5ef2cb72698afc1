"""A recorded run of the quickstart, replayed without engines: the policy gets better than the one that sampled.

Three seeds of data and orders, three objectives. The policies are sampled for the evaluations alone, by a launch
without steps, before and after.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shared.metrics import read_rows
from tests.system.launch import ROOT

QUICKSTART = ROOT / "configs" / "quickstart.toml"
RECORDED_STEPS, REPLAYED_STEPS = 12, 60
pytestmark = [pytest.mark.soak, pytest.mark.timeout(3 * 3600)]


def command(module: str, runs: Path, *settings: str) -> None:
    """Run one to its end; its output is in the error where it fails."""
    full = [sys.executable, "-m", module, str(QUICKSTART), f"--runs_dir={runs}", *settings]
    done = subprocess.run(full, cwd=ROOT, capture_output=True, text=True, timeout=3600, env=dict(os.environ))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def accuracy(runs: Path, name: str) -> float:
    """Held-out accuracy at the sampling temperature, the last of a run."""
    found = [row["evaluation/accuracy"] for row in read_rows(runs / name / "metrics.jsonl")
             if "evaluation/accuracy" in row]  # fmt: skip
    return float(found[-1])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_held_out_accuracy_rises_above_that_of_the_data(tmp_path: Path, seed: int) -> None:
    """The recorded policy hardly moves (a learning rate of 1e-9), so that its accuracy is that of the data."""
    still = ("--objective.name=agro", "--optimiser.learning_rate=1e-9", f"--steps={RECORDED_STEPS}")
    command("trainer", tmp_path, "--name=recorded", f"--seed={seed}", "--evaluate.samples=4", *still)
    start = tmp_path / "recorded" / "reference"
    made = tmp_path / "recorded" / "made"
    files = (f"--data.train={made}/train.jsonl", f"--data.validation={made}/validation.jsonl", "--prepare.script=")
    before, found = accuracy(tmp_path, "recorded"), dict[str, float]()
    for name in ("agro", "spo", "dro"):
        command(
            "lab.replay", tmp_path, f"--name={name}", f"--seed={seed}", f"--model.path={start}", *files,
            f"--data.offline={tmp_path / 'recorded'}", f"--objective.name={name}", f"--steps={REPLAYED_STEPS}",
        )  # fmt: skip
        command(
            "trainer", tmp_path, f"--name={name}-evaluated", f"--model.path={tmp_path / name / 'latest'}", *files,
            "--steps=0", "--sft.steps=0", "--sft.demonstrations=", "--evaluate.samples=4",
        )  # fmt: skip
        found[name] = accuracy(tmp_path, f"{name}-evaluated")
    print(f"seed {seed}: data {before:.3f}, after {found}")
    assert all(value > before + 0.02 for value in found.values()), (before, found)
