"""Files that are whole or not there: written beside and renamed, and on the disk where a crash must not lose them.

What it does not: choose what is written. Who calls this: all rooms.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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


def flush(path: Path) -> None:
    """Return when the content of the file, or the entries of the folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
