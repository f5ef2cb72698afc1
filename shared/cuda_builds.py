"""Hides torchvision, torchaudio and torchcodec when they are CUDA builds and torch is a CPU build.

Plain pip brings the CUDA builds with vLLM; importing them with a CPU torch fails, and with it the import of
transformers and vLLM. Hidden means: as if not installed.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


def installed(package: str) -> str:
    """Return the version of a package, "" if it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def hide_cuda_builds() -> list[str]:
    """Hide companions of torch that cannot load here; returns their names (empty on a CUDA torch)."""
    torch_version = installed("torch")
    if not torch_version.endswith("+cpu"):
        return []
    hidden = []
    for package in COMPANIONS:
        installed_version = installed(package)
        if installed_version and not installed_version.endswith("+cpu") and sys.modules.get(package) is None:
            sys.modules[package] = None  # type: ignore[assignment]  # import -> ModuleNotFoundError, find_spec -> None
            hidden.append(package)
    return hidden
