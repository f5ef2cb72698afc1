"""Where an item runs, and how it measures time and memory there: a card, or with `tiny` sizes a CPU."""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from benchmarks import head_memory
from benchmarks.peak import wait

Size = TypeVar("Size")
MATMUL, COPY = "matrix product, bfloat16", "copy on the device"
"""figures of the item `peaks`, by which others are divided"""


def group_heads() -> None:
    """Give torch's attention over packed sequences grouped heads where it has none (2.11): keys and values are repeated
    for every head that reads them, which takes time and memory."""
    from torch.nn.attention import varlen

    plain = varlen.varlen_attn
    if "enable_gqa" in inspect.signature(plain).parameters:
        return

    def grouped(query: Tensor, key: Tensor, value: Tensor, *others: Any, enable_gqa: bool = False, **named: Any) -> Any:
        if enable_gqa:
            key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
        return plain(query, key, value, *others, **named)

    varlen.varlen_attn = grouped


class Where:
    """Device and sizes of an item, and the figures of `peaks`."""

    def __init__(self, device: str, tiny: bool, known: dict[str, float]):
        self.tiny, self.known = tiny, known
        self.device = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
        group_heads()

    @property
    def on_card(self) -> bool:
        """Whether the device is a card."""
        return self.device.type == "cuda"

    def size(self, full: Size, tiny: Size) -> Size:
        """Choose a size."""
        return tiny if self.tiny else full

    @cached_property
    def peak(self) -> float:
        """FLOP/s of the fastest product of this run; 0 where it was not measured."""
        return 1e12 * self.known.get(MATMUL, 0.0)

    @cached_property
    def copy(self) -> float:
        """Bytes a second of a copy on the device, read and written; 0 where it was not measured."""
        return 1e9 * self.known.get(COPY, 0.0)

    def seconds(self, work: Callable[[], Any], repeats: int = 3) -> float:
        """Median time of `work` after a first call."""
        work()
        found = []
        for _ in range(repeats):
            wait(self.device)
            start = time.perf_counter()
            work()
            wait(self.device)
            found.append(time.perf_counter() - start)
        return statistics.median(found)

    def extra_bytes(self, work: Callable[[], Any]) -> int:
        """Largest memory during `work` beyond that before it, after a first call."""
        work()
        wait(self.device)
        if self.on_card:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            work()
            return torch.cuda.max_memory_allocated() - before
        head_memory.forget_peak()
        before = head_memory.status("VmRSS")
        work()
        return max(head_memory.peak_bytes() - before, 0)
