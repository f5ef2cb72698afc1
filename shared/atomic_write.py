"""Writes files whole or not at all: with another name, renamed, flushed to the disk where a crash must not lose them.

A disk that is full, read-only or broken raises one error, which names the file, the free space and what to do.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from shared.errors import MORE_FILES, ConfigError, DiskError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_ALLOWED = (errno.EROFS, errno.EACCES, errno.EPERM)
_NO_FILES = (errno.EMFILE, errno.ENFILE)
_WRONG_KIND = (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOENT, errno.ENAMETOOLONG)


def cannot_write(path: Path, error: OSError) -> str:
    """Say in one line why a file cannot be written, and what to do."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    gone = next((folder for folder in reversed(path.parents) if not folder.exists()), None)
    if error.errno == errno.ENOENT and gone is not None:
        why = f"{gone} is not there, it or its disk was taken away"
        return f"{path} cannot be written: {why}: put it back, or choose another folder (runs_dir)"
    if error.errno in _NO_ROOM:
        repair = "free disk space, or choose a folder on another disk (runs_dir)"
    elif error.errno in _NOT_ALLOWED:
        repair = "make it writable, or choose another folder (runs_dir)"
    elif error.errno in _NO_FILES:
        return f"{path} cannot be written ({reason}): {MORE_FILES}"
    else:
        repair = "repair the disk, or choose a folder on another one (runs_dir)"
    return f"{path} cannot be written ({reason}, {_free(path)} free): {repair}"


def _free(path: Path) -> str:
    for folder in (path, *path.parents):
        if folder.exists():
            count = shutil.disk_usage(folder).free
            return f"{count / 1e6:,.0f} MB" if count >= 1e6 else f"{count:,} bytes"
    return "nothing known"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn errors of the disk in the block into a DiskError about `path`."""
    try:
        yield
    except DiskError:
        raise
    except OSError as error:
        if error.errno not in (*_NO_ROOM, *_NOT_ALLOWED, *_NO_FILES, *_WRONG_KIND, errno.EIO, errno.ENODEV):
            raise
        raise DiskError(cannot_write(path, error)) from error


def append_line(path: Path, line: bytes) -> None:
    """Add a line to a file, whole or not at all. Raises DiskError."""
    with writing(path), path.open("ab", buffering=0) as stream:
        before = stream.seek(0, os.SEEK_END)
        lead = b"" if before == 0 or _ends_line(path) else b"\n"
        left = data = lead + line + b"\n"
        try:
            while left:
                left = left[stream.write(left) :]
        except OSError:
            if len(left) < len(data):
                stream.truncate(before)
            raise


def _ends_line(path: Path) -> bool:
    with path.open("rb") as stream:
        stream.seek(-1, os.SEEK_END)
        return stream.read() == b"\n"


def claim(folder: Path, setting: str) -> None:
    """Make a folder, and try to write into it. Raises ConfigError, which begins with `setting`."""
    try:
        for parent in (*reversed(folder.parents), folder):
            if parent.exists() and not parent.is_dir():
                raise ConfigError(f"{setting}: {parent} is a file, where a folder is wanted: choose another place")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as trial:
            trial.write(b"x" * 4096)
    except OSError as error:
        raise ConfigError(f"{setting}: {cannot_write(folder, error)}") from error


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """Yield a name next to `path` to write to. It becomes `path` at the block's end, and is removed if that raises.
    Raises DiskError where the disk fails."""
    partial = path.with_name(path.name + ".partial")
    try:
        with writing(path):
            yield partial
            partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file, text as UTF-8, next to its old content, which it then replaces. Raises DiskError."""
    with beside(path) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


def take_lock(file: int | BinaryIO, kind: int) -> bool:
    """Lock a file as `fcntl.flock` does. Returns False where its file system has no locks, as Lustre without the mount
    option flock. Raises BlockingIOError where another process has it."""
    try:
        fcntl.flock(file, kind)
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            raise
        return False
    return True


def open_log(path: Path, setting: str, restart: bool = False) -> tuple[BinaryIO, list[bytes]]:
    """Open a file of lines for appending, and return its whole lines; a last one that a kill has cut is removed.

    It is locked until it is closed or the process ends; restart: its content is deleted once it is locked. Raises
    ConfigError, which begins with `setting`, if another process has locked it.
    """
    stream = path.open("a+b")
    try:
        try:
            take_lock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"{setting}: another process is writing it: stop it, or wait for it") from error
        if restart:
            stream.truncate(0)
        stream.seek(0)
        data = stream.read()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            stream.truncate(whole)
    except BaseException:
        stream.close()
        raise
    return stream, data[:whole].splitlines()


def flush(path: Path) -> None:
    """Return when the content of the file, or the entries of the folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
