"""Processes that really end: noticed at once, with how they ended, whoever their parent is."""

from __future__ import annotations

import fcntl
import os
import resource
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shared.atomic_write import cannot_write
from shared.errors import MORE_FILES, RunError
from shared.launch import deaths
from shared.launch.deaths import Watched
from shared.launch.messages import RankFailed
from shared.launch.rpc import raise_failure


def test_an_end_is_noticed_at_once_and_told_before_and_after_the_parent_asked() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    watched = Watched(process.pid)
    assert not watched.ended()
    began = time.monotonic()
    process.kill()
    assert select.select([watched], [], [], 30)[0] and time.monotonic() - began < 5
    assert watched.ended() and watched.status() == -signal.SIGKILL
    process.wait()
    assert watched.status() in (-signal.SIGKILL, None), "None: a kernel before 6.15"
    watched.close()


def test_a_descriptor_may_have_any_number() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    watched = Watched(os.getpid())
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[1], 4096), before[1]))
        low, watched.descriptor = watched.descriptor, fcntl.fcntl(watched.descriptor, fcntl.F_DUPFD_CLOEXEC, 2000)
        os.close(low)
        assert not watched.ended()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        watched.close()


def test_an_exit_code_is_told_as_such() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.exit(3)"])
    watched = Watched(process.pid)
    select.select([watched], [], [], 60)
    assert watched.status() == 3 and deaths.how(3).startswith("ended with exit code 3")
    process.wait()
    watched.close()


def test_memory_is_blamed_only_where_the_kernel_counted_a_kill() -> None:
    before = deaths.memory_kills()
    blamed = deaths.advice(-signal.SIGKILL, "trainer", 3 << 30, before - 1)
    assert (
        "memory killer has ended a process" in blamed
        and "3.0 GiB" in blamed
        and "optimiser.micro_batch_tokens" in blamed
    )
    assert "counted no out-of-memory kill" in deaths.advice(-signal.SIGKILL, "trainer", 3 << 30, before)
    assert deaths.advice(-signal.SIGSEGV, "trainer", 3 << 30, before - 1) == ""


@pytest.mark.parametrize(("steps", "told"), [([], "starts anew"), ([0, 9, 10], "goes on from step 10")])
def test_what_the_same_command_would_do(tmp_path: Path, steps: list[int], told: str) -> None:
    for step in steps:
        folder = tmp_path / "checkpoints" / f"step_{step}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").touch()
    (tmp_path / "checkpoints" / "step_11.partial").mkdir(parents=True)
    assert told in deaths.again(tmp_path)


def test_ends_of_helpers_are_told_each_time_at_first_and_ever_more_seldom() -> None:
    helpers, counts = deaths.HelperEnds(), []
    for count in range(1, 201):
        helpers.add("a verifier process", "was killed", "another takes its place")
        if news := helpers.news():
            assert news == [f"a verifier process was killed ({count:,} so far): another takes its place"]
            counts.append(count)
    assert counts == [*range(1, 11), 100]
    helpers.add("a verifier process", "gave no answer", "another takes its place")
    assert helpers.news() == ["a verifier process gave no answer (1 so far): another takes its place"]


def test_want_of_files_and_memory_in_a_rank_is_told_with_the_repair_and_no_traceback() -> None:
    for kind, message, who, repair in (
        ("OSError", "[Errno 24] Too many open files: '/x'", "trainer rank 1", "Raise the limit of open files"),
        ("MemoryError", "", "trainer rank 1", "lower optimiser.micro_batch_tokens"),
        ("RuntimeError", "DefaultCPUAllocator: can't allocate memory", "engine rank 2", "lower rollout.cache_bytes"),
        ("OSError", "[Errno 12] Cannot allocate memory", "", "lower rollout.prompts_per_step"),
    ):
        with pytest.raises(RunError) as told:
            raise_failure(who, RankFailed(kind=kind, message=message or kind, traceback="Traceback ..."))
        assert "Traceback" not in str(told.value) and repair in deaths.lacking(str(told.value))
    full = cannot_write(Path("/x"), OSError(24, "Too many open files"))
    assert full.endswith(MORE_FILES) and deaths.lacking(full) == "", "said already"
    assert deaths.lacking("ValueError: 3") == ""
