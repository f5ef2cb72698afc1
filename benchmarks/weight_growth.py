"""Weight updates of 10 MB to 2 GB, one engine and two, against memcpy.

As weight_update.py, for every size: update after update of engines at rest, then of engines that decode. Of several
engines, which are updated at once, the slowest counts. Sizes for which this machine lacks memory are not measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import NamedTuple

import psutil

from benchmarks.weight_update import SHARE, STALL_TARGET, Times, measured, share  # first: it prepares for vLLM

# isort: split
import torch

from benchmarks.figures import Figure, NotMeasured, benchmark
from benchmarks.llama import SMOLLM2_135M, Shape

REQUESTS = 8
COPIES, COPIES_OF_ENGINE = 6.0, 3.0
"""memory in copies of the weights: of trainer (float32, two buffers) and of everything passing; of each engine"""
SPARE_BYTES = 3 << 30


class Size(NamedTuple):
    """A model, and how long its completions must be to outlast the updates."""

    name: str
    shape: Shape
    tokens: int
    engines: tuple[int, ...] = (1,)

    @property
    def bytes(self) -> int:
        """Bytes of the weights on the wire, bfloat16."""
        return 2 * self.shape.parameters


SIZES = (
    Size("10 MB", Shape(192, 8, 3, 1, 512, 8192), tokens=6000),
    Size("50 MB", Shape(320, 18, 5, 1, 896, 16384), tokens=3000, engines=(1, 2)),
    Size("270 MB", SMOLLM2_135M, tokens=1200, engines=(1, 2)),
    Size("1 GB", Shape(1024, 36, 16, 8, 3072, 49152), tokens=800, engines=(1, 2)),
    Size("2 GB", Shape(2048, 20, 32, 8, 5632, 49152), tokens=700),
)


def needed_bytes(size: Size, engines: int) -> int:
    """Return the memory that a measurement takes, about."""
    return round((COPIES + COPIES_OF_ENGINE * engines) * size.bytes) + SPARE_BYTES


def of_size(size: Size, engines: int, loads: dict[str, Times]) -> Iterator[Figure]:
    """Yield the figures of one size and number of engines."""
    name, rest = f"{size.name}, {engines} engine{'s' if engines > 1 else ''}", loads["at rest"]
    rates = [size.bytes / 1e9 / seconds for seconds in rest["write"]]
    yield Figure(f"{name}: write", rates, "GB/s", better="higher", kind="sync")
    yield share(f"{name}: {SHARE}", rest)
    times = [1e3 * seconds for seconds in rest["update"]]
    yield Figure(f"{name}: write and update of the slowest engine", times, "ms", better="lower", kind="sync")
    yield Figure(f"{name}: stall of running requests", loads["decoding"]["stall"], "", "a decode step", "lower",
                 STALL_TARGET, "sync")  # fmt: skip


def growth(found: dict[tuple[Size, int], Times]) -> Iterator[Figure]:
    """Yield how the time of each byte grows with the bytes, and the time of an update with the engines; at rest."""
    seconds = {key: statistics.median(times["update"]) for key, times in found.items()}
    first = next(iter(found))[0]
    for size, engines in found:
        if engines > 1 and (size, 1) in found:
            beside = [one / seconds[size, 1] for one in found[size, engines]["update"]]
            yield Figure(f"{size.name}: update of {engines} engines at once", beside, "", "that of one engine", "lower",
                         kind="sync")  # fmt: skip
        elif size is not first:
            ratio = seconds[size, 1] / size.bytes / (seconds[first, 1] / first.bytes)
            yield Figure(f"time of each byte (write and update), {size.name}", [ratio], "", f"that of {first.name}",
                         "lower", kind="sync")  # fmt: skip


@benchmark()
def weight_growth(quick: bool) -> Iterator[Figure]:
    """Measure all sizes, smallest first."""
    if torch.cuda.is_available():
        raise NotMeasured("engines on a GPU copy weights in place and repack nothing; run this on a CPU")
    sizes, updates = (SIZES[:2], 3) if quick else (SIZES, 6)
    found: dict[tuple[Size, int], Times] = {}
    for size, engines in [(one, engines) for one in sizes for engines in one.engines]:
        needed, free = needed_bytes(size, engines), psutil.virtual_memory().available
        if needed > free:
            reason = f"about {needed / 1e9:.0f} GB of memory are needed, {free / 1e9:.0f} GB are free"
            yield Figure(f"{size.name}, {engines} engine(s)", [], "", not_measured=reason)
            continue
        loads = measured(size.shape, engines, updates, REQUESTS, size.tokens)
        found[size, engines] = loads["at rest"]
        yield from of_size(size, engines, loads)
    yield from growth(found)
