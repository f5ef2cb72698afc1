"""Control messages between the controller and the other ranks: msgpack over ZeroMQ, typed, never pickle.

    controller                      worker
    Hub (ROUTER, asyncio)  <---->   Link (DEALER, synchronous: trainers) or AsyncLink (asyncio: engines)

Frames are [call id (8 bytes), message]. A call has exactly one reply with the same id; id 0 is an event.
A worker's identity carries a token from the launch's store; the hub drops everything else.
What it does not: carry weights (rollout/transfer) or notice silent ranks (watch.py).
Who calls this: controller, workers.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import traceback
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import TypeVar

import msgspec
import zmq
import zmq.asyncio

from shared import errors, watch
from shared.messages import Failed, FromWorker, Hello, Message, Stop, ToEngine, ToTrainer
from shared.roles import Role

Reply = TypeVar("Reply", bound=Message)

BURST = 256
"""messages that are taken at most before others have their turn"""
_encode = msgspec.msgpack.Encoder().encode
_decode_reply = msgspec.msgpack.Decoder(FromWorker).decode


def reachable_address(role: Role) -> str:
    """Address to bind: loopback when the whole launch is on this node, else the rendezvous host's."""
    return "127.0.0.1" if role.one_node else role.master


def raise_failure(rank_name: str, failed: Failed) -> None:
    """Raise what a worker reported, as the same kind of error where it is one of ours."""
    kind = getattr(errors, failed.kind, errors.RunError)
    if not (isinstance(kind, type) and issubclass(kind, errors.MaestraleError)) or kind is errors.DeadlineExceeded:
        kind = errors.RunError
    text = f"{rank_name}: {failed.message}"
    raise kind(text if issubclass(kind, errors.InputError) else f"{text}\n{failed.traceback}".rstrip())


class Hub:
    """The controller's end. `call` for a reply, `post` for none; `events` holds (rank, message) pairs."""

    def __init__(self, role: Role):
        self.socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 1000)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        address = reachable_address(role)
        port = self.socket.bind_to_random_port(f"tcp://{address}")
        self.token = secrets.token_hex(8)
        role.store.set("hub", f"tcp://{address}:{port} {self.token}")
        self.hellos: dict[int, Hello] = {}
        self.events: asyncio.Queue[tuple[int, Message]] = asyncio.Queue()
        self._replies: dict[int, asyncio.Future[Message]] = {}
        self._ids = itertools.count(1)
        self._arrived = asyncio.Event()
        self._sending = asyncio.Lock()

    async def receive(self) -> None:
        """Sort incoming messages for ever: replies to their calls, the rest to `events`."""
        waiting: zmq.Socket[bytes] = zmq.Socket.shadow(self.socket)  # the same one, of which what is there is taken
        while True:
            self._sort(await self.socket.recv_multipart())
            for _ in range(BURST):
                try:
                    self._sort(waiting.recv_multipart(zmq.NOBLOCK))
                except zmq.Again:
                    break
            await asyncio.sleep(0)  # a full line does not keep others from their turn

    def _sort(self, frames: list[bytes]) -> None:
        identity, call_id, payload = frames
        rank_text, _, token = identity.decode("ascii", "replace").partition(":")
        if token != self.token:
            return
        rank, message = int(rank_text), _decode_reply(payload)
        number = int.from_bytes(call_id, "big")
        if isinstance(message, Hello):
            self.hellos[rank] = message
            self._arrived.set()
        elif number and (future := self._replies.get(number)):
            if not future.done():
                future.set_result(message)
        elif number == 0:
            self.events.put_nowait((rank, message))

    async def gather_hellos(self, ranks: range, deadline_s: float) -> None:
        """Wait until all ranks said hello; DeadlineExceeded names the missing ones."""
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline_s
        while missing := [rank for rank in ranks if rank not in self.hellos]:
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), max(end - loop.time(), 0.01))
            except TimeoutError:
                names = "ranks " + ", ".join(map(str, missing))
                raise errors.DeadlineExceeded("controller", "start of all ranks", names, deadline_s) from None

    def name(self, rank: int) -> str:
        """e.g. "trainer rank 1"."""
        return f"{self.hellos[rank].role} rank {rank}" if rank in self.hellos else f"rank {rank}"

    async def post(self, rank: int, message: Message, call_id: int = 0) -> None:
        """Send without waiting for a reply."""
        identity = f"{rank}:{self.token}".encode()
        await self.socket.send_multipart([identity, call_id.to_bytes(8, "big"), _encode(message)])

    async def call(
        self, rank: int, message: Message, reply_type: type[Reply], phase: str, deadline_s: float
    ) -> Reply:
        """Send and wait for the reply. Raises the worker's error if it failed, DeadlineExceeded if it is late."""
        number = await self._begin(rank, message)
        return await self._finish(rank, number, reply_type, phase, deadline_s)

    async def call_all(
        self, messages: dict[int, Message], reply_type: type[Reply], phase: str, deadline_s: float
    ) -> list[Reply]:
        """One call to each rank, replies in the order of `messages`. All are sent before any other `call_all` sends, so
        that ranks with collectives see overlapping calls in one order."""
        async with self._sending:
            numbers = {rank: await self._begin(rank, message) for rank, message in messages.items()}
        waits = [self._finish(rank, number, reply_type, phase, deadline_s) for rank, number in numbers.items()]
        return list(await asyncio.gather(*waits))

    async def _begin(self, rank: int, message: Message) -> int:
        number = next(self._ids)
        self._replies[number] = asyncio.get_running_loop().create_future()
        await self.post(rank, message, number)
        return number

    async def _finish(self, rank: int, number: int, reply_type: type[Reply], phase: str, deadline_s: float) -> Reply:
        future = self._replies[number]
        try:
            reply = await asyncio.wait_for(future, deadline_s)
        except TimeoutError:
            raise errors.DeadlineExceeded("controller", phase, self.name(rank), deadline_s) from None
        finally:
            self._replies.pop(number, None)
        if isinstance(reply, Failed):
            raise_failure(self.name(rank), reply)
        if not isinstance(reply, reply_type):
            raise errors.RunError(f"{self.name(rank)} answered {phase!r} with {type(reply).__name__}")
        return reply

    def close(self) -> None:
        """Free the socket (pending messages get a second)."""
        self.socket.close()


