"""Faults of real launches: kills, freezes, Ctrl-C, resumes. Nothing is lost, trained twice, or left behind."""

from __future__ import annotations

import itertools
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import time
from pathlib import Path

import pytest

from dashboard.run_folder import RunFolder
from tests.system.conftest import Start
from tests.system.launch import Launch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def straight(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """An uninterrupted synchronous run to compare with."""
    launch = start(tmp_path_factory.mktemp("straight"), rollout__max_async_level=0, steps=5)
    assert launch.wait() == 0, launch.output[-6000:]
    return launch


def test_kill_of_the_launch_then_the_same_command_gives_the_same_losses(start: Start, straight: Launch, tmp_path: Path):
    settings = {"rollout__max_async_level": 0, "steps": 5}
    moment = random.Random(os.urandom(4)).uniform(0.0, 2.0)
    first = start(tmp_path, **settings)
    first.until_step(1)
    time.sleep(moment)
    first.kill()
    assert first.survivors() == [], "a rank outlived the launcher"
    done = len(first.metrics())
    second = start(tmp_path, **settings)
    assert second.wait() == 0, second.output[-6000:]
    assert done >= 5 or "resuming" in second.output
    assert second.losses() == straight.losses(), f"killed {moment:.2f} s after step 1"
    assert len(set(straight.losses())) == 5, "the weights did not move: equal losses would prove nothing"
    assert second.trained_prompts() == straight.trained_prompts() == list(range(20))


@pytest.mark.soak  # in make test: the kill above, SIGTERM in test_deaths.py
def test_kill_then_ctrl_c_of_an_asynchronous_launch_train_every_prompt_once(start: Start, tmp_path: Path):
    settings = {"rollout__max_async_level": 2, "steps": 10, "checkpoint__every": 2}
    first = start(tmp_path, **settings)
    first.until_step(3)
    first.kill()
    assert first.survivors() == []
    second = start(tmp_path, **settings)
    second.until_step(5)
    second.process.send_signal(signal.SIGINT)
    assert second.wait(200) != 0
    assert second.survivors() == []
    assert "resuming" in second.output and "saving a checkpoint" in second.output, second.output[-3000:]
    third = start(tmp_path, **settings)
    assert third.wait() == 0, third.output[-6000:]
    assert "resuming" in third.output
    assert third.trained_prompts() == list(range(40))


@pytest.mark.soak  # in make test: tests/rollout/test_worker.py, without the launch around it
def test_kill_of_an_engine_process_continues_its_completions(start: Start, tmp_path: Path):
    """It dies while it samples, two completions at a time, so that some of them are in flight."""
    few = {"rollout__max_sequences": 2, "rollout__max_completion_tokens": 100}
    launch = start(tmp_path, rollout__max_async_level=2, steps=8, **few)
    launch.until_step(2)
    engine = launch.engine_pid(2)
    launch.until_busy(engine)
    os.kill(engine, signal.SIGKILL)
    assert launch.wait() == 0, launch.output[-6000:]
    assert launch.trained_prompts() == list(range(32))
    assert launch.metrics()[-1]["engine/restarts"] == 1
    completions = [completion for group in launch.groups() for completion in group["completions"]]
    assert any(completion["restarts"] for completion in completions), "nothing was interrupted: the test tests nothing"
    for completion in completions:
        spans = completion["spans"]
        assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
        assert spans[-1]["end"] == len(completion["token_ids"]) == len(completion["logprobs"])
    assert launch.survivors() == []


@pytest.mark.soak  # in make test: tests/shared/test_watchdog.py
@pytest.mark.parametrize(("rank", "role"), [(0, "controller"), (2, "engine")])
def test_a_frozen_role_stops_the_launch_with_its_name_and_all_stacks(
    start: Start, tmp_path: Path, rank: int, role: str
):
    """A frozen trainer: tests/shared/test_watchdog.py, without the launch around it."""
    launch = start(tmp_path, steps=10_000, deadlines__sync_s=30, checkpoint__every=0)
    launch.until_step(1)
    os.kill(launch.rank_pid(rank), signal.SIGSTOP)
    frozen = time.monotonic()
    assert launch.wait(150) != 0
    assert time.monotonic() - frozen < 15 + 60
    assert launch.survivors() == []
    assert f"{role} rank {rank}" in launch.output or f"{role} (rank {rank})" in launch.output
    assert "phase" in launch.output and "stacks of all processes" in launch.output
    stacks = {path.name: path.read_text() for path in (launch.run_dir / "stacks").glob("*.txt")}
    for other in ("rank0.txt", "rank1.txt", "rank2.txt"):
        assert "most recent call first" in stacks[other], f"{other} has no stack"


CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
static volatile long still, *ahead = &still; /* seconds, in a file that the test writes */
__attribute__((constructor)) static void begin(void) {
  const char *path = getenv("CLOCK_AHEAD");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  void *page = file < 0 ? MAP_FAILED : mmap(0, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
  if (page != MAP_FAILED) ahead = page;
}
int clock_gettime(clockid_t clock, struct timespec *now) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  int code = real(clock, now);
  if (!code && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += *ahead;
  return code;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec exact;
  clock_gettime(CLOCK_REALTIME, &exact);
  now->tv_sec = exact.tv_sec, now->tv_usec = exact.tv_nsec / 1000;
  return 0;
}
time_t time(time_t *to) {
  struct timespec exact;
  clock_gettime(CLOCK_REALTIME, &exact);
  return to ? *to = exact.tv_sec : exact.tv_sec;
}
"""
"""a wall clock that jumps, for all processes of a launch; clocks that only measure are left alone"""


@pytest.mark.soak
def test_a_wall_clock_that_jumps_by_days_ends_nothing_and_loses_nothing(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "clock.c").write_text(CLOCK)
    library, ahead = tmp_path / "clock.so", tmp_path / "ahead"
    compiler = shutil.which("gcc") or shutil.which("g++") or pytest.skip("needs a C compiler")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, tmp_path / "clock.c", "-ldl"], check=True)
    ahead.write_bytes(struct.pack("l", 0))
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("CLOCK_AHEAD", str(ahead))
    launch = start(tmp_path, steps=40, deadlines__sync_s=30, deadlines__step_s=120)
    monkeypatch.delenv("LD_PRELOAD")
    day, seen = 86_400, []
    for jump in (day, -day, 0):
        launch.until_step(len(launch.metrics()) + 4)
        with ahead.open("r+b") as file:
            file.write(struct.pack("l", jump))
        launch.until_step(len(launch.metrics()) + 4)
        shown = RunFolder(launch.run_dir).summary()
        seen.append(shown)
        assert shown["state"] == "running" and 0 < shown["step_s"] < 60 and 0 < shown["total_s"] < 3600, shown
    assert launch.wait(300) == 0, launch.output[-4000:]
    times = [row["time"] for row in launch.metrics()]
    leaps = [round((after - before) / day) for before, after in itertools.pairwise(times)]
    assert [leap for leap in leaps if leap] == [1, -2, 1], "the clock did jump"
    print("\n".join(line for line in launch.output.splitlines() if "left" in line or "warning" in line.lower())[-3000:])
    assert launch.trained_prompts() == list(range(4 * 40)) and launch.metrics()[-1]["engine/restarts"] == 0
    assert not any(word in launch.output for word in ("waited", "silent", "hung", "Traceback"))
    assert max(row["time/step_s"] for row in launch.metrics()) < 60
    left = re.findall(r"left ([^ ]+ [^ ]+)", launch.output)
    assert left and not any("day" in one or " h" in one for one in left), left
