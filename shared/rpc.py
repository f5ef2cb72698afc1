"""Control messages between the controller and the other ranks: msgpack over ZeroMQ, typed, never pickle.

    controller                      worker
    Hub (ROUTER, asyncio)  <---->   Link (DEALER, synchronous: trainers) or AsyncLink (asyncio: engines)

A message is a call id (8 bytes), then msgpack, cut into frames where it is long. A call has one reply with the same id,
from the rank that was asked; id 0 is an event. The first message of a connection is Hello, which binds its identity to
one rank; whatever else arrives is dropped and counted (sockets.py, which also keeps strangers out).
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import msgspec
import zmq
import zmq.asyncio

from shared import errors, watchdog
from shared.adaptive_deadline import AdaptiveDeadline
from shared.inbox import Inbox
from shared.messages import Failed, FromWorker, Hello, Message, Stop, ToEngine, ToTrainer
from shared.ranks import Role
from shared.sockets import MESSAGE_BYTES, ListeningSocket, connect, pieces, rank_of, reachable_address, refused

Reply = TypeVar("Reply", bound=Message)

BURST = 256
"""most messages that are taken before other tasks have their turn"""
CALL_ID_BYTES = 8
_encode = msgspec.msgpack.Encoder().encode
_decode_reply = msgspec.msgpack.Decoder(FromWorker).decode


def raise_failure(rank_name: str, failed: Failed) -> None:
    """Raise what a worker reported, as the same kind of error where it is one of ours, whose text says it all."""
    found = getattr(errors, failed.kind, None)
    ours = isinstance(found, type) and issubclass(found, errors.MaestraleError)
    kind = errors.RunError if found is None or not ours or found is errors.DeadlineExceeded else found
    text = f"{rank_name}: {failed.message}"
    raise kind(text if ours else f"{text}\n{failed.traceback}".rstrip())


class _RankFailed(Exception):
    """A rank's answer to a call was Failed: ends the wait for the others."""

    def __init__(self, failed: Failed):
        super().__init__(failed.message)
        self.failed = failed


def framed(call_id: int, content: bytes) -> bytes:
    """Put the call id before an encoded message."""
    return call_id.to_bytes(CALL_ID_BYTES, "big") + content


def unframed(frame: bytes) -> tuple[int, memoryview]:
    """Split a frame into (call id, encoded message)."""
    return int.from_bytes(frame[:CALL_ID_BYTES], "big"), memoryview(frame)[CALL_ID_BYTES:]


async def _answered(
    futures: Mapping[int, asyncio.Future[Message]], patience_s: float, excused: Callable[[], set[int]]
) -> set[asyncio.Future[Message]]:
    """Wait for all answers, or the first failure. Returns those that are late; none is while a rank is excused."""
    waiting, end = set(futures.values()), time.monotonic() + patience_s
    while waiting and (left := end - time.monotonic()) > 0:
        done, waiting = await asyncio.wait(waiting, timeout=min(left, 1.0), return_when=asyncio.FIRST_EXCEPTION)
        if any(future.exception() for future in done):
            break
        if any(futures[rank] in waiting for rank in excused() & futures.keys()):
            end = time.monotonic() + patience_s
    return waiting


