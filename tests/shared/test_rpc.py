"""The controller's wire over real sockets: nothing is lost or late, a failure ends the wait, strangers go unheard."""

import asyncio
import contextlib
import os
import resource
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
import torch.distributed as dist
import zmq

from shared.errors import ConfigError, DeadlineExceeded, RunError
from shared.launch import adaptive_deadline, addresses, launch_folder, rpc
from shared.launch import messages as events
from shared.launch.adaptive_deadline import AdaptiveDeadline
from shared.launch.addresses import reachable_address
from shared.launch.batch_queue import BatchQueue
from shared.launch.calls import CallReply, CallRequest, RankClient, call, request
from shared.launch.messages import EngineEnded, Finished, RankFailed, Register
from shared.launch.ranks import Role
from shared.launch.sockets import FRAME_BYTES, OPEN_FILES, raise_open_files, refused
from shared.sections import Deadlines
from shared.types import Completion
from tests.asynchronous import asynchronous

pytestmark = pytest.mark.timeout(300)
RANKS = range(1, 4)
ENOUGH_S = 200.0
"""for what takes no time"""


def role(rank: int, store: dist.Store, folder: Path | None = None, master: str = "127.0.0.1") -> Role:
    """folder: of the sockets of one node; None: as on several nodes."""
    kind, device = "engine" if rank else "controller", torch.device("cpu")
    return Role(kind, rank, 4, rank, folder is not None, master, device, store, folder=folder or Path())


@pytest.fixture(params=["one node", "several nodes"])
def folder(request):
    if request.param != "one node":
        yield None
        return
    made = launch_folder.make(launch_folder.temporary(), "test")
    yield made.path
    made.leave()


@asynccontextmanager
async def listening(hub: rpc.Hub) -> AsyncIterator[rpc.Hub]:
    """A hub that receives; it is closed afterwards."""
    receiving = asyncio.ensure_future(hub.receive())
    try:
        yield hub
    finally:
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)
        hub.close()


@asynccontextmanager
async def wired(folder: Path | None, master: str = "127.0.0.1") -> AsyncIterator[tuple[Any, ...]]:
    """A hub and three engines' ends that have registered."""
    store = dist.HashStore()
    async with listening(rpc.Hub(role(0, store, folder, master))) as hub:
        links = [rpc.EngineLink(role(rank, store, folder)) for rank in RANKS]
        try:
            for link in links:
                await link.register()
            await hub.wait_for_ranks(RANKS, ENOUGH_S)
            yield hub, links, store
        finally:
            for link in links:
                link.close()


def on_wire(work: Callable[..., Any]) -> Callable[..., None]:
    """A test with a hub and three engines, on one node and on several."""

    @asynchronous
    async def test(folder: Path | None) -> None:
        async with wired(folder) as (hub, links, store):
            await work(hub, links, store)

    return test


class Echo:
    """A rank whose calls carry a number and give one."""

    @call("step {number}", deadline="step")
    def step(self, number: int) -> int:
        return number

    @call("careful step", deadline="step", survives=(ValueError,))
    def careful_step(self) -> None:
        raise ValueError("negative learning rate")

    @call("sums", deadline="step")
    def sums(self, numbers: list[int]) -> list[float]:
        return [0.5] * FRAME_BYTES + [float(sum(numbers))]

    @call("silence", deadline=0.5)
    def silence(self) -> None: ...

    @call("stop", deadline=10, last=True)
    def stop(self) -> None: ...


def asked(number: int) -> CallRequest[int]:
    return request(Echo.step, number)


def completion(group: int, index: int = 0) -> Finished:
    return Finished([Completion(group, index, 0)])


def same(value: Any) -> Any:
    return value


async def answer(link: rpc.EngineLink, reply: Callable[[Any], Any]) -> None:
    """Answer every call with what `reply` makes of its result; None: not at all."""
    async for call_id, called in link.calls(Echo):
        if (value := reply(called.run(Echo()))) is not None:
            await link.send(call_id, value if isinstance(value, RankFailed) else CallReply(value))


@asynccontextmanager
async def answering(links: list[rpc.EngineLink], *replies: Callable[[Any], Any]) -> AsyncIterator[None]:
    """Engines that answer all calls meanwhile, each in its way."""
    tasks = [asyncio.ensure_future(answer(link, reply)) for link, reply in zip(links, replies, strict=True)]
    yield
    for task in tasks:
        task.cancel()


