"""The controller's wire over real sockets: nothing is lost or late, a failure ends the wait, strangers go unheard."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
import torch.distributed as dist
import zmq

from shared.errors import DeadlineExceeded, RunError
from shared.launch import launch_folder
from shared.launch.calls import CallReply, CallRequest, call, request
from shared.launch.messages import EngineEnded, Finished, RankFailed, Register
from shared.launch.ranks import Kind, Role
from shared.launch.rpc import EngineLink, Hub, TrainerLink, framed
from shared.launch.sockets import FRAME_BYTES, OPEN_FILES, raise_open_files, refused
from shared.types import Completion

pytestmark = pytest.mark.timeout(180)
RANKS = range(1, 4)


def role(rank: int, store: dist.Store, folder: Path | None = None) -> Role:
    """folder: of the sockets of one node; None: as on several nodes."""
    kind: Kind = "engine" if rank else "controller"
    one_node, device = folder is not None, torch.device("cpu")
    return Role(kind, rank, 4, rank, one_node, "127.0.0.1", device, store, folder=folder or Path())


@pytest.fixture(params=["one node", "several nodes"])
def folder(request: pytest.FixtureRequest) -> Iterator[Path | None]:
    if request.param != "one node":
        yield None
        return
    made = launch_folder.make(launch_folder.temporary(), "test")
    yield made.path
    made.leave()


@asynccontextmanager
async def wired(folder: Path | None) -> AsyncIterator[tuple[Hub, list[EngineLink], dist.Store]]:
    """A hub and three engines' ends that have registered."""
    store = dist.HashStore()
    hub = Hub(role(0, store, folder))
    receiving = asyncio.ensure_future(hub.receive())
    links = [EngineLink(role(rank, store, folder)) for rank in RANKS]
    try:
        for link in links:
            await link.register()
        await hub.wait_for_ranks(RANKS, 10)
        yield hub, links, store
    finally:
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)
        hub.close()
        for link in links:
            link.close()


def within(work: Callable[[], Coroutine[Any, Any, None]], seconds: float = 30) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(seconds):
            await work()

    asyncio.run(bounded())


class Echo:
    """A rank whose calls carry a number and give one."""

    @call("step {number}", deadline="step")
    def step(self, number: int) -> int:
        return number

    @call("sums", deadline="step")
    def sums(self, numbers: list[int]) -> list[float]:
        return [0.5] * FRAME_BYTES + [float(sum(numbers))]

    @call("stop", deadline=10, last=True)
    def stop(self) -> None: ...


def asked(number: int) -> CallRequest[int]:
    """A call that carries a number."""
    return request(Echo.step, number)


async def answer(link: EngineLink, reply: Callable[[int], Any]) -> None:
    """Answer every call with what `reply` makes of its number; None: not at all."""
    async for call_id, called in link.calls(Echo):
        if (found := reply(called.run(Echo()))) is not None:
            await link.send(call_id, found if isinstance(found, RankFailed) else CallReply(found))


def test_a_call_to_a_rank_that_has_gone_waits_for_the_report_of_its_death(folder: Path | None) -> None:
    """Its connection ends before anybody knows why; an error of the socket would hide the reason."""

    async def call_the_dead() -> None:
        async with wired(folder) as (hub, links, _):
            links[1].socket.close(linger=0)
            events: list[str] = []

            async def call(rank: int) -> None:
                try:
                    await hub.call(rank, asked(1), 2)
                except DeadlineExceeded as error:
                    events.append(str(error))

            for _ in range(20):  # until the hub's socket has noticed
                await hub.post(2, asked(0))
                await asyncio.sleep(0.02)
            living = asyncio.ensure_future(answer(links[0], lambda number: number))
            await asyncio.gather(call(2), hub.call(1, asked(5), 10))
            assert len(events) == 1 and "rank 2" in events[0]
            living.cancel()

    within(call_the_dead)


def test_no_message_waits_for_the_next_one(folder: Path | None) -> None:
    """Sends and receives cross thousands of times: whoever sends may take the word that something has arrived."""

    async def cross() -> None:
        async with wired(folder) as (hub, links, _):
            answering = [asyncio.ensure_future(answer(link, lambda number: 2 * number)) for link in links]

            async def tell(link: EngineLink) -> None:
                for number in range(1000):
                    await link.send(0, Finished([Completion(number, link.role.rank, 0)]))

            async def call(rank: int) -> None:
                for number in range(300):
                    assert await hub.call(rank, asked(number), 10) == 2 * number

            await asyncio.gather(*map(tell, links), *map(call, RANKS))
            seen: dict[int, list[int]] = {rank: [] for rank in RANKS}
            while sum(map(len, seen.values())) < 3000:
                for rank, event in await hub.events.take():
                    assert isinstance(event, Finished) and event.completions[0].index == rank
                    seen[rank].append(event.completions[0].group)
            assert all(found == list(range(1000)) for found in seen.values()), "each rank's events in order"
            for task in answering:
                task.cancel()

    within(cross)


