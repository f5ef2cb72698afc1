"""Objectives and adapters in real launches: what they keep, and that a resume finds it.

A finished synchronous launch is its own standard: a copy of its folder without the newest checkpoints must go through
the same steps again, with the same numbers.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from shared.model.adapter_folder import read_matrices
from shared.model.lora import B
from tests.serve.command import Command
from tests.system.conftest import Start
from tests.system.launch import Launch
from trainer.export import main as export

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]
SHORT: dict[str, Any] = {
    "rollout__max_async_level": 0, "data__validation": "", "evaluate__every": 0, "optimiser__min_lr_ratio": 1.0,
    "steps": 2,
}  # fmt: skip
SPEED = ("time", "sync", "engine", "tokens", "memory", "verify", "tflops", "mfu")
MOVING = {
    "objective__name": "decoupled_ppo", "optimiser__minibatches": 2, "objective__kl__weight": 0.1,
    "objective__kl__reference__kind": "average", "objective__kl__reference__share": 0.25,
    "optimiser__learning_rate": 3e-3, "optimiser__warmup_steps": 0,
}  # fmt: skip


def numbers(launch: Launch, step: int) -> dict[str, float]:
    """What a step found, but for its times and what counts from the start of a launch."""
    row = [row for row in launch.metrics() if row["step"] == step][-1]
    return {name: value for name, value in row.items() if not name.startswith(SPEED)}


def again(start: Start, first: Launch, folder: Path, **settings: Any) -> Launch:
    """A launch that goes on from the checkpoint of step 1 of a copy of another one's folder, and finds the same."""
    shutil.copytree(first.run_dir, folder / first.run_dir.name, symlinks=True)
    shutil.rmtree(folder / first.run_dir.name / "checkpoints" / "step_2")
    launch = start(folder, **settings).finish()
    assert launch.resumed_from() == 1 and numbers(launch, 2) == numbers(first, 2)
    return launch


def test_a_moving_reference_goes_on_from_the_checkpoint_beside_a_teacher(start, seasoned, tmp_path):
    """Two steps a batch, clipped at its start. The teacher is the policy that the run starts with; the reference of the
    checkpoint is neither that nor the policy, and only with it the second batch repeats."""
    teacher = {"objective__teacher__kind": "local", "objective__teacher__path": str((seasoned / "latest").resolve())}
    settings = {**SHORT, **MOVING, **teacher}
    first = start(tmp_path / "first", **settings).finish()
    one, two = numbers(first, 1), numbers(first, 2)
    assert all(math.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in (one, two))
    assert one["clip/low"] + one["clip/high"] > 0, "the second minibatch met a policy that had moved"
    assert abs(two["kl/teacher"]) > 1e-3 and two["kl/reference"] != two["kl/teacher"]
    assert first.trained_prompts() == list(range(8))
    saved = first.run_dir / "checkpoints" / "step_1"
    assert "reference/model.safetensors" in json.loads((saved / "manifest.json").read_text())["files"]
    moved, began = (folder / "reference" / "model.safetensors" for folder in (saved, first.run_dir))
    assert moved.read_bytes() != began.read_bytes()
    again(start, first, tmp_path / "second", **settings)


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_a_run_with_adapters_repeats_from_its_checkpoint_and_leaves_both_exports(start, tmp_path, implementation):
    """Two steps a batch; the reference is the frozen model, so that the first of them all has no divergence."""
    settings = {
        **SHORT, "lora__rank": 4, "optimiser__learning_rate": 1e-2, "optimiser__warmup_steps": 0,
        "optimiser__minibatches": 2, "objective__kl__weight": 0.1, "model__implementation": implementation,
    }  # fmt: skip
    first = start(tmp_path / "first", **settings).finish()
    step_1, step_2 = numbers(first, 1), numbers(first, 2)
    assert (
        step_1["grad_norm"] > 0 and step_2["kl/reference"] > abs(step_1["kl/reference"]) and step_1["kl/reference"] != 0
    )
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
    alone, kept = (run / "adapters" / name / "adapter_model.safetensors" for name in (step, "kept"))
    assert alone.read_bytes() == kept.read_bytes()
    again(start, first, tmp_path / "second", **settings)


def test_open_problems_are_learned_from_by_their_ground_truth_answers(start, seasoned, tmp_path):
    rows = [json.loads(line) for line in (seasoned / "made" / "train.jsonl").read_text().splitlines()[:8]]
    rows = [row if number % 2 else {**row, "domain": "open"} for number, row in enumerate(rows)]
    (tmp_path / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    launch = start(
        tmp_path, **SHORT, data__train=str(tmp_path / "mixed.jsonl"), data__order="file", objective__name="jepo",
        objective__bound_groups="open", objective__answer_weight=1.0,
    ).finish()  # fmt: skip
    for row in launch.metrics():
        assert math.isfinite(row["loss"]) and row["grad_norm"] > 0
        assert row["reward/correctness"] >= 0 and "accuracy" in row
    of_open = [group for group in launch.groups() if group["prompt"]["problem"]["domain"] == "open"]
    verdicts = {reward["verdict"] for group in of_open for reward in group["rewards"]}
    assert "open" in verdicts and not verdicts & {"correct", "wrong"}


@pytest.mark.parametrize("rank", [0, 4])
def test_a_teacher_behind_an_address_is_asked_while_sampling_goes_on(start, seasoned, tmp_path, rank):
    """Our own server with the model that the run starts with, of adapters the frozen one: it knows what the policy
    knows."""
    teacher = Command((seasoned / "latest").resolve(), tmp_path / "teacher.log", name="teacher")
    try:
        launch = start(
            tmp_path, **{**SHORT, "steps": 1}, model__max_tokens=190, objective__name="distill", lora__rank=rank,
            objective__teacher__kind="served", objective__teacher__url=f"{teacher.url}/v1",
            objective__teacher__model="teacher",
        ).finish()  # fmt: skip
    finally:
        teacher.close()
    assert "teacher: teacher at" in launch.output and "the same tokenizer" in launch.output
    [row] = launch.metrics()
    assert abs(row["kl/teacher"]) < 1e-5 and abs(row["loss"]) < 1e-3, "nothing to learn from oneself"
    for one in launch.completions():
        assert len(one["teacher"]) == len(one["logprobs"]) == len(one["token_ids"])
        assert one["teacher"] == pytest.approx(one["logprobs"], abs=1e-4)
