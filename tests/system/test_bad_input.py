"""Bad input: one clear error that names the repair, exit code 2, and nothing half-written."""

import shutil
from pathlib import Path

import pytest

from trainer.__main__ import main


@pytest.mark.parametrize(("option", "named"), [
    ("--rollout.group_sise=4", "rollout.group_size"),
    ("--rollout.top_p=0.9", "rollout.top_p: training samples from the whole distribution"), ("--steps=many", "steps"),
])  # fmt: skip
def test_a_bad_setting_is_told_with_code_2(option, named, capsys):
    assert main(["configs/quickstart.toml", option, "--dry-run"]) == 2
    assert named in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.soak  # in make test: shared/test_hf.py
@pytest.mark.timeout(1200)
def test_a_truncated_model_is_one_clear_error_of_the_launch(start, seasoned, tmp_path):
    weights = Path(shutil.copytree((seasoned / "latest").resolve(), tmp_path / "model")) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    launch = start(tmp_path, command="trainer", model__path=str(weights.parent))
    assert launch.wait() == 2
    assert "starting trainers and engines" not in launch.output, "told before anything else starts"
    [error] = launch.errors
    assert "model.safetensors" in error and "Traceback" not in launch.output


@pytest.mark.slow
@pytest.mark.soak  # in make test: trainer/test_full_disk.py
@pytest.mark.timeout(1200)
def test_a_second_launch_into_a_run_is_refused_and_leaves_the_first_alone(start, tmp_path):
    first = start(tmp_path, steps=10_000)
    first.until_step(1)
    stacks = first.run_dir / "stacks" / "rank0.txt"
    before = stacks.read_text()
    refused = start(tmp_path, log_dir=tmp_path / "logs", steps=10_000)
    assert refused.wait() != 0 and "in use by another launch" in refused.output
    assert stacks.read_text() == before and first.process.poll() is None
    first.kill()