def test_all_are_called_and_answer_in_their_order(folder: Path | None) -> None:
    async def call() -> None:
        async with wired(folder) as (hub, links, _):
            factors = (1, 10, 100)
            answering = [
                asyncio.ensure_future(answer(link, lambda number, f=factor: f * number))  # type: ignore[misc]
                for link, factor in zip(links, factors, strict=True)
            ]
            assert await hub.call_all(dict.fromkeys(RANKS, asked(2)), 10) == [2, 20, 200]
            own = {rank: asked(rank) for rank in RANKS}
            assert await hub.call_all(own, 10) == [1, 20, 300]
            assert await hub.call_all(dict[int, CallRequest[int]](), 10) == []
            for task in answering:
                task.cancel()

    within(call)


def test_one_failure_ends_the_wait_for_all(folder: Path | None) -> None:
    async def call() -> None:
        async with wired(folder) as (hub, links, _):
            replies = (None, RankFailed("RunError", "no memory", ""), RankFailed("RunError", "none here either", ""))
            answering = [
                asyncio.ensure_future(answer(link, lambda _, r=reply: r))  # type: ignore[misc]
                for link, reply in zip(links, replies, strict=True)
            ]
            with pytest.raises(RunError, match="engine rank [23]: (no memory|none here either)"):
                await hub.call_all(dict.fromkeys(RANKS, asked(1)), 20)
            for task in answering:
                task.cancel()

    within(call, 10)  # rank 1 never answers


def test_whoever_is_late_is_named(folder: Path | None) -> None:
    async def call() -> None:
        async with wired(folder) as (hub, links, _):
            answering = asyncio.ensure_future(answer(links[1], lambda number: number))
            with pytest.raises(DeadlineExceeded, match="engine rank 1, engine rank 3") as late:
                await hub.call_all(dict.fromkeys(RANKS, asked(1)), 0.5)
            assert "in phase 'step 1' (raise deadlines.step_s" in str(late.value) and "rank 2" not in str(late.value)
            assert await hub.call(2, asked(3), 10) == 3
            answering.cancel()

    within(call)


def speak(hub: Hub, store: dist.Store, identity: bytes, *messages: list[bytes], keys: bool = True) -> None:
    """What somebody says who has found the address and, with `keys`, the keys."""
    endpoint, *found = store.get("hub").split(b" ")
    line = zmq.Context.instance().socket(zmq.DEALER)
    line.setsockopt(zmq.IDENTITY, identity)
    if found and keys:
        line.curve_serverkey, line.curve_publickey, line.curve_secretkey = found
    line.connect(endpoint.decode())
    for frames in messages:
        line.send_multipart(frames)
    line.close(linger=1000 if keys else 0)


async def refusals(most: int, seconds: float = 10) -> int:
    """How many there were when `most` were counted, or the time was over."""
    end = asyncio.get_running_loop().time() + seconds
    while refused.total < most and asyncio.get_running_loop().time() < end:
        refused.look()
        await asyncio.sleep(0.02)
    return refused.total


def test_messages_of_another_shape_and_of_other_ranks_are_dropped_and_counted(folder: Path | None) -> None:
    done = framed(0, msgspec.msgpack.encode(EngineEnded(0, "")))
    hello = framed(0, msgspec.msgpack.encode(Register("engine", 2, 1, "h")))
    bad: list[tuple[bytes, list[list[bytes]]]] = [
        (b"2:another", [[hello]]),  # rank 2 has registered
        (b"x:2", [[hello], [done]]),
        (b"-1", [[hello]]),
        (b"3:another", [[hello], [done], [b""], [b"\xc1" * 50], [bytes(8) + b"\x91" * 100_000], [done, b"more"]]),
        (b"99:1", [[framed(0, msgspec.msgpack.encode(Register("engine", 99, 1, "h")))]]),
        (b"2:finished", [[framed(0, msgspec.msgpack.encode(Finished([Completion(0, 0, 0)])))]]),
    ]

    async def listen() -> None:
        async with wired(folder) as (hub, links, store):
            before = refused.total
            for identity, messages in bad:
                speak(hub, store, identity, *messages)
            expected = before + sum(len(messages) for _, messages in bad)
            assert await refusals(expected) == expected
            await links[0].send(0, Finished([Completion(5, 0, 0)]))
            [(rank, found)] = await hub.events.take()
            assert rank == 1 and isinstance(found, Finished) and not len(hub.events)

    within(listen)


