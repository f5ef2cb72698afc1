"""The rollout rank's side of a weight transfer: finds the buffers, waits for versions, informs the engine process.

An engine on the host of all trainer ranks reads their buffers directly; one elsewhere (or under transport = "network")
gets a staging copy on its own host, filled by a NetworkReceiver. Either way the rank itself holds the memory that the
engine process opens, so a restarted engine needs no trainer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from rollout.weights.layout import Layout, buffer_of, merge_ranges, read_layout
from rollout.weights.network import NetworkReceiver
from rollout.weights.shm import HostWeightBuffer, create_buffer, host_identity, open_buffer
from shared.errors import ConfigError, SyncMismatch

Rows = list[tuple[str, int, int]]


def choose_transport(transfers: Sequence[dict[str, Any]], host: str) -> str:
    """Return "shm", "cuda_ipc" or "network" for an engine on `host`, from the descriptions of all trainer ranks.

    Raises ConfigError if the run insists on a same-host transport that cannot reach this engine.
    """
    asked, kind = transfers[0]["transport"], transfers[0]["kind"]
    elsewhere = sorted({transfer["host"].split("/")[0] for transfer in transfers if transfer["host"] != host})
    if asked == "network" or (asked == "auto" and elsewhere):
        return "network"
    if elsewhere:
        raise ConfigError(
            f'rollout.transport = "{asked}" works on one host only, but trainers run on {", ".join(elsewhere)} and an '
            f'engine on {host.split("/")[0]}: use rollout.transport = "auto" or "network"'
        )
    return str(kind)


class WeightReceiver:
    """Holds the buffers of one engine's weights. `engine_info` is what its process needs to open them."""

    def __init__(self, transfers: list[dict[str, Any]], engine: int, store: dist.Store, device: torch.device):
        """transfers: `WeightSender.describe()` of every trainer rank, in order. device: of the engine (a GPU or the
        CPU)."""
        self.engine = engine
        self.layout: Layout = read_layout(transfers[0]["layout"])
        self.rows: list[Rows] = [[(name, first, count) for name, first, count in t["rows"]] for t in transfers]
        self.transport = choose_transport(transfers, host_identity())
        self.memory: HostWeightBuffer | None = None
        self.network: NetworkReceiver | None = None
        self.handles: list[dict[str, Any]] = []
        self._keep: list[Any] = []
        if self.transport == "network":
            self._stage(transfers, store, device)
            return
        if transfers[0]["transport"] == "auto":
            store.set(f"transfer/engine/{engine}", "local")
        if self.transport == "shm":
            self.memory = open_buffer(transfers[0]["path"], self.layout)
        else:
            self.handles = [transfer["handle"] for transfer in transfers]

    def _stage(self, transfers: list[dict[str, Any]], store: dist.Store, device: torch.device) -> None:
        """Make the staging buffers and the thread that fills them."""
        if transfers[0]["kind"] == "cuda_ipc":
            from rollout.weights.cuda_ipc import create_shard, export_handle

            shards = [create_shard(self.layout, rows, device) for rows in self.rows]
            self.handles = [export_handle(shard.memory) for shard in shards]
            self._keep = list(shards)
            self.network = NetworkReceiver(
                store,
                self.engine,
                self.layout.world,
                lambda rank, buffer: [shards[rank].range_view(buffer, i) for i in range(len(shards[rank].ranges))],
                lambda rank, buffer, version: shards[rank].mark_complete(buffer, version),
                device,
            )
            return
        memory = self.memory = create_buffer(self.layout)
        ranges = [merge_ranges(self.layout, rows) for rows in self.rows]

        def incoming(rank: int, buffer: int) -> list[torch.Tensor]:
            return memory.ranges(buffer, ranges[rank])

        cpu, world = torch.device("cpu"), self.layout.world
        self.network = NetworkReceiver(store, self.engine, world, incoming, memory.mark_complete, cpu)

    def wait_for(self, version: int, deadline_s: float) -> float:
        """Block until all ranks' parts of `version` are readable here. Returns the seconds waited.

        Raises SyncMismatch if a trainer rank's part holds another version, DeadlineExceeded if the network is late.
        """
        waited = self.network.wait_for(version, deadline_s) if self.network is not None else 0.0
        if self.memory is not None:
            check_flags(self.memory.version_flags(buffer_of(version)), version, self.engine)
        return waited

    def engine_info(self) -> dict[str, Any]:
        """Arguments of the engine process's transfer engine (plain JSON types)."""
        info: dict[str, Any] = {"engine": self.engine, "layout": self.layout.describe(), "path": None, "handles": []}
        if self.memory is not None:
            return {**info, "path": self.memory.path}
        return {**info, "handles": self.handles, "rows": [[list(row) for row in rows] for rows in self.rows]}

    def close(self) -> None:
        """Close the buffer in host memory."""
        if self.memory is not None:
            self.memory.close()


def check_flags(flags: list[int], version: int, engine: int) -> None:
    """Raise SyncMismatch, naming engine, rank and both versions, unless every trainer rank has completed `version`."""
    for rank, held in enumerate(flags):
        if held != version:
            what = "nothing complete" if held < 0 else f"version {held}"
            raise SyncMismatch(
                f"engine {engine} should take version {version}, but the buffer part of trainer {rank} holds {what}"
            )
