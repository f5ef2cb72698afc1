"""The environment "mcp" with a real server of the `mcp` package, started by a command and over HTTP."""

import asyncio
import gzip
import os
import re
import shlex
import signal
import sys
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import psutil
import pytest

from environments import mcp_tools
from environments.environment import made
from environments.mcp_tools import Mcp, McpOptions
from shared.errors import ConfigError
from shared.launch.deaths import children, helpers
from shared.sections import RewardWeights
from tests.environments.servers import printing
from tests.environments.test_tools import PROBLEM, new, no_grade, turn
from tests.tables import read_table
from verify.plugins import Failed

SERVER = Path(__file__).with_name("mcp_server.py")
COMMAND = f"{sys.executable} {SERVER}"
ADD = ("add", {"a": 1, "b": 2})
GIVEN_UP = "the MCP server of environment.options.mcp.command gave no answer for 1 s: given up"


@pytest.fixture(autouse=True)
def no_ends(monkeypatch):
    """No process of another test has ended."""
    monkeypatch.setattr(helpers, "_ends", {})


async def answers(episode: Any, *calls: tuple[str, dict[str, Any]]) -> list[str]:
    return [message.text for message in (await episode.step(turn(*calls))).messages]


async def noted(episode: Any, text: str) -> str:
    return (await answers(episode, ("note", {"text": text})))[0]


@asynccontextmanager
async def episodes(count: int = 1, begin: bool = True, **options: Any) -> AsyncIterator[list[Any]]:
    made = [new(Mcp, **options) for _ in range(count)]
    try:
        for episode in made if begin else ():
            await episode.reset(PROBLEM, 0)
        yield made
    finally:
        for episode in made:
            await episode.close()


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def check_tools(episode: Any) -> None:
    words = (await episode.reset(PROBLEM, 0)).messages[0].text
    calls = [ADD, ("add", {"a": "x", "b": 2}), ("fail", {}), ("subtract", {})]
    three, wrong, failed, unknown = await answers(episode, *calls)
    assert '"name": "add", "description": "Add two whole numbers.", "parameters": {' in words
    assert three == "3" and wrong.startswith("Error: ") and "valid integer" in wrong
    assert failed.startswith("Error: ") and "fail" in failed and "there is no tool 'subtract'" in unknown


async def test_the_tools_of_a_command(monkeypatch, capfd):
    """It gets the variables that are named and no others, what it writes to standard error is clean, and it ends with
    its episode; test_orphans.py says that it ends with the process that started it, too."""
    monkeypatch.setenv("MAPS_TOKEN", "hidden-1")
    monkeypatch.setenv("OTHER_TOKEN", "hidden-2")
    script = f"printf 'hello \\033]0;title\\007 end' >&2; exec {COMMAND}"
    async with episodes(begin=False, command=shlex.join(["sh", "-c", script]), variables=["MAPS_TOKEN"]) as [episode]:
        await check_tools(episode)
        names = [("variable", {"name": name}) for name in ("MAPS_TOKEN", "OTHER_TOKEN")]
        given, other, process = await answers(episode, *names, ("process", {}))
        assert given.startswith("hidden-1 ") and given.count("hidden") == 1 and other.startswith("None ")
    assert gone(int(process.split()[0]))
    errors = ""
    while " end" not in errors:
        errors += capfd.readouterr().err
    assert "hello ·]0;title· end" in errors


async def test_the_tools_of_an_address():
    with printing([sys.executable, str(SERVER), "0"]) as lines:
        async with episodes(begin=False, url=f"http://127.0.0.1:{int(next(lines))}/mcp") as [episode]:
            await check_tools(episode)


async def test_each_episode_has_a_server_of_its_own():
    async with episodes(2, command=COMMAND) as [first, second]:
        assert [await noted(first, "a"), await noted(second, "b")] == ["a", "b"]
        await first.close()
        await first.reset(PROBLEM, 0)
        assert await noted(first, "c") == "c"


async def test_a_shared_server_stays_and_is_replaced_where_it_ends_while_it_is_still_in_use():
    async with episodes(2, command=COMMAND, shared=True) as [first, second]:
        assert [await noted(first, "a"), await noted(second, "b")] == ["a", "a,b"]
        for episode in (first, second):
            await episode.close()
        for episode in (first, second):
            await episode.reset(PROBLEM, 0)
        assert await noted(first, "c") == "a,b,c"
        with pytest.raises(Failed, match="the MCP server has ended"):
            await answers(first, ("leave", {}))
        await second.close()
        await second.reset(PROBLEM, 0)  # the first still has it
        assert await noted(second, "d") == "d"


