"""Filters the system calls that a program in a sandbox may make (seccomp, x86-64).

Refused calls return EPERM, calls newer than the table ENOSYS (glibc then takes the older one; clone3's flags cannot be
inspected), another call table (i386, x32) ends the process. Programs may start threads but no processes; the compiler
may start processes. Signals reach only the process itself. No sockets but pairs, no shared memory that escapes
RLIMIT_AS (memfd, System V), no tracing, mounting, keys, io_uring, BPF, nor other users.
A program that shares its process with its tests (`fixed`) may map no code, not write to what lies below 4 GiB and was
not writable (its linked code and tables), and handle no signals, by which it could walk through the tests' code.
Of files only what Landlock leaves out: owners, modes and times, `truncate` by name, folders (no call makes one, so that
a work folder is flat), and where Landlock is older than ABI 3 also opening with O_TRUNC, which it does not see there.
"""

from __future__ import annotations

import ctypes
import errno
import struct

from verify.code.sandbox import syscalls

_ARCH = 0xC000003E
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST, _SECOND, _THIRD, _FOURTH = 0, 4, 16, 24, 32, 40
_HIGH = 4
"""behind the offset of an argument: of its upper 32 bits"""

# fmt: off
_NEVER = {
    "shmget": 29, "shmat": 30, "shmctl": 31, "socket": 41, "connect": 42, "accept": 43, "bind": 49, "listen": 50,
    "semget": 64, "semop": 65, "semctl": 66, "shmdt": 67, "msgget": 68, "msgsnd": 69, "msgrcv": 70, "msgctl": 71,
    "truncate": 76, "mkdir": 83, "link": 86, "symlink": 88, "ptrace": 101, "setuid": 105, "setgid": 106, "setpgid": 109,
    "setsid": 112, "setreuid": 113, "setregid": 114, "setgroups": 116, "setresuid": 117, "setresgid": 119,
    "capset": 126, "rt_sigqueueinfo": 129, "mknod": 133, "uselib": 134, "personality": 135, "setpriority": 141,
    "sched_setparam": 142, "sched_setscheduler": 144, "vhangup": 153, "modify_ldt": 154, "pivot_root": 155,
    "_sysctl": 156, "adjtimex": 159, "chroot": 161, "acct": 163, "settimeofday": 164, "mount": 165, "umount2": 166,
    "swapon": 167, "swapoff": 168, "reboot": 169, "sethostname": 170, "setdomainname": 171, "iopl": 172, "ioperm": 173,
    "create_module": 174, "init_module": 175, "delete_module": 176, "quotactl": 179, "tkill": 200,
    "sched_setaffinity": 203, "lookup_dcookie": 212, "semtimedop": 220, "clock_settime": 227, "mbind": 237,
    "set_mempolicy": 238, "mq_open": 240, "mq_unlink": 241, "kexec_load": 246, "add_key": 248, "request_key": 249,
    "keyctl": 250, "ioprio_set": 251, "inotify_init": 253, "migrate_pages": 256, "mkdirat": 258, "mknodat": 259,
    "linkat": 265, "symlinkat": 266, "unshare": 272, "move_pages": 279, "accept4": 288, "inotify_init1": 294,
    "rt_tgsigqueueinfo": 297, "perf_event_open": 298, "fanotify_init": 300, "name_to_handle_at": 303,
    "open_by_handle_at": 304, "clock_adjtime": 305, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311,
    "kcmp": 312, "finit_module": 313, "sched_setattr": 314, "seccomp": 317, "memfd_create": 319, "kexec_file_load": 320,
    "bpf": 321, "userfaultfd": 323,
}
# owners, modes, times and attributes of files: Landlock does not cover them; the linker sets a mode
_MARKS = {
    "chmod": 90, "fchmod": 91, "chown": 92, "fchown": 93, "lchown": 94, "utime": 132, "setxattr": 188, "lsetxattr": 189,
    "fsetxattr": 190, "removexattr": 197, "lremovexattr": 198, "fremovexattr": 199, "utimes": 235, "fchownat": 260,
    "futimesat": 261, "fchmodat": 268, "utimensat": 280,
}
# fmt: on
_STARTS = {"fork": 57, "vfork": 58, "execveat": 322}
_EXECVE, _CLONE, _KILL_CALL, _TGKILL, _FCNTL, _IOCTL, _PRCTL, _PRLIMIT = 59, 56, 62, 234, 72, 16, 157, 302
_NEWEST = 424
_OPEN, _CREAT, _OPENAT, _OPENAT2 = 2, 85, 257, 437
_O_TRUNC = 0o1000
_NEW_BUT_HARMLESS = (436, _OPENAT2, 439, 441, 449)  # close_range, faccessat2, epoll_pwait2, futex_waitv
_CLONE_THREAD, _CLONE_NAMESPACES = 0x00010000, 0x7E020080
_FCNTL_SIGNALS = (8, 10, 15)  # F_SETOWN, F_SETSIG, F_SETOWN_EX: signals to somebody else
_IOCTL_SIGNALS = (0x8901, 0x8902, 0x5412)  # FIOSETOWN, SIOCSPGRP, TIOCSTI
_PRCTL_NAMES = (15, 16)  # PR_SET_NAME, PR_GET_NAME
_MMAP, _MPROTECT, _MREMAP = 9, 10, 25
_PATCHES = {"rt_sigaction": 13, "remap_file_pages": 216, "pkey_mprotect": 329}
_PROT_WRITE, _PROT_EXEC = 2, 4
_MREMAP_PLACED = 2 | 4  # MREMAP_FIXED, MREMAP_DONTUNMAP


