"""Which type of numbers a processor multiplies faster."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shared.processor import multiplies_bfloat16_fast


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """No answer of this machine before, none of the tests' afterwards."""
    multiplies_bfloat16_fast.cache_clear()
    yield
    multiplies_bfloat16_fast.cache_clear()


@pytest.mark.parametrize(("found", "fast"), [({"amx_bf16": True}, True), ({"amx_bf16": False}, False), ({}, False)])
def test_a_cpu_needs_matrix_units(monkeypatch: pytest.MonkeyPatch, found: dict[str, bool], fast: bool) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)
    assert multiplies_bfloat16_fast("cpu") is fast
    assert multiplies_bfloat16_fast("cuda") is True


def test_this_machine_says_what_its_kernel_says() -> None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        flags = next(line for line in lines if line.startswith("flags")).split()
    except (OSError, StopIteration):
        pytest.skip("no flags in /proc/cpuinfo")
    assert multiplies_bfloat16_fast("cpu") is ("amx_bf16" in flags)
