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

from shared.model.cpu import processor
from shared.model.cpu.processor import (
    given_threads,
    has_matrix_units,
    keep_freed_memory,
    multiplies_bfloat16_fast,
    spare_allocator,
)
from tests.process import in_fresh_process


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """No answer of this machine before, none of the tests' afterwards."""
    multiplies_bfloat16_fast.cache_clear()
    yield
    multiplies_bfloat16_fast.cache_clear()


INTEL, AMD = "GenuineIntel", "AuthenticAMD"


def is_processor(monkeypatch: pytest.MonkeyPatch, folder: Path, found: dict[str, bool], vendor: str) -> None:
    """From now on the processor can do what `found` says and is the vendor's ("": the kernel does not say)."""
    info = folder / "cpuinfo"
    if vendor:
        info.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: 25\n", encoding="utf-8")
    monkeypatch.setattr(processor, "CPU_INFO", info)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)


@pytest.mark.parametrize(
    ("found", "vendor", "fast"),
    [({"amx_bf16": True}, INTEL, True), ({"amx_bf16": True, "avx512_bf16": True}, "", True),
     ({"amx_bf16": False}, INTEL, False), ({"avx512_bf16": True}, INTEL, False), ({"avx512_bf16": True}, "", False),
     ({"avx512_bf16": True}, AMD, True), ({"avx512_f": True}, AMD, False), ({}, AMD, False), ({}, "", False)],
)  # fmt: skip
def test_bfloat16_is_for_matrix_units_and_for_amds_instructions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, found: dict[str, bool], vendor: str, fast: bool
) -> None:
    is_processor(monkeypatch, tmp_path, found, vendor)
    assert has_matrix_units("cpu") is found.get("amx_bf16", False) and has_matrix_units("cuda")
    assert multiplies_bfloat16_fast("cpu") is fast
    assert multiplies_bfloat16_fast("cuda") is True


def test_this_machine_says_what_its_kernel_says() -> None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        flags = next(line for line in lines if line.startswith("flags")).split()
    except (OSError, StopIteration):
        pytest.skip("no flags in /proc/cpuinfo")
    amd = any(AMD in line for line in lines)
    assert multiplies_bfloat16_fast("cpu") is ("amx_bf16" in flags or (amd and "avx512_bf16" in flags))


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


@pytest.mark.parametrize(("given", "threads"), [("3", 3), ("4,2", 4), ("", 1), ("0", 1), ("many", 1), (None, 1)])
def test_threads_are_those_of_openmp(monkeypatch: pytest.MonkeyPatch, given: str | None, threads: int) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", given or "")
    if given is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    assert given_threads() == threads
    assert given_threads(otherwise=8) == (threads if given in ("3", "4,2", "0") else 8)
