"""How processes ended, why that may be, and what is known of them afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shared.atomic_write import cannot_write
from shared.errors import MORE_FILES, ConfigError, RunError
from shared.launch import deaths
from shared.launch.messages import RankFailed
from shared.launch.rpc import raise_failure

ROOT = str(Path(__file__).resolve().parents[2])


def test_what_a_rank_has_named_is_there_after_any_death(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from shared.launch import deaths, watchdog\n"
        "file = deaths.RankFile(Path(sys.argv[1])); watchdog.keep_phases(file)\n"
        "file.about = 'engine 1 (rank 3)', '/runs/\\u00e9\\n'\n"
        "watchdog.phase('a long phase ' + 'x' * 5000); watchdog.phase('\\u00fcber')\n"
        "os.kill(os.getpid(), 9)"
    )
    file = deaths.RankFile(tmp_path / "rank3")
    assert (file.about, file.phase, file.explained) == (("", ""), "", False)
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "rank3")], env={**os.environ, "PYTHONPATH": ROOT})
    assert (file.about, file.phase, file.explained) == (("engine 1 (rank 3)", "/runs/\u00e9\n"), "\u00fcber", False)
    file.explain()
    assert file.explained and file.phase == "\u00fcber"
    file.phase = "y" * 5000
    assert file.explained and file.about[0] == "engine 1 (rank 3)" and 0 < len(file.phase) < 5000


def test_a_full_disk_ends_a_launch_before_it_begins(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"TMPDIR: .*rank0 cannot be written.* is not there"):
        deaths.RankFile(tmp_path / "gone" / "rank0")


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
