"""Shared by both sides of a conversation inside boxes: standard streams, a fresh module, frames over two pipes.

A frame is 4 bytes little-endian length, then the body: one letter and a tree (`codec.py`).
"""

from __future__ import annotations

import os
import struct
import sys
import types
from typing import Any

from verify.code.sandbox import codec

HEADER = struct.Struct("<I")


def open_streams() -> None:
    """Open standard streams over the descriptors 0, 1 and 2, as a fresh interpreter has them."""
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # type: ignore[misc] # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", closefd=False)  # type: ignore[misc] # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(  # type: ignore[misc] # noqa: SIM115
        2, "w", encoding="utf-8", errors="backslashreplace", closefd=False
    )
    sys.set_int_max_str_digits(0)
    sys.argv = ["solution.py"]


def fresh_module(name: str) -> dict[str, Any]:
    """Make a new, empty module and return its names."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    return module.__dict__


class Line:
    """Sends and receives frames over two pipes."""

    def __init__(self, read: int, write: int) -> None:
        self.read, self.write = read, write

    def send(self, kind: bytes, tree: codec.Tree) -> None:
        """Write one frame."""
        body = kind + codec.dump(tree)
        data = memoryview(HEADER.pack(len(body)) + body)
        while data:
            data = data[os.write(self.write, data) :]

    def receive(self) -> codec.Tree:
        """Return the next tree. Raises EOFError at the end."""
        size = HEADER.unpack(self._exactly(HEADER.size))[0]
        return codec.load(self._exactly(size)[1:])

    def _exactly(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = os.read(self.read, min(size - len(parts), 1 << 20))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)


def message(error: BaseException) -> str:
    """Return the message of an exception, cut to 1,000 characters."""
    try:
        return str(error)[:1000]
    except BaseException:  # noqa: BLE001 - its own __str__ may raise
        return ""
