"""The private folder of a launch: what its processes share, and what no other user may read, change or connect to.

Every node has one in its folder of temporary files. It is the TMPDIR of the node's ranks, so that what they and their
engines put down for a while lies in it. The ranks of a launch meet in a key-value store in a file: on one node in this
folder, beside their sockets; on several nodes in a second private folder inside the run's folder, which all nodes see.

Each process that uses a folder holds a shared lock on it. Whoever leaves last removes it, and the next launch removes
what a killed one has left.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

from shared.errors import ConfigError

PREFIX = "maestrale."
LOCK = "lock"
YOUNG_S = 60.0
"""a folder without a lock is being made as long as it is younger"""
LONGEST_PARENT = 32
"""characters; the address of a socket has at most 107, and vLLM's names have 36"""


class LaunchFolder:
    """A folder that this process uses, until it leaves it."""

    def __init__(self, path: Path, lock: int):
        self.path, self._lock = path, lock

    def leave(self) -> None:
        """Stop using it; the last one removes it."""
        if self._lock >= 0 and _whole(self._lock):
            shutil.rmtree(self.path, ignore_errors=True)
        self._close()

    def _close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1


def temporary() -> Path:
    """Where this node's folder is made."""
    usual = tempfile.gettempdir()
    return Path(usual if len(usual) <= LONGEST_PARENT else "/tmp")


def make(parent: Path, name: str = "meeting") -> LaunchFolder:
    """A new one that only this user can enter. `name`: others find it by this (`find`)."""
    parent.mkdir(parents=True, exist_ok=True)
    sweep(parent)
    path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{name}.", dir=parent))
    lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_SH)
    return LaunchFolder(path, lock)


def enter(path: Path) -> LaunchFolder:
    """One that another process of the launch has made. Raises ConfigError if others have access to it,
    FileNotFoundError if it is gone or not ready."""
    if why := _open_to_others(path):
        raise ConfigError(f"{path} should be the private folder of this launch, but {why}: remove it and start again")
    lock = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_SH)
    if not os.fstat(lock).st_nlink:
        os.close(lock)
        raise FileNotFoundError(path)
    return LaunchFolder(path, lock)


def find(name: str) -> LaunchFolder | None:
    """This node's folder of that name; those of other users are not looked at."""
    inherited = Path(tempfile.gettempdir())
    for path in (inherited, *sorted(temporary().glob(f"{PREFIX}{name}.*"))):
        if not path.name.startswith(f"{PREFIX}{name}."):
            continue
        try:
            if not _open_to_others(path):
                return enter(path)
        except FileNotFoundError:
            continue
    return None


def sweep(parent: Path) -> None:
    """Remove the folders that killed launches of this user have left."""
    for path in parent.glob(f"{PREFIX}*"):
        try:
            if _open_to_others(path):
                continue
            lock = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            if time.time() - _changed(path) > YOUNG_S:
                shutil.rmtree(path, ignore_errors=True)
            continue
        try:
            if _whole(lock):
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)


def name_of(pid: int) -> str:
    """A name that only the launch of this agent has: its process id, and when it started."""
    text = Path(f"/proc/{pid}/stat").read_text()
    return f"{pid}.{text.rpartition(')')[2].split()[19]}"


def use_for_temporary_files(folder: LaunchFolder) -> None:
    """Of this process and of all that it starts."""
    os.environ["TMPDIR"] = str(folder.path)
    tempfile.tempdir = None


def _whole(lock: int) -> bool:
    """Take the lock alone, if no other process holds it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _open_to_others(path: Path) -> str:
    """Why others may have access, "" if they have none."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        return "it is no folder"
    if found.st_uid not in (os.geteuid(), path.parent.stat().st_uid):  # a network's file system may rename root
        return f"it belongs to user {found.st_uid}"
    return f"its mode is {stat.S_IMODE(found.st_mode):o}" if found.st_mode & 0o077 else ""


def _changed(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:
        return time.time()
