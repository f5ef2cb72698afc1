"""A recorded run of the quickstart, replayed without engines: the policy gets better than the one that sampled.

Three seeds of data and orders, three objectives. The policies are sampled for the evaluations alone, by a launch
without steps, before and after.
"""

import subprocess
import sys

import pytest

from shared.metrics import read_rows
from tests.system.launch import ROOT

RECORDED_STEPS, REPLAYED_STEPS = 12, 60
pytestmark = [pytest.mark.soak, pytest.mark.timeout(3 * 3600)]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_held_out_accuracy_rises_above_that_of_the_data(tmp_path, seed):
    """The recorded policy hardly moves (a learning rate of 1e-9), so that its accuracy is that of the data."""

    def run(module: str, name: str, *settings: str) -> None:
        """Run a command to its end; its output is in the error where it fails."""
        line = [sys.executable, "-m", module, "configs/quickstart.toml", f"--runs_dir={tmp_path}", f"--name={name}"]
        done = subprocess.run([*line, f"--seed={seed}", *settings], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    def accuracy(name: str) -> float:
        """Held-out accuracy at the sampling temperature, the last of a run."""
        rows = read_rows(tmp_path / name / "metrics.jsonl")
        return float([row["evaluation/accuracy"] for row in rows if "evaluation/accuracy" in row][-1])

    still = ("--objective.name=agro", "--optimiser.learning_rate=1e-9", f"--steps={RECORDED_STEPS}")
    run("trainer", "recorded", "--evaluate.samples=4", *still)
    recorded = tmp_path / "recorded"
    made = recorded / "made"
    files = (f"--data.train={made}/train.jsonl", f"--data.validation={made}/validation.jsonl", "--prepare.script=")
    before, after = accuracy("recorded"), dict[str, float]()
    for name in ("agro", "spo", "dro"):
        replay = (f"--data.offline={recorded}", f"--objective.name={name}", f"--steps={REPLAYED_STEPS}")
        run("lab.replay", name, f"--model.path={recorded / 'reference'}", *files, *replay)
        alone = ("--steps=0", "--sft.steps=0", "--sft.demonstrations=", "--evaluate.samples=4")
        run("trainer", f"{name}-evaluated", f"--model.path={tmp_path / name / 'latest'}", *files, *alone)
        after[name] = accuracy(f"{name}-evaluated")
    print(f"seed {seed}: data {before:.3f}, after {after}")
    assert all(value > before + 0.02 for value in after.values()), (before, after)
