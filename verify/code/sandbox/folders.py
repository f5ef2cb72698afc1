"""Makes, checks, empties and removes the folders of sandboxes.

`make`, `is_open` and `remove` serve the owner (`is_open` also `cpp.py`, `remove` also the supervisor), the others the
server in a sandbox.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path


def make() -> str:
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


def modules(prefix: str) -> str:
    """Return the folder where an interpreter has its extension modules that are not built in."""
    return f"{prefix}/{sys.platlibdir}/python{sys.version_info.major}.{sys.version_info.minor}/lib-dynload"


def redirect_imports(old: str, new: str) -> None:
    """Look for modules below `new` where they were looked for below `old`."""
    places = [sys.path, *(module.__path__ for module in list(sys.modules.values()) if hasattr(module, "__path__"))]
    for place in places:
        if isinstance(place, list):
            place[:] = [new + path[len(old) :] if path.startswith(old + "/") else path for path in place]
    sys.path_importer_cache.clear()


def empty(folder: str) -> None:
    """Remove what is in a folder, whatever its modes and however deep: what is nested is moved up first."""
    while True:
        with os.scandir(folder) as entries:
            found = list(entries)
        if not found:
            return
        for entry in found:
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


def remove(folder: str) -> None:
    """Remove the folder of a sandbox without namespaces, when nothing runs in it any more."""
    for path in (f"{folder}/own", f"{folder}/own/build"):
        with contextlib.suppress(OSError):
            os.chmod(path, 0o700)
    shutil.rmtree(folder, ignore_errors=True)
