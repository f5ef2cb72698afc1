"""Which number types the processor multiplies fast, and how a process that computes on it should allocate memory."""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

CPU_INFO = Path("/proc/cpuinfo")
CONTROL_GROUPS = Path("/sys/fs/cgroup")
MEASURED_ROWS, MEASURED_SIZE, MEASURED_S = 4, 2048, 0.25
"""of `measure_threads`: sequences, the largest layer, and seconds for each number of threads"""


def given_threads(otherwise: int = 1) -> int:
    """Return the threads that the environment gives to a process that computes on the CPU (OMP_NUM_THREADS)."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return max(1, int(first)) if first.isdecimal() else otherwise


def usable_cores(groups: Path = CONTROL_GROUPS) -> int:
    """Return the cores that this process may compute with: those of its affinity, and of them at most as many as the
    CPU quotas of its control groups pay for (cpu.max, as a container's)."""
    cores = len(os.sched_getaffinity(0))
    try:
        path = Path("/proc/self/cgroup").read_text(encoding="utf-8").rpartition("::/")[2].strip()
    except OSError:
        path = ""
    for folder in (groups / path, *(groups / path).parents):
        with suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
            if quota != "max":
                cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def measure_threads(most: int, hidden: int, inner: int, dtype: torch.dtype) -> dict[int, float]:
    """Return the seconds that the products of a decoder's layer take with one, two, four, ... up to `most` threads, for
    MEASURED_ROWS sequences that decode a token each. Leaves torch with one thread.

    hidden, inner: sizes of the layer; larger ones than MEASURED_SIZE are measured as that. Each product ends when its
    last thread has computed, so that one core that another program uses delays them all.
    """
    hidden, inner = min(hidden, MEASURED_SIZE), min(inner, 4 * MEASURED_SIZE)
    shapes = ((hidden, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner))
    weights = [torch.ones(shape, dtype=dtype) for shape in shapes]
    inputs = {size: torch.ones(MEASURED_ROWS, size, dtype=dtype) for size in (hidden, inner)}
    seconds = {}
    for threads in sorted({most, *(1 << power for power in range(most.bit_length()))}):
        torch._C.set_num_threads(threads)
        took: list[float] = []
        while len(took) < 3 or sum(took) < MEASURED_S:
            began = time.perf_counter()
            for weight in weights:
                torch.nn.functional.linear(inputs[weight.shape[1]], weight)
            took.append(time.perf_counter() - began)
        seconds[threads] = sum(took[1:]) / (len(took) - 1)  # the first one starts the threads
    torch._C.set_num_threads(1)
    return seconds


def fewest_fast(seconds: Mapping[int, float]) -> int:
    """Return the fewest threads that take at most 10 % longer than the fastest number of them."""
    return min(threads for threads, took in seconds.items() if took <= 1.1 * min(seconds.values()))


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
    """Let glibc keep freed memory of any size for the next allocation, for all threads; other C libraries stay.

    For processes that allocate the same again and again. A training step of SmolLM2 (2,000 tokens, one thread, a
    virtual machine) spent 1 to 2.4 of its 17 seconds in the kernel without it, none with it, at the same peak; an
    engine's weight update a quarter of its time.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(MMAP_MAX, 0)
        libc.mallopt(TRIM_THRESHOLD, (1 << 31) - 1)
        libc.mallopt(TOP_PAD, 64 << 20)
        libc.mallopt(ARENA_MAX, 1)
