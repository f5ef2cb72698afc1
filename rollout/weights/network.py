"""Streams weights to engines on other hosts along a chain: trainers -> first engine -> second engine -> ...

Each trainer rank sends its rows once, to the first engine's rollout rank; every engine passes on what it receives while
the next message arrives. So a delivery takes as long as one link needs for the model, and a message more for each
engine, however many there are. All ranks of the chain (not the engine processes) form one group, gloo between CPUs and
NCCL between GPUs, on the launch's store; nothing is registered as a default process group.

Why nobody waits in a circle: engines say in the store whether they need the network, and everybody waits for all of
these answers before joining, so that all form the same group. Trainer 0 alone decides which version comes next and
announces it over gloo, where waiting takes neither processor nor GPU; ranks carry out deliveries in this one order. The
engine at place p of the chain receives message j while that at place p - 1 receives j + 1: earlier messages only.

An engine process that is gone holds nobody up: its rollout rank only passes on what comes. Once there is another one,
the rank asks trainer 0, in the store, for the version again. The trainers' buffers have it as long as it can be wanted:
version n + 2, which takes its place, is published only after every engine has taken n + 1.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from rollout.weights.layout import BUFFERS, Bucket, Layout, buffer_of, cut, plan_buckets
from rollout.weights.slots import DELIVERY_DEADLINE_S, POLL_S, WeightSlots
from shared.errors import DeadlineExceeded, RunError

IDLE = datetime.timedelta(days=30)
"""limit of the wait for the next delivery, which is none: a step may take as long as it likes"""
DEADLINE = datetime.timedelta(seconds=DELIVERY_DEADLINE_S)
LOOK_S, REQUEST_LOOK_S = 0.1, 1.0
"""seconds between two looks into the store: for the engines' answers, for requests of a version"""
MESSAGE_BYTES = {"cpu": 2 << 20, "cuda": 32 << 20}
"""small enough that a chain is soon full, large enough that starting an exchange costs little"""
STOP = -1
Piece = tuple[int, torch.Tensor]
"""(peer in the chain, [bytes] to receive or to send)"""


def spans(bucket: Bucket, device: torch.device) -> list[tuple[int, int]]:
    """Cut a bucket into messages: (start, end) in bytes of the buffer."""
    step = MESSAGE_BYTES[device.type]
    return [(start, min(start + step, bucket.end)) for start in range(bucket.start, bucket.end, step)]


