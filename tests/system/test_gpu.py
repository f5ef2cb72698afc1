"""Whole launches on GPUs: each way of the weights, NCCL among trainers and engines, an engine of two GPUs. The same
launches run on the CPU in test_run.py; these were not run on a card yet (docs/gpu.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.system.conftest import Start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ON_GPUS: dict[str, Any] = {
    "steps": 4, "deadlines__start_s": 600, "rollout__max_async_level": 2, "model__dtype": "bfloat16",
    "optimiser__compute_dtype": "bfloat16",
}  # fmt: skip
LAYOUTS = [
    pytest.param({"rollout__transport": "auto"}, "cuda_ipc", id="auto", marks=pytest.mark.gpu(2)),
    pytest.param({"rollout__transport": "cuda_ipc"}, "cuda_ipc", id="cuda_ipc", marks=pytest.mark.gpu(2)),
    pytest.param({"rollout__transport": "network"}, "network", id="network", marks=pytest.mark.gpu(2)),
    pytest.param({"rollout__transport": "network", "placement__trainers": 2, "placement__engines": 2}, "network",
                 id="network, two trainers and two engines", marks=pytest.mark.gpu(4)),
    pytest.param({"rollout__tensor_parallel": 2}, "cuda_ipc", id="tensor parallel 2", marks=pytest.mark.gpu(3)),
    pytest.param({"rollout__tensor_parallel": 2, "rollout__transport": "network"}, "network",
                 id="tensor parallel 2 over the network", marks=pytest.mark.gpu(3)),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "transport"), LAYOUTS)
def test_a_launch(start: Start, tmp_path: Path, settings: dict[str, Any], transport: str) -> None:
    launch = start(tmp_path, **ON_GPUS, **settings)
    assert launch.wait(800) == 0, launch.output[-6000:]
    rows = launch.metrics()
    assert [row["step"] for row in rows] == [1, 2, 3, 4], transport
    trained = launch.trained_prompts()
    assert len(trained) == len(set(trained)) == 4 * 4
    for row in rows:
        assert row["engine/restarts"] == 0 and row["sync/bytes"] > 0 and row["sync/logprob_diff_mean"] < 0.1
        assert row["memory/trainer_peak_gpu_bytes"] > 0 and row["memory/engine_peak_gpu_bytes"] > 0
        assert row["tflops_per_device"] > 0 and 0 < row.get("mfu", 0.5) < 1
    assert any(row["spans/multi_version_share"] > 0 for row in rows), "no update met a completion that was sampled"


@pytest.mark.gpu(2)
def test_the_cpu_s_transport_is_refused_on_gpus(start: Start, tmp_path: Path) -> None:
    launch = start(tmp_path, **ON_GPUS, rollout__transport="shm")
    assert launch.wait(400) == 2 and 'rollout.transport = "shm" is for trainers on the CPU' in launch.output