class Hub:
    """The controller's end: `call` waits for a reply, `post` for none; `events` holds (rank, message) pairs."""

    def __init__(self, role: Role):
        # no asyncio socket: with the messages of a thousand engines its futures cost more than the messages
        self.door = ListeningSocket(role, "hub", reachable_address(role))
        self.socket = self.door.socket
        self.socket.setsockopt(zmq.LINGER, 1000)
        self.socket.setsockopt(zmq.SNDHWM, 0)  # so that sending never waits
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.world = role.world
        self.hellos: dict[int, Hello] = {}
        self.events: Inbox[tuple[int, Message]] = Inbox()
        self._senders: dict[bytes, int] = {}
        self._lines: dict[int, bytes] = {}
        """rank -> the identity that said hello for it"""
        self._replies: dict[int, tuple[int, asyncio.Future[Message]]] = {}
        """call id -> (the rank that was asked, its reply)"""
        self._ids = itertools.count(1)
        self.patience = AdaptiveDeadline()
        self._arrived = asyncio.Event()
        self._incoming = asyncio.Event()

    async def receive(self) -> None:
        """Dispatch incoming messages until cancelled: replies to their calls, the rest to `events`."""
        loop, line = asyncio.get_running_loop(), self._ask(zmq.FD)
        loop.add_reader(line, self._incoming.set)
        try:
            while True:
                self._incoming.clear()
                if self._take():
                    await asyncio.sleep(0)  # a full line does not keep others from their turn
                else:
                    await self._incoming.wait()
        finally:
            loop.remove_reader(line)

    def _take(self) -> bool:
        """Dispatch the messages that are there; False when none is left, and ZeroMQ will signal the next."""
        for _ in range(BURST):
            try:
                identity = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return False
            frame = self.socket.recv()
            if self._ask(zmq.RCVMORE):
                frame = self._rest(frame)
            self._sort(identity, frame)
        return True

    def _rest(self, first: bytes) -> bytes:
        """Return the whole of a long message; b"" for one that is too long."""
        frames, size = [first], len(first)
        while self._ask(zmq.RCVMORE):
            frames.append(self.socket.recv())
            size += len(frames[-1])
            if size > MESSAGE_BYTES:
                frames.clear()
        return b"".join(frames)

    def _sort(self, identity: bytes, frame: bytes) -> None:
        number, encoded = unframed(frame)
        try:
            message = _decode_reply(encoded)
        except (msgspec.DecodeError, RecursionError):
            refused.add("a message that cannot be read")
            return
        rank = self._senders.get(identity)
        if rank is None:
            self._greet(identity, message)
        elif number == 0:
            self.events.put((rank, message))
        elif (asked := self._replies.get(number)) is None or asked[0] != rank:
            refused.add(f"an answer of rank {rank} to what it was not asked")
        elif not asked[1].done():
            if isinstance(message, Failed):
                asked[1].set_exception(_RankFailed(message))
            else:
                asked[1].set_result(message)

    def _greet(self, identity: bytes, message: Message) -> None:
        """Handle the first message of a connection: only a Hello of a rank that has not said it before is accepted."""
        rank = rank_of(identity, self.world)
        if not isinstance(message, Hello) or rank is None or rank != message.rank or rank in self._lines:
            refused.add("a connection that is no rank of this launch")
            return
        self._senders[identity], self._lines[rank] = rank, identity
        self.hellos[rank] = message
        self._arrived.set()

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

    async def post(self, rank: int, message: Message) -> None:
        """Send without waiting for a reply."""
        self._send(rank, framed(0, _encode(message)))

    def _send(self, rank: int, frame: bytes) -> None:
        self.socket.send_multipart([self._lines[rank], *pieces(frame)], zmq.NOBLOCK)
        if self._ask(zmq.EVENTS) & zmq.POLLIN:  # sending takes the word that something has arrived
            self._incoming.set()

    def _ask(self, option: int) -> int:
        found = self.socket.getsockopt(option)
        assert isinstance(found, int)
        return found

    async def call(self, rank: int, message: Message, reply_type: type[Reply], phase: str, deadline_s: float) -> Reply:
        """Send and wait for the reply. Raises the worker's error if it failed, DeadlineExceeded if it is late."""
        return (await self.call_all({rank: message}, reply_type, phase, deadline_s))[0]

    async def call_all(
        self,
        messages: Mapping[int, Message],
        reply_type: type[Reply],
        phase: str,
        deadline_s: float,
        excused: Callable[[], set[int]] = set,
    ) -> list[Reply]:
        """One call to each rank, replies in the order of `messages`. All are sent before any other call is, so that
        ranks with collectives see overlapping calls in one order. Raises as `call`, as soon as one rank failed.

        deadline_s: upper limit; after the first such call, `AdaptiveDeadline` sets it. excused: ranks that may be late
        now.
        """
        if not messages:
            return []
        numbers = {rank: next(self._ids) for rank in messages}
        distinct = {id(message): message for message in messages.values()}
        contents = {key: _encode(message) for key, message in distinct.items()}  # one for all ranks is encoded once
        futures = {rank: self._begin(rank, numbers[rank], contents[id(messages[rank])]) for rank in messages}
        try:
            began, kind = time.monotonic(), type(next(iter(messages.values()))).__name__
            patience_s = self.patience(kind, deadline_s)
            late = await _answered(futures, patience_s, excused)
            errors_of = {rank: future.exception() for rank, future in futures.items() if future.done()}
            for rank, error in errors_of.items():
                if isinstance(error, _RankFailed):
                    raise_failure(self.name(rank), error.failed)
            if late:
                names = ", ".join(self.name(rank) for rank, future in futures.items() if future in late)
                raise errors.DeadlineExceeded("controller", phase, names, patience_s, deadline_s)
            self.patience.took(kind, time.monotonic() - began)
        finally:
            for number in numbers.values():
                del self._replies[number]
        return [self._checked(rank, future.result(), reply_type, phase) for rank, future in futures.items()]

    def _begin(self, rank: int, number: int, content: bytes) -> asyncio.Future[Message]:
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._replies[number] = rank, future
        self._send(rank, framed(number, content))
        return future

    def _checked(self, rank: int, reply: Message, reply_type: type[Reply], phase: str) -> Reply:
        if not isinstance(reply, reply_type):
            raise errors.RunError(f"{self.name(rank)} answered {phase!r} with {type(reply).__name__}")
        return reply

    def close(self) -> None:
        """Free the socket (pending messages get a second)."""
        self.door.close()


