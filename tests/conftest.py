"""Fixtures for all rooms: the checkout, the problem sets beside it, a box for programs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from verify.code.seats import Seats

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """Folder of real problem sets (JSONL), which lies beside the checkout and is not part of it."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the problem sets (../shared/data) are not on this machine")
    return folder


@pytest.fixture(scope="module")
def seats() -> Iterator[Seats]:
    """One sandbox for programs; skips where the host cannot isolate them."""
    from verify.code import cpp
    from verify.code.sandbox.client import SandboxRefused
    from verify.code.seats import Seats
    from verify.program import isolation

    held = Seats(1, shared_folder=cpp.cache_folder())
    try:
        isolation(held)
    except SandboxRefused as error:
        pytest.skip(str(error))
    yield held
    held.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `gpu` tests where torch finds no GPU."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
