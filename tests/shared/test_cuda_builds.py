"""CUDA builds beside a CPU torch are hidden; everything else is left alone."""

import importlib.metadata
import sys

import pytest

from shared import cuda_builds


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


def test_cuda_build_beside_cpu_torch_is_hidden(versions):
    versions.update({"torch": "2.13.0+cpu", "torchvision": "0.28.0", "torchaudio": "2.11.0+cpu"})
    assert cuda_builds.hide_cuda_builds() == ["torchvision"]
    with pytest.raises(ModuleNotFoundError):
        __import__("torchvision")
    assert "torchaudio" not in sys.modules


def test_cuda_torch_keeps_all(versions):
    versions.update({"torch": "2.13.0", "torchvision": "0.28.0"})
    assert cuda_builds.hide_cuda_builds() == []


def test_no_torch_no_change(versions):
    versions["torchvision"] = "0.28.0"
    assert cuda_builds.hide_cuda_builds() == []
