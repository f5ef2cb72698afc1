"""What separates a sandbox from its host: namespaces, Landlock, and the folders that it works in.

Namespaces (processes, mounts, network, IPC, host name, cgroups, and users where the host allows) take two steps,
because a process enters a new process namespace only through its next child: `leave_namespaces` in the supervisor, then
`build_root` and `drop_user` in the first child. The new root holds /usr and the interpreter, read-only, /dev/null, and
one memory-backed folder of limited size; no /proc, no /etc, no home. As root the mounts are made by root, and the
sandbox then becomes a user of its own (RLIMIT_NPROC does not bind root) inside a user namespace; an ordinary user gets
a user namespace first. Where the host refuses, OSError is raised, and the sandbox reports it and ends.

Landlock refuses every file that is not granted: a program can open no file but the system's libraries (reading), and
where it has a work folder, plain files directly in it: no folders, links, devices or sockets, so that clearing it is
one flat loop. Before ABI 3 it does not see that a file is emptied (`seccomp.py` does). ABI 4 also refuses TCP, ABI 6
signals and abstract sockets out of the domain.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import stat
import struct
import sys
import tempfile
from pathlib import Path

from verify.code.sandbox import syscalls

WORK_BYTES = 320 << 20
WORK_FILES = 4096
_INSIDE = (
    syscalls.CLONE_NEWNS | syscalls.CLONE_NEWPID | syscalls.CLONE_NEWNET | syscalls.CLONE_NEWIPC | syscalls.CLONE_NEWUTS
    | syscalls.CLONE_NEWCGROUP
)  # fmt: skip
_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_CREATE, _ADD, _RESTRICT = 444, 445, 446
EXECUTE, WRITE, READ, LIST = 1, 2, 4, 8
REMOVE_FILE, MAKE_FILE, TRUNCATE = 1 << 5, 1 << 8, 1 << 14
_HANDLED = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
_FILE_RIGHTS = EXECUTE | WRITE | READ | TRUNCATE


def leave_namespaces() -> None:
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
    for name, text in (("setgroups", "deny"), ("gid_map", f"{group} {group} 1"), ("uid_map", f"{user} {user} 1")):
        file = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=own)
        try:
            os.write(file, text.encode())
        finally:
            os.close(file)


def _bind(source: str, target: str) -> None:
    """Show `source` read-only at `target`, keeping the flags that a user namespace may not clear."""
    syscalls.mount(source, target, "", syscalls.MS_BIND | syscalls.MS_REC)
    current = os.statvfs(target).f_flag
    kept = current & (syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC | 1024 | 2048)
    kept |= (1 << 21) if current & 4096 else 0
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


def landlock_version() -> int:
    """Return the kernel's Landlock ABI, 0 where there is none."""
    try:
        return syscalls.syscall(_CREATE, None, 0, 1)
    except OSError:
        return 0


def restrict_files(grants: list[tuple[str, int]], abi: int) -> None:
    """Allow only these (path, rights) from now on, by the rules of `abi`, which must be at most `landlock_version()`.

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


def make_folder() -> str:
    """Make the folder of a sandbox without namespaces, which allows execution and any user can reach. Raises OSError.

    As root the sandbox becomes another user, who may have no way to root's TMPDIR; and C++ programs are executed there.
    """
    places = [tempfile.gettempdir(), *(place for place in ("/tmp", "/var/tmp") if os.path.isdir(place))]
    fit = [place for place in places if is_open(place) and not os.statvfs(place).f_flag & os.ST_NOEXEC]
    folder = tempfile.mkdtemp(prefix="maestrale-sandbox-", dir=(fit or places)[0])
    try:
        os.mkdir(f"{folder}/own", 0o700)
    except OSError:
        os.rmdir(folder)
        raise
    if os.geteuid() == 0:
        os.chmod(folder, 0o711)
    return folder


def is_open(folder: str) -> bool:
    """Return whether a sandbox can reach a folder: it keeps its user, or every folder on the way is open to all."""
    path = Path(os.path.realpath(folder))
    return os.geteuid() != 0 or all(place.stat().st_mode & 0o001 for place in (path, *path.parents))


def reaches(folder: str) -> bool:
    """Whether this process's user can list a folder and open what is in it."""
    return os.access(folder, os.R_OK | os.X_OK)


def module_folder(prefix: str) -> str:
    """Return the folder where an interpreter has its extension modules that are not built in."""
    return f"{prefix}/{sys.platlibdir}/python{sys.version_info.major}.{sys.version_info.minor}/lib-dynload"


def redirect_imports(old: str, new: str) -> None:
    """Look for modules below `new` where they were looked for below `old`."""
    packages = [module for module in list(sys.modules.values()) if hasattr(module, "__path__")]
    for folders in (sys.path, *(package.__path__ for package in packages)):
        if isinstance(folders, list):
            folders[:] = [new + path[len(old) :] if path.startswith(old + "/") else path for path in folders]
    sys.path_importer_cache.clear()


def empty_folder(folder: str) -> None:
    """Remove what is in a folder, whatever its modes and however deep: what is nested is moved up first."""
    while True:
        with os.scandir(folder) as entries:
            contents = list(entries)
        if not contents:
            return
        for entry in contents:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            os.chmod(entry.path, 0o700)
            with os.scandir(entry.path) as entries:
                for inner in list(entries):
                    if inner.is_dir(follow_symlinks=False):
                        os.chmod(inner.path, 0o700)
                        os.rename(inner.path, f"{folder}/{os.urandom(16).hex()}")
                    else:
                        os.unlink(inner.path)
            os.rmdir(entry.path)


def remove_folder(folder: str) -> None:
    """Remove the folder of a sandbox without namespaces, when nothing runs in it any more."""
    for path in (f"{folder}/own", f"{folder}/own/build"):
        with contextlib.suppress(OSError):
            os.chmod(path, 0o700)
    shutil.rmtree(folder, ignore_errors=True)
