"""What `shared` sets before anything imports torch: CUDA builds beside a CPU torch are hidden, caches are private."""

import getpass
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shared import cuda_builds

ROOT = str(Path(__file__).resolve().parents[2])


@pytest.mark.parametrize(("installed", "hidden"), [
    ({"torch": "2.13.0+cpu", "torchvision": "0.28.0", "torchaudio": "2.11.0+cpu"}, ["torchvision"]),
    ({"torch": "2.13.0", "torchvision": "0.28.0"}, []), ({"torchvision": "0.28.0"}, []),
])  # fmt: skip
def test_cuda_builds_beside_cpu_torch_are_hidden(monkeypatch, installed, hidden):
    def version(package):
        if package not in installed:
            raise importlib.metadata.PackageNotFoundError(package)
        return installed[package]

    modules = {name: module for name, module in sys.modules.items() if name not in cuda_builds.COMPANIONS}
    monkeypatch.setattr(sys, "modules", modules)  # none of the three is imported yet
    monkeypatch.setattr(cuda_builds, "version", version)
    assert cuda_builds.hide_cuda_builds() == hidden
    assert {name for name in cuda_builds.COMPANIONS if name in modules} == {*hidden}
    assert [modules[name] for name in hidden] == [None] * len(hidden), "to import one is a ModuleNotFoundError"


@pytest.mark.parametrize(("home", "place"), [("home", "home/.cache/torchinductor"), ("file", "")])
def test_what_others_put_among_the_temporary_files_is_no_cache_of_torch(tmp_path, home, place):
    """A link there ended every command that imports torch._dynamo with torch's own traceback."""
    (tmp_path / "home").mkdir()
    (tmp_path / "file").touch()
    program = "import os, shared; print(os.environ.get('TORCHINDUCTOR_CACHE_DIR', ''), end='')"
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": ROOT, "HOME": str(tmp_path / home)}
    if home == "file" and os.geteuid() == 0:
        environment["XDG_CACHE_HOME"] = "/proc/none"  # root may write everywhere else
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == (str(tmp_path / place) if place else "")


@pytest.mark.soak
def test_a_planted_link_ends_no_import_of_torch(tmp_path):
    (tmp_path / f"torchinductor_{getpass.getuser()}").symlink_to("/none/of/that")
    environment = {**os.environ, "PYTHONPATH": ROOT, "TMPDIR": str(tmp_path)}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    done = subprocess.run([sys.executable, "-c", "import shared, torch._dynamo"], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr[-2000:]
