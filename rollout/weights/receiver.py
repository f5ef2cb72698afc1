"""The rollout rank's side of a weight transfer: finds the buffers, waits for versions, informs the engine process.

An engine on the host of all trainer ranks reads their buffers directly. To one elsewhere (or under transport =
"network") the weights stream through two slots, which a NetworkReceiver fills (slots.py). An engine that is started
again finds the newest weights in the trainers' buffers, or has them delivered once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from rollout.weights.layout import Layout, buffer_of, merge_ranges, read_layout
from rollout.weights.network import NetworkReceiver
from rollout.weights.shm import HostWeightBuffer, host_identity, open_buffer
from rollout.weights.slots import WeightSlots
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

    def __init__(
        self, transfers: list[dict[str, Any]], engine: int, store: dist.Store, device: torch.device, workers: int = 1
    ):
        """transfers: `WeightSender.describe()` of every trainer rank, in order. device: of the engine (a GPU or the
        CPU). workers: processes that hold its model, one for each of its GPUs."""
        self.engine = engine
        self.layout: Layout = read_layout(transfers[0]["layout"])
        self.rows: list[Rows] = [[(name, first, count) for name, first, count in t["rows"]] for t in transfers]
        self.transport = choose_transport(transfers, host_identity())
        self.memory: HostWeightBuffer | None = None
        self.network: NetworkReceiver | None = None
        self.handles: list[dict[str, Any]] = []
        self.slots: WeightSlots | None = None
        if self.transport == "network":
            slots = self.slots = WeightSlots.create(self.layout, workers, device)
            ranges = [merge_ranges(self.layout, rows) for rows in self.rows]
            self.network = NetworkReceiver(store, engine, transfers[0]["engines"], slots, ranges, device)
            return
        if transfers[0]["transport"] == "auto":
            store.set(f"transfer/engine/{engine}", "local")
        if self.transport == "shm":
            self.memory = open_buffer(transfers[0]["path"], self.layout)
        else:
            self.handles = [transfer["handle"] for transfer in transfers]

    def wait_for(self, version: int, deadline_s: float) -> float:
        """Block until all ranks' parts of `version` are readable here, or begin to arrive. Returns the seconds waited.

        Raises SyncMismatch if a trainer rank's part holds another version, DeadlineExceeded if the network is late.
        """
        waited = self.network.wait_for(version, deadline_s) if self.network is not None else 0.0
        if self.memory is not None:
            check_flags(self.memory.version_flags(buffer_of(version)), version, self.engine)
        return waited

    def engine_info(self) -> dict[str, Any]:
        """Arguments of the engine process's transfer engine (plain JSON types)."""
        rows = [[list(row) for row in part] for part in self.rows]
        info: dict[str, Any] = {"engine": self.engine, "layout": self.layout.describe(), "rows": rows}
        if self.slots is not None:
            return {**info, "slots": self.slots.describe()}
        if self.memory is not None:
            return {**info, "path": self.memory.path}
        return {**info, "handles": self.handles}

    def engine_lost(self) -> None:
        """The engine process is gone; deliveries to others go on through here."""
        if self.network is not None:
            self.network.engine_lost()

    def engine_back(self) -> None:
        """There is another engine process."""
        if self.network is not None:
            self.network.engine_back()

    def lively(self) -> bool:
        """Whether the engine process takes weights as they arrive, or waits for them. Raises RunError if the network
        has failed."""
        return self.network is not None and self.network.lively()

    def close(self) -> None:
        """Close the buffer in host memory."""
        for memory in (self.memory, self.slots):
            if memory is not None:
                memory.close()


def check_flags(flags: list[int], version: int, engine: int) -> None:
    """Raise SyncMismatch, naming engine, rank and both versions, unless every trainer rank has completed `version`."""
    for rank, flag in enumerate(flags):
        if flag != version:
            what = "nothing complete" if flag < 0 else f"version {flag}"
            raise SyncMismatch(
                f"engine {engine} should take version {version}, but the buffer part of trainer {rank} holds {what}"
            )
