"""Transfer buffers in GPU memory: allocated once, their CUDA IPC handles sent once, then copied GPU to GPU.

A trainer rank keeps both buffers of its own shard (rollout dtype) in one allocation; engines open it and copy peer to
peer. The allocation must be plain cudaMalloc memory: with PyTorch's expandable segments no handle can be shared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rollout.weights.checksum import Columns
from rollout.weights.layout import ALIGNMENT_BYTES, BUFFERS, Layout, Slice, align, merge_ranges, piece_start
from rollout.weights.sender import WeightSender
from rollout.weights.shm import export_handle
from shared.errors import ConfigError


@dataclass
class DeviceShard:
    """Both buffers of a part of the model in GPU memory: 64 bytes with the version flag, then the byte ranges."""

    layout: Layout
    rows: list[tuple[str, int, int]]
    """(tensor, first row, rows) of the part"""
    memory: torch.Tensor
    """[2 * part_bytes] uint8 on a GPU"""

    def __post_init__(self) -> None:
        self.ranges = merge_ranges(self.layout, self.rows)
        self.starts: list[int] = []
        cursor = ALIGNMENT_BYTES
        for _, size in self.ranges:
            self.starts.append(cursor)
            cursor += align(size)
        self.part_bytes = cursor

    def range_view(self, buffer: int, number: int) -> torch.Tensor:
        """[bytes] uint8 of one byte range."""
        start = buffer * self.part_bytes + self.starts[number]
        return self.memory[start : start + self.ranges[number][1]]

    def rows_view(self, buffer: int, number: int) -> torch.Tensor:
        """[rows, ...] of part `number`, typed and shaped; nothing is copied."""
        name, first_row, count = self.rows[number]
        tensor = self.layout.places[name]
        start = piece_start(self.layout, name, first_row)
        index = max(i for i, (begin, _) in enumerate(self.ranges) if begin <= start)
        offset = start - self.ranges[index][0]
        size = count * tensor.row_bytes(self.layout.dtype.itemsize)
        view = self.range_view(buffer, index)[offset : offset + size].view(self.layout.dtype)
        return view.view(count, *tensor.shape[1:]) if tensor.shape else view.view(())

    def version_flag(self, buffer: int) -> torch.Tensor:
        """[1] int64: the version in this buffer."""
        return self.memory[buffer * self.part_bytes :][:8].view(torch.int64)


def part_bytes(layout: Layout, rows: list[tuple[str, int, int]]) -> int:
    """Bytes of one buffer of a part: version flag and aligned ranges."""
    return ALIGNMENT_BYTES + sum(align(size) for _, size in merge_ranges(layout, rows))


def create_shard(layout: Layout, rows: list[tuple[str, int, int]], device: torch.device) -> DeviceShard:
    """Allocate both buffers of a part, with version flags set to -1."""
    memory = torch.zeros(BUFFERS * part_bytes(layout, rows), dtype=torch.uint8, device=device)
    shard = DeviceShard(layout, rows, memory)
    for buffer in range(BUFFERS):
        shard.version_flag(buffer).fill_(-1)
    torch.cuda.synchronize(device)
    return shard


class DeviceWeightSender(WeightSender):
    """Writes into this rank's own GPU buffers."""

    kind = "cuda_ipc"

    def __init__(self, transport: str, layout: Layout, pieces: list[Slice], rank: int, store: dist.Store, engines: int):
        if transport == "shm":
            raise ConfigError('rollout.transport = "shm" is for trainers on the CPU: use "auto" or "cuda_ipc" on GPUs')
        rows = [(piece.name, piece.first_row, piece.local.shape[0] if piece.local.ndim else 1) for piece in pieces]
        self.device = pieces[0].local.device
        self.shard = create_shard(layout, rows, self.device)
        super().__init__(transport, layout, pieces, rank, store, engines)

    @property
    def network_device(self) -> torch.device:
        """The trainer's GPU: NCCL sends from it."""
        return self.device

    def target(self, buffer: int, number: int) -> torch.Tensor:
        """The rows' place in this rank's buffer."""
        return self.shard.rows_view(buffer, number)

    def mark_complete(self, buffer: int, version: int) -> None:
        """Set the version flag, in stream order with the copies."""
        self.shard.version_flag(buffer).fill_(version)
        torch.cuda.current_stream(self.device).synchronize()  # not the device: weights may be on their way

    def finish_writes(self) -> None:
        """Wait for the copies; kernels of other processes may read as soon as this returns."""
        torch.cuda.current_stream(self.device).synchronize()

    def columns(self, version: int) -> dict[str, Columns]:
        """None: engines on GPUs keep nothing packed."""
        return {}

    def outgoing(self, buffer: int) -> list[torch.Tensor]:
        """Byte ranges of this rank's buffer."""
        return [self.shard.range_view(buffer, number) for number in range(len(self.ranges))]

    def describe(self) -> dict[str, Any]:
        """Return the base's description and the IPC handle."""
        return {**super().describe(), "handle": export_handle(self.shard.memory)}
