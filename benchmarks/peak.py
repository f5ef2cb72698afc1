"""The fastest matrix product that this machine does: operations (trainer/step/flops.py) are told as a share of it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

SIZES = ((2048, 2048, 2048), (4096, 4096, 4096), (8192, 1024, 4096))
"""(rows, inner, columns) of the products that are tried"""
LARGE = (8192, 8192, 8192)
"""and on a GPU"""


class Peak:
    """FLOP/s of the fastest large matrix product in one type, with the threads in force."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device, sizes: Sequence[tuple[int, int, int]] = SIZES, repeats: int = 3
    ):
        """Tries every size, on a GPU also LARGE, and keeps the fastest."""
        self.dtype, self.device = dtype, device
        sizes = (*sizes, LARGE) if device.type == "cuda" else sizes
        found = {size: statistics.median(self._rates(size, repeats)) for size in sizes}
        self.size = max(found, key=lambda size: found[size])

    def measure(self, repeats: int = 3) -> float:
        """Return FLOP/s now: the best of some products, since whatever disturbs one only makes it slower."""
        return max(self._rates(self.size, repeats))

    def _rates(self, size: tuple[int, int, int], repeats: int) -> list[float]:
        rows, inner, columns = size
        left = torch.randn(rows, inner, device=self.device).to(self.dtype)
        right = torch.randn(columns, inner, device=self.device).to(self.dtype)
        out = torch.mm(left, right.T)
        rates = []
        for _ in range(repeats):
            wait(self.device)
            start = time.perf_counter()
            torch.mm(left, right.T, out=out)
            wait(self.device)
            rates.append(2.0 * rows * inner * columns / (time.perf_counter() - start))
        return rates


def wait(device: torch.device) -> None:
    """Until a GPU has done what it was given; a CPU has already."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
