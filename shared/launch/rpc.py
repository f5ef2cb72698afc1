"""Control messages between the controller and the other ranks: msgpack over ZeroMQ, typed, never pickle.

    controller                      worker
    Hub (ROUTER, asyncio)  <---->   TrainerLink (DEALER, synchronous: trainers) or EngineLink (asyncio: engines)

A message is a call id (8 bytes), then msgpack, cut into frames where it is long. A call (calls.py) has one answer with
the same id, from the rank that was asked; id 0 is an event. The first message of a connection is Register, which binds
its identity to one rank; whatever else arrives is dropped and counted (sockets.py, which also keeps strangers out).
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from shared import errors
from shared.launch import watchdog
from shared.launch.adaptive_deadline import AdaptiveDeadline
from shared.launch.addresses import reachable_address
from shared.launch.batch_queue import BatchQueue
from shared.launch.calls import CallReply, CallRequest, RequestDecoder, Result, encode
from shared.launch.deaths import lacking
from shared.launch.messages import Event, Message, RankFailed, Register, failure
from shared.launch.ranks import Role
from shared.launch.sockets import MESSAGE_BYTES, ListeningSocket, connect, pieces, rank_of, refused

BURST = 256
"""most messages that are taken before other tasks have their turn"""
MOST_GIVEN_UP = 4096
"""calls whose late answers are still known for such"""
CALL_ID_BYTES = 8
_decode_event = msgspec.msgpack.Decoder(Event).decode


def raise_failure(rank_name: str, failed: RankFailed) -> None:
    """Raise what a worker reported, as the same kind of error where it is one of ours, whose text says it all."""
    named = getattr(errors, failed.kind, None)
    ours = isinstance(named, type) and issubclass(named, errors.MaestraleError)
    kind = errors.RunError if named is None or not ours or named is errors.DeadlineExceeded else named
    text = f"{rank_name}: {failed.message}"
    clear = ours or lacking(f"{failed.kind}: {failed.message}")
    raise kind(text if clear else f"{text}\n{failed.traceback}".rstrip())


class _AnswerFailed(Exception):
    """A rank's answer to a call was RankFailed: ends the wait for the others."""

    def __init__(self, failed: RankFailed):
        super().__init__(failed.message)
        self.failed = failed


def framed(call_id: int, content: bytes) -> bytes:
    """Put the call id before an encoded message."""
    return call_id.to_bytes(CALL_ID_BYTES, "big") + content


def unframed(frame: bytes) -> tuple[int, memoryview]:
    """Split a frame into (call id, encoded message)."""
    return int.from_bytes(frame[:CALL_ID_BYTES], "big"), memoryview(frame)[CALL_ID_BYTES:]


def too_long(size_bytes: int) -> str:
    """Return the error of a message above the wire's bound; "" for any other."""
    if size_bytes <= MESSAGE_BYTES:
        return ""
    return (
        f"a message of {size_bytes:,} bytes is longer than the {MESSAGE_BYTES:,} that may travel: lower "
        "rollout.prompts_per_step or rollout.max_completion_tokens, or give the run more ranks (placement)"
    )