class Chain:
    """One rank's place in the chain: trainers come first, then the engines that need the network, by number."""

    def __init__(self, name: str, store: dist.Store, trainers: int, engines: int, number: int, device: torch.device):
        """Wait for the answers of all `engines` and join. number: of the trainer, or `trainers` + the engine's number.

        Raises DeadlineExceeded, RunError.
        """
        self.name, self.device, self.sent_bytes = name, device, 0
        if device.type == "cuda":
            torch.cuda.set_device(device)  # of this thread
            self.stream = torch.cuda.Stream(device)  # so that nothing here waits for training or copies
        keys, end = [f"transfer/engine/{engine}" for engine in range(engines)], time.monotonic() + DELIVERY_DEADLINE_S
        while not store.check(keys):
            if time.monotonic() > end:
                missing = [key.rpartition("/")[2] for key in keys if not store.check([key])]
                self._late("meet for the weight transfer", f"engine {', '.join(missing)}")
            time.sleep(LOOK_S)
        members = [*range(trainers), *(trainers + n for n, key in enumerate(keys) if store.get(key) == b"network")]
        self.size, self.head = len(members), trainers
        if self.size == trainers:
            return
        self.place = members.index(number)
        self.control = self.data = self._join(dist.ProcessGroupGloo, "control", store, DEADLINE)
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = DEADLINE
            self.data = self._join(dist.ProcessGroupNCCL, "data", store, options)
            self.data.eager_connect_single_device(device)

    def _join(self, kind: Any, name: str, store: dist.Store, last: Any) -> Any:
        return kind(dist.PrefixStore(f"transfer/{name}", store), self.place, self.size, last)

    def _late(self, phase: str, peer: str) -> None:
        raise DeadlineExceeded(self.name, phase, peer, DELIVERY_DEADLINE_S, setting="")

    def announce(self, version: int) -> None:
        """Trainer 0: announce to all others which version is delivered next, or STOP."""
        announced = torch.tensor([version], dtype=torch.int64)
        for work in [self.control.send([announced], place, 0) for place in range(1, self.size)]:
            work.wait(DEADLINE)

    def hear(self) -> int:
        """The others: wait for the next announcement."""
        announced = torch.empty(1, dtype=torch.int64)
        self.control.recv([announced], 0, 0).wait(IDLE)
        return int(announced.item())

    def exchange(self, receives: list[Piece], sends: list[Piece]) -> None:
        """Receive and send at the same time; returns when all of it is done. Raises RunError naming the peers."""
        self.sent_bytes += sum(memory.numel() for _, memory in sends)
        try:
            if self.device.type == "cuda":
                self._exchange_on_gpu(receives, sends)
                return
            works = [self.data.recv([memory], peer, 1) for peer, memory in receives]
            for work in [*works, *(self.data.send([memory], peer, 1) for peer, memory in sends)]:
                work.wait(DEADLINE)
        except RuntimeError as error:
            peers = ", ".join(f"{way} {peer}" for way, some in (("from", receives), ("to", sends)) for peer, _ in some)
            raise RunError(f"{self.name}: weights {peers} (places in the chain): {error}") from error

    def _exchange_on_gpu(self, receives: list[Piece], sends: list[Piece]) -> None:
        """The same as one NCCL operation, in which all of it makes progress at once."""
        if not receives and not sends:
            return
        with torch.cuda.stream(self.stream):
            self.data._start_coalescing()
            for peer, memory in receives:
                self.data.recv([memory], peer, 0)
            for peer, memory in sends:
                self.data.send([memory], peer, 0)
            self.data._end_coalescing().wait()
            done = self.stream.record_event()
        done.synchronize()