@on_wire
async def test_a_call_to_a_rank_that_has_gone_waits_for_the_report_of_its_death(hub, links, store):
    """Its connection ends before anybody knows why; an error of the socket would hide the reason."""
    links[1].socket.close(linger=0)
    for _ in range(20):  # until the hub's socket has noticed
        await hub.post(2, asked(0))
        await asyncio.sleep(0.02)
    async with answering(links[:1], same):
        calls = hub.call(2, asked(1), 0.5), hub.call(1, asked(5), ENOUGH_S)
        dead, living = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(dead, DeadlineExceeded) and "rank 2" in str(dead) and living == 5


@on_wire
async def test_no_message_waits_for_the_next_one(hub, links, store):
    """Sends and receives cross thousands of times: whoever sends may take the word that something has arrived."""

    async def tell(link: rpc.EngineLink) -> None:
        for number in range(1000):
            await link.send(0, completion(number, link.role.rank))

    async def ask(rank: int) -> None:
        for number in range(300):
            assert await hub.call(rank, asked(number), ENOUGH_S) == 2 * number

    async with answering(links, *[(2).__mul__] * 3):
        await asyncio.gather(*map(tell, links), *map(ask, RANKS))
    seen: dict[int, list[int]] = {rank: [] for rank in RANKS}
    while sum(map(len, seen.values())) < 3000:
        for rank, event in await hub.events.take():
            assert isinstance(event, Finished) and event.completions[0].index == rank
            seen[rank].append(event.completions[0].group)
    assert all(groups == list(range(1000)) for groups in seen.values()), "each rank's events in order"


@on_wire
async def test_a_client_calls_all_ranks_and_the_late_the_failed_and_the_wrong_are_named(hub, links, store):
    client = RankClient(hub, RANKS, Deadlines())
    async with answering(links, *((10**place).__mul__ for place in range(3))):
        assert await client.call(Echo.step, 2) == [2, 20, 200]
        assert await client.call_each([asked(rank) for rank in RANKS]) == [1, 20, 300]
        assert await hub.call_all({}, ENOUGH_S) == []
    async with answering(links, same, str, same):
        with pytest.raises(RunError, match="engine rank 2 answered 'step 1' wrongly: Expected `int`, got `str`"):
            await client.call(Echo.step, 1)
    failed = RankFailed("RunError", "no memory", "")
    async with answering(links[1:], lambda _: failed, lambda _: failed):  # though rank 1 never answers
        with pytest.raises(RunError, match="engine rank [23]: no memory"):
            await client.call(Echo.step, 1)


@on_wire
async def test_whoever_is_late_is_named(hub, links, store):
    async with answering(links[1:2], same):
        with pytest.raises(DeadlineExceeded, match="engine rank 1, engine rank 3") as late:
            await hub.call_all(dict.fromkeys(RANKS, asked(1)), 1.0)
        assert "in phase 'step 1' (raise deadlines.step_s" in str(late.value) and "rank 2" not in str(late.value)
        assert await hub.call(2, asked(3), ENOUGH_S) == 3
        with pytest.raises(DeadlineExceeded, match=r"in phase 'silence' \(no setting") as late:
            await RankClient(hub, RANKS, Deadlines()).call(Echo.silence)
        assert late.value.deadline_s == 0.5


@pytest.mark.parametrize(("setting_s", "took_s", "expected_s"), [
    (3600, [], 3600),  # the first: all of the setting
    (3600, [2.0, 1.0], 360),  # a tenth of the setting
    (3600, [50.0, 1.0], 500),  # ten times the longest
    (3600, [1000.0], 3600),
    (900, [0.1], 120),  # a busy machine
    (20, [0.1], 20),
])  # fmt: skip
def test_a_deadline_is_ten_times_the_longest_so_far_within_bounds(setting_s, took_s, expected_s):
    patience = AdaptiveDeadline()
    for seconds in took_s:
        patience.took("step", seconds)
    assert patience("step", setting_s) == expected_s and patience("another", setting_s) == setting_s


