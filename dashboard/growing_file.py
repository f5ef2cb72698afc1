"""Reads files of run folders that grow meanwhile, and that anybody may have written."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

MOST_BYTES_OF_A_LINE = 48 << 20
"""longer lines are passed over: 64 completions of 16,000 tokens take half of it"""
CHUNK = 1 << 20


def open_plain(path: Path) -> BinaryIO:
    """Open a regular file for reading. Raises OSError for anything else: links lead elsewhere, pipes wait."""
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(f"{path.name} is no regular file")
    return os.fdopen(number, "rb")


def read_small(path: Path, most_bytes: int = 1 << 20) -> bytes:
    """The first bytes of a file; b"" where it is missing or cannot be read."""
    try:
        with open_plain(path) as stream:
            return stream.read(most_bytes)
    except OSError:
        return b""


def last_lines(path: Path, most_bytes: int = 64 << 10) -> list[bytes]:
    """The whole lines within the last bytes of a file; [] where it is missing or cannot be read."""
    try:
        with open_plain(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            stream.seek(max(size - most_bytes, 0))
            data = stream.read(most_bytes)
    except OSError:
        return []
    lines = data[: data.rfind(b"\n") + 1].splitlines()
    return lines if size <= most_bytes else lines[1:]


def lines_of(stream: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """(offset, line) of all whole lines from the stream's position on; None for one that is too long to be read. The
    stream is after the last whole line when it ends."""
    while True:
        offset, line = stream.tell(), stream.readline(MOST_BYTES_OF_A_LINE)
        if line.endswith(b"\n"):
            yield offset, line[:-1]
            continue
        rest = line
        while rest and not rest.endswith(b"\n"):
            rest = stream.readline(CHUNK)
        if not rest:  # it is not whole yet
            stream.seek(offset)
            return
        yield offset, None


class GrowingFile:
    """A JSONL file of which each line is read once: a look goes on after the last whole line. A file that was written
    anew (a resume does that) is read from its beginning."""

    def __init__(self, path: Path):
        self.path = path
        self._file: tuple[int, int] | None = None
        """device and number of the file that was read"""
        self._end = 0
        """bytes of it that were read"""

    def look(self) -> tuple[bool, Iterator[tuple[int, bytes | None]]]:
        """(whether what was read before is void, the new whole lines with their offsets)."""
        try:
            stream = open_plain(self.path)
        except OSError:
            void, self._file, self._end = self._file is not None, None, 0
            return void, iter(())
        status = os.fstat(stream.fileno())
        now = status.st_dev, status.st_ino
        void = self._file is not None and (now != self._file or status.st_size < self._end)
        self._end = 0 if void else self._end
        self._file = now
        return void, self._read(stream)

    def _read(self, stream: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
        with stream:
            stream.seek(self._end)
            for offset, line in lines_of(stream):
                self._end = stream.tell()
                yield offset, line
