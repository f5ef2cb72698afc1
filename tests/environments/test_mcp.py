"""The environment "mcp" with a real server of the `mcp` package, started by a command and over HTTP."""

from __future__ import annotations

import asyncio
import functools
import gzip
import json
import os
import shlex
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from environments import mcp_tools
from environments.environment import made
from environments.mcp_tools import Mcp, McpOptions
from shared.errors import ConfigError
from shared.launch.deaths import children, helpers
from shared.sections import RewardWeights
from tests.environments.test_tools import PROBLEM, new, no_grade, turn
from verify.plugins import Failed

SERVER = Path(__file__).with_name("mcp_server.py")
COMMAND = f"{sys.executable} {SERVER}"
Play = Callable[[Any], Awaitable[Any]]


async def answers(one: Any, *calls: tuple[str, dict[str, Any]]) -> list[str]:
    return [message.text for message in (await one.step(turn(*calls))).messages]


def play(work: Callable[..., Awaitable[Any]], count: int = 1, **options: Any) -> Any:
    """Begin episodes, let `work` act in them, end them."""

    async def run() -> Any:
        episodes = [new(Mcp, **options) for _ in range(count)]
        try:
            told = [await one.reset(PROBLEM, 0) for one in episodes]
            return await work(*episodes), told[0].messages[0].text
        finally:
            for one in episodes:
                await one.close()

    return asyncio.run(asyncio.wait_for(run(), 150))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    process = subprocess.Popen([sys.executable, str(SERVER), "0"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/mcp"
    finally:
        process.kill()
        process.wait()


def check_tools(**options: Any) -> None:
    async def work(one: Any) -> list[str]:
        calls = [("add", {"a": 1, "b": 2}), ("add", {"a": "x", "b": 2}), ("fail", {}), ("subtract", {})]
        return await answers(one, *calls)

    (three, wrong, failed, unknown), told = play(work, **options)
    assert '"name": "add", "description": "Add two whole numbers.", "parameters": {' in told
    assert three == "3" and wrong.startswith("Error: ") and "valid integer" in wrong
    assert failed.startswith("Error: ") and "fail" in failed and "there is no tool 'subtract'" in unknown


def test_tools_of_a_command_and_of_an_address(url: str) -> None:
    check_tools(command=COMMAND)
    check_tools(url=url)


def test_each_episode_has_a_server_of_its_own_unless_they_share_one() -> None:
    async def work(one: Any, two: Any) -> list[str]:
        return await answers(one, ("note", {"text": "a"})) + await answers(two, ("note", {"text": "b"}))

    assert play(work, 2, command=COMMAND)[0] == ["a", "b"]
    assert play(work, 2, command=COMMAND, shared=True)[0] == ["a", "a,b"]

    async def again(one: Any) -> list[str]:
        await answers(one, ("note", {"text": "a"}))
        await one.close()
        await one.reset(PROBLEM, 0)
        return await answers(one, ("note", {"text": "b"}))

    assert play(again, command=COMMAND)[0] == ["b"] and play(again, command=COMMAND, shared=True)[0] == ["a,b"]


def test_some_tools_only() -> None:
    async def work(one: Any) -> list[str]:
        return await answers(one, ("note", {"text": "a"}))

    [unknown], told = play(work, command=COMMAND, tools=["add"])
    assert "there is no tool 'note'; there is add" in unknown and '"note"' not in told
    with pytest.raises(Failed, match="names 'substract'; the server has add, fail"):
        play(work, command=COMMAND, tools=["substract"])


def test_a_slow_call_is_told_and_a_server_that_ends_costs_the_episode() -> None:
    async def slow(one: Any) -> list[str]:
        return await answers(one, ("wait", {"seconds": 2.0}))

    assert play(slow, command=COMMAND, call_s=0.5)[0] == ["Error: no result after 0.5 s"]

    async def leave(one: Any) -> list[str]:
        return await answers(one, ("leave", {}))

    with pytest.raises(Failed, match="the MCP server has ended"):
        play(leave, command=COMMAND)
    for command in ("/no/such/server", f"{sys.executable} -c pass"):
        with pytest.raises(Failed, match="the MCP server cannot be used"):
            play(leave, command=command)
    with pytest.raises(Failed, match="the MCP server cannot be used"):
        play(leave, url="http://127.0.0.1:9/mcp")


def test_a_shared_server_that_ends_is_replaced_while_it_is_still_in_use() -> None:
    async def leave(one: Any, two: Any) -> list[str]:
        with pytest.raises(Failed, match="the MCP server has ended"):
            await answers(one, ("leave", {}))
        await two.close()
        await two.reset(PROBLEM, 0)  # the first still has it
        return await answers(two, ("add", {"a": 1, "b": 2}))

    assert play(leave, 2, command=COMMAND, shared=True)[0] == ["3"]


def test_a_server_that_dies_between_calls_or_answers_nothing_is_told_and_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def harmed(number: int, one: Any, two: Any) -> list[str]:
        pid, supervisor = map(int, (await answers(one, ("process", {})))[0].split())
        os.kill(pid, number)
        lines: list[str] = []
        while not lines:
            await asyncio.sleep(0.05)
            lines = helpers.news()
        await two.close()
        await two.reset(PROBLEM, 0)  # the first still has the other
        assert await answers(two, ("add", {"a": 1, "b": 2})) == ["3"]
        while not (gone(pid) and gone(supervisor)):
            await asyncio.sleep(0.05)
        return lines

    async def busy(one: Any) -> list[str]:
        return await answers(one, ("wait", {"seconds": 2.0}), ("add", {"a": 1, "b": 2}))

    monkeypatch.setattr(helpers, "_ends", {})
    monkeypatch.setattr(mcp_tools, "WATCH_S", 0.2)
    settings = {"command": COMMAND, "shared": True, "call_s": 5.0}
    for number, how in ((signal.SIGKILL, "has ended"), (signal.SIGSTOP, "gave no answer for 5 s: given up")):
        (line,) = play(functools.partial(harmed, number), 2, **settings)[0]
        assert line.startswith(f"the MCP server of environment.options.mcp.command {how} (1 so far)")
    assert play(busy, **settings)[0] == ["waited", "3"] and helpers.news() == []


def test_a_shared_server_that_stops_while_it_starts_is_given_up_and_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    command = f"bash -c 'test -e {tmp_path}/begun && exec {COMMAND}; touch {tmp_path}/begun; exec sleep 600'"

    async def episodes() -> list[str]:
        one, two, three = (new(Mcp, command=command, shared=True) for _ in range(3))
        failures = await asyncio.gather(*(each.reset(PROBLEM, 0) for each in (one, two)), return_exceptions=True)
        assert [str(failure) for failure in failures] == ["the MCP server gave no answer for 1 s: given up"] * 2
        monkeypatch.setattr(mcp_tools, "START_S", 60.0)
        await three.reset(PROBLEM, 0)  # the others still have the session that was given up
        try:
            return await answers(three, ("add", {"a": 1, "b": 2}))
        finally:
            for each in (one, two, three):
                await each.close()

    monkeypatch.setattr(helpers, "_ends", {})
    monkeypatch.setattr(mcp_tools, "START_S", 1.0)
    assert asyncio.run(episodes()) == ["3"]
    assert [line.partition(" (")[0] for line in helpers.news()] == [
        "the MCP server of environment.options.mcp.command gave no answer for 1 s: given up"
    ]


@pytest.mark.parametrize("command", ["sleep 600", "yes", "cat /dev/zero"])
def test_a_server_that_starts_badly_is_given_up_though_its_transport_never_ends(
    monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """The package's own shutdown waits for what a server writes; here it hangs altogether."""
    from mcp.client import stdio

    async def hang(process: Any) -> None:
        await asyncio.sleep(600)

    async def episodes() -> list[int]:
        environment = new(Mcp, command=command, shared=True)
        with pytest.raises(Failed, match="gave no answer for 1 s: given up"):
            await environment.reset(PROBLEM, 0)
        session = environment.session
        assert session is not None and session.ended, "the next episode begins another"
        left = []
        for pid in children(os.getpid()):
            with suppress(OSError):
                left += [pid] * (session._mark in Path(f"/proc/{pid}/environ").read_text())
        await environment.close()
        return left

    monkeypatch.setattr(stdio, "_stop_server_process", hang)
    monkeypatch.setattr(helpers, "_ends", {})
    monkeypatch.setattr(mcp_tools, "START_S", 1.0)
    monkeypatch.setattr(mcp_tools, "CLOSE_S", 0.2)
    loop = asyncio.new_event_loop()
    try:
        assert all(map(gone, loop.run_until_complete(episodes())))
    finally:
        loop.stop()  # its tasks hang, as planted
    assert [line.partition(" (")[0] for line in helpers.news()] == [
        "the MCP server of environment.options.mcp.command gave no answer for 1 s: given up"
    ]


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_server_ends_with_its_episode() -> None:
    """test_orphans.py says that it ends with the process that started it, too."""

    async def ask(one: Any) -> int:
        return int((await answers(one, ("process", {})))[0].split()[0])

    assert gone(play(ask, command=COMMAND)[0])


def test_what_a_server_writes_to_standard_error_is_clean(capfd: pytest.CaptureFixture[str]) -> None:
    script = f"printf 'hello \\033]0;title\\007 end' >&2; exec {COMMAND}"
    _, told = play(lambda one: answers(one, ("add", {"a": 1, "b": 2})), command=shlex.join(["sh", "-c", script]))
    seen = ""
    while " end" not in seen:
        seen += capfd.readouterr().err
    assert "hello ·]0;title· end" in seen and "add" in told


def test_options_name_one_server() -> None:
    for options in ({}, {"command": "a", "url": "http://b"}):
        with pytest.raises(ConfigError, match=r"environment.options.mcp: give either a command or a url"):
            made(Mcp, "mcp", options, no_grade, RewardWeights())
    with pytest.raises(ConfigError, match="environment.options.mcp: No closing quotation"):
        made(Mcp, "mcp", {"command": "a 'b"}, no_grade, RewardWeights())


# ---- secrets ---------------------------------------------------------------------------------------------------------


def test_a_server_gets_the_variables_that_are_named_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAPS_TOKEN", "hidden-1")
    monkeypatch.setenv("OTHER_TOKEN", "hidden-2")

    async def ask(one: Any) -> list[str]:
        return await answers(one, ("variable", {"name": "MAPS_TOKEN"}), ("variable", {"name": "OTHER_TOKEN"}))

    given, other = play(ask, command=COMMAND, variables=["MAPS_TOKEN"])[0]
    assert given.startswith("hidden-1 ") and given.count("hidden") == 1 and other.startswith("None ")


def test_a_variable_that_is_not_set_is_told_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MAPS_TOKEN", raising=False)
    for options in (
        {"command": COMMAND, "variables": ["MAPS_TOKEN"]},
        {"url": "http://x", "key_variable": "MAPS_TOKEN"},
    ):
        with pytest.raises(ConfigError, match='variables? (names|=) "MAPS_TOKEN"'):
            asyncio.run(Mcp.check(McpOptions.model_validate(options)))


@pytest.mark.parametrize("line", Path(__file__).with_name("mcp_secrets.jsonl").read_text().splitlines())
def test_a_secret_in_a_command_or_an_address_is_refused_and_not_repeated(line: str) -> None:
    """named: what the refusal names; "" where nothing is a secret."""
    options, name = json.loads(line).values()
    if not name:
        assert McpOptions(**options).command == options["command"]
        return
    with pytest.raises(ConfigError) as refused:
        made(Mcp, "mcp", options, no_grade, RewardWeights())
    said = str(refused.value)
    assert name in said and "hush" not in said
    assert '= "NAME"' in said or '["NAME"]' in said or "without values" in said


def test_an_address_gets_the_key_of_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAPS_TOKEN", "hidden-1")
    asked = hostile(b"HTTP/1.1 401 X\r\nContent-Length: 0\r\n\r\n", key_variable="MAPS_TOKEN")[0]
    assert "authorization: bearer hidden-1" in asked and "accept-encoding: identity" in asked


# ---- bounds ----------------------------------------------------------------------------------------------------------


def test_a_list_of_tools_without_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless:
        """A client whose server always has another page."""

        pages = 0

        def __init__(self, server: object):
            pass

        async def __aenter__(self) -> Endless:
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

        async def list_tools(self, **_: object) -> SimpleNamespace:
            Endless.pages += 1
            assert Endless.pages <= 3, "asked on and on"
            return SimpleNamespace(tools=[], next_cursor="more")

    async def server(*_: object) -> None:
        return None

    async def scene() -> None:
        session = mcp_tools.McpSession(McpOptions(command="endless"))
        await session.open()
        await session.close()

    monkeypatch.setattr("mcp.Client", Endless)
    monkeypatch.setattr(mcp_tools.McpSession, "_server", server)
    monkeypatch.setattr(mcp_tools, "MOST_PAGES", 3)
    asyncio.run(asyncio.wait_for(scene(), 60))
    assert Endless.pages == 3


@pytest.mark.parametrize(
    ("shared", "ended", "others", "closed"),
    [(False, False, 0, 1), (False, False, 1, 0), (True, False, 0, 0), (True, True, 0, 1), (True, True, 1, 0)],
)
def test_a_session_is_closed_by_the_last_that_can_use_it(shared: bool, ended: bool, others: int, closed: int) -> None:
    ends: list[int] = []

    async def end() -> None:
        ends.append(1)

    episode = new(Mcp, command="server", shared=shared)
    episode.session = SimpleNamespace(users=1 + others, ended=ended, close=end)
    asyncio.run(episode.close())
    assert len(ends) == closed


# ---- hostile servers -------------------------------------------------------------------------------------------------


def hostile(*reply: bytes, **options: Any) -> tuple[str, str]:
    """What a server gets that replies so to all, and what the episode fails of."""
    asked: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            asked.append((await reader.readuntil(b"\r\n\r\n")).decode().lower())
            for part in reply:
                writer.write(part)
                await writer.drain()
        writer.close()

    async def scene() -> str:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server, asyncio.timeout(60):
            address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp"
            one = new(Mcp, url=address, **options)
            with pytest.raises(Failed) as failed:
                await one.reset(PROBLEM, 0)
            await one.close()
        return str(failed.value)

    tracemalloc.start()
    try:
        reason = asyncio.run(scene())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20, f"{peak >> 20} MiB"
    return asked[0], reason


def test_replies_of_a_hostile_server_are_neither_unpacked_nor_read_without_end() -> None:
    packed = gzip.compress(gzip.compress(bytes(1 << 28)))
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
    assert "Content-Encoding" in hostile(head + b"Content-Encoding: gzip, gzip\r\n\r\n", packed)[1]
    hostile(head + b"\r\n", *[b" " * (1 << 20)] * 200)
    hostile(head.replace(b"200 OK", b"400 X") + b"\r\n", *[b" " * (1 << 20)] * 200)
    hostile(head.replace(b"application/json", b"text/event-stream") + b"\r\ndata: ", *[b"a" * (1 << 20)] * 200)
