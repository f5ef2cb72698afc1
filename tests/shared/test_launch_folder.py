"""The private folder of a launch: closed to others, found by its own, gone with the last process that used it."""

import fcntl
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from shared.errors import ConfigError
from shared.launch import launch_folder
from shared.model.cpu.fused_layers import kernels_folder
from tests.process import started
from verify.code import cpp

HOLDER = """
import sys
from pathlib import Path
from shared.launch import launch_folder
place, way = Path(sys.argv[1]), sys.argv[2]
folder = launch_folder.make(place, "held") if way == "make" else launch_folder.enter(place)
print(folder.path, flush=True)
sys.stdin.readline()
folder.leave()
"""


def holder(place: Path, way: str) -> tuple[subprocess.Popen[str], Path]:
    """Another process that uses a folder until it is told to leave."""
    process = started(HOLDER, place, way)
    return process, Path(process.stdout.readline().strip())


def test_it_is_closed_and_the_last_one_removes_it(tmp_path):
    ours = launch_folder.make(tmp_path)
    (ours.path / "deep").mkdir()
    (ours.path / "deep" / "file").write_text("x")
    assert ours.path.stat().st_mode & 0o777 == 0o700
    other, path = holder(ours.path, "enter")
    ours.leave()
    ours.leave()
    assert path.is_dir(), "one still uses it"
    other.communicate("\n")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_launch_left_goes_and_what_is_used_stays(tmp_path):
    (killed, left), (living, used) = holder(tmp_path, "make"), holder(tmp_path, "make")
    killed.kill()
    killed.communicate()
    begun = tmp_path / f"{launch_folder.PREFIX}begun.x"
    begun.mkdir(0o700)
    ours = launch_folder.make(tmp_path)
    assert not left.exists() and used.is_dir() and begun.is_dir(), "the last may get its lock any moment"
    os.utime(begun, (0, 0))
    launch_folder.sweep(tmp_path)
    assert not begun.exists()
    living.communicate("\n")
    ours.leave()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("mode", "owner", "why"), [
    (0o777, 0, "its mode is 777"), (0o710, 0, "its mode is 710"), (0o701, 0, "its mode is 701"),
    (0o700, 65534, "belongs to user 65534"),
])  # fmt: skip
def test_a_folder_that_others_can_enter_or_own_is_refused(tmp_path, mode, owner, why):
    forged = tmp_path / f"{launch_folder.PREFIX}aaaa"
    forged.mkdir()
    (forged / launch_folder.LOCK).touch()
    forged.chmod(mode)
    if owner:
        if os.geteuid():
            pytest.skip("only root can give folders away")
        os.chown(tmp_path, 65533, 65533)  # as root's own folder would be trusted
        os.chown(forged, owner, owner)
    with pytest.raises(ConfigError, match=why):
        launch_folder.enter(forged)
    forged.rename(tmp_path / "moved")
    forged.symlink_to(tmp_path / "moved")
    with pytest.raises(ConfigError, match="it is no folder"):
        launch_folder.enter(forged)


def test_a_folder_that_root_left_is_left_alone(tmp_path, monkeypatch):
    """The owner of the parent folder, as root of /tmp, may have folders in it that this user cannot enter."""
    other, opened = tmp_path / f"{launch_folder.PREFIX}held.root", os.open
    other.mkdir(0o700)
    (other / launch_folder.LOCK).touch()

    def refused(path: Any, *arguments: Any, **named: Any) -> int:
        if Path(path).parent == other:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *arguments, **named)

    monkeypatch.setattr(os, "open", refused)
    launch_folder.make(tmp_path, "mine").leave()
    assert other.is_dir()


def test_a_folder_that_is_swept_before_its_lock_is_held_is_made_again(tmp_path, monkeypatch):
    locked, swept = fcntl.flock, list[Path]()

    def late(lock: int, way: int) -> None:
        if way == fcntl.LOCK_SH and not swept:
            swept.append(next(tmp_path.iterdir()))
            shutil.rmtree(swept[0])
        locked(lock, way)

    monkeypatch.setattr(fcntl, "flock", late)
    ours = launch_folder.make(tmp_path)
    assert ours.path.is_dir() and ours.path != swept[0]
    ours.leave()


def test_a_cache_that_another_user_can_have_filled_is_not_used(tmp_path, monkeypatch):
    """As where HOME is /tmp. Compiled kernels and headers of C++ are code."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tmp_path.chmod(0o755)
    kernels = tmp_path / "cache" / "maestrale" / "kernels"
    assert kernels_folder() == kernels and not launch_folder.made_by_others(kernels)
    for place, mode in ((kernels, 0o1777), (kernels.parent, 0o777), (kernels.parent.parent, 0o777)):
        was = place.stat().st_mode
        place.chmod(mode)
        assert launch_folder.made_by_others(kernels) and kernels_folder() != kernels
        if place != kernels:
            assert str(tmp_path) not in cpp.cache_folder.__wrapped__()
        place.chmod(was)
        if os.geteuid() == 0:
            os.chown(place, 65534, 65534)
            assert launch_folder.made_by_others(kernels) and kernels_folder() != kernels
            os.chown(place, 0, 0)
    kernels.parent.parent.chmod(0o1777)
    assert not launch_folder.made_by_others(kernels), "in /tmp nobody replaces what belongs to another user"