@asynchronous
async def test_a_call_that_hangs_is_noticed_by_what_such_calls_took(monkeypatch, tmp_path):
    monkeypatch.setattr(adaptive_deadline, "LEAST_S", 0.0)
    async with wired(tmp_path) as (hub, links, _), answering(links, *[lambda number: number or None] * 3):
        await hub.call_all(dict.fromkeys(RANKS, asked(1)), 3600)
        hub.patience.longest["Echo.step"] = 1 / 36000  # so that a tenth of the setting, 0.5 s, decides
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="far longer than it ever took"):
            await hub.call_all(dict.fromkeys(RANKS, asked(0)), 5)
        assert time.monotonic() - began > 0.4


@asynchronous
async def test_a_rank_whose_engine_starts_again_may_be_late(tmp_path):
    async with wired(tmp_path) as (hub, links, _), answering(links[::2], same, same):
        excused = {2}
        asyncio.get_running_loop().call_later(1.2, excused.clear)
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="engine rank 2"):
            await hub.call_all(dict.fromkeys(RANKS, asked(1)), 0.5, lambda: excused)
        assert time.monotonic() - began > 1.2


def speak(store: dist.Store, identity: bytes, *messages: list[bytes], keys: bool = True) -> None:
    """What somebody says who knows the address and, with `keys`, the keys."""
    endpoint, *known = store.get("hub").split(b" ")
    line = zmq.Context.instance().socket(zmq.DEALER)
    line.setsockopt(zmq.IDENTITY, identity)
    if known and keys:
        line.curve_serverkey, line.curve_publickey, line.curve_secretkey = known
    line.connect(endpoint.decode())
    for frames in messages:
        line.send_multipart(frames)
    line.close(linger=200_000 if keys else 0)


async def refusals(most: int) -> int:
    """How many there were when `most` were counted, or the time was over."""
    end = asyncio.get_running_loop().time() + ENOUGH_S
    while refused.total < most and asyncio.get_running_loop().time() < end:
        refused.look()
        await asyncio.sleep(0.02)
    return refused.total


def event(message: Any) -> bytes:
    return rpc.framed(0, msgspec.msgpack.encode(message))


DONE, HELLO = event(EngineEnded(0, "")), event(Register("engine", 2, 1, "h"))
STRANGE: list[tuple[bytes, list[list[bytes]]]] = [
    (b"2:another", [[HELLO]]),  # rank 2 has registered
    (b"x:2", [[HELLO], [DONE]]),
    (b"-1", [[HELLO]]),
    (b"3:another", [[HELLO], [DONE], [b""], [b"\xc1" * 50], [bytes(8) + b"\x91" * 100_000], [DONE, b"more"]]),
    (b"99:1", [[event(Register("engine", 99, 1, "h"))]]),
    (b"2:finished", [[event(completion(0))]]),
]
"""identity of a connection, and what it sends"""


@on_wire
async def test_messages_of_another_shape_and_of_other_ranks_are_dropped_and_counted(hub, links, store):
    expected = refused.total + sum(len(messages) for _, messages in STRANGE)
    for identity, messages in STRANGE:
        speak(store, identity, *messages)
    assert await refusals(expected) == expected
    await links[0].send(0, completion(5))
    [(rank, message)] = await hub.events.take()
    assert rank == 1 and isinstance(message, Finished) and not len(hub.events)


@on_wire
async def test_only_the_rank_that_was_asked_can_answer_and_a_late_answer_is_nobodys_attack(hub, links, store):
    before, waiting = refused.total, asyncio.ensure_future(hub.call(1, asked(1), ENOUGH_S))
    await asyncio.sleep(0)
    await links[1].send(1, CallReply(666))
    await links[1].send(77, CallReply(666))
    assert await refusals(before + 2) == before + 2 and not waiting.done()
    await links[0].send(1, CallReply(3))
    assert await waiting == 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rpc, "MOST_GIVEN_UP", 2)
        for _ in range(3):  # calls 2 to 4, as after Ctrl-C
            given_up = asyncio.ensure_future(hub.call(1, asked(1), ENOUGH_S))
            await asyncio.sleep(0)
            given_up.cancel()
            await asyncio.gather(given_up, return_exceptions=True)
    await links[1].send(4, CallReply(666))  # another rank's
    assert await refusals(before + 3) == before + 3
    for number in (4, 3, 4, 2):  # 4 comes a second time, and 2 is so long ago that it is forgotten
        await links[0].send(number, CallReply(3))
    assert await refusals(before + 5) == before + 5
    waiting = asyncio.ensure_future(hub.call(1, asked(4), ENOUGH_S))
    await asyncio.sleep(0)
    await links[0].send(5, CallReply(4))
    assert await waiting == 4 and refused.total == before + 5


