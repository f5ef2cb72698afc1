"""System calls that Python 3.11 does not offer, through the C library.

Each function raises OSError with the call's name. x86-64 only where numbers are needed (`SUPPORTED`): elsewhere a
sandbox says so and is refused.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import sys

SUPPORTED = sys.platform == "linux" and platform.machine() == "x86_64"

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP = 1, 4, 24
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 36, 38, 47
_SYS_PIVOT_ROOT, _SYS_CAPSET = 155, 126

_libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, call: str) -> int:
    """Return the result of a C call. Raises OSError when it is -1."""
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")
    return result


def syscall(number: int, *arguments: object) -> int:
    """Call the kernel by number; integers and pointers go as 64 bits."""
    return check(_libc.syscall(ctypes.c_long(number), *arguments), f"syscall {number}")


def prctl(option: int, *values: object) -> int:
    """Set a property of this process."""
    padded = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in (*values, 0, 0, 0, 0)[:4]]
    return check(_libc.prctl(option, *padded), f"prctl {option}")


def unshare(flags: int) -> None:
    """Leave the namespaces that `flags` name for new ones."""
    check(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """Mount, bind or remount."""
    arguments = (source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    check(_libc.mount(*arguments), f"mount {target}")


def detach(target: str) -> None:
    """Unmount a tree, lazily."""
    check(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    """Make `new` the root; the previous root appears at `old`."""
    syscall(_SYS_PIVOT_ROOT, new.encode(), old.encode())


def give(folder: str, user: int) -> None:
    """Make `user` the owner of a folder."""
    try:
        os.chown(folder, user, user)
    except OSError as error:
        reason = f"{error.strerror}: does this container map other users?"
        raise OSError(error.errno, f"root cannot give {folder} to user {user}: {reason}") from error


def become(user: int) -> None:
    """Change from root to `user` and its group for good."""
    try:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    except OSError as error:
        raise OSError(error.errno, f"root cannot become user {user}: {error.strerror}") from error


def die_with_parent(parent: int = 0) -> None:
    """SIGKILL this process when its parent's thread ends. Must be set again after a change of user. Linux only.

    parent: process id of the parent; where it has ended already, this process ends now.
    """
    if sys.platform == "linux":
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if parent and os.getppid() != parent:
        os._exit(1)


def hide_memory() -> None:
    """Refuse core files and ptrace by processes of the same user."""
    prctl(_PR_SET_DUMPABLE, 0)


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent ends."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def drop_capabilities() -> None:
    """Give up every capability for good, and gain none by executing a file."""
    for number in range(64):
        try:
            prctl(_PR_CAPBSET_DROP, number)
        except OSError:  # not allowed to, or no such capability; cleared below either way
            pass
    try:
        prctl(_PR_CAP_AMBIENT, 4)
    except OSError:  # a kernel without ambient capabilities
        pass
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    syscall(_SYS_CAPSET, header, (ctypes.c_uint32 * 6)())
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