async def test_some_tools_only_and_slow_calls():
    async with episodes(begin=False, command=COMMAND, tools=["wait"], call_s=0.5) as [episode]:
        assert '"note"' not in (await episode.reset(PROBLEM, 0)).messages[0].text
        unknown, slow = await answers(episode, ("note", {"text": "a"}), ("wait", {"seconds": 2.0}))
        assert "there is no tool 'note'; there is wait" in unknown and slow == "Error: no result after 0.5 s"
    async with episodes(begin=False, command=COMMAND, tools=["substract"]) as [episode]:
        with pytest.raises(Failed, match="names 'substract'; the server has add, fail"):
            await episode.reset(PROBLEM, 0)


@pytest.mark.parametrize("options", [
    {"command": "/no/such/server"}, {"command": f"{sys.executable} -c pass"}, {"url": "http://127.0.0.1:9/mcp"},
])  # fmt: skip
async def test_a_server_that_does_not_start_costs_the_episode(options):
    async with episodes(begin=False, **options) as [episode]:
        with pytest.raises(Failed, match="the MCP server cannot be used"):
            await episode.reset(PROBLEM, 0)


@pytest.mark.parametrize(
    ("number", "call_s", "how"),
    [(signal.SIGKILL, 60.0, "has ended"), (signal.SIGSTOP, 3.0, "gave no answer for 3 s: given up")],
)
async def test_a_server_that_dies_between_calls_or_answers_nothing_is_told_and_replaced(
    monkeypatch, number, call_s, how
):
    monkeypatch.setattr(mcp_tools, "WATCH_S", 0.2)
    async with episodes(2, command=COMMAND, shared=True, call_s=call_s) as [first, second]:
        assert await answers(first, ("wait", {"seconds": 1.0}), ADD) == ["waited", "3"]
        assert not helpers.news(), "it was busy"
        pids = [int(pid) for pid in (await answers(first, ("process", {})))[0].split()]
        os.kill(pids[0], number)
        while not (lines := helpers.news()):
            await asyncio.sleep(0.05)
        assert lines[0].startswith(f"the MCP server of environment.options.mcp.command {how} (1 so far)")
        await second.close()
        await second.reset(PROBLEM, 0)  # the first still has the other
        assert await answers(second, ADD) == ["3"]
        while not all(map(gone, pids)):
            await asyncio.sleep(0.05)


async def test_a_shared_server_that_stops_while_it_starts_is_given_up_and_replaced(monkeypatch, tmp_path):
    command = f"bash -c 'test -e {tmp_path}/begun && exec {COMMAND}; touch {tmp_path}/begun; exec sleep 600'"
    monkeypatch.setattr(mcp_tools, "START_S", 1.0)
    async with episodes(3, begin=False, command=command, shared=True) as [first, second, third]:
        failures = await asyncio.gather(*(one.reset(PROBLEM, 0) for one in (first, second)), return_exceptions=True)
        assert [str(failure) for failure in failures] == ["the MCP server gave no answer for 1 s: given up"] * 2
        monkeypatch.setattr(mcp_tools, "START_S", 60.0)
        await third.reset(PROBLEM, 0)  # the others still have the session that was given up
        assert await answers(third, ADD) == ["3"]
    assert [line.partition(" (")[0] for line in helpers.news()] == [GIVEN_UP]


