"""Whole launches on GPUs: each way of the weights, NCCL among trainers and engines, an engine of two GPUs, trainer and
engine on one. The same launches run on the CPU in test_run.py; these were not run on a card yet (docs/gpu.md)."""

import hashlib
import os
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
ON_GPUS: dict[str, Any] = {
    "steps": 4, "deadlines__start_s": 600, "rollout__max_async_level": 2, "model__dtype": "bfloat16",
    "optimiser__compute_dtype": "bfloat16",
}  # fmt: skip
FOUR = {"placement__trainers": 2, "placement__engines": 2}


@pytest.mark.parametrize(("transport", "settings"), [
    pytest.param("auto", {}, marks=pytest.mark.gpu(2)), pytest.param("cuda_ipc", {}, marks=pytest.mark.gpu(2)),
    pytest.param("network", {}, marks=pytest.mark.gpu(2)), pytest.param("network", FOUR, marks=pytest.mark.gpu(4)),
    pytest.param("auto", {"rollout__tensor_parallel": 2}, marks=pytest.mark.gpu(3)),
    pytest.param("network", {"rollout__tensor_parallel": 2}, marks=pytest.mark.gpu(3)),
])  # fmt: skip
def test_a_launch(start, tmp_path, transport, settings):
    launch = start(tmp_path, **ON_GPUS, rollout__transport=transport, **settings).finish()
    rows = launch.metrics()
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    trained = launch.trained_prompts()
    assert len(trained) == len(set(trained)) == 4 * 4
    for row in rows:
        assert row["engine/restarts"] == 0 and row["sync/bytes"] > 0 and row["sync/logprob_diff_mean"] < 0.1
        assert row["memory/trainer_peak_gpu_bytes"] > 0 and row["memory/engine_peak_gpu_bytes"] > 0
        assert row["tflops_per_device"] > 0 and 0 < row.get("mfu", 0.5) < 1
    assert any(row["spans/multi_version_share"] > 0 for row in rows), "no update met a completion that was sampled"


@pytest.mark.gpu(2)
def test_the_cpu_s_transport_is_refused_on_gpus(start, tmp_path):
    launch = start(tmp_path, **ON_GPUS, rollout__transport="shm")
    assert launch.wait() == 2 and 'rollout.transport = "shm" is for trainers on the CPU' in launch.output


@pytest.mark.gpu
@pytest.mark.parametrize("colocate", ["resident", "turns"])
def test_on_one_gpu_trainer_and_engine_share_it(start, tmp_path, monkeypatch, colocate):
    """Every update is proved as ever."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0])
    launch = start(tmp_path, placement__colocate=colocate, rollout__max_async_level=0, steps=3).finish()
    assert launch.told(f"shares GPUs with the engines ({colocate})") and len(launch.losses()) == 3


@pytest.mark.soak
def test_turns_change_no_bit_of_what_is_trained(start, tmp_path):
    """Synchronous, with a reference model beside the policy and an evaluation on the way. On a CPU the engines' sleep
    frees nothing, but they lose their version and may not sample before the next update."""
    trained = []
    for colocate in ("never", "turns"):
        launch = start(
            tmp_path / colocate, placement__colocate=colocate, rollout__max_async_level=0, steps=2,
            objective__kl__weight=0.01, evaluate__every=1, evaluate__greedy=False,
        ).finish()  # fmt: skip
        assert launch.told("shares GPUs with the engines (turns)") is (colocate == "turns")
        digest = hashlib.sha256((launch.run_dir / "latest" / "model.safetensors").read_bytes()).hexdigest()
        trained.append((digest, launch.losses()))
    assert trained[0] == trained[1] and len(launch.losses()) == 2 and any(launch.losses())
