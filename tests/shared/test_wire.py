"""The controller's wire over real sockets: nothing is lost or late, a failure ends the wait, strangers go unheard."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zmq

from shared.errors import DeadlineExceeded, RunError
from shared.messages import Done, Failed, Finished, OptimiserStep, Stepped, Stop, Update, Updated
from shared.roles import Role
from shared.types import Completion
from shared.wire import AsyncLink, Hub, Link, framed

pytestmark = pytest.mark.timeout(180)
RANKS = range(1, 4)


def role(rank: int, store: dist.Store) -> Role:
    return Role("engine" if rank else "controller", rank, 4, rank, rank, True, "127.0.0.1", torch.device("cpu"), store)


@asynccontextmanager
async def wired() -> AsyncIterator[tuple[Hub, list[AsyncLink], dist.Store]]:
    """A hub and three engines' ends that have said hello."""
    store = dist.HashStore()
    hub = Hub(role(0, store))
    receiving = asyncio.ensure_future(hub.receive())
    links = [AsyncLink(role(rank, store)) for rank in RANKS]
    try:
        for link in links:
            await link.hello()
        await hub.gather_hellos(RANKS, 10)
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


def asked(number: int) -> Update:
    """A call that carries a number."""
    return Update(number)


def told(number: int) -> Updated:
    """A reply that carries one."""
    return Updated(0, number, {}, 0, {})


async def answer(link: AsyncLink, reply: Callable[[int], Any]) -> None:
    """Answer every call with what `reply` makes of its number; None: not at all."""
    async for call_id, message in link.calls():
        if isinstance(message, Update) and (found := reply(message.version)) is not None:
            await link.reply(call_id, found)


def test_no_message_waits_for_the_next_one() -> None:
    """Sends and receives cross thousands of times: whoever sends may take the word that something has arrived."""

    async def cross() -> None:
        async with wired() as (hub, links, _):
            answering = [asyncio.ensure_future(answer(link, lambda number: told(2 * number))) for link in links]

            async def tell(link: AsyncLink) -> None:
                for number in range(1000):
                    await link.event(Finished([Completion(number, link.role.rank, 0)]))

            async def call(rank: int) -> None:
                for number in range(300):
                    reply = await hub.call(rank, asked(number), Updated, "step", 10)
                    assert reply.version == 2 * number

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


def test_all_are_called_and_answer_in_their_order() -> None:
    async def call() -> None:
        async with wired() as (hub, links, _):
            factors = (1, 10, 100)
            answering = [
                asyncio.ensure_future(answer(link, lambda number, f=factor: told(f * number)))  # type: ignore[misc]
                for link, factor in zip(links, factors, strict=True)
            ]
            message = asked(2)
            replies = await hub.call_all(dict.fromkeys(RANKS, message), Updated, "step", 10)
            assert [reply.version for reply in replies] == [2, 20, 200]
            own = {rank: asked(rank) for rank in RANKS}
            assert [reply.version for reply in await hub.call_all(own, Updated, "step", 10)] == [1, 20, 300]
            assert await hub.call_all({}, Updated, "step", 10) == []
            with pytest.raises(RunError, match="answered 'stop' with Updated"):
                await hub.call(1, message, Done, "stop", 10)
            for task in answering:
                task.cancel()

    within(call)


def test_one_failure_ends_the_wait_for_all() -> None:
    async def call() -> None:
        async with wired() as (hub, links, _):
            replies = (None, Failed("RunError", "no memory", ""), Failed("RunError", "none here either", ""))
            answering = [
                asyncio.ensure_future(answer(link, lambda _, r=reply: r))  # type: ignore[misc]
                for link, reply in zip(links, replies, strict=True)
            ]
            with pytest.raises(RunError, match="engine rank [23]: (no memory|none here either)"):
                await hub.call_all(dict.fromkeys(RANKS, asked(1)), Updated, "step", 20)
            for task in answering:
                task.cancel()

    within(call, 10)  # rank 1 never answers


def test_whoever_is_late_is_named() -> None:
    async def call() -> None:
        async with wired() as (hub, links, _):
            answering = asyncio.ensure_future(answer(links[1], told))
            with pytest.raises(DeadlineExceeded, match="engine rank 1, engine rank 3") as late:
                await hub.call_all(dict.fromkeys(RANKS, asked(1)), Updated, "optimiser step", 0.5)
            assert "optimiser step" in str(late.value) and "rank 2" not in str(late.value)
            assert (await hub.call(2, asked(3), Updated, "step", 10)).version == 3
            answering.cancel()

    within(call)


def test_strangers_and_messages_of_another_shape_are_not_heard() -> None:
    async def listen() -> None:
        async with wired() as (hub, links, store):
            address, token = store.get("hub").decode().split(" ")
            event = framed(0, b"\x81\xa4type\xa4Done")
            context = zmq.Context.instance()
            for identity, frames in ((b"9:wrong", [event]), (f"8:{token}".encode(), [event, b"more"])):
                line = context.socket(zmq.DEALER)
                line.setsockopt(zmq.IDENTITY, identity)
                line.connect(address)
                line.send_multipart(frames)
                line.close(linger=1000)
            await asyncio.sleep(0.3)
            await links[0].event(Finished([Completion(5, 0, 0)]))
            [(rank, found)] = await hub.events.take()
            assert rank == 1 and isinstance(found, Finished) and not len(hub.events)

    within(listen)


def test_a_trainers_end_answers_one_call_after_the_other() -> None:
    store = dist.HashStore()

    def trainer() -> None:
        link = Link(role(1, store))
        for call_id, message in link.calls():
            link.reply(call_id, Stepped(message.learning_rate, 0.0) if isinstance(message, OptimiserStep) else Done())
        link.close()

    async def drive() -> None:
        hub = Hub(role(0, store))
        receiving = asyncio.ensure_future(hub.receive())
        thread = threading.Thread(target=trainer)
        thread.start()
        await hub.gather_hellos(range(1, 2), 10)
        calls = [hub.call(1, OptimiserStep(float(number)), Stepped, "step", 10) for number in range(20)]
        assert [reply.grad_norm for reply in await asyncio.gather(*calls)] == list(range(20))
        await hub.call(1, Stop(), Done, "stop", 10)
        await asyncio.to_thread(thread.join, 10)
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)
        hub.close()

    within(drive)
