"""Locks a run folder so that one launch at a time uses it, and records how each launch ended.

The lock is the kernel's and ends with the process. The file names the launch that holds it and, once that has ended,
how; of a launch that could not write this (kill -9 of torchrun, a machine that went down) the next one reports it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from shared.atomic_write import cannot_write, claim, take_lock
from shared.errors import ConfigError
from shared.json_reader import decode_json

MOST_TEXT = 2000
WELL = [f"exit code {code}" for code in (0, 129, 130, 143)]
"""of a launch that did all its steps, or was stopped by a signal"""


class LockHolder(msgspec.Struct):
    """The launch that holds the lock, or held it last."""

    pid: int
    host: str
    since: str
    ended: str = ""
    """how it ended; "" while it runs"""
    until: float = 0.0
    """Unix time of its end, in s"""
    error: str = ""
    """the last error that it printed, at most MOST_TEXT characters of it"""

    @property
    def silent(self) -> str:
        """What is known of a launch that ended without recording it; "" of any other."""
        if self.ended:
            return ""
        return (
            f"the launch before (controller pid {self.pid} on {self.host}, since {self.since}) ended without a "
            "word: its launcher (torchrun, python -m trainer), its controller or the machine was killed"
        )


def forget_refused(run_dir: Path, *others: str) -> None:
    """Remove the folder of a launch that was refused before it wrote anything but its lock, stacks and `others`."""
    with suppress(OSError), (run_dir / "lock").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # else another launch has begun in it
        if {path.name for path in run_dir.iterdir()} <= {"lock", "stacks", *others}:
            shutil.rmtree(run_dir)


def failure(run_dir: Path) -> str:
    """How the last launch in a folder failed, with its last error; "" where it goes on, ended well or was stopped."""
    try:
        with (run_dir / "lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # else it goes on
            last = decode_json(file.read(), LockHolder)
    except (OSError, msgspec.DecodeError):
        return ""
    known = last.silent or f"the last launch failed ({last.ended}): {last.error}".rstrip(": ")
    return "" if last.ended in WELL else known


class RunLock:
    """Holds a run folder's lock until `close`. `silent`: text about a launch before that ended unrecorded, or "".
    `alone`: whether the lock keeps other launches out; the file system may have none."""

    def __init__(self, run_dir: Path):
        """Take the lock. Raises ConfigError if another launch has it, or if the folder cannot be written."""
        claim(run_dir, "runs_dir")
        try:
            self.file = (run_dir / "lock").open("a+b")
        except OSError as error:
            raise ConfigError(f"runs_dir: {cannot_write(run_dir / 'lock', error)}") from error
        try:
            self.alone = take_lock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.file.close()
            raise ConfigError(
                f"{run_dir} is in use by another launch: stop it, or give this one another name (--name=...)"
            ) from error
        self.file.seek(0)
        self.silent = ""
        with suppress(msgspec.DecodeError):  # empty: the first launch
            self.silent = decode_json(self.file.read(), LockHolder).silent
        self.launch = LockHolder(os.getpid(), os.uname().nodename, time.strftime("%Y-%m-%d %H:%M:%S"))
        self._write()

    def _write(self) -> None:
        self.file.seek(0)
        self.file.truncate()
        self.file.write(msgspec.json.encode(self.launch))
        self.file.flush()

    def close(self, ended: str, error: str = "") -> None:
        """Write how this launch ended and its last error, and release the lock."""
        self.launch.ended, self.launch.until, self.launch.error = ended, time.time(), error[:MOST_TEXT]
        for last in (self._write, self.file.close):
            with suppress(OSError):  # a disk that fails has been reported
                last()
