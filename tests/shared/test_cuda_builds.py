"""What `shared` sets before anything imports torch: CUDA builds beside a CPU torch are hidden, caches are private."""

import getpass
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shared import cuda_builds

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def versions(monkeypatch):
    """Pretend these packages are installed, and none of the three imported yet."""
    installed = {}
    for package in cuda_builds.COMPANIONS:
        monkeypatch.delitem(sys.modules, package, raising=False)

    def version(package):
        if package not in installed:
            raise importlib.metadata.PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(cuda_builds, "version", version)
    yield installed
    for package in cuda_builds.COMPANIONS:
        sys.modules.pop(package, None)


@pytest.mark.parametrize(
    ("installed", "hidden"),
    [
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0", "torchaudio": "2.11.0+cpu"}, ["torchvision"]),
        ({"torch": "2.13.0", "torchvision": "0.28.0"}, []),
        ({"torchvision": "0.28.0"}, []),
    ],
)
def test_cuda_builds_beside_cpu_torch_are_hidden(versions, installed, hidden):
    versions.update(installed)
    assert cuda_builds.hide_cuda_builds() == hidden
    for package in hidden:
        with pytest.raises(ModuleNotFoundError):
            __import__(package)
    assert "torchaudio" not in sys.modules


@pytest.mark.parametrize(("home", "place"), [("home", "home/.cache/torchinductor"), ("file", "")])
def test_what_others_put_among_the_temporary_files_is_no_cache_of_torch(tmp_path: Path, home: str, place: str) -> None:
    """A link there ended every command that imports torch._dynamo with torch's own traceback."""
    (tmp_path / "home").mkdir()
    (tmp_path / "file").touch()
    program = "import os, shared; print(os.environ.get('TORCHINDUCTOR_CACHE_DIR', ''), end='')"
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": str(tmp_path / home)}
    if home == "file" and os.geteuid() == 0:
        environment["XDG_CACHE_HOME"] = "/proc/none"  # root may write everywhere else
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == (str(tmp_path / place) if place else "")


@pytest.mark.slow
def test_a_planted_link_ends_no_import_of_torch(tmp_path: Path) -> None:
    (tmp_path / f"torchinductor_{getpass.getuser()}").symlink_to("/none/of/that")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    for program, code in (("import torch._dynamo", 1), ("import shared, torch._dynamo", 0)):
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True)
        assert done.returncode == code, done.stderr[-2000:]
