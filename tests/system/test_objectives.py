"""Objectives that need more than rewards and log-probs, in real launches: what they keep, and that a resume finds it.

A finished synchronous launch is its own standard: a copy of its folder without the newest checkpoints must go through
the same steps again, with the same numbers.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.serve.command import Command
from tests.system.conftest import Start
from tests.system.launch import Launch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
SHORT = {"rollout__max_async_level": 0, "data__validation": "", "evaluate__every": 0, "optimiser__min_lr_ratio": 1.0}


def numbers(launch: Launch, step: int) -> dict[str, float]:
    """What a step found, but for its times and what counts from the start of a launch."""
    row = [row for row in launch.metrics() if row["step"] == step][-1]
    others = ("time", "sync", "engine", "tokens", "memory", "verify", "tflops", "mfu")
    return {name: value for name, value in row.items() if not name.startswith(others)}


def again(start: Start, first: Launch, folder: Path, step: int, **settings: Any) -> Launch:
    """A launch that goes on from the checkpoint of `step` of a copy of another one's folder."""
    shutil.copytree(first.run_dir, folder / first.run_dir.name, symlinks=True)
    for newer in (folder / first.run_dir.name / "checkpoints").glob("step_*"):
        if int(newer.name.removeprefix("step_")) > step:
            shutil.rmtree(newer)
    launch = start(folder, **settings)
    assert launch.wait(500) == 0, launch.output[-6000:]
    assert f"from step {step} of" in launch.output
    return launch


def finished(start: Start, folder: Path, **settings: Any) -> Launch:
    launch = start(folder, **settings)
    assert launch.wait(500) == 0, launch.output[-6000:]
    return launch


@pytest.mark.soak  # in make test: tests/trainer/test_soft_values.py, without a launch
def test_soft_values_are_sampled_once_and_kept(start: Start, tmp_path: Path):
    settings = {**SHORT, "steps": 2, "objective__name": "spo", "objective__value_samples": 2}
    first = finished(start, tmp_path / "first", **settings)
    kept = json.loads((first.run_dir / "values.json").read_text())
    drawn = {group["prompt"]["problem"]["id"] for group in first.groups()}
    assert drawn <= kept["values"].keys() and all(map(math.isfinite, kept["values"].values()))
    second = again(start, first, tmp_path / "second", 1, **settings)
    assert "soft values of" in first.output and "soft values of" not in second.output
    assert json.loads((second.run_dir / "values.json").read_text()) == kept
    assert numbers(second, 2) == numbers(first, 2) and numbers(first, 2)["kl/reference"] != 0


@pytest.mark.soak
def test_a_moving_reference_goes_on_from_the_checkpoint_beside_a_teacher(start: Start, seasoned: Path, tmp_path: Path):
    """Two steps a batch, clipped at its start. The teacher is the policy that the run starts with; the reference of the
    checkpoint is neither that nor the policy, and only with it the second batch repeats."""
    settings = {
        **SHORT, "steps": 2, "objective__name": "decoupled_ppo", "optimiser__minibatches": 2,
        "objective__kl__weight": 0.1,
        "objective__kl__reference__kind": "average", "objective__kl__reference__share": 0.25,
        "optimiser__learning_rate": 3e-3, "optimiser__warmup_steps": 0, "objective__teacher__kind": "local",
        "objective__teacher__path": str((seasoned / "latest").resolve()),
    }  # fmt: skip
    first = finished(start, tmp_path / "first", **settings)
    one, two = numbers(first, 1), numbers(first, 2)
    assert all(math.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in (one, two))
    assert one["clip/low"] + one["clip/high"] > 0, "the second minibatch met a policy that had moved"
    assert abs(two["kl/teacher"]) > 1e-3 and two["kl/reference"] != two["kl/teacher"]
    assert first.trained_prompts() == list(range(8))
    saved = first.run_dir / "checkpoints" / "step_1"
    assert "reference/model.safetensors" in json.loads((saved / "manifest.json").read_text())["files"]
    moved, began = (folder / "reference" / "model.safetensors" for folder in (saved, first.run_dir))
    assert moved.read_bytes() != began.read_bytes()
    second = again(start, first, tmp_path / "second", 1, **settings)
    assert numbers(second, 2) == two


@pytest.mark.soak  # in make test: tests/trainer/objectives, without a launch
def test_open_problems_are_learned_from_by_their_ground_truth_answers(start: Start, seasoned: Path, tmp_path: Path):
    rows = [json.loads(line) for line in (seasoned / "made" / "train.jsonl").read_text().splitlines()[:8]]
    for row in rows[::2]:
        row["domain"] = "open"
    data = tmp_path / "mixed.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    launch = finished(
        start, tmp_path, **SHORT, steps=2, data__train=str(data), data__order="file", objective__name="jepo",
        objective__bound_groups="open", objective__answer_weight=1.0,
    )  # fmt: skip
    for row in launch.metrics():
        assert math.isfinite(row["loss"]) and row["grad_norm"] > 0
    verdicts = {
        reward["verdict"]
        for group in launch.groups()
        if group["prompt"]["problem"]["domain"] == "open"
        for reward in group["rewards"]
    }
    assert "open" in verdicts and not verdicts & {"correct", "wrong"}
    assert all(row["reward/correctness"] >= 0 and "accuracy" in row for row in launch.metrics())


@pytest.mark.soak  # in make test: tests/trainer/objectives/test_teachers.py, without a launch
def test_a_teacher_behind_an_address_is_asked_while_sampling_goes_on(start: Start, seasoned: Path, tmp_path: Path):
    """Our own server with the model that the run starts with: it knows what the policy knows."""
    teacher = Command((seasoned / "latest").resolve(), tmp_path / "teacher.log", name="teacher")
    try:
        launch = finished(
            start, tmp_path, **SHORT, steps=1, model__max_tokens=190, objective__name="distill",
            objective__teacher__kind="served", objective__teacher__url=f"{teacher.url}/v1",
            objective__teacher__model="teacher",
        )  # fmt: skip
    finally:
        teacher.close()
    assert "teacher: teacher at" in launch.output and "the same tokenizer" in launch.output
    (row,) = launch.metrics()
    assert abs(row["kl/teacher"]) < 1e-5 and abs(row["loss"]) < 1e-3, "nothing to learn from oneself"
    completions = [completion for group in launch.groups() for completion in group["completions"]]
    assert all(len(one["teacher"]) == len(one["logprobs"]) == len(one["token_ids"]) for one in completions)
    for one in completions:
        assert one["teacher"] == pytest.approx(one["logprobs"], abs=1e-4)