def _connect(socket: zmq.Socket, role: Role) -> None:  # type: ignore[type-arg]
    address, token = role.store.get("hub").decode().split(" ")
    socket.setsockopt(zmq.IDENTITY, f"{role.rank}:{token}".encode())
    socket.setsockopt(zmq.LINGER, 2000)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.connect(address)


def _hello(role: Role, details: dict[str, object] | None = None) -> Hello:
    return Hello(role=role.kind, rank=role.rank, pid=os.getpid(), host=role.host, details=dict(details or {}))


def failure(error: BaseException) -> Failed:
    """An error as a reply."""
    lines = traceback.format_exception(error)
    return Failed(kind=type(error).__name__, message=str(error) or repr(error), traceback="".join(lines))


class Link:
    """A trainer rank's end: one call after the other, each answered once."""

    def __init__(self, role: Role):
        self.role = role
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        _connect(self.socket, role)
        self._decode = msgspec.msgpack.Decoder(ToTrainer).decode
        self._open: int | None = None
        self._send(0, _hello(role))

    def _send(self, call_id: int, message: Message) -> None:
        self.socket.send_multipart([call_id.to_bytes(8, "big"), _encode(message)])

    def calls(self) -> Iterator[tuple[int, ToTrainer]]:
        """Yield (call id, message) until Stop was answered."""
        while True:
            watch.phase("waiting for the controller")
            call_id, payload = self.socket.recv_multipart()
            message = self._decode(payload)
            watch.phase(type(message).__name__)
            yield int.from_bytes(call_id, "big"), message
            if isinstance(message, Stop):
                return

    def reply(self, call_id: int, message: Message) -> None:
        """Answer a call."""
        self._send(call_id, message)

    @contextmanager
    def answering(self, call_id: int) -> Iterator[None]:
        """Turn an exception inside into a Failed reply, then let it go on (the rank ends; the controller reports)."""
        try:
            yield
        except Exception as error:
            self.reply(call_id, failure(error))
            raise

    def close(self) -> None:
        """Free the socket."""
        self.socket.close()


class AsyncLink:
    """An engine rank's end."""

    def __init__(self, role: Role):
        self.role = role
        self.socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        _connect(self.socket, role)
        self._decode = msgspec.msgpack.Decoder(ToEngine).decode

    async def hello(self, **details: object) -> None:
        """Tell the controller that this rank is up."""
        await self._send(0, _hello(self.role, details))

    async def _send(self, call_id: int, message: Message) -> None:
        await self.socket.send_multipart([call_id.to_bytes(8, "big"), _encode(message)])

    async def calls(self) -> AsyncIterator[tuple[int, ToEngine]]:
        """Yield (call id, message) until Stop came (the receiver answers it)."""
        while True:
            call_id, payload = await self.socket.recv_multipart()
            message = self._decode(payload)
            yield int.from_bytes(call_id, "big"), message
            if isinstance(message, Stop):
                return

    async def reply(self, call_id: int, message: Message) -> None:
        """Answer a call."""
        await self._send(call_id, message)

    async def event(self, message: Message) -> None:
        """Tell something that nobody asked for."""
        await self._send(0, message)

    def close(self) -> None:
        """Free the socket."""
        self.socket.close()

