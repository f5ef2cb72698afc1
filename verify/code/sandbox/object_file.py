"""Reads the object file of a C++ candidate: whether it may be linked with its tests.

The linker makes the tables of a program before any of its code runs, from what object files ask for by the names and
flags of their sections. A candidate that asks by assembly could so get functions that are called while the tables are
still writable (indirect functions, entries of the linker's own tables), or code and constants that stay writable. A
compiler asks for the kinds below alone; anything else is refused. Format: System V ABI, ELF-64.
"""

from __future__ import annotations

import mmap
import re
import struct

REFUSED = 117
"""exit status of a child whose object file is refused"""
_READ_ONLY = re.compile(rb"\.(text|rodata|eh_frame|gcc_except_table|note)(\..*)?")
_WRITABLE = re.compile(rb"\.(data|bss|tdata|tbss|init_array|fini_array)(\..*)?")
_WRITE, _ALLOC, _EXECUTE = 1, 2, 4
_SYMBOLS, _INDIRECT = 2, 10
_SECTION = struct.Struct("<IIQQQQIIQQ")


def is_plain(path: str) -> bool:
    """Return whether all sections are what a compiler makes, and no function is indirect."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        (start,) = struct.unpack_from("<Q", data, 40)
        count, names = struct.unpack_from("<HH", data, 60)
        sections = [_SECTION.unpack_from(data, start + _SECTION.size * number) for number in range(count)]
        if not sections:  # so many that their count stands elsewhere
            return False
        texts = sections[names][4]
        for name, kind, flags, _, offset, size, *_ in sections:
            spelled = data[texts + name : data.find(b"\0", texts + name)]
            if flags & _ALLOC and not _is_usual(spelled, flags):
                return False
            if kind == _SYMBOLS:
                symbols = data[offset : offset + size]
                if any(info & 15 == _INDIRECT for _, info in struct.iter_unpack("<IB19x", symbols)):
                    return False
    return True


def _is_usual(name: bytes, flags: int) -> bool:
    if flags & _WRITE:
        return not flags & _EXECUTE and bool(_WRITABLE.fullmatch(name))
    return bool(_READ_ONLY.fullmatch(name))