def _connect(socket: zmq.Socket, role: Role) -> None:  # type: ignore[type-arg]
    socket.setsockopt(zmq.LINGER, 2000)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    connect(socket, role, "hub")


def _hello(role: Role, details: dict[str, object] | None = None) -> Hello:
    return Hello(role=role.kind, rank=role.rank, pid=os.getpid(), host=role.host, details=dict(details or {}))


def failure(error: BaseException) -> Failed:
    """Return an error as a Failed reply."""
    lines = traceback.format_exception(error)
    return Failed(kind=type(error).__name__, message=str(error) or repr(error), traceback="".join(lines))


class Link:
    """A trainer rank's end: one call after the other, each answered once."""

    def __init__(self, role: Role):
        self.role = role
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        _connect(self.socket, role)
        self._decode = msgspec.msgpack.Decoder(ToTrainer).decode
        self._send(0, _hello(role))

    def _send(self, call_id: int, message: Message) -> None:
        self.socket.send_multipart(pieces(framed(call_id, _encode(message))))

    def calls(self) -> Iterator[tuple[int, ToTrainer]]:
        """Yield (call id, message) until Stop was answered."""
        while True:
            watchdog.phase("waiting for the controller")
            call_id, content = unframed(b"".join(self.socket.recv_multipart()))
            message = self._decode(content)
            watchdog.phase(type(message).__name__)
            yield call_id, message
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
    """An engine rank's end, for asyncio."""

    def __init__(self, role: Role):
        self.role = role
        self.socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        _connect(self.socket, role)
        self._decode = msgspec.msgpack.Decoder(ToEngine).decode

    async def hello(self, **details: object) -> None:
        """Tell the controller that this rank is up."""
        await self._send(0, _hello(self.role, details))

    async def _send(self, call_id: int, message: Message) -> None:
        await self.socket.send_multipart(pieces(framed(call_id, _encode(message))))

    async def calls(self) -> AsyncIterator[tuple[int, ToEngine]]:
        """Yield (call id, message) until Stop came (the receiver answers it)."""
        while True:
            call_id, content = unframed(b"".join(await self.socket.recv_multipart()))
            message = self._decode(content)
            yield call_id, message
            if isinstance(message, Stop):
                return

    async def reply(self, call_id: int, message: Message) -> None:
        """Answer a call."""
        await self._send(call_id, message)

    async def event(self, message: Message) -> None:
        """Send an event, which answers no call."""
        await self._send(0, message)

    def close(self) -> None:
        """Free the socket."""
        self.socket.close()
