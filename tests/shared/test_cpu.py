"""Which type of numbers a processor multiplies faster; memory that a process keeps."""

import ctypes
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shared.model.cpu import processor
from tests.process import in_fresh_process

INTEL, AMD = "GenuineIntel", "AuthenticAMD"


@pytest.fixture(autouse=True)
def forgotten():
    """No answer of this machine before, none of the tests' afterwards."""
    processor.multiplies_bfloat16_fast.cache_clear()
    yield
    processor.multiplies_bfloat16_fast.cache_clear()


def is_processor(monkeypatch: pytest.MonkeyPatch, folder: Path, can: dict[str, bool], vendor: str) -> None:
    """From now on the processor can do this and is the vendor's ("": the kernel does not say)."""
    info = folder / "cpuinfo"
    if vendor:
        info.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: 25\n", encoding="utf-8")
    monkeypatch.setattr(processor, "CPU_INFO", info)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: can)


@pytest.mark.parametrize(("can", "vendor", "fast"), [
    ({"amx_bf16": True}, INTEL, True), ({"amx_bf16": True, "avx512_bf16": True}, "", True),
    ({"amx_bf16": False}, INTEL, False), ({"avx512_bf16": True}, INTEL, False), ({"avx512_bf16": True}, "", False),
    ({"avx512_bf16": True}, AMD, True), ({"avx512_f": True}, AMD, False), ({}, AMD, False), ({}, "", False),
])  # fmt: skip
def test_bfloat16_is_for_matrix_units_and_for_amds_instructions(monkeypatch, tmp_path, can, vendor, fast):
    is_processor(monkeypatch, tmp_path, can, vendor)
    assert processor.has_matrix_units("cpu") is can.get("amx_bf16", False) and processor.has_matrix_units("cuda")
    assert processor.multiplies_bfloat16_fast("cpu") is fast and processor.multiplies_bfloat16_fast("cuda") is True


def test_this_machine_says_what_its_kernel_says():
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        flags = next(line for line in lines if line.startswith("flags")).split()
    except (OSError, StopIteration):
        pytest.skip("no flags in /proc/cpuinfo")
    amd = any(AMD in line for line in lines)
    assert processor.multiplies_bfloat16_fast("cpu") is ("amx_bf16" in flags or (amd and "avx512_bf16" in flags))


def faults_of_allocating_again() -> list[int]:
    """Pages that were touched for the first time in the second half of 16 rounds that allocate and free 40 MB; then
    the same where freed memory is kept."""
    faults = []
    for prepare in (lambda: None, processor.keep_freed_memory):
        prepare()
        counts = []
        for _ in range(16):
            torch.empty(10_000_000).zero_()
            counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
        faults.append(counts[-1] - counts[7])
    return faults


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
def test_freed_memory_is_there_for_the_next_allocation():
    """Once the heap has found room: a round more or less may still miss it, by the few bytes of its alignment."""
    always, kept = in_fresh_process(faults_of_allocating_again)
    assert kept < always / 3


def test_a_process_that_starts_with_the_spare_allocator_has_it():
    if not (library := processor.spare_allocator()):
        pytest.skip("tcmalloc is not installed: apt install libtcmalloc-minimal4")
    command = [sys.executable, "-c", "print(open('/proc/self/maps').read().count('libtcmalloc_minimal'))"]
    environment = {**os.environ, "LD_PRELOAD": library}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) > 0 and done.stderr == ""


@pytest.mark.parametrize(("given", "threads"), [("3", 3), ("4,2", 4), ("", 1), ("0", 1), ("many", 1), (None, 1)])
def test_threads_are_those_of_openmp(monkeypatch, given, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", given or "")
    if given is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    assert processor.given_threads() == threads
    assert processor.given_threads(otherwise=8) == (threads if given in ("3", "4,2", "0") else 8)


@pytest.mark.parametrize(
    ("quotas", "cores"), [({}, 8), ({"": "250000 100000"}, 2), ({"": "max 100000"}, 8), ({"": "50000 100000"}, 1)]
)
def test_the_cores_are_those_of_the_affinity_and_of_a_containers_quota(tmp_path, monkeypatch, quotas, cores):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    for folder, quota in quotas.items():
        (tmp_path / folder / "cpu.max").write_text(f"{quota}\n")
    assert processor.usable_cores(tmp_path) == cores


def test_threads_are_measured_and_the_fewest_of_the_fast_ones_are_taken(monkeypatch):
    monkeypatch.setattr(processor, "MEASURED_S", 0.001)
    before = torch.get_num_threads()
    try:
        seconds = processor.measure_threads(3, hidden=16, inner=32, dtype=torch.bfloat16)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    assert list(seconds) == [1, 2, 3] and min(seconds.values()) > 0
    assert processor.fewest_fast({1: 0.9, 2: 0.5, 4: 0.46, 8: 0.45}) == 4
    assert processor.fewest_fast({1: 1.0, 2: 8.0}) == 1
