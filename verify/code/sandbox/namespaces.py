"""Gives a box its own namespaces: processes, mounts, network, IPC, host name, cgroups, and users where the host allows.

Two steps, because a process enters a new process namespace only through its next child: `leave` in the supervisor, then
`build_root` and `drop_user` in the first child. The new root holds /usr and the interpreter, read-only, /dev/null, and
one memory-backed folder of limited size; no /proc, no /etc, no home. As root the mounts are made by root, and the box
then becomes a user of its own (RLIMIT_NPROC does not bind root) inside a user namespace; an ordinary user gets a user
namespace first. Raises OSError where the host refuses; the box then reports it and ends.
"""

from __future__ import annotations

import os
import stat

from verify.code.sandbox import kernel

WORK_BYTES = 320 << 20
WORK_FILES = 4096
_INSIDE = (
    kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
    | kernel.CLONE_NEWCGROUP
)  # fmt: skip
_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")


def leave() -> None:
    """Take new namespaces; the process namespace holds for children only."""
    if os.geteuid() == 0:
        kernel.unshare(_INSIDE)
    else:
        own = os.open("/proc/self", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        user, group = os.geteuid(), os.getegid()  # after the call below they read "nobody"
        kernel.unshare(_INSIDE | kernel.CLONE_NEWUSER)
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
    kernel.mount(source, target, "", kernel.MS_BIND | kernel.MS_REC)
    found = os.statvfs(target).f_flag
    kept = found & (kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC | 1024 | 2048)
    kept |= (1 << 21) if found & 4096 else 0
    if stat.S_ISDIR(os.stat(target).st_mode):
        kept |= kernel.MS_NODEV
    flags = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID | kept
    kernel.mount("", target, "", flags)


def build_root(readable: list[str], work: str, user: int) -> None:
    """Replace the root by a small one with `readable` folders at their own paths and one of `user`'s at `work`."""
    kernel.mount("", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", "/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=755")
    os.chdir("/tmp")
    os.mkdir("old")
    kernel.pivot_root(".", "old")
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
    kernel.mount("/old/dev/null", "/dev/null", "", kernel.MS_BIND)
    os.makedirs(work)
    limits = f"size={WORK_BYTES},nr_inodes={WORK_FILES},mode=700"
    kernel.mount("tmpfs", work, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, limits)
    if os.geteuid() == 0:
        kernel.give(work, user)
    kernel.detach("/old")
    os.rmdir("/old")
    flags = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("", "/", "", flags)


def drop_user(user: int, own: int) -> bool:
    """Become `user` when root, in a user namespace of its own; return whether it has one. `own`: see `_map`."""
    if os.geteuid() != 0:
        return True
    kernel.become(user)
    try:
        kernel.prctl(4, 1)  # a change of user made /proc files root's; the map must be written by the new user
        kernel.unshare(kernel.CLONE_NEWUSER)
        _map(own, user, user)
    except OSError:  # the host has no user namespaces for ordinary users; the other namespaces hold
        return False
    return True
