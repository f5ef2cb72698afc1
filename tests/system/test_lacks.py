"""A launch that lacks something of the machine: a disk that is full, turns read-only or is slow, open files, memory, a
steady clock. One line names what is missing and the repair, and the same command goes on once it is there."""

import itertools
import os
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from dashboard.run_folder import RunFolder
from tests.system.conftest import Start
from tests.system.launch import ROOT, Launch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
ENDLESS: dict[str, Any] = {
    "command": "trainer", "steps": 10_000, "rollout__max_async_level": 2, "rollout__prompts_per_step": 2,
    "checkpoint__every": 2, "evaluate__every": 0,
}  # fmt: skip


def test_too_few_open_files_are_refused_at_the_start(tmp_path):
    limit = ["prlimit", "--nofile=256:256", sys.executable, "-m", "trainer", "configs/quickstart.toml"]
    limit += [f"--runs_dir={tmp_path}"]  # in runs/ it may be finished, and then nothing starts
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(limit, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 2 and run.stderr == (
        "error: processes may have 256 open files, and a launch needs 512: raise the limit of open files before the "
        "start (`ulimit -n 65536`, /etc/security/limits.conf, or of a container --ulimit nofile=65536)\n"
    )


def ended(launch: Launch, before: int, *words: str, code: int = 1) -> str:
    """Wait until a launch has ended with one line that says why. before: length of its output then."""
    assert launch.wait() == code and launch.survivors() == [], launch.output[-3000:]
    assert "Traceback" not in launch.output[before:], launch.output[before:][-3000:]
    [line] = launch.errors
    assert all(word in line for word in words), line
    print(line)
    return line


def goes_on(start: Start, folder: Path, **settings: Any) -> None:
    """The same command trains on from the checkpoint."""
    launch = start(folder, **settings)
    launch.until_step(len(launch.metrics()) + 1)
    launch.process.send_signal(signal.SIGTERM)
    assert launch.wait() == 128 + signal.SIGTERM and launch.survivors() == [] and "resuming" in launch.output
    steps = [row["step"] for row in launch.metrics()]  # lines that a lost disk had not taken yet are lost with it
    assert steps == list(range(steps[0], steps[-1] + 1)) and steps[-1] >= 4


@pytest.fixture
def disk(tmp_path):
    """A disk of its own."""
    image, folder = tmp_path / "image", tmp_path / "disk"
    folder.mkdir()
    image.touch()
    os.truncate(image, 256 << 20)
    commands = (["mkfs.ext4", "-q", image], ["mount", "-o", "loop,errors=remount-ro", image, folder])
    if any(subprocess.run(command, capture_output=True, check=False).returncode for command in commands):
        pytest.skip("cannot mount a disk here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=False)


@pytest.mark.soak  # in make test: tests/trainer/test_full_disk.py, every writer on such disks, without a launch
@pytest.mark.parametrize("lack", ["full", "read-only"])
def test_a_disk_that_takes_no_more_is_told_and_the_launch_goes_on_from_it(start, tmp_path, disk, lack):
    first = start(disk, log_dir=tmp_path, **ENDLESS)
    first.until_step(3)
    before = len(first.output)
    if lack == "full":
        with (disk / "filler").open("wb", buffering=0) as stream, pytest.raises(OSError):
            while True:
                stream.write(b"x" * 4096)
        ended(first, before, "cannot be written", "free")
        (disk / "filler").unlink()
    else:
        subprocess.run(["mount", "-o", "remount,abort", str(disk)], check=True)  # as after an error of the disk
        line = ended(first, before, str(disk))
        assert "Read-only file system" in line or "Input/output error" in line, "a flush gets the latter"
        assert "make it writable, or choose" in line or "repair the disk, or choose" in line
        subprocess.run(["umount", str(disk)], check=True)  # nothing holds it any more
        subprocess.run(["mount", "-o", "loop", str(tmp_path / "image"), str(disk)], check=True)
    goes_on(start, disk, log_dir=tmp_path, **ENDLESS)


@pytest.mark.soak
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_may_open_no_more_files_is_named_with_the_limit(start, tmp_path, rank):
    first = start(tmp_path, **ENDLESS)
    first.until_step(3)
    before = len(first.output)
    resource.prlimit(first.rank_pid(rank), resource.RLIMIT_NOFILE, (5, 5))
    ended(first, before, "Too many open files", "ulimit -n 65536")
    goes_on(start, tmp_path, **ENDLESS)


@pytest.fixture
def memory_group():
    """A control group with a limit of its own."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    path = next((line.split(":", 2)[2] for line in lines if "memory" in line.split(":")[1]), None)
    if path is None:
        pytest.skip("needs control groups of version 1 with memory")
    group = Path("/sys/fs/cgroup/memory", path.lstrip("/"), f"maestrale-test-{os.getpid()}")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"cannot make a control group here: {error}")
    yield group
    for _ in range(600):
        try:
            return group.rmdir()
        except OSError:  # its processes are not gone yet
            time.sleep(0.1)


@pytest.mark.soak
@pytest.mark.parametrize("who", ["controller (rank 0", "trainer 0 (rank 1", "engine 0 (rank 2)"])
def test_what_the_kernel_kills_for_want_of_memory_is_told_as_that(start, tmp_path, memory_group, who):
    """A rank ends the launch, an engine process is replaced."""
    launch = start(tmp_path, **ENDLESS)
    launch.until_step(2)
    rank = int(who.rstrip(")")[-1])
    victim, done = launch.engine_pid(2) if rank == 2 else launch.rank_pid(rank), len(launch.metrics())
    (memory_group / "cgroup.procs").write_text(str(victim))
    (memory_group / "memory.limit_in_bytes").write_text(str(1 << 20))  # of what it takes from now on
    if rank == 2:
        words = (who, f"pid {victim}", "memory killer has ended a process", "lower rollout.cache_bytes")
        launch.until(lambda: launch.told(*words))
        launch.until_step(done + 3)
        assert not psutil.pid_exists(victim)
        launch.kill()
    else:
        assert launch.wait() == 128 + signal.SIGKILL, launch.output[-3000:]
        assert launch.told(who, f"pid {victim}", "out-of-memory killer has ended a process"), launch.output[-3000:]
    assert launch.survivors() == []


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


def preload(folder: Path, source: str, monkeypatch: pytest.MonkeyPatch, **variables: Path) -> None:
    """Compile a library that stands before those of the launches to come."""
    (folder / "between.c").write_text(source)
    compiler = shutil.which("gcc") or shutil.which("g++") or pytest.skip("needs a C compiler")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", folder / "between.so", folder / "between.c", "-ldl"], check=True
    )
    for name, value in {"LD_PRELOAD": folder / "between.so", **variables}.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.soak
def test_a_slow_disk_costs_time_only(start, tmp_path, monkeypatch):
    preload(tmp_path, SLOW_DISK, monkeypatch, SLOW_FOLDER=tmp_path / "runs")
    settings = {**ENDLESS, "steps": 6}
    launch = start(tmp_path / "runs", log_dir=tmp_path, **settings).finish()
    assert launch.survivors() == [] and not launch.told("silent")
    assert launch.trained_prompts() == list(range(12))


@pytest.mark.soak
def test_a_wall_clock_that_jumps_by_days_ends_nothing_and_loses_nothing(start, tmp_path, monkeypatch):
    ahead, day = tmp_path / "ahead", 86_400
    ahead.write_bytes(struct.pack("l", 0))
    preload(tmp_path, CLOCK, monkeypatch, CLOCK_AHEAD=ahead)
    launch = start(tmp_path, steps=40, deadlines__sync_s=30, deadlines__step_s=120)
    monkeypatch.delenv("LD_PRELOAD")
    for jump in (day, -day, 0):
        launch.until_step(len(launch.metrics()) + 4)
        with ahead.open("r+b") as file:
            file.write(struct.pack("l", jump))
        launch.until_step(len(launch.metrics()) + 4)
        shown = RunFolder(launch.run_dir).summary()
        assert shown["state"] == "running" and 0 < shown["step_s"] < 60 and 0 < shown["total_s"] < 3600, shown
    rows = launch.finish().metrics()
    leaps = [round((after["time"] - before["time"]) / day) for before, after in itertools.pairwise(rows)]
    assert [leap for leap in leaps if leap] == [1, -2, 1], "the clock did jump"
    assert launch.trained_prompts() == list(range(4 * 40)) and rows[-1]["engine/restarts"] == 0
    assert not any(word in launch.output for word in ("waited", "silent", "hung", "Traceback"))
    assert max(row["time/step_s"] for row in rows) < 60
    left = re.findall(r"left ([^ ]+ [^ ]+)", launch.output)
    assert left and not any("day" in one or " h" in one for one in left), left
