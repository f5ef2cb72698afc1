"""Sends weights to engines on other hosts: gloo between CPUs, NCCL between GPUs, over a small group for each engine.

The group holds all trainer ranks and the engine's rollout rank (not the engine process), built on the launch's store;
nothing is registered as a default process group, so a rollout rank stays free to restart its engine. The rollout rank
keeps what it received in a staging buffer on its host, from which the engine reads as from the trainers' own buffers:
there is one way to apply weights, and a restarted engine needs no trainer.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from rollout.weights.layout import BUFFERS, buffer_of
from shared.errors import DeadlineExceeded, RunError

PATIENCE = datetime.timedelta(days=30)
"""timeout of the group itself; the deadlines that matter are those of the calls that wait"""
SEND_DEADLINE_S = 600.0
MESSAGE_BYTES = 256 << 20
STOP = -1


def join_group(store: dist.Store, engine: int, rank: int, world: int, device: torch.device) -> Any:
    """Join the side group of one engine: trainers are 0 .. world-1, the engine's rollout rank is `world`."""
    group_store = dist.PrefixStore(f"transfer/group/{engine}", store)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = PATIENCE
        return dist.ProcessGroupNCCL(group_store, rank, world + 1, options)
    return dist.ProcessGroupGloo(group_store, rank, world + 1, PATIENCE)


def split(memory: torch.Tensor) -> list[torch.Tensor]:
    """Cut [bytes] into messages of at most 256 MiB."""
    return list(memory.split(MESSAGE_BYTES))