def test_only_the_rank_that_was_asked_can_answer(folder: Path | None) -> None:
    async def listen() -> None:
        async with wired(folder) as (hub, links, _):
            before = refused.total
            call = asyncio.ensure_future(hub.call(1, asked(1), 20))
            await asyncio.sleep(0.1)
            await links[1].send(1, CallReply(666))
            await links[1].send(77, CallReply(666))
            assert await refusals(before + 2) == before + 2 and not call.done()
            await links[0].send(1, CallReply(3))
            assert await call == 3

    within(listen)


def test_a_late_answer_to_a_cancelled_call_is_nobodys_attack(
    folder: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.launch.rpc.MOST_GIVEN_UP", 2)

    async def listen() -> None:
        async with wired(folder) as (hub, links, _):
            before = refused.total
            for _ in range(3):  # as after Ctrl-C
                call = asyncio.ensure_future(hub.call(1, asked(1), 20))
                await asyncio.sleep(0)
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)
            await links[1].send(3, CallReply(666))  # another rank's
            assert await refusals(before + 1) == before + 1
            await links[0].send(3, CallReply(3))
            await links[0].send(2, CallReply(3))
            await links[0].send(3, CallReply(3))  # a second time
            await links[0].send(1, CallReply(3))  # so long ago that it is forgotten
            assert await refusals(before + 3) == before + 3
            call = asyncio.ensure_future(hub.call(1, asked(4), 10))
            await asyncio.sleep(0)
            await links[0].send(4, CallReply(4))
            assert await call == 4 and refused.total == before + 3

    within(listen)


def test_long_messages_arrive_whole_in_both_directions(folder: Path | None) -> None:
    async def call() -> None:
        async with wired(folder) as (hub, links, _):
            numbers = list(range(FRAME_BYTES // 2))

            async def echo() -> None:
                async for call_id, called in links[0].calls(Echo):
                    await links[0].send(call_id, CallReply(called.run(Echo())))

            answering = asyncio.ensure_future(echo())
            found = await hub.call(1, request(Echo.sums, numbers), 20)
            assert found[-1] == sum(numbers) and len(found) == FRAME_BYTES + 1
            answering.cancel()

    within(call)


def test_who_has_no_key_is_refused_and_cannot_fill_the_memory() -> None:
    """On several nodes: garbage, another protocol, no authentication, other keys, a frame of 800 MB, and silence."""

    async def listen() -> None:
        async with wired(None) as (hub, links, store):
            address = store.get("hub").split(b" ")[0].decode()
            host, port = address.removeprefix("tcp://").split(":")
            before, memory = refused.total, psutil.Process().memory_info().rss
            lines = [socket.create_connection((host, int(port))) for _ in range(20)]
            greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
            plain = greeting.replace(b"CURVE", b"NULL\0")
            giant = greeting + b"\x06" + (800 << 20).to_bytes(8, "big") + bytes(8 << 20)
            for line, payload in zip(lines, (os.urandom(5000), b"GET / HTTP/1.1\r\n" * 9, plain, giant), strict=False):
                with contextlib.suppress(OSError):
                    line.setblocking(False)
                    line.send(payload)
            speak(hub, store, b"1:stranger", [framed(0, b"x")], keys=False)
            stranger = zmq.Context.instance().socket(zmq.DEALER)
            stranger.curve_serverkey = store.get("hub").split(b" ")[1]
            stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
            stranger.connect(address)
            assert await refusals(before + 4) >= before + 4
            stranger.close(linger=0)
            assert psutil.Process().memory_info().rss - memory < 100 << 20
            await links[0].send(0, Finished([Completion(5, 0, 0)]))
            assert len(await hub.events.take()) == 1
            for line in lines:
                line.close()

    within(listen)


def test_a_trainers_end_answers_one_call_after_the_other(folder: Path | None) -> None:
    store = dist.HashStore()

    def trainer() -> None:
        link = TrainerLink(role(1, store, folder))
        link.serve(Echo())
        link.close()

    async def drive() -> None:
        hub = Hub(role(0, store, folder))
        receiving = asyncio.ensure_future(hub.receive())
        thread = threading.Thread(target=trainer)
        thread.start()
        await hub.wait_for_ranks(range(1, 2), 10)
        calls = [hub.call(1, asked(number), 10) for number in range(20)]
        assert await asyncio.gather(*calls) == list(range(20))
        await hub.call(1, request(Echo.stop), 10)
        await asyncio.to_thread(thread.join, 10)
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)
        hub.close()

    within(drive)


def test_a_controller_may_open_as_many_files_as_the_system_lets_it() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        raise_open_files()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert soft == (OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