@pytest.mark.parametrize("command", ["sleep 600", "yes", "cat /dev/zero"])
def test_a_server_that_starts_badly_is_given_up_though_its_transport_never_ends(monkeypatch, command):
    """The package's own shutdown waits for what a server writes; here it hangs altogether."""
    from mcp.client import stdio

    async def hang(process: Any) -> None:
        await asyncio.sleep(600)

    async def scene() -> list[int]:
        async with episodes(begin=False, command=command, shared=True) as [episode]:
            with pytest.raises(Failed, match="gave no answer for 1 s: given up"):
                await episode.reset(PROBLEM, 0)
            assert episode.session.ended, "the next episode begins another"
            left = []
            for pid in children(os.getpid()):
                with suppress(OSError):
                    left += [pid] * (episode.session._mark in Path(f"/proc/{pid}/environ").read_text())
            return left

    monkeypatch.setattr(stdio, "_stop_server_process", hang)
    monkeypatch.setattr(mcp_tools, "START_S", 1.0)
    monkeypatch.setattr(mcp_tools, "CLOSE_S", 0.2)
    loop = asyncio.new_event_loop()
    try:
        assert all(map(gone, loop.run_until_complete(scene())))
    finally:
        loop.stop()  # its tasks hang, as planted
    assert [line.partition(" (")[0] for line in helpers.news()] == [GIVEN_UP]


@pytest.mark.parametrize("row", read_table("environments/mcp_secrets"), ids=str)
def test_a_secret_in_a_command_or_an_address_is_refused_and_not_repeated(row):
    """named: what the refusal names; "" where nothing is a secret."""
    options, name = row["options"], row["named"]
    if not name:
        assert McpOptions(**options).command == options["command"]
        return
    with pytest.raises(ConfigError, match=re.escape(name)) as refused:
        made(Mcp, "mcp", options, no_grade, RewardWeights())
    text = str(refused.value)
    assert "hush" not in text and ('= "NAME"' in text or '["NAME"]' in text or "without values" in text)


async def test_a_list_of_tools_without_end_is_cut(monkeypatch):
    """A server that always has another page."""
    client = AsyncMock()
    client.__aenter__.return_value = client
    client.list_tools.side_effect = [SimpleNamespace(tools=[], next_cursor="more")] * 3  # and then it raises
    monkeypatch.setattr("mcp.Client", lambda server: client)
    monkeypatch.setattr(mcp_tools.McpSession, "_server", AsyncMock())
    monkeypatch.setattr(mcp_tools, "MOST_PAGES", 3)
    session = mcp_tools.McpSession(McpOptions(command="endless"))
    await session.open()
    await session.close()
    assert client.list_tools.await_count == 3


@pytest.mark.parametrize(
    ("shared", "ended", "others", "closed"),
    [(False, False, 0, 1), (False, False, 1, 0), (True, False, 0, 0), (True, True, 0, 1), (True, True, 1, 0)],
)
async def test_a_session_is_closed_by_the_last_that_can_use_it(shared, ended, others, closed):
    episode = new(Mcp, command="server", shared=shared)
    episode.session = session = SimpleNamespace(users=1 + others, ended=ended, close=AsyncMock())
    await episode.close()
    assert session.close.await_count == closed


async def hostile(*reply: bytes, **options: Any) -> tuple[str, str]:
    """What a server gets that replies so to all, and what the episode fails of."""
    requests: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            requests.append((await reader.readuntil(b"\r\n\r\n")).decode().lower())
            for part in reply:
                writer.write(part)
                await writer.drain()
        writer.close()

    tracemalloc.start()
    try:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp"
            async with episodes(begin=False, url=url, **options) as [episode]:
                with pytest.raises(Failed) as failed:
                    await episode.reset(PROBLEM, 0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20, f"{peak >> 20} MiB"
    return requests[0], str(failed.value)


async def test_replies_of_a_hostile_server_are_neither_unpacked_nor_read_without_end():
    packed = gzip.compress(gzip.compress(bytes(1 << 28)))
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
    assert "Content-Encoding" in (await hostile(head + b"Content-Encoding: gzip, gzip\r\n\r\n", packed))[1]
    await hostile(head + b"\r\n", *[b" " * (1 << 20)] * 200)
    await hostile(head.replace(b"200 OK", b"400 X") + b"\r\n", *[b" " * (1 << 20)] * 200)
    stream = head.replace(b"application/json", b"text/event-stream")
    await hostile(stream + b"\r\ndata: ", *[b"a" * (1 << 20)] * 200)


async def test_an_address_gets_the_key_of_its_variable(monkeypatch):
    monkeypatch.setenv("MAPS_TOKEN", "hidden-1")
    request, _ = await hostile(b"HTTP/1.1 401 X\r\nContent-Length: 0\r\n\r\n", key_variable="MAPS_TOKEN")
    assert "authorization: bearer hidden-1" in request and "accept-encoding: identity" in request