class NetworkSender:
    """A trainer rank's background thread that carries its shard to every engine that asked for the network."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world: int,
        engines: int,
        outgoing: Callable[[int], list[torch.Tensor]],
        device: torch.device,
    ):
        self.rank, self.world, self.device = rank, world, device
        self.store: dist.Store = store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
        self.outgoing = outgoing
        self.unknown = set(range(engines))
        self.groups: dict[int, Any] = {}
        self.delivered: dict[int, int] = {}
        self.newest = -1
        self.sending: int | None = None
        self.closed = False
        self.error: BaseException | None = None
        self.changed = threading.Condition()
        self.thread = threading.Thread(target=self._work, name="weight transfer", daemon=True)
        self.thread.start()

    def send(self, version: int) -> None:
        """Begin to send a version that lies complete in its buffer; returns at once."""
        with self.changed:
            self.newest = version
            if self.groups:
                self.sending = version
            self.changed.notify_all()

    def wait_until_free(self, buffer: int) -> None:
        """Block until nothing is being sent from this buffer. Raises RunError if sending failed, DeadlineExceeded."""
        with self.changed:
            free = self.changed.wait_for(
                lambda: self.error is not None or self.sending is None or buffer_of(self.sending) != buffer,
                SEND_DEADLINE_S,
            )
        if self.error is not None:
            raise RunError(f"sending weights over the network failed: {self.error}") from self.error
        if not free:
            peer = "the engines on other hosts"
            raise DeadlineExceeded(f"trainer rank {self.rank}", "send weights", peer, SEND_DEADLINE_S)

    def close(self) -> None:
        """Send STOP to the receivers and end the thread."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        self.thread.join(timeout=10)

    def _work(self) -> None:
        try:
            while not self.closed:
                self._meet_engines()
                late = [engine for engine in self.groups if self.delivered[engine] < self.newest]
                for engine in late:
                    self._deliver(engine, self.newest)
                with self.changed:
                    self.sending = None
                    self.changed.notify_all()
                    if not self.closed and all(done >= self.newest for done in self.delivered.values()):
                        self.changed.wait(0.05 if self.unknown else None)
            for group in self.groups.values():
                self._send(group, torch.tensor([STOP], dtype=torch.int64))
        except Exception as error:  # noqa: BLE001 - kept for the next write(), which must not go on
            with self.changed:
                self.error = error
                self.changed.notify_all()

    def _meet_engines(self) -> None:
        """Look up in the store what engines chose; join the groups of those that need the network."""
        for engine in sorted(self.unknown):
            key = f"transfer/engine/{engine}"
            if self.store.check([key]):
                self.unknown.discard(engine)
                if self.store.get(key) == b"network":
                    self.groups[engine] = join_group(self.store, engine, self.rank, self.world, self.device)
                    self.delivered[engine] = -1

    def _deliver(self, engine: int, version: int) -> None:
        with self.changed:
            self.sending = version
        group = self.groups[engine]
        self._send(group, torch.tensor([version], dtype=torch.int64))
        for memory in self.outgoing(buffer_of(version)):
            for message in split(memory):
                self._send(group, message)
        self.delivered[engine] = version

    def _send(self, group: Any, message: torch.Tensor) -> None:
        group.send([message.to(self.device)], self.world, 0).wait()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class NetworkReceiver:
    """A rollout rank's background thread that receives all shards into its staging buffers."""

    def __init__(
        self,
        store: dist.Store,
        engine: int,
        world: int,
        incoming: Callable[[int, int], list[torch.Tensor]],
        mark_complete: Callable[[int, int, int], None],
        device: torch.device,
    ):
        """incoming(trainer rank, buffer) -> byte ranges to fill; mark_complete(trainer rank, buffer, version) sets its
        version flag."""
        self.world, self.incoming, self.mark_complete, self.device = world, incoming, mark_complete, device
        self.store: dist.Store = store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
        self.engine = engine
        self.held = [-1] * BUFFERS
        self.stopped = False
        self.error: BaseException | None = None
        self.changed = threading.Condition()
        self.store.set(f"transfer/engine/{engine}", "network")
        self.thread = threading.Thread(target=self._work, name="weight transfer", daemon=True)
        self.thread.start()

    def wait_for(self, version: int, deadline_s: float) -> float:
        """Block until `version` is complete here. Returns the seconds waited. Raises DeadlineExceeded or RunError."""
        start = time.perf_counter()
        with self.changed:
            there = self.changed.wait_for(
                lambda: self.error is not None or self.stopped or self.held[buffer_of(version)] == version, deadline_s
            )
            if self.held[buffer_of(version)] == version:
                return time.perf_counter() - start
        if self.error is not None or self.stopped:
            why = self.error or "the trainers closed the transfer"
            raise RunError(f"receiving weights over the network failed: {why}") from self.error
        assert not there
        phase = f"receive weights of version {version}"
        raise DeadlineExceeded(f"engine {self.engine}", phase, "the trainers", deadline_s)

    def _work(self) -> None:
        try:
            group = join_group(self.store, self.engine, self.world, self.world, self.device)
            while True:
                versions = [self._receive_header(group, rank) for rank in range(self.world)]
                if STOP in versions:
                    break
                while min(versions) != max(versions):  # we came late, and one rank met us a version earlier
                    behind = versions.index(min(versions))
                    self._receive(group, versions[behind], [behind])
                    versions[behind] = self._receive_header(group, behind)
                self._receive(group, versions[0], list(range(self.world)))
                with self.changed:
                    self.held[buffer_of(versions[0])] = versions[0]
                    self.changed.notify_all()
        except Exception as error:  # noqa: BLE001 - told to whoever waits for the next version
            self.error = error
        with self.changed:
            self.stopped = True
            self.changed.notify_all()

    def _receive_header(self, group: Any, rank: int) -> int:
        header = torch.empty(1, dtype=torch.int64, device=self.device)
        group.recv([header], rank, 0).wait()
        return int(header.item())

    def _receive(self, group: Any, version: int, ranks: list[int]) -> None:
        buffer = buffer_of(version)
        with self.changed:
            self.held[buffer] = -1
        works = []
        for rank in ranks:
            self.mark_complete(rank, buffer, -1)
            for memory in self.incoming(rank, buffer):
                works += [group.recv([message], rank, 0) for message in split(memory)]
        for work in works:
            work.wait()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for rank in ranks:
            self.mark_complete(rank, buffer, version)
