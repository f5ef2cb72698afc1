"""Restricts the files that a program in a sandbox may touch (Landlock): everything that is not granted is refused.

A program can then open no file but the system's libraries (reading), and where it has a work folder, plain files
directly in it: no folders, links, devices or sockets, so that clearing it is one flat loop. Before ABI 3 it does not
see that a file is emptied (`seccomp.py` does). ABI 4 also refuses TCP, ABI 6 signals and abstract sockets out of the
domain.
"""

from __future__ import annotations

import ctypes
import os
import struct

from verify.code.sandbox import syscalls

_CREATE, _ADD, _RESTRICT = 444, 445, 446
EXECUTE, WRITE, READ, LIST = 1, 2, 4, 8
REMOVE_FILE, MAKE_FILE, TRUNCATE = 1 << 5, 1 << 8, 1 << 14
_HANDLED = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
_FILE_RIGHTS = EXECUTE | WRITE | READ | TRUNCATE


def version() -> int:
    """Return the kernel's Landlock ABI, 0 where there is none."""
    try:
        return syscalls.syscall(_CREATE, None, 0, 1)
    except OSError:
        return 0


def restrict(grants: list[tuple[str, int]], abi: int) -> None:
    """Allow only these (path, rights) from now on, by the rules of `abi`, which must be at most `version()`.

    A path that does not exist is left out. Raises OSError.
    """
    handled = _HANDLED[max(level for level in _HANDLED if level <= abi)]
    attributes = struct.pack("<QQQ", handled, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    size = 8 if abi < 4 else 16 if abi < 6 else 24
    rules = syscalls.syscall(_CREATE, ctypes.c_char_p(attributes), ctypes.c_size_t(size), 0)
    try:
        for path, rights in grants:
            try:
                folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            if not os.path.isdir(path):
                rights &= _FILE_RIGHTS
            rule = struct.pack("<Qi", rights & handled, folder)
            try:
                syscalls.syscall(_ADD, rules, 1, ctypes.c_char_p(rule), 0)
            finally:
                os.close(folder)
        syscalls.syscall(_RESTRICT, rules, 0)
    finally:
        os.close(rules)