class NetworkSender:
    """A trainer rank's background thread that sends its rows of each version into the chain."""

    def __init__(
        self, store: dist.Store, rank: int, layout: Layout, engines: int, ranges: list[tuple[int, int]],
        outgoing: Callable[[int], list[torch.Tensor]], device: torch.device,
    ):  # fmt: skip
        """ranges: this rank's bytes of a buffer, (start, size). outgoing(buffer) -> the memory of each of them."""
        self.rank, self.world, self.engines, self.device = rank, layout.world, engines, device
        self.store: dist.Store = store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
        self.outgoing = outgoing
        messages = [span for bucket in plan_buckets(layout) for span in spans(bucket, device)]
        self.messages = [
            [(number, start - ranges[number][0], end - ranges[number][0]) for number, start, end in parts]
            for parts in cut(ranges, messages)
            if parts
        ]
        """of each message with rows of this rank: (range, its first byte, its last)"""
        self.newest = self.announced = -1
        self.served = 0
        """requests of a version that were looked at"""
        self.sending: int | None = None
        self.closed = False
        self.error: BaseException | None = None
        self.chain: Chain | None = None
        self.changed = threading.Condition()
        self.thread = threading.Thread(target=self._work, name="weight transfer", daemon=True)
        self.thread.start()

    def send(self, version: int) -> None:
        """Begin to send a version that is complete in its buffer; returns at once."""
        with self.changed:
            self.newest = version
            self.changed.notify_all()

    def wait_until_free(self, buffer: int) -> None:
        """Block until nothing is being sent from this buffer. Raises RunError if sending failed, DeadlineExceeded."""
        with self.changed:
            free = self.changed.wait_for(
                lambda: self.error is not None or self.sending is None or buffer_of(self.sending) != buffer,
                DELIVERY_DEADLINE_S,
            )
        if self.error is not None:
            raise RunError(f"sending weights over the network failed: {self.error}") from self.error
        if not free:
            self._late("send weights", "the engines on other hosts")

    def close(self) -> None:
        """End the thread; trainer 0 sends STOP to all others of the chain."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        self.thread.join(timeout=10)

    def _late(self, phase: str, peer: str) -> None:
        raise DeadlineExceeded(f"trainer rank {self.rank}", phase, peer, DELIVERY_DEADLINE_S, setting="")

    def _work(self) -> None:
        try:
            with self.changed:
                self.changed.wait_for(lambda: self.closed or self.newest >= 0)
            if self.closed:
                return
            name = f"trainer rank {self.rank}"
            chain = self.chain = Chain(name, self.store, self.world, self.engines, self.rank, self.device)
            while chain.size > self.world and (version := self._next(chain)) != STOP:
                self._deliver(chain, version)
        except Exception as error:  # noqa: BLE001 - kept for the next write(), which must not go on
            with self.changed:
                self.error = error
                self.changed.notify_all()

    def _next(self, chain: Chain) -> int:
        """Return the version of the next delivery, which trainer 0 decides for all, or STOP."""
        if self.rank:
            return chain.hear()
        version = self._decide()
        chain.announce(version)
        return version

    def _decide(self) -> int:
        """Wait for a new version, for a request of one that is still here, or for the end."""
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.closed or self.newest > self.announced, REQUEST_LOOK_S)
                if self.closed:
                    return STOP
                newest = self.newest
                if newest > self.announced:
                    self.announced = newest
                    return newest
            if self.store.check([f"transfer/request/{self.served + 1}"]):
                self.served += 1
                version = int(self.store.get(f"transfer/request/{self.served}"))
                if version > newest - BUFFERS:  # else of an engine that has died again, and taken a later one since
                    return version

    def _deliver(self, chain: Chain, version: int) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: self.closed or self.newest >= version, DELIVERY_DEADLINE_S):
                self._late(f"send weights of version {version}", "its own write of it")
            if self.newest < version:
                return
            self.sending = version  # not before: the write itself waits until nothing is sent from its buffer
        memory = self.outgoing(buffer_of(version))
        for parts in self.messages:
            chain.exchange([], [(chain.head, memory[number][start:end]) for number, start, end in parts])
        with self.changed:
            self.sending = None
            self.changed.notify_all()


class NetworkReceiver:
    """A rollout rank's background thread: passes deliveries on, and fills the slots of its engine with those it wants.

    A version that is announced for the first time is wanted by every live engine, once the controller has asked it
    to update; the thread waits for that, and posts no receive before.
    """

    def __init__(
        self,
        store: dist.Store,
        engine: int,
        engines: int,
        slots: WeightSlots,
        ranges: list[list[tuple[int, int]]],
        device: torch.device,
    ):
        """ranges: [trainers] byte ranges (start, size) that each of them sends."""
        self.engine, self.engines, self.slots, self.ranges, self.device = engine, engines, slots, ranges, device
        self.store: dist.Store = store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
        self.messages = [spans(bucket, device) for bucket in slots.buckets]
        self.present = True
        """whether there is an engine process"""
        self.wanted: int | None = None
        self.begun: int | None = None
        """the version that was wanted last, once its delivery has begun"""
        self.last = -1
        """the newest version of which a delivery has begun"""
        self.taking = False
        """whether the delivery under way is for the engine, too"""
        self.seen = 0
        self.stopped = False
        self.error: BaseException | None = None
        self.chain: Chain | None = None
        self.changed = threading.Condition()
        self.store.set(f"transfer/engine/{engine}", "network")
        self.thread = threading.Thread(target=self._work, name="weight transfer", daemon=True)
        self.thread.start()

    def wait_for(self, version: int, deadline_s: float) -> float:
        """Have `version` delivered: block until it begins to fill the slots, or the engine is gone.

        Returns the seconds waited. Raises DeadlineExceeded or RunError.
        """
        start = time.perf_counter()
        with self.changed:
            self.wanted, self.begun, passed = version, None, version <= self.last
            self.changed.notify_all()
        if passed:  # while the engine was away
            request = self.store.add("transfer/requests", 1)
            self.store.set(f"transfer/request/{request}", str(version))
        with self.changed:
            ends = self.changed.wait_for(lambda: self.stopped or not self.present or self.begun == version, deadline_s)
        self.check()
        if not ends:
            phase = f"receive weights of version {version}"
            raise DeadlineExceeded(f"engine {self.engine}", phase, "the trainers", deadline_s)
        return time.perf_counter() - start

    def check(self) -> None:
        """Raise RunError if the transfer has failed."""
        if self.stopped:
            why = self.error or "the trainers closed the transfer"
            raise RunError(f"receiving weights over the network failed: {why}") from self.error

    def engine_lost(self) -> None:
        """From now on only pass on what comes."""
        with self.changed:
            self.present = self.taking = False
            self.wanted = self.begun = None
            self.slots.begin(STOP)
            self.changed.notify_all()

    def engine_back(self) -> None:
        """There is an engine process again."""
        with self.changed:
            self.present = True

    def lively(self) -> bool:
        """Whether the engine took weights out of the slots since the last call, or waits for those on their way. Raises
        RunError if the transfer has failed."""
        if self.taking:
            self.check()
        taken, seen = self.slots.taken, self.seen
        self.seen = taken
        return self.taking and (taken != seen or taken == self.slots.filled)

    def _work(self) -> None:
        try:
            with self.changed:
                self.changed.wait_for(lambda: self.wanted is not None)
            name, trainers = f"engine {self.engine}", len(self.ranges)
            member = trainers + self.engine
            chain = self.chain = Chain(name, self.store, trainers, self.engines, member, self.device)
            self.parts = self._plan() if chain.place == chain.head else []
            while (version := chain.hear()) != STOP:
                self._decide(version)
                self._take_part(chain)
                with self.changed:
                    self.taking = False
        except Exception as error:  # noqa: BLE001 - raised where the next version is waited for
            self.error = error
        with self.changed:
            self.stopped = True
            self.changed.notify_all()

    def _plan(self) -> list[list[tuple[int, int, int]]]:
        """For the first of the chain: of every message, (trainer, start, end) of what comes from whom."""
        messages = [span for bucket in self.messages for span in bucket]
        cuts = [cut(ranges, messages) for ranges in self.ranges]
        return [[(rank, a, b) for rank, parts in enumerate(cuts) for _, a, b in parts[n]] for n in range(len(messages))]

    def _decide(self, version: int) -> None:
        """Decide whether a delivery is for the engine, too."""
        with self.changed:
            known = version <= self.last or self.changed.wait_for(
                lambda: self.wanted is not None or not self.present, DELIVERY_DEADLINE_S
            )
            if not known:
                phase, peer = f"receive weights of version {version}", "the controller's call to update"
                raise DeadlineExceeded(f"engine {self.engine}", phase, peer, DELIVERY_DEADLINE_S, setting="")
            self.last = max(self.last, version)
            self.taking = self.present and self.wanted == version
            if self.taking:
                self.wanted, self.begun = None, version
                self.slots.begin(version)
            self.changed.notify_all()

    def _take_part(self, chain: Chain) -> None:
        """Receive all messages, each while the one before goes on to the next of the chain."""
        slots, pending, message = self.slots, list[Piece](), 0
        last = chain.place == chain.size - 1
        for number, bucket in enumerate(slots.buckets):
            self._wait_for_slot(number)
            slot = slots.slot(number)
            for start, end in self.messages[number]:
                memory = slot[start - bucket.start : end - bucket.start]
                if chain.place == chain.head:
                    arriving = [(rank, memory[a - start : b - start]) for rank, a, b in self.parts[message]]
                else:
                    arriving = [(chain.place - 1, memory)]
                chain.exchange(arriving, pending)
                pending = [] if last else [(chain.place + 1, memory)]
                message += 1
            slots.fill(number)
        chain.exchange([], pending)
        self._wait_for_slot(len(slots.buckets) + 1)  # all of it was read: the next delivery may fill the slots

    def _wait_for_slot(self, number: int) -> None:
        """Block until the engine has read the bucket whose memory this one is to take."""
        end = time.monotonic() + DELIVERY_DEADLINE_S
        while self.taking and self.slots.taken < number - 1:
            if time.monotonic() > end:
                phase, peer = "fill the slots of weights", "its engine process, which reads them"
                raise DeadlineExceeded(f"engine {self.engine}", phase, peer, DELIVERY_DEADLINE_S, setting="")
            time.sleep(POLL_S)
