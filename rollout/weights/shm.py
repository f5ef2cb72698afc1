"""Transfer buffers in host memory: a memfd that all processes of a node map.

memfd: not bound by the size of /dev/shm, and freed by the kernel when its last user is gone. A process opens it by the
path /proc/<owner>/fd/<n>, which is all that it has to know. The owner touches every page at the start, because first
touches are ten times slower than later writes.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

import torch

from rollout.weights.layout import ALIGNMENT_BYTES, BUFFERS, FLAG_BYTES, Layout, Place
from shared.errors import RunError


def host_identity() -> str:
    """A name that two processes share exactly if they can map each other's memory: kernel boot and PID namespace."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return f"{os.uname().nodename}/{boot}/{os.readlink('/proc/self/ns/pid')}"


@dataclass
class Segment:
    """A mapped memfd with both buffers. `path` opens it in another process of this host as long as this one lives."""

    layout: Layout
    memory: torch.Tensor
    """[2 * size_bytes] uint8"""
    descriptor: int

    @property
    def path(self) -> str:
        """Path by which other processes of this host open it."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    def version_flags(self, buffer: int) -> torch.Tensor:
        """[world] int64: the version that each trainer rank wrote into this buffer; -1 for none or half written."""
        start = buffer * self.layout.size_bytes
        return self.memory[start : start + FLAG_BYTES * self.layout.world].view(torch.int64)

    def view(self, buffer: int, place: Place) -> torch.Tensor:
        """Return a view of one tensor, shaped and typed; nothing is copied."""
        start = buffer * self.layout.size_bytes + place.offset
        size = place.rows * place.row_bytes(self.layout.dtype.itemsize)
        return self.memory[start : start + size].view(self.layout.dtype).view(place.shape)

    def close(self) -> None:
        """Close the descriptor; the pages stay as long as any process maps them."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _map(descriptor: int, size_bytes: int) -> torch.Tensor:
    area = mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    memory = torch.frombuffer(area, dtype=torch.uint8)
    if memory.data_ptr() % ALIGNMENT_BYTES:
        raise RunError("the kernel gave an unaligned mapping")
    return memory


def create_segment(layout: Layout) -> Segment:
    """Make a new segment with every page touched and all flags set to -1. Raises RunError if memory is short."""
    descriptor = os.memfd_create("maestrale-weights", os.MFD_CLOEXEC)
    size = BUFFERS * layout.size_bytes
    try:
        os.ftruncate(descriptor, size)
        memory = _map(descriptor, size)
    except OSError as error:
        os.close(descriptor)
        raise RunError(f"cannot map {size} bytes of shared memory for the weight transfer: {error}") from error
    segment = Segment(layout, memory, descriptor)
    for buffer in range(BUFFERS):
        segment.version_flags(buffer).fill_(-1)
    return segment


def open_segment(path: str, layout: Layout) -> Segment:
    """Map a segment that another process of this host owns."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise RunError(f"cannot open the weight buffer {path}: {error} (its owner died, or runs elsewhere)") from error
    return Segment(layout, _map(descriptor, BUFFERS * layout.size_bytes), descriptor)