@on_wire
async def test_messages_are_whole_up_to_a_limit_above_which_they_stop_the_run(hub, links, store):
    """An answer, an event and a call that are too long, an event that cannot be read: none is waited for."""
    numbers = list(range(FRAME_BYTES // 2))
    async with answering(links[:1], same):
        sums = await hub.call(1, request(Echo.sums, numbers), ENOUGH_S)
        assert sums[-1] == sum(numbers) and len(sums) == FRAME_BYTES + 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rpc, "MESSAGE_BYTES", 3 << 20)
            limit = r"of \d,\d{3},\d{3} bytes is longer than the 3,145,728 .* lower rollout.prompts_per_step"
            with pytest.raises(RunError, match=f"engine rank 1 answered 'sums' wrongly: a message {limit}"):
                await hub.call(1, request(Echo.sums, []), ENOUGH_S)
            await links[1].send(0, Finished([Completion(0, 0, 0, numbers, [0.5] * len(numbers))]))
            [(rank, failed)] = await hub.events.take()
            with pytest.raises(RunError, match=f"engine rank 2: a message {limit}"):
                rpc.raise_failure(hub.name(rank), failed)
            with pytest.raises(RunError, match=f"'sums': a message {limit}"):
                await hub.call_all({1: request(Echo.sums, []), 2: request(Echo.sums, numbers * 3)}, ENOUGH_S)
        await links[2].socket.send(rpc.framed(0, b"\xc1"))
        [(rank, failed)] = await hub.events.take()
        assert rank == 3 and "a message of 9 bytes cannot be read" in failed.message
        assert await hub.call(1, asked(3), ENOUGH_S) == 3, "the next call is as ever"


@on_wire
async def test_a_wave_of_completions_above_the_limit_arrives_in_several_messages(hub, links, store):
    """In order, each once."""
    wave = [Completion(group, 0, 0, [7] * 400) for group in range(9)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rpc, "MESSAGE_BYTES", 2000)
        patch.setattr(events, "FINISHED_BYTES", 1000)
        for part in events.parts(wave):
            await links[0].send(0, Finished(part))
        arrived = list[list[int]]()
        while sum(map(len, arrived)) < len(wave):
            arrived += [[one.group for one in message.completions] for _, message in await hub.events.take()]
    assert sum(arrived, []) == list(range(9)) and 3 <= len(arrived) <= 5


@asynchronous
async def test_one_call_is_encoded_at_a_time(monkeypatch, folder):
    """Shares of a batch do not stand in memory at once; one for all ranks is encoded once."""
    order = list[str]()
    async with wired(folder) as (hub, links, _):
        begin = hub._begin

        def note_begin(rank: int, *rest: Any) -> Any:
            order.append(f"send {rank}")
            return begin(rank, *rest)

        def note_encode(message: Any) -> bytes:
            order.append("encode")
            return msgspec.msgpack.encode(message)

        monkeypatch.setattr(hub, "_begin", note_begin)
        monkeypatch.setattr(rpc, "encode", note_encode)
        same_call = asked(3)
        async with answering(links[:2], same, same):
            await hub.call_all({1: asked(1), 2: asked(2)}, ENOUGH_S)
            del order[4:]  # the links' answers
            shares, order[:] = list(order), []
            await hub.call_all({1: same_call, 2: same_call}, ENOUGH_S)
    assert shares == ["encode", "send 1", "encode", "send 2"] and order[:3] == ["encode", "send 1", "send 2"]


@on_wire
async def test_a_call_that_cannot_be_read_is_reported_to_the_caller(hub, links, store):
    serving = asyncio.ensure_future(answer(links[0], same))
    with pytest.raises(RunError, match="engine rank 1: Echo cannot read a call: Expected `int`, got `str`"):
        await hub.call(1, asked("4"), ENOUGH_S)
    with pytest.raises(RunError, match="cannot read a call"):
        await serving


@asynchronous
async def test_who_has_no_key_is_refused_and_cannot_fill_the_memory():
    """On several nodes: garbage, another protocol, no authentication, other keys, a frame of 800 MB, and silence."""
    async with wired(None) as (hub, links, store):
        address = store.get("hub").split(b" ")[0].decode()
        host, port = address.removeprefix("tcp://").split(":")
        before, memory = refused.total, psutil.Process().memory_info().rss
        lines = [socket.create_connection((host, int(port))) for _ in range(20)]
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
        giant = greeting + b"\x06" + (800 << 20).to_bytes(8, "big") + bytes(8 << 20)
        plain = greeting.replace(b"CURVE", b"NULL\0")
        for line, payload in zip(lines, (os.urandom(5000), b"GET / HTTP/1.1\r\n" * 9, plain, giant), strict=False):
            with contextlib.suppress(OSError):
                line.setblocking(False)
                line.send(payload)
        speak(store, b"1:stranger", [rpc.framed(0, b"x")], keys=False)
        stranger = zmq.Context.instance().socket(zmq.DEALER)
        stranger.curve_serverkey = store.get("hub").split(b" ")[1]
        stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
        stranger.connect(address)
        assert await refusals(before + 4) >= before + 4
        stranger.close(linger=0)
        assert psutil.Process().memory_info().rss - memory < 100 << 20
        await links[0].send(0, completion(5))
        assert len(await hub.events.take()) == 1
        for line in lines:
            line.close()


@asynchronous
async def test_a_trainers_end_answers_one_call_after_the_other_and_goes_on_after_an_error_that_it_survives(folder):
    store = dist.HashStore()

    def trainer() -> None:
        link = rpc.TrainerLink(role(1, store, folder))
        link.serve(Echo())
        link.close()

    async with listening(rpc.Hub(role(0, store, folder))) as hub:
        thread = threading.Thread(target=trainer, daemon=True)
        thread.start()
        await hub.wait_for_ranks(range(1, 2), ENOUGH_S)
        calls = [hub.call(1, asked(number), ENOUGH_S) for number in range(20)]
        assert await asyncio.gather(*calls) == list(range(20))
        with pytest.raises(RunError, match="rank 1: negative learning rate"):
            await hub.call(1, request(Echo.careful_step), ENOUGH_S)
        await hub.call(1, request(Echo.stop), ENOUGH_S)
        await asyncio.to_thread(thread.join, ENOUGH_S)
        assert not thread.is_alive()


@asynchronous
async def test_whoever_gives_up_taking_from_a_queue_loses_nothing_and_all_that_gathered_comes_at_once():
    queue: BatchQueue[int] = BatchQueue()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(queue.take(), 0.01)
    queue.put(1)
    queue.put(2)
    assert await queue.take() == [1, 2] and len(queue) == 0
    waiting = asyncio.ensure_future(queue.take())
    await asyncio.sleep(0.01)
    assert not waiting.done(), "nothing is taken twice"
    queue.put(3)
    assert await waiting == [3]


def test_a_controller_may_open_as_many_files_as_the_system_lets_it():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        raise_open_files()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert soft == (OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(("master", "means", "expected"), [
    ("10.0.0.7", ["10.0.0.7"], "10.0.0.7"),
    ("fd00::7", ["fd00::7"], "[fd00::7]"),
    ("::1", ["::1"], "[::1]"),
    ("127.0.0.1", ["127.0.0.1"], "127.0.0.1"),
    ("node0", ["127.0.1.1"], "10.0.0.7"),  # Debian's /etc/hosts: the address from which this host speaks
    ("node0", ["127.0.1.1", "fd00::7"], "[fd00::7]"),
])  # fmt: skip
def test_several_nodes_meet_at_an_address_that_others_can_reach(monkeypatch, master, means, expected):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", (address, 0)) for address in means])
    monkeypatch.setattr(addresses, "_speaks_from", lambda target: "" if ":" in target else "10.0.0.7")
    monkeypatch.setattr(addresses, "_is_ours", lambda address: True)
    assert reachable_address(False, master) == expected


def test_a_master_that_is_no_address_of_this_host_is_refused(monkeypatch):
    monkeypatch.setattr(addresses, "_speaks_from", lambda target: "")
    with pytest.raises(ConfigError, match="--master-addr"):
        reachable_address(False, "192.0.2.250")


@asynchronous
async def test_ranks_meet_over_ipv6():
    async with wired(None, "::1"):
        pass
