"""One launch in a run folder; one that ended without a word is told of by the next."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shared.errors import ConfigError
from trainer.run_lock import RunLock


def test_a_second_launch_is_refused_and_may_come_later(tmp_path: Path) -> None:
    first = RunLock(tmp_path / "run")
    with pytest.raises(ConfigError, match="in use by another launch"):
        RunLock(tmp_path / "run")
    first.close("exit code 0")
    second = RunLock(tmp_path / "run")
    assert first.silent == second.silent == ""
    second.close("exit code 0")


def test_a_launch_that_was_killed_is_told_of_by_the_next(tmp_path: Path) -> None:
    program = "import os, sys; from pathlib import Path; from trainer.run_lock import RunLock\n"
    program += "lock = RunLock(Path(sys.argv[1])); os.kill(os.getpid(), 9)"
    killed = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], env={**os.environ, "PYTHONPATH": "."})
    assert killed.wait(600) == -9
    lock = RunLock(tmp_path)
    assert f"controller pid {killed.pid}" in lock.silent and "ended without a word" in lock.silent
    lock.close("exit code 1")
    assert RunLock(tmp_path).silent == ""


@pytest.mark.parametrize("rest", [b"", b"\x00\x00", b'{"pid": "x"}'])
def test_a_damaged_lock_file_is_no_obstacle(tmp_path: Path, rest: bytes) -> None:
    (tmp_path / "lock").write_bytes(rest)
    lock = RunLock(tmp_path)
    assert lock.silent == ""
    lock.close("exit code 0")
