"""Strangers at the gateway: other users of the machine, without a key, over real sockets; and an agent beside them."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
import psutil

from environments.gateway.client import AgentSession, open_session
from environments.gateway.connections import EPISODE_CONNECTIONS, STRANGERS
from environments.gateway.messages import ChatAsked, TurnGiven
from environments.gateway.process import Gateway
from shared.launch.sockets import refused

ASK = {"messages": [{"role": "user", "content": "x"}]}
DEADLINE_S = 150
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(session: AgentSession) -> Stream:
    """A connection, which nothing is sent on yet."""
    port = int(session.gateway.url.rpartition(":")[2])
    return await asyncio.open_connection("127.0.0.1", port)


async def turn(session: AgentSession, client: httpx.AsyncClient, during: Callable[[], Awaitable[None]]) -> str:
    """What an agent is given for its request, while something else happens."""
    asking = asyncio.create_task(client.post("/v1/chat/completions", json=ASK))
    told = await session.events.get()
    assert isinstance(told, ChatAsked)
    await during()
    session.gateway.post(Gateway.give, TurnGiven(session.key, told.number, "hello"))
    reply = await asking
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["message"]["content"])


@asynccontextmanager
async def episode() -> AsyncGenerator[tuple[AgentSession, httpx.AsyncClient], None]:
    """An episode and its agent's client."""
    session = await open_session("127.0.0.1")
    headers = {"Authorization": f"Bearer {session.key}"}
    async with asyncio.timeout(DEADLINE_S):
        async with httpx.AsyncClient(base_url=session.gateway.url, headers=headers, timeout=DEADLINE_S) as client:
            yield session, client
    session.close("the end")


async def nothing() -> None:
    """Nothing else happens."""


async def reply_to(session: AgentSession, *sent: bytes) -> bytes:
    """What a connection answers until it is closed; b"" for a reset."""
    reader, writer = await connect(session)
    with contextlib.suppress(ConnectionError):
        for data in sent:
            writer.write(data)
            await writer.drain()
        return await reader.read()
    return b""


def test_headers_without_end_are_cut_off_and_take_no_memory() -> None:
    begin = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
    floods = {
        "one header": [begin + b"X: ", *[b"a" * (1 << 20)] * 200],
        "headers": [begin, *[b"X-1: " + b"a" * 60_000 + b"\r\n"] * 3000],
        "small headers": [begin, *[b"ab: c\r\n" * 10_000] * 500],
        "an address": [b"GET /" + b"a" * (1 << 20), *[b"a" * (1 << 20)] * 200],
        "trailers": [begin + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", *[b"X: a\r\n" * 100_000] * 200],
        "no HTTP": [b"\x00" * (1 << 20)] * 200,
    }

    async def scene() -> None:
        async with episode() as (session, client):
            process = psutil.Process(session.gateway.child.pid)
            assert {one.laddr.ip for one in process.net_connections() if one.status == "LISTEN"} == {"127.0.0.1"}
            before = process.memory_info().rss
            for name, flood in floods.items():
                reply = await reply_to(session, *flood)
                assert reply[:12] in (b"", b"HTTP/1.1 431", b"HTTP/1.1 400", b"HTTP/1.1 401"), name
                grown = process.memory_info().rss - before
                assert grown < 64 << 20, f"{name}: {grown >> 20} MiB"
            assert await turn(session, client, nothing) == "hello"

    asyncio.run(scene())


def test_idle_connections_of_strangers_cost_no_agent_its_turn() -> None:
    """One agent has asked before they came, another one comes while they are there."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = STRANGERS + 1000 if hard == resource.RLIM_INFINITY else min(STRANGERS + 1000, hard - 200)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    strangers: list[Stream] = []

    async def come(session: AgentSession) -> None:
        for _ in range(count):
            strangers.append(await connect(session))
            if len(strangers) % 2:
                strangers[-1][1].write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: ")

    async def scene() -> None:
        async with episode() as (first, client), episode() as (second, other):
            assert await turn(first, client, lambda: come(first)) == "hello"
            for _ in range(3):
                assert await turn(second, other, nothing) == "hello"
            assert await turn(first, client, nothing) == "hello", "on its old connection"
            process = psutil.Process(first.gateway.child.pid)
            assert process.num_fds() < STRANGERS + 100
            for _, writer in strangers:
                writer.close()

    try:
        asyncio.run(scene())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_request_without_a_key_is_refused_before_its_body_and_keeps_no_connection() -> None:
    async def scene() -> None:
        async with episode() as (session, _):
            for path in (b"chat/completions", b"reward", b"nothing"):
                for key in (b"", b"Authorization: Bearer x\r\n", b"Authorization: Bearer \r\n"):
                    head = b"POST /v1/%s HTTP/1.1\r\nHost: x\r\n%sContent-Length: 5000000\r\n\r\n" % (path, key)
                    reply = await reply_to(session, head)
                    assert reply[:12] == b"HTTP/1.1 401" and b"no key of an episode" in reply
            assert (await reply_to(session, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"))[:12] == b"HTTP/1.1 401"

    asyncio.run(scene())


def test_strangers_are_counted_and_late_requests_of_an_agent_are_not() -> None:
    async def scene() -> None:
        async with episode() as (session, client):
            late = await open_session("127.0.0.1")
            late.close("it was cut")
            assert await turn(session, client, nothing) == "hello", "the gateway knows by now that the other is over"
            before = refused.total
            head = b"POST /v1/reward HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n\r\n"
            for key in (late.key.encode(), b"x", late.key.encode(), b"y"):
                assert (await reply_to(session, head % key))[:12] == b"HTTP/1.1 401"
            assert (await reply_to(session, b"GET /" + b"a" * (1 << 16)))[:12] in (b"", b"HTTP/1.1 431")
            while refused.total < before + 3:
                await asyncio.sleep(0.05)
            assert refused.total == before + 3 and "key, at the gateway" in refused.last

    asyncio.run(scene())


def test_an_episode_has_a_few_connections_and_takes_no_other_s() -> None:
    """With bodies that never come; the oldest connections are closed for newer ones."""

    async def scene() -> None:
        async with episode() as (greedy, _), episode() as (session, client):
            head = b"POST /v1/reward HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Length: 9\r\n\r\n"
            streams = []
            for _ in range(EPISODE_CONNECTIONS + 4):
                streams.append(await connect(greedy))
                streams[-1][1].write(head % greedy.key.encode())
            for reader, _ in streams[:4]:
                with contextlib.suppress(ConnectionResetError):
                    assert await reader.read() == b""
            assert not streams[-1][0].at_eof()
            assert await turn(session, client, nothing) == "hello"
            for _, writer in streams:
                writer.close()

    asyncio.run(scene())
