"""Gives a sandbox its own namespaces: processes, mounts, network, IPC, host name, cgroups, and users where the host
allows.

Two steps, because a process enters a new process namespace only through its next child: `leave` in the supervisor, then
`build_root` and `drop_user` in the first child. The new root holds /usr and the interpreter, read-only, /dev/null, and
one memory-backed folder of limited size; no /proc, no /etc, no home. As root the mounts are made by root, and the
sandbox then becomes a user of its own (RLIMIT_NPROC does not bind root) inside a user namespace; an ordinary user gets
a user namespace first. Raises OSError where the host refuses; the sandbox then reports it and ends.
"""

from __future__ import annotations

import os
import stat

from verify.code.sandbox import syscalls

WORK_BYTES = 320 << 20
WORK_FILES = 4096
_INSIDE = (
    syscalls.CLONE_NEWNS | syscalls.CLONE_NEWPID | syscalls.CLONE_NEWNET | syscalls.CLONE_NEWIPC | syscalls.CLONE_NEWUTS
    | syscalls.CLONE_NEWCGROUP
)  # fmt: skip
_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")


def leave() -> None:
    """Take new namespaces; the process namespace holds for children only."""
    if os.geteuid() == 0:
        syscalls.unshare(_INSIDE)
    else:
        own = os.open("/proc/self", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        user, group = os.geteuid(), os.getegid()  # after the call below they read "nobody"
        syscalls.unshare(_INSIDE | syscalls.CLONE_NEWUSER)
        _map(own, user, group)
        os.close(own)


def _map(own: int, user: int, group: int) -> None:
    """Map a user to itself in its new user namespace; `own` is the process's folder in a /proc."""
    for name, text in (
        ("setgroups", "deny"),
        ("gid_map", f"{group} {group} 1"),
        ("uid_map", f"{user} {user} 1"),
    ):
        file = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=own)
        try:
            os.write(file, text.encode())
        finally:
            os.close(file)


def _bind(source: str, target: str) -> None:
    """Show `source` read-only at `target`, keeping the flags that a user namespace may not clear."""
    syscalls.mount(source, target, "", syscalls.MS_BIND | syscalls.MS_REC)
    found = os.statvfs(target).f_flag
    kept = found & (syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC | 1024 | 2048)
    kept |= (1 << 21) if found & 4096 else 0
    if stat.S_ISDIR(os.stat(target).st_mode):
        kept |= syscalls.MS_NODEV
    flags = syscalls.MS_REMOUNT | syscalls.MS_BIND | syscalls.MS_RDONLY | syscalls.MS_NOSUID | kept
    syscalls.mount("", target, "", flags)


def build_root(readable: list[str], work: str, user: int) -> None:
    """Replace the root by a small one with `readable` folders at their own paths and one of `user`'s at `work`."""
    syscalls.mount("", "/", "", syscalls.MS_REC | syscalls.MS_PRIVATE)
    syscalls.mount("tmpfs", "/tmp", "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "size=1m,mode=755")
    os.chdir("/tmp")
    os.mkdir("old")
    syscalls.pivot_root(".", "old")
    os.chdir("/")
    for path in readable:
        os.makedirs(path, mode=0o755, exist_ok=True)
        _bind("/old" + path, path)
    for name in _LINKS:
        old = f"/old/{name}"
        if os.path.islink(old):
            os.symlink(os.readlink(old), f"/{name}")
        elif os.path.isdir(old):
            os.mkdir(f"/{name}")
            _bind(old, f"/{name}")
    os.mkdir("/dev")
    os.close(os.open("/dev/null", os.O_CREAT | os.O_WRONLY))
    syscalls.mount("/old/dev/null", "/dev/null", "", syscalls.MS_BIND)
    os.makedirs(work)
    limits = f"size={WORK_BYTES},nr_inodes={WORK_FILES},mode=700"
    syscalls.mount("tmpfs", work, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, limits)
    if os.geteuid() == 0:
        syscalls.give(work, user)
    syscalls.detach("/old")
    os.rmdir("/old")
    flags = syscalls.MS_REMOUNT | syscalls.MS_BIND | syscalls.MS_RDONLY | syscalls.MS_NOSUID | syscalls.MS_NODEV
    syscalls.mount("", "/", "", flags)


def drop_user(user: int, own: int) -> bool:
    """Become `user` when root, in a user namespace of its own; return whether it has one. `own`: see `_map`."""
    if os.geteuid() != 0:
        return True
    syscalls.become(user)
    try:
        syscalls.prctl(4, 1)  # a change of user made /proc files root's; the map must be written by the new user
        syscalls.unshare(syscalls.CLONE_NEWUSER)
        _map(own, user, user)
    except OSError:  # the host has no user namespaces for ordinary users; the other namespaces hold
        return False
    return True
