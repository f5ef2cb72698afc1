"""Bad input: one clear error that names the repair, exit code 2, and nothing half-written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shared.errors import ModelError
from shared.model import hf
from tests.system.conftest import Start
from tests.system.launch import ROOT, Launch
from trainer.__main__ import main

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def trainer(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "trainer", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
        env=environment,
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["configs/quickstart.toml", "--rollout.group_sise=4"], "rollout.group_size"),
        (
            ["configs/quickstart.toml", "--rollout.top_p=0.9"],
            "rollout.top_p: training samples from the whole distribution",
        ),
        (
            ["configs/quickstart.toml", "--rollout.max_async_level=0", "--rollout.reorder_window=64"],
            "rollout.reorder_window",
        ),
        (["configs/quickstart.toml", "--steps=many"], "steps"),
        (["nowhere.toml"], "nowhere.toml"),
    ],
)
def test_a_bad_setting_is_told_with_code_2(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]):
    assert main([*arguments, "--dry-run"]) == 2
    assert told in capsys.readouterr().err


def test_the_command_exits_2_without_a_traceback():
    found = trainer("configs/quickstart.toml", "--rollout.group_sise=4")
    assert found.returncode == 2
    assert "rollout.group_size" in found.stderr and "Traceback" not in found.stderr


def broken_model(folder: Path, kind: str) -> Path:
    if kind == "missing":
        return folder / "nothing"
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    if kind == "pickle":
        (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")
    return folder


@pytest.mark.parametrize(("kind", "told"), [("missing", "model.path"), ("pickle", "safetensors")])
def test_a_bad_model_folder_is_told_with_the_repair(tmp_path: Path, kind: str, told: str):
    with pytest.raises(ModelError, match=told):
        hf.load_config(hf.resolve(str(broken_model(tmp_path / "model", kind))))
        hf.weight_files(tmp_path / "model")


def test_a_truncated_model_is_one_clear_error_of_the_launch(start: Start, seasoned: Path, tmp_path: Path):
    model = tmp_path / "model"
    shutil.copytree((seasoned / "latest").resolve(), model)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    launch = start(tmp_path, model__path=str(model))
    assert launch.wait(400) != 0
    assert "starting trainers and engines" not in launch.output, "told before anything else starts"
    errors = [line for line in launch.output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "model.safetensors" in errors[0], launch.output[:3000]


@pytest.mark.soak  # in make test: tests/shared/test_ranks.py
def test_more_ranks_than_asked_for_names_the_settings(tmp_path: Path):
    launch = Launch(tmp_path, torchrun=("--standalone", "--nproc-per-node=4"))
    assert launch.wait(400) != 0
    errors = [line for line in launch.output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "4 ranks" in errors[0] and "placement.engines" in errors[0], launch.output[:3000]


@pytest.mark.soak  # in make test: tests/trainer/test_full_disk.py, every writer on a full disk, without a launch
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_while_checkpointing(start: Start, tmp_path: Path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=26m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("cannot mount a small disk here")
    try:
        launch = start(disk, log_dir=tmp_path, steps=4, checkpoint__keep=10, checkpoint__on_error="continue")
        assert launch.wait(400) == 0, launch.output[-3000:]
        complete = [p for p in (launch.run_dir / "checkpoints").glob("step_*") if (p / "manifest.json").exists()]
        assert "the disk is full" in launch.output and "checkpoint.keep" in launch.output, launch.output[-3000:]
        assert complete, "an earlier checkpoint is intact"
        assert not list((launch.run_dir / "checkpoints").glob("*.partial"))
        assert len(launch.losses()) == 4, "training goes on without the checkpoint, as asked"
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)
