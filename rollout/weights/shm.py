"""Memory that other processes of a host open: transfer buffers in a memfd that all map, handles of GPU memory.

memfd: not bound by the size of /dev/shm, and freed by the kernel when its last user is gone. A process opens it by the
path /proc/<owner>/fd/<n>, which is all that it has to know. The owner touches every page at the start, because first
touches are ten times slower than later writes. A handle names the GPU by its UUID, because a process may number the
GPUs of its node differently.
"""

from __future__ import annotations

import base64
import mmap
import os
from dataclasses import dataclass, field
from typing import Any

import torch

from rollout.weights.layout import ALIGNMENT_BYTES, BUFFERS, FLAG_BYTES, Layout
from shared.errors import ConfigError, RunError


def host_identity() -> str:
    """A name that two processes share exactly if they can map each other's memory: kernel boot and PID namespace."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return f"{os.uname().nodename}/{boot}/{os.readlink('/proc/self/ns/pid')}"


@dataclass
class HostWeightBuffer:
    """A mapped memfd with both buffers, which trainers write and engines read in place. `path` opens it in another
    process of this host as long as this one lives."""

    layout: Layout
    memory: torch.Tensor
    """[2 * size_bytes] uint8"""
    descriptor: int
    views: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict, repr=False)
    """those that `tensor` has made: adapters are hundreds of small ones, which cost more to find than to copy"""

    @property
    def path(self) -> str:
        """Path by which other processes of this host open it."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    def _flags(self, buffer: int) -> torch.Tensor:
        start = buffer * self.layout.size_bytes
        return self.memory[start : start + FLAG_BYTES * self.layout.world].view(torch.int64)

    def version_flags(self, buffer: int) -> list[int]:
        """[world] the version that each trainer rank wrote into this buffer; -1 for none or half written."""
        versions: list[int] = self._flags(buffer).tolist()
        return versions

    def mark_complete(self, rank: int, buffer: int, version: int) -> None:
        """Set the version flag of a trainer rank; -1 while it writes."""
        self._flags(buffer)[rank] = version

    def ranges(self, buffer: int, ranges: list[tuple[int, int]]) -> list[torch.Tensor]:
        """Views of byte ranges (start, size), [bytes] uint8 each."""
        base = buffer * self.layout.size_bytes
        return [self.memory[base + start : base + start + size] for start, size in ranges]

    def tensor(self, buffer: int, name: str) -> torch.Tensor:
        """Return a view of one tensor, shaped and typed; nothing is copied."""
        if (buffer, name) not in self.views:
            spec = self.layout.places[name]
            [memory] = self.ranges(buffer, [(spec.offset, spec.rows * spec.row_bytes(self.layout.dtype.itemsize))])
            self.views[buffer, name] = memory.view(self.layout.dtype).view(spec.shape)
        return self.views[buffer, name]

    def view(self, buffer: int, names: list[str]) -> torch.Tensor | None:
        """Rows of these tensors, one after the other, in place; None unless they are neighbours, as q, k, v are."""
        parts = [self.tensor(buffer, name) for name in names]
        end = parts[0].data_ptr()
        for tensor in parts:
            if tensor.data_ptr() != end:
                return None
            end += tensor.numel() * tensor.element_size()
        rows = sum(part.shape[0] for part in parts) if parts[0].ndim else 1
        shape = (rows, *parts[0].shape[1:]) if parts[0].ndim else ()
        return parts[0].as_strided(shape, parts[0].stride())

    def read(self, buffer: int, names: list[str]) -> torch.Tensor:
        """Rows of these tensors, one after the other; copied where they are not neighbours."""
        rows = self.tensor(buffer, names[0]) if len(names) == 1 else self.view(buffer, names)
        return torch.cat([self.tensor(buffer, name) for name in names]) if rows is None else rows

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


def create_memory(size: int) -> tuple[int, torch.Tensor]:
    """Make a new memfd with every page touched: (descriptor, [size] uint8). Raises RunError if memory is short."""
    descriptor = os.memfd_create("maestrale-weights", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
        return descriptor, _map(descriptor, size)
    except OSError as error:
        os.close(descriptor)
        raise RunError(f"cannot map {size} bytes of shared memory for the weight transfer: {error}") from error


def open_memory(path: str, size: int) -> tuple[int, torch.Tensor]:
    """Map what another process of this host owns: (descriptor, [size] uint8)."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise RunError(f"cannot open the weight buffer {path}: {error} (its owner died, or runs elsewhere)") from error
    return descriptor, _map(descriptor, size)


def create_buffer(layout: Layout) -> HostWeightBuffer:
    """Make a new memfd with all flags set to -1. Raises RunError if memory is short."""
    descriptor, memory = create_memory(BUFFERS * layout.size_bytes)
    made = HostWeightBuffer(layout, memory, descriptor)
    for buffer in range(BUFFERS):
        for rank in range(layout.world):
            made.mark_complete(rank, buffer, -1)
    return made


def open_buffer(path: str, layout: Layout) -> HostWeightBuffer:
    """Map what another process of this host owns."""
    descriptor, memory = open_memory(path, BUFFERS * layout.size_bytes)
    return HostWeightBuffer(layout, memory, descriptor)


def export_handle(memory: torch.Tensor) -> dict[str, Any]:
    """JSON-able handle of a GPU tensor that is its whole storage. Raises ConfigError under expandable segments."""
    try:
        arguments = memory.untyped_storage()._share_cuda_()
    except RuntimeError as error:
        raise ConfigError(
            f"GPU memory cannot be shared between processes: {error}. Remove expandable_segments:True from "
            'PYTORCH_CUDA_ALLOC_CONF, or set rollout.transport = "network"'
        ) from error
    packed = [{"bytes": base64.b64encode(value).decode()} if isinstance(value, bytes) else value for value in arguments]
    return {"gpu": str(torch.cuda.get_device_properties(memory.device).uuid), "size": memory.numel(), "storage": packed}


def local_index(gpu: str) -> int:
    """The number by which this process knows the GPU with this UUID. Raises ConfigError if it does not see it."""
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == gpu:
            return index
    raise ConfigError(
        f"an engine does not see the trainers' GPU {gpu}: make it visible (CUDA_VISIBLE_DEVICES), "
        'or set rollout.transport = "network"'
    )


def import_handle(handle: dict[str, Any]) -> torch.Tensor:
    """[bytes] uint8: the GPU memory of another process of this host."""
    arguments = [base64.b64decode(value["bytes"]) if isinstance(value, dict) else value for value in handle["storage"]]
    arguments[0] = local_index(handle["gpu"])
    with torch.cuda.device(arguments[0]):
        storage = torch.UntypedStorage._new_shared_cuda(*arguments)
    memory = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    if memory.numel() < handle["size"]:
        raise RunError(f"the shared GPU buffer has {memory.numel()} bytes instead of {handle['size']}")
    return memory[: handle["size"]]
