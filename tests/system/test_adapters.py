"""Launches that train adapters: what they leave, that a resume and a kill change nothing, and a teacher beside them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from shared.model.adapter_folder import read_matrices
from shared.model.lora import B
from tests.serve.command import Command
from tests.system.conftest import Start
from tests.system.test_objectives import SHORT, again, finished, numbers
from trainer.export import main as export

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
LORA: dict[str, Any] = {
    **SHORT, "lora__rank": 4, "optimiser__learning_rate": 1e-2, "optimiser__warmup_steps": 0, "steps": 2,
}  # fmt: skip


@pytest.mark.soak  # in make test: tests/trainer/test_rank.py; a launch with adapters in test_deaths.py
@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_a_run_with_adapters_repeats_from_its_checkpoint_and_leaves_both_exports(
    start: Start, tmp_path: Path, implementation: str
) -> None:
    """Two steps a batch; the reference is the frozen model, so that the first of them all has no divergence."""
    settings = {
        **LORA, "optimiser__minibatches": 2, "objective__kl__weight": 0.1, "model__implementation": implementation,
    }  # fmt: skip
    first = finished(start, tmp_path / "first", **settings)
    one, two = numbers(first, 1), numbers(first, 2)
    assert one["grad_norm"] > 0 and two["kl/reference"] > abs(one["kl/reference"]) and one["kl/reference"] != 0
    assert first.told("adapters", "(rank 4, alpha 32) on frozen weights")
    run, step = first.run_dir, "step_2"
    assert (run / "latest").resolve() == run / "hf" / step
    assert (run / "latest-adapter").resolve() == run / "adapters" / step
    began, trained = read_matrices(run / "reference"), read_matrices(run / "latest-adapter")
    assert not any(value.any() for name, value in began.items() if name.endswith(B))
    assert all(value.any() for value in trained.values())
    shard = load_file(run / "checkpoints" / step / "trainer-0-of-1.safetensors")
    assert {name.partition("/")[2] for name in shard} == trained.keys()
    merged = (run / "latest" / "model.safetensors").read_bytes()
    for name in ("hf", "adapters"):
        (run / name / step).rename(run / name / "kept")
    assert export([str(run)]) == 0, "from the checkpoint alone"
    assert (run / "hf" / step / "model.safetensors").read_bytes() == merged
    alone = [run / "adapters" / name / "adapter_model.safetensors" for name in (step, "kept")]
    assert alone[0].read_bytes() == alone[1].read_bytes()
    second = again(start, first, tmp_path / "second", 1, **settings)
    assert numbers(second, 2) == two


@pytest.mark.soak  # in make test: the kills in test_deaths.py, of which a launch has adapters
def test_killed_ranks_with_adapters_lose_nothing(start: Start, tmp_path: Path) -> None:
    settings = {**LORA, "rollout__max_async_level": 1, "steps": 6}
    for victim in ("trainer", "engine", "launcher"):
        launch = start(tmp_path, name=victim, **settings)
        launch.until_step(2)
        if victim == "launcher":
            launch.kill()
        elif victim == "engine":
            os.kill(launch.engine_pid(2), signal.SIGKILL)
        else:
            os.kill(launch.rank_pid(1), signal.SIGKILL)
        if victim != "launcher":
            assert (launch.wait() == 0) == (victim == "engine"), launch.output[-6000:]
        if victim == "engine":
            assert launch.told("was started again")
        else:
            launch = finished(start, tmp_path, name=victim, **settings)
            assert "resuming" in launch.output
        assert launch.trained_prompts() == list(range(24))
        assert max(row.get("sync/logprob_diff_mean", 0) for row in launch.metrics()) < 1e-4


@pytest.mark.soak  # in make test: the same with all weights (test_objectives.py)
def test_a_served_teacher_of_adapters_is_asked(start: Start, seasoned: Path, tmp_path: Path) -> None:
    teacher = Command((seasoned / "latest").resolve(), tmp_path / "teacher.log", name="teacher")
    try:
        launch = finished(
            start, tmp_path, **{**LORA, "steps": 2}, model__max_tokens=190, objective__name="distill",
            objective__teacher__kind="served", objective__teacher__url=f"{teacher.url}/v1",
            objective__teacher__model="teacher",
        )  # fmt: skip
    finally:
        teacher.close()
    one, _ = launch.metrics()
    assert abs(one["kl/teacher"]) < 1e-5, "the frozen model is the teacher"
