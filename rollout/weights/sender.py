"""The trainers' side of a weight transfer: each rank writes its own shard, cast to the wire dtype, where engines read.

No all-gather, no rank that collects, no file. Two buffers take turns. Every rank has a version flag in each
buffer: -1 while it writes, the version when it is done; a reader checks all flags.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist

from rollout.weights.checksum import Columns, checksum_rows, choose_columns
from rollout.weights.layout import BUFFERS, NO_VERSION, Layout, Slice, buffer_of, merge_ranges
from rollout.weights.network import NetworkSender
from rollout.weights.shm import HostWeightBuffer, create_buffer, host_identity, open_buffer


class WeightSender(ABC):
    """Base of the transports: writes this rank's pieces. Subclasses say where a piece is written."""

    kind: str

    def __init__(self, transport: str, layout: Layout, pieces: list[Slice], rank: int, store: dist.Store, engines: int):
        self.transport, self.layout, self.pieces, self.rank = transport, layout, pieces, rank
        self.rows = [(piece.name, piece.first_row, piece.local.shape[0] if piece.local.ndim else 1) for piece in pieces]
        self.ranges = merge_ranges(layout, self.rows)
        self.host = host_identity()
        self.store, self.engines = store, engines
        self.held = [NO_VERSION] * BUFFERS
        """the complete version in each buffer"""
        self.network: NetworkSender | None = None
        if transport in ("auto", "network"):
            device = self.network_device
            self.network = NetworkSender(store, rank, layout, engines, self.ranges, self.outgoing, device)

    @property
    def network_device(self) -> torch.device:
        """Device whose memory is sent to engines on other hosts."""
        return torch.device("cpu")

    @abstractmethod
    def target(self, buffer: int, number: int) -> torch.Tensor:
        """Where the piece with this number is written, same shape as its local rows."""

    @abstractmethod
    def mark_complete(self, buffer: int, version: int) -> None:
        """Set this rank's version flag of the buffer."""

    @abstractmethod
    def outgoing(self, buffer: int) -> list[torch.Tensor]:
        """This rank's byte ranges of the buffer ([bytes] uint8 each), in the order of `ranges`."""

    def finish_writes(self) -> None:  # noqa: B027 - nothing to wait for in host memory
        """Wait until written bytes are visible to other processes."""

    def describe(self) -> dict[str, Any]:
        """Return what an engine needs to read this rank's part; JSON-able, for `WeightReceiver`."""
        return {
            "transport": self.transport,
            "kind": self.kind,
            "rank": self.rank,
            "host": self.host,
            "engines": self.engines,
            "layout": self.layout.describe(),
            "rows": [list(row) for row in self.rows],
        }

    @torch.no_grad()
    def write(self, version: int) -> tuple[int, float]:
        """Write the current weights as `version`. Returns (bytes written, seconds).

        Waits until an earlier version in the same buffer has left for the engines on other hosts. The caller must have
        seen every engine take version - 1 before. Raises DeadlineExceeded if an engine does not take its copy.
        """
        buffer = buffer_of(version)
        if self.network is not None:
            self.network.wait_until_free(buffer)
        start = time.perf_counter()
        self.mark_complete(buffer, -1)
        self.held[buffer] = NO_VERSION
        written = 0
        for number, piece in enumerate(self.pieces):
            target = self.target(buffer, number)
            target.copy_(piece.values, non_blocking=True)
            written += target.numel() * target.element_size()
        self.finish_writes()
        self.mark_complete(buffer, version)
        self.held[buffer] = version
        seconds = time.perf_counter() - start
        if self.network is not None:
            self.network.send(version)
        return written, seconds

    @torch.no_grad()
    def checksums(self) -> dict[str, int]:
        """tensor -> this rank's part of its checksum, from the master weights, not from what was written."""
        return {piece.name: checksum_rows(piece.values, piece.first_row, self.layout.dtype) for piece in self.pieces}

    @torch.no_grad()
    def columns(self, version: int) -> dict[str, Columns]:
        """matrix -> the columns of this rank's rows that are compared where an engine keeps it packed, from the master
        weights; `version` was written last. What changed is seen in the other buffer, which holds the version before
        (not at first)."""
        other = buffer_of(version - 1)
        known, dtype = version > 0 and self.held[other] == version - 1, self.layout.dtype
        return {
            piece.name: choose_columns(
                piece.values, piece.first_row, version, dtype, self.target(other, number) if known else None
            )
            for number, piece in enumerate(self.pieces)
            if piece.local.ndim == 2
        }

    def close(self) -> None:
        """Stop the network sender and free the buffers."""
        if self.network is not None:
            self.network.close()


class HostWeightSender(WeightSender):
    """Writes into the memfd of this host, which the lowest trainer rank of the host owns."""

    kind = "shm"

    def __init__(self, transport: str, layout: Layout, pieces: list[Slice], rank: int, store: dist.Store, engines: int):
        store.set(f"transfer/host/{rank}", host_identity())
        hosts = [store.get(f"transfer/host/{other}").decode() for other in range(layout.world)]
        owner = hosts.index(host_identity())
        self.memory: HostWeightBuffer
        if owner == rank:
            self.memory = create_buffer(layout)
            store.set(f"transfer/path/{rank}", self.memory.path)
        else:
            self.memory = open_buffer(store.get(f"transfer/path/{owner}").decode(), layout)
        super().__init__(transport, layout, pieces, rank, store, engines)

    def target(self, buffer: int, number: int) -> torch.Tensor:
        """The rows' place in the shared memory."""
        name, first_row, count = self.rows[number]
        view = self.memory.tensor(buffer, name)
        return view[first_row : first_row + count] if view.ndim and count < len(view) else view

    def mark_complete(self, buffer: int, version: int) -> None:
        """Set this rank's version flag in the shared memory."""
        self.memory.mark_complete(self.rank, buffer, version)

    def outgoing(self, buffer: int) -> list[torch.Tensor]:
        """Slices of the shared memory."""
        return self.memory.ranges(buffer, self.ranges)

    def describe(self) -> dict[str, Any]:
        """Return the base's description and the path of the memory."""
        return {**super().describe(), "path": self.memory.path}

    def close(self) -> None:
        """Stop the network sender and close the memory."""
        super().close()
        self.memory.close()
