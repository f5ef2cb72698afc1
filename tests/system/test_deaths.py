"""Every death and every hang of a real launch is told in one line: who, why, what to do."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.system.conftest import Start
from tests.system.launch import Launch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
ENDLESS = {"steps": 10_000, "rollout__lead": 2, "checkpoint__every": 0, "evaluate__every": 0}


def saved_steps(launch: Launch) -> list[int]:
    found = (launch.run_dir / "checkpoints").glob("step_*/manifest.json")
    return sorted(int(manifest.parent.name.removeprefix("step_")) for manifest in found)


def test_a_frozen_engine_is_replaced_sigterm_saves_and_a_killed_trainer_is_named(start: Start, tmp_path: Path):
    """Default deadlines; SIGTERM goes to the launcher, as a cluster sends it, then the same command goes on."""
    first = start(tmp_path, command="trainer", rollout__max_completion_tokens=100, **ENDLESS)
    first.until_step(2)
    frozen = first.engine_pid(2)
    os.kill(frozen, signal.SIGSTOP)
    first.until(lambda: first.told("engine 0 (rank 2", "was started again"), 200)
    assert first.told("engine 0 (rank 2", f"pid {frozen}", "no token and no answer"), first.output[-3000:]
    first.until_step(len(first.metrics()) + 1)
    first.process.send_signal(signal.SIGTERM)
    assert first.wait(100) == 128 + signal.SIGTERM, first.output[-3000:]
    assert first.survivors() == []
    assert "SIGTERM" in first.output and "saving a checkpoint" in first.output, first.output[-3000:]
    (step,) = [step for step in saved_steps(first) if step]
    assert step == len(first.metrics()), "nothing of what was trained is lost"

    second = start(tmp_path, command="trainer", rollout__max_completion_tokens=100, **ENDLESS)
    second.until_step(step + 1)
    assert f"from step {step}" in second.output, second.output[-3000:]
    victim = second.rank_pid(1)
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    assert second.wait(100) == 128 + signal.SIGKILL, second.output[-3000:]
    assert time.monotonic() - killed < 25
    assert second.told(
        "trainer 0 (rank 1", f"pid {victim}", "killed by signal 9 (SIGKILL)", f"goes on from step {step}"
    ), second.output[-3000:]
    assert second.survivors() == []


def test_what_fails_in_an_engine_before_it_is_ready_is_told_with_its_reason(start: Start, tmp_path: Path):
    """vLLM refuses a cache that no sequence fits in; torchrun, where nobody but a rank can tell."""
    launch = start(tmp_path, rollout__cache_bytes=4096)
    assert launch.wait(150) != 0
    assert launch.told("engine rank 2", "could not start", "cache"), launch.output[-3000:]
    assert launch.survivors() == []


def test_a_second_launch_in_one_folder_is_refused_and_leaves_the_stacks_of_the_first_alone(
    start: Start, tmp_path: Path
):
    """And of a controller that is killed the other ranks tell."""
    first = start(tmp_path, **ENDLESS)
    first.until_step(1)
    before = (first.run_dir / "stacks" / "rank0.txt").read_text()
    (tmp_path / "logs").mkdir()
    second = start(tmp_path, log_dir=tmp_path / "logs", **ENDLESS)
    assert second.wait(100) != 0
    assert "in use by another launch" in second.output
    assert (first.run_dir / "stacks" / "rank0.txt").read_text() == before
    victim = first.rank_pid(0)
    os.kill(victim, signal.SIGKILL)
    assert first.wait(100) != 0
    assert first.told("controller (rank 0", f"pid {victim}", "killed by signal 9 (SIGKILL)", "goes on from step"), (
        first.output[-3000:]
    )
    assert first.survivors() == []