async def _answered(
    futures: Mapping[int, asyncio.Future[Any]], patience_s: float, excused: Callable[[], set[int]]
) -> set[asyncio.Future[Any]]:
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
        self.door = ListeningSocket(role, "hub", reachable_address(role.one_node, role.master))
        self.socket = self.door.socket
        self.socket.setsockopt(zmq.LINGER, 1000)
        self.socket.setsockopt(zmq.SNDHWM, 0)  # so that sending never waits
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.world = role.world
        self.registered: dict[int, Register] = {}
        self.events: BatchQueue[tuple[int, Message]] = BatchQueue()
        self._senders: dict[bytes, int] = {}
        self._lines: dict[int, bytes] = {}
        """rank -> the identity that registered for it"""
        self._waiting: dict[int, tuple[int, CallRequest[Any], asyncio.Future[Any]]] = {}
        """call id -> (the rank that was asked, what it was asked, its answer)"""
        self._given_up: dict[int, int] = {}
        """call id -> the rank whose answer nobody waits for any more, of the last MOST_GIVEN_UP such calls"""
        self._ids = itertools.count(1)
        self.patience = AdaptiveDeadline()
        self._arrived = asyncio.Event()
        self._incoming = asyncio.Event()

    async def receive(self) -> None:
        """Dispatch incoming messages until cancelled: answers to their calls, the rest to `events`."""
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
            size_bytes = len(frame)
            if self._ask(zmq.RCVMORE):
                frame, size_bytes = self._rest(frame)
            self._dispatch(identity, frame, size_bytes)
        return True

    def _rest(self, first: bytes) -> tuple[bytes, int]:
        """Return the whole of a long message, of one that is too long only the call id; and its bytes."""
        frames, size_bytes = [first], len(first)
        while self._ask(zmq.RCVMORE):
            frames.append(self.socket.recv())
            size_bytes += len(frames[-1])
            if size_bytes > MESSAGE_BYTES:
                frames = [first[:CALL_ID_BYTES]]
        return b"".join(frames), size_bytes

    def _dispatch(self, identity: bytes, frame: bytes, size_bytes: int) -> None:
        number, encoded = unframed(frame)
        rank = self._senders.get(identity)
        if rank is not None and number:
            self._answer(rank, number, encoded, size_bytes)
            return
        try:
            message = _decode_event(encoded)
        except (msgspec.DecodeError, RecursionError) as error:
            if rank is None:
                refused.add("a message that cannot be read")
            else:  # completions may be lost with it, and the run would wait for them
                text = too_long(size_bytes) or f"a message of {size_bytes:,} bytes cannot be read: {error}"
                self.events.put((rank, RankFailed("RunError", text)))
            return
        if rank is None:
            self._register(identity, message)
        else:
            self.events.put((rank, message))

    def _answer(self, rank: int, number: int, encoded: memoryview, size_bytes: int) -> None:
        """Handle an answer: only the rank that was asked can give one, and only of the type that the call returns."""
        asked = self._waiting.get(number)
        if asked is None and self._given_up.get(number) == rank:
            del self._given_up[number]  # a late answer to a call that was cancelled, or had failed
            return
        if asked is None or asked[0] != rank:
            refused.add(f"an answer of rank {rank} to what it was not asked")
            return
        _, request, future = asked
        if future.done():
            return
        try:
            answer = request.call.decode_answer(encoded)
        except (msgspec.DecodeError, RecursionError) as error:
            why = too_long(size_bytes) or error
            future.set_exception(errors.RunError(f"{self.name(rank)} answered '{request.phase}' wrongly: {why}"))
            return
        if isinstance(answer, RankFailed):
            future.set_exception(_AnswerFailed(answer))
        else:
            future.set_result(answer.value)

    def _register(self, identity: bytes, message: Message) -> None:
        """Handle the first message of a connection: only Register of a rank that has not sent it before is accepted."""
        rank = rank_of(identity, self.world)
        if not isinstance(message, Register) or rank is None or rank != message.rank or rank in self._lines:
            refused.add("a connection that is no rank of this launch")
            return
        self._senders[identity], self._lines[rank] = rank, identity
        self.registered[rank] = message
        self._arrived.set()

    async def wait_for_ranks(self, ranks: range, deadline_s: float) -> None:
        """Wait until all ranks have registered; DeadlineExceeded names the missing ones."""
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline_s
        while missing := [rank for rank in ranks if rank not in self.registered]:
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), max(end - loop.time(), 0.01))
            except TimeoutError:
                names = "ranks " + ", ".join(map(str, missing))
                raise errors.DeadlineExceeded("controller", "start of all ranks", names, deadline_s) from None

    def name(self, rank: int) -> str:
        """e.g. "trainer rank 1"."""
        return f"{self.registered[rank].role} rank {rank}" if rank in self.registered else f"rank {rank}"

    async def post(self, rank: int, request: CallRequest[Any]) -> None:
        """Call a rank without waiting for its answer."""
        self._send(rank, framed(0, encode(request.message)))

    def _send(self, rank: int, frame: bytes) -> None:
        """Send without waiting. What is sent to a rank that has just died is lost: a moment later its parent reports
        the death, which names it (node.py); where a network is cut, its silence does."""
        try:
            self.socket.send_multipart([self._lines[rank], *pieces(frame)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
        if self._ask(zmq.EVENTS) & zmq.POLLIN:  # sending takes the word that something has arrived
            self._incoming.set()

    def _ask(self, option: int) -> int:
        value = self.socket.getsockopt(option)
        assert isinstance(value, int)
        return value

    async def call(self, rank: int, request: CallRequest[Result], deadline_s: float) -> Result:
        """Call a rank and wait for its answer. Raises the rank's error if it failed, DeadlineExceeded if it is late."""
        return (await self.call_all({rank: request}, deadline_s))[0]

    async def call_all(
        self, requests: Mapping[int, CallRequest[Result]], deadline_s: float, excused: Callable[[], set[int]] = set
    ) -> list[Result]:
        """One call to each rank, answers in the order of `requests`, which are of one method. All are sent before any
        other call is, so that ranks with collectives see overlapping calls in one order. Raises as `call`, as soon as
        one rank failed. deadline_s: at most; `AdaptiveDeadline` lowers it. excused: may be late.
        """
        if not requests:
            return []
        numbers = {rank: next(self._ids) for rank in requests}
        futures, encoded, content = dict[int, asyncio.Future[Any]](), None, b""
        try:
            for rank, request in requests.items():
                if request is not encoded:  # one for all ranks is encoded once; of others, one is there at a time
                    encoded, content = request, encode(request.message)
                    if text := too_long(len(content)):
                        raise errors.RunError(f"'{request.phase}': {text}")
                futures[rank] = self._begin(rank, numbers[rank], request, content)
            began, asked = time.monotonic(), next(iter(requests.values()))
            kind = asked.call.method.__qualname__
            patience_s = self.patience(kind, deadline_s)
            late = await _answered(futures, patience_s, excused)
            failures = {rank: future.exception() for rank, future in futures.items() if future.done()}
            for rank, error in failures.items():
                if isinstance(error, _AnswerFailed):
                    raise_failure(self.name(rank), error.failed)
                if error is not None:
                    raise error
            if late:
                names = ", ".join(self.name(rank) for rank, future in futures.items() if future in late)
                setting = asked.call.setting
                raise errors.DeadlineExceeded("controller", asked.phase, names, patience_s, deadline_s, setting)
            self.patience.took(kind, time.monotonic() - began)
        finally:
            for rank, future in futures.items():
                del self._waiting[numbers[rank]]
                if not future.done() or future.cancelled():
                    self._given_up[numbers[rank]] = rank
            while len(self._given_up) > MOST_GIVEN_UP:
                del self._given_up[next(iter(self._given_up))]
        return [future.result() for future in futures.values()]

    def _begin(self, rank: int, number: int, request: CallRequest[Any], content: bytes) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = rank, request, future
        self._send(rank, framed(number, content))
        return future

    def close(self) -> None:
        """Free the socket (pending messages get a second)."""
        self.door.close()


def _connect(socket: zmq.Socket, role: Role) -> None:  # type: ignore[type-arg]
    socket.setsockopt(zmq.LINGER, 2000)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    connect(socket, role, "hub")


def _registration(role: Role) -> Register:
    return Register(role=role.kind, rank=role.rank, pid=os.getpid(), host=role.host)


class TrainerLink:
    """A trainer rank's end: one call after the other, each answered once."""

    def __init__(self, role: Role):
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        _connect(self.socket, role)
        self.send(0, _registration(role))

    def send(self, call_id: int, message: Message | CallReply[Any]) -> None:
        """Send the answer to a call, or with id 0 an event."""
        self.socket.send_multipart(pieces(framed(call_id, encode(message))))

    def receive(self) -> bytes:
        """Wait for the next message."""
        return b"".join(self.socket.recv_multipart())

    def serve(self, rank: object) -> None:
        """Answer the controller's calls of methods of `rank` until its last.

        An error is reported to the controller and raised again, unless the call survives it.
        """
        decode = RequestDecoder(type(rank))
        while True:
            watchdog.phase("waiting for the controller")
            call_id, content = unframed(self.receive())
            survives: tuple[type[Exception], ...] = ()
            try:
                request = decode(content)
                survives = request.call.survives
                watchdog.phase(request.phase)
                self.send(call_id, CallReply(request.run(rank)))
                if request.call.last:
                    return
            except Exception as error:
                self.send(call_id, failure(error))
                if not isinstance(error, survives):
                    raise

    def close(self) -> None:
        """Free the socket."""
        self.socket.close()


class EngineLink:
    """An engine rank's end, for asyncio."""

    def __init__(self, role: Role):
        self.role = role
        self.socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        _connect(self.socket, role)

    async def register(self) -> None:
        """Tell the controller that this rank is up."""
        await self.send(0, _registration(self.role))

    async def send(self, call_id: int, message: Message | CallReply[Any]) -> None:
        """Send the answer to a call, or with id 0 an event."""
        await self.socket.send_multipart(pieces(framed(call_id, encode(message))))

    async def calls(self, rank_class: type) -> AsyncIterator[tuple[int, CallRequest[Any]]]:
        """Yield (call id, call) of each call of a method of this class, until its last; whoever takes them answers.
        Raises RunError, after reporting it, for one that cannot be read."""
        decode = RequestDecoder(rank_class)
        while True:
            call_id, content = unframed(b"".join(await self.socket.recv_multipart()))
            try:
                request = decode(content)
            except errors.RunError as error:
                await self.send(call_id, failure(error))
                raise
            yield call_id, request
            if request.call.last:
                return

    def close(self) -> None:
        """Free the socket."""
        self.socket.close()
