"""Two slots, each as large as the largest tensor, through which a model streams from a rollout rank into its engine.

The rank fills the slots in turn with the buckets of a version (layout.py) while the workers of the engine read what is
there, so neither process ever holds the model a second time. A header in host memory says which version is on its way,
how many of its buckets are complete, and how many each worker has taken. On a CPU the slots come after the header; on
GPUs in the memory of the engine's first, where the other workers copy from, each only its own rows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import torch

from rollout.weights.layout import NO_VERSION, Layout, plan_buckets
from rollout.weights.shm import create_memory, export_handle, import_handle, open_memory
from shared.errors import DeadlineExceeded

VERSION, FILLED, TAKEN = 0, 1, 2
"""places in the header: the version on its way, its complete buckets, and from TAKEN on the buckets of each worker"""
HEADER_BYTES = 4096
POLL_S = 0.0005
DELIVERY_DEADLINE_S = 600.0
"""limit of every wait inside a delivery; that of the whole update is deadlines.sync_s"""


class WeightSlots:
    """Both sides of the slots: a rollout rank calls create, begin, slot and fill; a worker open and tensors."""

    def __init__(self, layout: Layout, readers: int, descriptor: int, header: torch.Tensor, memory: torch.Tensor):
        """memory: [2 * slot bytes] uint8. readers: workers of the engine."""
        self.layout, self.buckets, self.readers, self.descriptor = layout, plan_buckets(layout), readers, descriptor
        self.header = header[:HEADER_BYTES].view(torch.int64)
        self.memory = memory.view(2, -1)

    @classmethod
    def create(cls, layout: Layout, readers: int, device: torch.device) -> WeightSlots:
        """Make the slots on a GPU, or in host memory for an engine on the CPU. Raises RunError if memory is short."""
        size = 2 * slot_bytes(layout)
        descriptor, shared = create_memory(HEADER_BYTES + (0 if device.type == "cuda" else size))
        memory = torch.empty(size, dtype=torch.uint8, device=device) if device.type == "cuda" else shared[HEADER_BYTES:]
        made = cls(layout, readers, descriptor, shared, memory)
        made.header[VERSION] = NO_VERSION
        return made

    @classmethod
    def open(cls, layout: Layout, readers: int, path: str, handle: dict[str, Any] | None) -> WeightSlots:
        """Open the slots of another process. handle: of the memory of a GPU."""
        size = 2 * slot_bytes(layout)
        if handle is None:
            descriptor, shared = open_memory(path, HEADER_BYTES + size)
            return cls(layout, readers, descriptor, shared, shared[HEADER_BYTES:])
        descriptor, shared = open_memory(path, HEADER_BYTES)
        return cls(layout, readers, descriptor, shared, import_handle(handle))

    def describe(self) -> dict[str, Any]:
        """Arguments of `open`, JSON-able."""
        path, handle = f"/proc/{os.getpid()}/fd/{self.descriptor}", None
        if self.memory.is_cuda:
            handle = export_handle(self.memory.view(-1))
        return {"readers": self.readers, "path": path, "handle": handle}

    # ---- the rollout rank --------------------------------------------------------------------------------------------

    def begin(self, version: int) -> None:
        """Announce a version to the engine, whose workers wait for it; NO_VERSION ends one that breaks off."""
        self.header[FILLED : TAKEN + self.readers] = 0
        self.header[VERSION] = version

    def slot(self, number: int) -> torch.Tensor:
        """[bytes] where the bucket with this number is to be received."""
        bucket = self.buckets[number]
        return self.memory[number % 2, : bucket.end - bucket.start]

    def fill(self, number: int) -> None:
        """Say that the bucket with this number is complete."""
        self.header[FILLED] = number + 1

    @property
    def filled(self) -> int:
        """Buckets of the version that are complete."""
        return int(self.header[FILLED])

    @property
    def taken(self) -> int:
        """Buckets of the version that every worker has read."""
        return int(self.header[TAKEN : TAKEN + self.readers].min())

    # ---- a worker of the engine --------------------------------------------------------------------------------------

    def tensors(self, version: int, engine: int, reader: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, whole tensor) of the version as they come. A tensor is gone once the next one is asked for.

        Raises DeadlineExceeded if the stream stops.
        """
        item, end = self.layout.dtype.itemsize, time.monotonic() + DELIVERY_DEADLINE_S
        for number, bucket in enumerate(self.buckets):
            while int(self.header[VERSION]) != version or self.filled <= number:
                if time.monotonic() > end:
                    phase = f"receive weights of version {version}"
                    raise DeadlineExceeded(
                        f"engine process {engine}", phase, "its rollout rank", DELIVERY_DEADLINE_S, setting=""
                    )
                time.sleep(POLL_S)
            slot, end = self.slot(number), time.monotonic() + DELIVERY_DEADLINE_S
            for name in bucket.names:
                spec = self.layout.places[name]
                start = spec.offset - bucket.start
                values = slot[start : start + spec.rows * spec.row_bytes(item)]
                yield name, values.view(self.layout.dtype).view(spec.shape)
            if self.memory.is_cuda:
                torch.cuda.current_stream().synchronize()  # the copies of this worker out of the slot
            self.header[TAKEN + reader] = number + 1

    def close(self) -> None:
        """Close the descriptor; the pages stay as long as any process maps them."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def slot_bytes(layout: Layout) -> int:
    """Bytes of a slot: those of the longest bucket."""
    return max(bucket.end - bucket.start for bucket in plan_buckets(layout))
