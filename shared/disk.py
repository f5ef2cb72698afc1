"""Files that are whole or not there: written beside and renamed, and on the disk where a crash must not lose them.

What it does not: choose what is written. Who calls this: all rooms.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from shared.errors import ConfigError


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """A name beside `path` to write to. It becomes `path` at the end of the block; nothing is left if that raises."""
    partial = path.with_name(path.name + ".partial")
    try:
        yield partial
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def open_log(path: Path, setting: str, restart: bool = False) -> tuple[BinaryIO, list[bytes]]:
    """Open a file of lines for appending, and return its whole lines; a last one that a kill has cut is removed.

    It is locked until it is closed or the process ends; restart: what it held is forgotten, once it is locked. Raises
    ConfigError, which begins with `setting`, where another process has it.
    """
    stream = path.open("a+b")
    try:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
