"""Every death and every hang of a real launch is told in one line: who, why, what to do."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.system.conftest import Start
from tests.system.launch import Launch, free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
ENDLESS = {"steps": 10_000, "rollout__max_async_level": 2, "checkpoint__every": 0, "evaluate__every": 0}


def saved_steps(launch: Launch) -> list[int]:
    found = (launch.run_dir / "checkpoints").glob("step_*/manifest.json")
    return sorted(int(manifest.parent.name.removeprefix("step_")) for manifest in found)


def test_sigterm_saves_a_second_launch_touches_nothing_and_a_killed_trainer_is_named(start: Start, tmp_path: Path):
    """SIGTERM goes to the launcher, as a cluster sends it; then the same command goes on. The launches train adapters:
    those of full training are stopped in test_faults.py."""
    settings = {**ENDLESS, "lora__rank": 4}
    first = start(tmp_path, command="trainer", **settings)
    first.until_step(1)
    assert first.told("adapters", "(rank 4, alpha 32) on frozen weights")
    before = (first.run_dir / "stacks" / "rank0.txt").read_text()
    (tmp_path / "logs").mkdir()
    refused = start(tmp_path, log_dir=tmp_path / "logs", **settings)
    assert refused.wait(100) != 0
    assert "in use by another launch" in refused.output
    assert (first.run_dir / "stacks" / "rank0.txt").read_text() == before
    first.remember_processes()
    first.process.send_signal(signal.SIGTERM)
    assert first.wait(100) == 128 + signal.SIGTERM, first.output[-3000:]
    assert first.survivors() == []
    assert "SIGTERM came" in first.output and "saving a checkpoint" in first.output, first.output[-3000:]
    (step,) = [step for step in saved_steps(first) if step]
    assert step == len(first.metrics()), "nothing of what was trained is lost"

    second = start(tmp_path, command="trainer", **settings)
    second.until_step(step + 1)
    assert f"from step {step}" in second.output, second.output[-3000:]
    victim = second.rank_pid(1)
    os.kill(victim, signal.SIGKILL)
    assert second.wait(100) == 128 + signal.SIGKILL, second.output[-3000:]
    words = "trainer 0 (rank 1", f"pid {victim}", "killed by signal 9 (SIGKILL)", f"goes on from step {step}"
    assert second.told(*words), second.output[-3000:]
    assert second.survivors() == []


@pytest.mark.soak  # in make test: tests/serve/test_start.py, a server's engine that cannot start
def test_what_fails_in_an_engine_before_it_is_ready_is_told_with_its_reason(start: Start, tmp_path: Path):
    """vLLM refuses a cache that no sequence fits in."""
    launch = start(tmp_path, rollout__cache_bytes=4096)
    assert launch.wait(150) != 0
    assert launch.told("engine rank 2", "could not start", "cache"), launch.output[-3000:]
    assert launch.survivors() == []


@pytest.mark.soak
def test_a_frozen_engine_is_replaced_with_default_deadlines(start: Start, tmp_path: Path):
    """While it samples or takes weights, whatever comes; then a controller is killed."""
    launch = start(tmp_path, rollout__max_completion_tokens=100, **ENDLESS)
    for step in (2, 4):
        launch.until_step(step)
        frozen = launch.engine_pid(2)
        os.kill(frozen, signal.SIGSTOP)
        began, words = time.monotonic(), ("engine 0 (rank 2", f"pid {frozen}", "no token and no answer")
        launch.until(lambda words=words: launch.told(*words, "was started again"), 200)
        print(f"frozen engine replaced after {time.monotonic() - began:.0f} s")
    launch.until_step(len(launch.metrics()) + 1)
    victim = launch.rank_pid(0)
    os.kill(victim, signal.SIGKILL)
    assert launch.wait(100) != 0
    words = "controller (rank 0", f"pid {victim}", "killed by signal 9 (SIGKILL)"
    assert launch.told(*words), launch.output[-3000:]
    assert launch.survivors() == []


@pytest.mark.soak
@pytest.mark.parametrize(("rank", "who"), [(1, "trainer 0 (rank 1"), (0, "controller (rank 0")])
def test_what_the_kernel_kills_for_want_of_memory_is_told_as_that(
    start: Start, tmp_path: Path, rank: int, who: str
) -> None:
    launch = start(tmp_path, command="trainer", **ENDLESS)
    launch.until_step(2)
    launch.remember_processes()
    victim, group = launch.rank_pid(rank), memory_group()
    try:
        (group / "cgroup.procs").write_text(str(victim))
        (group / "memory.limit_in_bytes").write_text(str(1 << 20))  # of what it takes from now on
        began = time.monotonic()
        assert launch.wait(100) == 128 + signal.SIGKILL, launch.output[-3000:]
    finally:
        remove(group)
    told = [line for line in launch.output.splitlines() if who in line and "memory" in line]
    print(f"out of memory | {told[-1:]} | {time.monotonic() - began:.0f} s")
    assert f"pid {victim}" in told[-1] and "out-of-memory killer has ended a process" in told[-1], launch.output[-3000:]
    assert launch.survivors() == []


@pytest.mark.soak  # in make test: tests/shared/test_node.py
@pytest.mark.parametrize("command", ["trainer", "torchrun"])
def test_the_death_of_the_only_rank_of_another_node_is_named_on_both(
    start: Start, tmp_path: Path, command: str
) -> None:
    """Its parent there reports it in the folder where the ranks meet."""
    port, agents = free_port(), []
    for node, ranks in enumerate((2, 1)):
        where = ("--nnodes=2", f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}")
        place = {"options": where} if command == "trainer" else {"torchrun": (*where, f"--nproc-per-node={ranks}")}
        (tmp_path / f"node{node}").mkdir()
        agents.append(start(
            tmp_path, command=command, log_dir=tmp_path / f"node{node}", rollout__transport="network",
            deadlines__sync_s=120, **place, **ENDLESS,
        ))  # fmt: skip
    first, second = agents
    first.until_step(2)
    first.remember_processes()
    second.remember_processes()
    victim = second.rank_pid(2)
    began = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    codes = first.wait(100), second.wait(100)
    seconds = time.monotonic() - began
    print(f"rank of another node | {command} | exit codes {codes} | {seconds:.0f} s")
    assert (codes == (1, 137) if command == "trainer" else 0 not in codes) and seconds < 30
    words = ("engine 0 (rank 2", f"pid {victim}", "killed by signal 9 (SIGKILL)", "goes on from step")
    assert first.told(*words) and second.told(*words), first.output[-3000:] + second.output[-2000:]
    assert first.survivors() == [] and second.survivors() == []


def memory_group() -> Path:
    """A control group with a limit of its own; skips where none can be made."""
    path = next((line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines()
                 if "memory" in line.split(":")[1]), None)  # fmt: skip
    if path is None:
        pytest.skip("needs control groups of version 1 with memory")
    group = Path("/sys/fs/cgroup/memory", path.lstrip("/"), f"maestrale-test-{os.getpid()}")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"cannot make a control group here: {error}")
    return group


def remove(group: Path) -> None:
    """It can be removed when its processes are gone."""
    for _ in range(100):
        try:
            return group.rmdir()
        except OSError:
            time.sleep(0.1)