def _step(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    return struct.pack("<HBBI", code, then, otherwise, value)


def _answer(code: int) -> bytes:
    return _step(_RETURN, _ERRNO | code)


def _refuse(number: int, code: int = errno.EPERM) -> bytes:
    return _step(_EQUAL, number, 0, 1) + _answer(code)


def _inspect(number: int, body: bytes) -> bytes:
    """Run `body`, which must return, for this call only; the call's number stays loaded for the steps after it."""
    return _step(_EQUAL, number, 0, len(body) // 8) + body


def _only(offset: int, allowed: tuple[int, ...]) -> bytes:
    tests = b"".join(_step(_EQUAL, value, 0, 1) + _step(_RETURN, _ALLOW) for value in allowed)
    return _step(_LOAD, offset) + tests + _answer(errno.EPERM)


def _all_but(offset: int, refused: tuple[int, ...]) -> bytes:
    return _step(_LOAD, offset) + b"".join(_refuse(value) for value in refused) + _step(_RETURN, _ALLOW)


def _no_bits(offset: int, bits: int) -> bytes:
    return _step(_LOAD, offset) + _step(_ANY_BIT, bits, 0, 1) + _answer(errno.EPERM) + _step(_RETURN, _ALLOW)


def _keep_code() -> bytes:
    """Refuse what makes memory executable, or the linked program writable. A filter sees an address in two halves."""
    refuse, allow = _answer(errno.EPERM), _step(_RETURN, _ALLOW)
    no_code = _step(_LOAD, _THIRD) + _step(_ANY_BIT, _PROT_EXEC, 0, 1) + refuse
    low = _step(_LOAD, _FIRST + _HIGH) + _step(_EQUAL, 0, 1, 0) + allow
    protect = no_code + _step(_ANY_BIT, _PROT_WRITE, 1, 0) + allow + low + refuse
    map_fixed = no_code + low + _step(_LOAD, _FIRST) + _step(_EQUAL, 0, 0, 1) + allow + refuse
    move = _no_bits(_FOURTH, _MREMAP_PLACED)
    refused = b"".join(_refuse(number) for number in _PATCHES.values())
    return refused + _inspect(_MPROTECT, protect) + _inspect(_MMAP, map_fixed) + _inspect(_MREMAP, move)


def build(pid: int, execute: bool, processes: bool, empties: bool = True, fixed: bool = False) -> bytes:
    """Return the filter of process `pid`: whether it may `execute` files, start `processes`, open with O_TRUNC, and
    whether its code is `fixed`."""
    program = [
        _step(_LOAD, _ARCHITECTURE) + _step(_EQUAL, _ARCH, 1, 0) + _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER) + _step(_AT_LEAST, 0x40000000, 0, 1) + _step(_RETURN, _KILL),
    ]
    if not empties:  # the flags of openat2 lie in memory: ENOSYS, and the C library takes openat
        program += [_refuse(_OPENAT2, errno.ENOSYS), _refuse(_CREAT)]
        program += [_inspect(_OPEN, _no_bits(_SECOND, _O_TRUNC)), _inspect(_OPENAT, _no_bits(_THIRD, _O_TRUNC))]
    program += [_step(_EQUAL, number, 0, 1) + _step(_RETURN, _ALLOW) for number in _NEW_BUT_HARMLESS]
    program += [_step(_AT_LEAST, _NEWEST, 0, 1) + _answer(errno.ENOSYS)]
    program += [_refuse(number) for number in _NEVER.values()]
    if fixed:
        program += [_keep_code()]
    if not execute:
        program += [_refuse(_EXECVE)]
    if processes:
        program += [_inspect(_CLONE, _no_bits(_FIRST, _CLONE_NAMESPACES))]
    else:
        program += [_refuse(number) for number in (*_STARTS.values(), *_MARKS.values())]
        program += [_inspect(_CLONE, _step(_LOAD, _FIRST) + _step(_ANY_BIT, _CLONE_THREAD, 1, 0)
                             + _answer(errno.EPERM) + _step(_RETURN, _ALLOW))]  # fmt: skip
    program += [
        _inspect(_KILL_CALL, _only(_FIRST, (pid,))), _inspect(_TGKILL, _only(_FIRST, (pid,))),
        _inspect(_PRLIMIT, _only(_FIRST, (0, pid))), _inspect(_PRCTL, _only(_FIRST, _PRCTL_NAMES)),
        _inspect(_FCNTL, _all_but(_SECOND, _FCNTL_SIGNALS)), _inspect(_IOCTL, _all_but(_SECOND, _IOCTL_SIGNALS)),
        _step(_RETURN, _ALLOW),
    ]  # fmt: skip
    return b"".join(program)


def install(program: bytes) -> None:
    """Bind this process and all it starts to the filter, for good. Needs no_new_privs. Raises OSError."""
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("<HxxxxxxQ", len(program) // 8, ctypes.addressof(code))
    syscalls.prctl(22, 2, ctypes.c_char_p(header))
