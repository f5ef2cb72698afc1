"""The private folder of a launch: what its processes share, and what no other user may read, change or connect to.

Every node has one in its folder of temporary files: the TMPDIR of the node's ranks and engines. The ranks of a launch
meet in a key-value store: on one node a file in this folder, beside their sockets. On several nodes rank 0 holds it,
and says where in a second private folder inside the run's folder, which all nodes see. A process that uses a folder has
a shared lock on it. The last one to leave removes it, and the next launch removes what a killed one has left.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

from shared.atomic_write import take_lock
from shared.errors import ConfigError

PREFIX = "maestrale."
LOCK = "lock"
YOUNG_S = 60.0
"""a folder without a lock that is younger than this is still being made"""
LONGEST_PARENT = 32
"""characters of its path; the address of a socket has at most 107, and vLLM's names have 36"""


class LaunchFolder:
    """A private folder that this process holds a lock on until it leaves it."""

    def __init__(self, path: Path, lock: int):
        self.path, self._lock = path, lock

    def leave(self) -> None:
        """Release the lock; the last process to leave removes the folder."""
        if self._lock >= 0:
            if _whole(self._lock):
                shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def temporary() -> Path:
    """Return the folder in which this node's private folder is made."""
    usual = tempfile.gettempdir()
    return Path(usual if len(usual) <= LONGEST_PARENT else "/tmp")


def make(parent: Path, name: str = "meeting") -> LaunchFolder:
    """Make a new folder that only this user can enter. `name`: part of its name."""
    parent.mkdir(parents=True, exist_ok=True)
    sweep(parent)
    path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{name}.", dir=parent))
    lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    take_lock(lock, fcntl.LOCK_SH)
    if not os.fstat(lock).st_nlink:  # another launch has swept it before it was locked
        os.close(lock)
        return make(parent, name)
    return LaunchFolder(path, lock)


def enter(path: Path) -> LaunchFolder:
    """Enter a folder that another process of the launch has made. Raises ConfigError if others have access to it,
    FileNotFoundError if it is gone or not ready."""
    if why := _open_to_others(path):
        raise ConfigError(f"{path} should be the private folder of this launch, but {why}: remove it and start again")
    lock = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC)
    take_lock(lock, fcntl.LOCK_SH)
    if not os.fstat(lock).st_nlink:
        os.close(lock)
        raise FileNotFoundError(path)
    return LaunchFolder(path, lock)


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
        except PermissionError:  # root's: the owner of the parent folder may have one in it
            continue
        try:
            if _whole(lock):
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)


def name_of(pid: int) -> str:
    """Return a name that only one process has: its process id, and when it started."""
    text = Path(f"/proc/{pid}/stat").read_text()
    return f"{pid}.{text.rpartition(')')[2].split()[19]}"


def _whole(lock: int) -> bool:
    """Try to take the lock exclusively. Returns False if another process holds it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _open_to_others(path: Path) -> str:
    """Return why others may have access, "" if they have none."""
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        return "it is no folder"
    if status.st_uid not in (os.geteuid(), path.parent.stat().st_uid):  # a network's file system may rename root
        return f"it belongs to user {status.st_uid}"
    return f"its mode is {stat.S_IMODE(status.st_mode):o}" if status.st_mode & 0o077 else ""


def made_by_others(cache: Path) -> bool:
    """Whether another user of the machine can have made the files of a cache, such as ~/.cache/maestrale/kernels: as
    ~/.cache lies in /tmp for a user without a home."""
    for folder in (cache, cache.parent, cache.parent.parent):
        status = folder.stat()
        shared = status.st_mode & stat.S_IWOTH and not (folder != cache and status.st_mode & stat.S_ISVTX)
        if status.st_uid not in (os.geteuid(), 0) or shared:
            return True
    return False


def _changed(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:
        return time.time()
