"""A launch that lacks something of the machine: a disk that turns read-only or is slow, open files, memory. One line
names what is missing and the repair, and the same command goes on once it is there."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.system.conftest import Start
from tests.system.launch import ROOT, Launch
from tests.system.test_deaths import ENDLESS, memory_group, remove

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
SLOW_DISK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>
/* each write to, and each flush of a file below $SLOW_FOLDER takes a while, as on a network's disk */
static void wait_for(int file, int milliseconds) {
    char name[64], path[4096];
    const char *slow = getenv("SLOW_FOLDER");
    snprintf(name, sizeof name, "/proc/self/fd/%d", file);
    ssize_t length = readlink(name, path, sizeof path - 1);
    if (slow && length > 0 && strncmp(path, slow, strlen(slow)) == 0) usleep(milliseconds * 1000);
}
ssize_t write(int file, const void *content, size_t size) {
    wait_for(file, 20);
    return ((ssize_t (*)(int, const void *, size_t))dlsym(RTLD_NEXT, "write"))(file, content, size);
}
int fsync(int file) {
    wait_for(file, 500);
    return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(file);
}
"""


def only_line(launch: Launch, before: int, *words: str) -> str:
    """The one line that says why a launch has ended."""
    lines = launch.output[before:].splitlines()
    assert not any("Traceback" in line for line in lines), launch.output[before:][-3000:]
    (line,) = [line for line in lines if line.startswith("error: ")]
    assert all(word in line for word in words), line
    print(line)
    return line


def test_too_few_open_files_are_refused_at_the_start() -> None:
    limit = ["prlimit", "--nofile=256:256", sys.executable, "-m", "trainer", "configs/quickstart.toml"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(limit, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert run.returncode == 2 and run.stderr == (
        "error: processes may have 256 open files, and a launch needs 512: raise the limit of open files before the "
        "start (`ulimit -n 65536`, /etc/security/limits.conf, or of a container --ulimit nofile=65536)\n"
    )


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own."""
    image, folder = tmp_path / "image", tmp_path / "disk"
    folder.mkdir()
    image.touch()
    os.truncate(image, 256 << 20)
    commands = (["mkfs.ext4", "-q", image], ["mount", "-o", "loop,errors=remount-ro", image, folder])
    if any(subprocess.run(command, capture_output=True, check=False).returncode for command in commands):
        pytest.skip("cannot mount a disk here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


@pytest.mark.soak
def test_a_disk_that_turns_read_only_is_told_and_the_launch_goes_on_from_it(
    start: Start, tmp_path: Path, disk: Path
) -> None:
    settings = {**ENDLESS, "checkpoint__every": 2, "rollout__prompts_per_step": 2}
    first = start(disk, command="trainer", log_dir=tmp_path, **settings)
    first.until_step(3)
    before = len(first.output)
    subprocess.run(["mount", "-o", "remount,abort", str(disk)], check=True)  # as after an error of the disk
    assert first.wait(100) == 1 and first.survivors() == []
    line = only_line(first, before, str(disk))
    assert "Read-only file system" in line or "Input/output error" in line, "a flush gets the latter"
    assert "make it writable, or choose" in line or "repair the disk, or choose" in line
    subprocess.run(["umount", str(disk)], check=True)  # nothing holds it any more
    subprocess.run(["mount", "-o", "loop", str(tmp_path / "image"), str(disk)], check=True)
    second = start(disk, command="trainer", log_dir=tmp_path, **settings)
    second.until_step(4)
    second.process.send_signal(signal.SIGTERM)
    assert second.wait(100) == 128 + signal.SIGTERM and second.survivors() == []
    assert "resuming" in second.output
    steps = [row["step"] for row in second.metrics()]  # lines that the disk had not taken yet are lost with it
    assert steps == list(range(steps[0], steps[-1] + 1)) and steps[-1] >= 4


@pytest.mark.soak
def test_a_slow_disk_costs_time_only(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, library, run_dir = tmp_path / "slow.c", tmp_path / "slow.so", tmp_path / "runs"
    source.write_text(SLOW_DISK)
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    for name, value in (("LD_PRELOAD", library), ("SLOW_FOLDER", run_dir)):
        monkeypatch.setenv(name, str(value))
    launch = start(run_dir, command="trainer", log_dir=tmp_path, steps=6, rollout__prompts_per_step=2)
    assert launch.wait(400) == 0, launch.output[-3000:]
    assert launch.survivors() == [] and not launch.told("silent")
    assert launch.trained_prompts() == list(range(12))
    seconds = [row["time/step_s"] for row in launch.metrics()]
    print(f"a write takes 20 ms more, a flush 500 ms: {min(seconds):.1f} to {max(seconds):.1f} s a step")


@pytest.mark.soak
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_may_open_no_more_files_is_named_with_the_limit(start: Start, tmp_path: Path, rank: int) -> None:
    settings = {**ENDLESS, "checkpoint__every": 2, "rollout__prompts_per_step": 2}
    first = start(tmp_path, command="trainer", **settings)
    first.until_step(3)
    before, began = len(first.output), time.monotonic()
    resource.prlimit(first.rank_pid(rank), resource.RLIMIT_NOFILE, (5, 5))
    assert first.wait(100) == 1 and first.survivors() == []
    only_line(first, before, "Too many open files", "ulimit -n 65536")
    print(f"{time.monotonic() - began:.0f} s")
    second = start(tmp_path, command="trainer", **settings)
    second.until_step(len(second.metrics()) + 1)
    assert "resuming" in second.output
    second.remember_processes()
    second.kill()
    assert second.survivors() == []


@pytest.mark.soak
def test_an_engine_process_that_the_kernel_kills_for_want_of_memory_is_told_as_that_and_replaced(
    start: Start, tmp_path: Path
) -> None:
    launch = start(tmp_path, command="trainer", **ENDLESS)
    launch.until_step(2)
    victim, group = launch.engine_pid(2), memory_group()
    try:
        (group / "cgroup.procs").write_text(str(victim))
        (group / "memory.limit_in_bytes").write_text(str(1 << 20))  # of what it takes from now on
        began, done = time.monotonic(), len(launch.metrics())
        words = (
            "engine 0 (rank 2)",
            f"pid {victim}",
            "memory killer has ended a process",
            "lower rollout.cache_bytes",
        )
        launch.until(lambda: launch.told(*words), 100)
        launch.until_step(done + 3)
    finally:
        remove(group)
    print(f"replaced after {time.monotonic() - began:.0f} s; it was pid {victim}")
    assert not psutil.pid_exists(victim)
    launch.kill()
    assert launch.survivors() == []
