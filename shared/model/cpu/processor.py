"""Which number types the processor multiplies fast, and how a process that computes on it should allocate memory."""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

CPU_INFO = Path("/proc/cpuinfo")


def given_threads(otherwise: int = 1) -> int:
    """Return the threads that the environment gives to a process that computes on the CPU (OMP_NUM_THREADS)."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return max(1, int(first)) if first.isdecimal() else otherwise


def has_matrix_units(device_type: str) -> bool:
    """Whether products of bfloat16 matrices take a fraction of the time of float32: on GPUs, and on CPUs with AMX."""
    return device_type != "cpu" or bool(torch.cpu.get_capabilities().get("amx_bf16"))


@functools.lru_cache
def multiplies_bfloat16_fast(device_type: str) -> bool:
    """Whether products of bfloat16 matrices are faster than those of float32: with matrix units, and on AMD's CPUs with
    bfloat16 instructions (AVX512-BF16).

    One thread, matrices of 576 to 3,072: on an AMD EPYC 201 to 218 GFLOP/s in bfloat16, 92 to 101 in float32. On an
    Intel Xeon with the same instructions but without matrix units bfloat16 took 1.7 times as long as float32.
    """
    if has_matrix_units(device_type):
        return True
    return bool(torch.cpu.get_capabilities().get("avx512_bf16")) and made_by_amd()


def made_by_amd() -> bool:
    """Whether the kernel calls the processor AMD's; False where it does not say."""
    try:
        lines = CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    return any(line.startswith("vendor_id") and line.endswith("AuthenticAMD") for line in lines)


@contextmanager
def exact_products(inputs: Tensor) -> Iterator[None]:
    """On a CPU, let float32 products of numbers that came from `inputs` use its bfloat16 units: what is bfloat16 loses
    nothing, and sums are float32 either way."""
    if inputs.dtype != torch.bfloat16 or inputs.is_cuda or not multiplies_bfloat16_fast("cpu"):
        yield
        return
    settings = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before, settings.fp32_precision = settings.fp32_precision, "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


def spare_allocator() -> str:
    """Return the library tcmalloc if it is installed (Debian and Ubuntu: apt install libtcmalloc-minimal4), else "".

    For LD_PRELOAD: a process has it from its start or not at all. Between the tensors of a training step glibc (2.36)
    leaves holes that no other tensor fits into; tcmalloc keeps sizes apart. SmolLM2-135M, micro-batches of 1,024
    tokens, two cores, after four steps: a trainer takes 4.6 GB instead of 5.1, its engine 2.6 instead of 2.9. The
    second and third step took 96 and 122 s with it, 100 and 121 s without.
    """
    return ctypes.util.find_library("tcmalloc_minimal") or ""


MMAP_MAX, TRIM_THRESHOLD, TOP_PAD, ARENA_MAX = -4, -1, -2, -8
"""numbers of glibc's malloc.h"""


def keep_freed_memory() -> None:
    """Let glibc keep freed memory of any size for the next allocation, instead of giving it back to the kernel and
    getting it page by page again. Other C libraries stay as they are.

    For processes that allocate the same again and again. A training step of SmolLM2 (2,000 tokens, one thread, a
    virtual machine) spent 1 to 2.4 of its 17 seconds in the kernel without it, none with it, at the same peak; an
    engine's weight update a quarter of its time. All threads share one arena, so that what one frees is there for the
    others.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(MMAP_MAX, 0)
        libc.mallopt(TRIM_THRESHOLD, (1 << 31) - 1)
        libc.mallopt(TOP_PAD, 64 << 20)
        libc.mallopt(ARENA_MAX, 1)
