"""Which type of numbers a processor multiplies faster; memory that a process keeps."""

import ctypes
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shared.processor import keep_freed_memory, multiplies_bfloat16_fast, multiplies_float16_fast, spare_allocator
from tests.process import in_fresh_process


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """No answer of this machine before, none of the tests' afterwards."""
    for answer in (multiplies_bfloat16_fast, multiplies_float16_fast):
        answer.cache_clear()
    yield
    for answer in (multiplies_bfloat16_fast, multiplies_float16_fast):
        answer.cache_clear()


@pytest.mark.parametrize(("found", "fast"), [({"amx_bf16": True}, True), ({"amx_bf16": False}, False), ({}, False)])
def test_a_cpu_needs_matrix_units(monkeypatch: pytest.MonkeyPatch, found: dict[str, bool], fast: bool) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)
    assert multiplies_bfloat16_fast("cpu") is fast
    assert multiplies_bfloat16_fast("cuda") is True


@pytest.mark.parametrize(
    ("found", "fast"),
    [({"avx512_fp16": True}, True), ({"avx512_fp16": True, "amx_bf16": True}, False), ({"amx_bf16": True}, False),
     ({}, False)],
)  # fmt: skip
def test_float16_is_for_cpus_with_its_instructions_and_without_matrix_units(
    monkeypatch: pytest.MonkeyPatch, found: dict[str, bool], fast: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)
    assert multiplies_float16_fast("cpu") is fast
    assert multiplies_float16_fast("cuda") is True


def test_this_machine_says_what_its_kernel_says() -> None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        flags = next(line for line in lines if line.startswith("flags")).split()
    except (OSError, StopIteration):
        pytest.skip("no flags in /proc/cpuinfo")
    assert multiplies_bfloat16_fast("cpu") is ("amx_bf16" in flags)


ROUNDS = 16


def faults_of_allocating_again(keep: bool) -> int:
    """Pages that were touched for the first time in the second half of rounds that allocate and free 200 MB."""
    if keep:
        keep_freed_memory()
    counts = []
    for _ in range(ROUNDS):
        torch.empty(50_000_000).zero_()
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    return counts[-1] - counts[ROUNDS // 2 - 1]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
def test_freed_memory_is_there_for_the_next_allocation() -> None:
    """Once the heap has found room: a round more or less may still miss it, by the few bytes of its alignment."""
    always, kept = (in_fresh_process(faults_of_allocating_again, keep) for keep in (False, True))
    assert kept < always / 3


def test_a_process_that_starts_with_the_spare_allocator_has_it() -> None:
    if not (library := spare_allocator()):
        pytest.skip("tcmalloc is not installed: apt install libtcmalloc-minimal4")
    script = "print(open('/proc/self/maps').read().count('libtcmalloc_minimal'))"
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "LD_PRELOAD": library}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert int(done.stdout) > 0 and done.stderr == ""
