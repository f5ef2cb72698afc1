"""The environment "mcp" with a real server of the `mcp` package, started by a command and over HTTP."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from environments.environment import made
from environments.mcp_tools import Mcp
from shared.errors import ConfigError
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

    return asyncio.run(asyncio.wait_for(run(), 60))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(SERVER), str(port)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/mcp"
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


def test_tools_of_a_command() -> None:
    check_tools(command=COMMAND)


def test_tools_of_an_address(url: str) -> None:
    check_tools(url=url)


def test_each_episode_has_a_server_of_its_own_unless_they_share_one() -> None:
    async def work(one: Any, two: Any) -> list[str]:
        return await answers(one, ("note", {"text": "a"})) + await answers(two, ("note", {"text": "b"}))

    assert play(work, 2, command=COMMAND)[0] == ["a", "b"]
    assert play(work, 2, command=COMMAND, shared=True)[0] == ["a", "a,b"]


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


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_server_ends_with_its_episode_and_with_the_process_that_started_it(tmp_path: Path) -> None:
    async def ask(one: Any) -> int:
        return int((await answers(one, ("process", {})))[0].split()[0])

    assert gone(play(ask, command=COMMAND)[0])
    program = tmp_path / "parent.py"
    program.write_text(
        "import asyncio, sys, time\nfrom tests.environments.test_mcp import COMMAND, new, Mcp, PROBLEM, answers\n"
        "async def run():\n    one = new(Mcp, command=COMMAND)\n    await one.reset(PROBLEM, 0)\n"
        "    print((await answers(one, ('process', {})))[0], flush=True)\n    time.sleep(60)\nasyncio.run(run())\n"
    )
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    parent = subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert parent.stdout is not None
        server = int(parent.stdout.readline().split()[0])
        assert not gone(server)
        os.kill(parent.pid, signal.SIGKILL)
    finally:
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + 10
    while not gone(server):
        assert time.monotonic() < deadline
        time.sleep(0.05)


SCRIPT = """
exec 9>{line}
setsid sleep 1000 &
printf x >&9
sleep 1000
"""
PLUGIN = """
import asyncio, subprocess
from environments.environment import Environment, Observation, environment

@environment("starts")
class Starts(Environment):
    async def reset(self, problem, seed):
        subprocess.run(["bash", "{script}"])
"""
CONTROLLER = """
import asyncio, sys
from environments.host import EnvironmentHost
from shared.environment_settings import EnvironmentSettings
from shared.sections import RewardWeights
from shared.types import Problem
name, script, plugin = sys.argv[1:]
settings = {"options": {name: {"command": f"bash {script}"}}} if name != "starts" else {"plugins": [plugin]}
async def main():
    host = EnvironmentHost(EnvironmentSettings(**settings), RewardWeights(), None)
    await host.start(["starts"] if name == "starts" else [])
    await host.reset((0, 0), Problem("a", "q", "1", environment=name), 1, 1000.0)
asyncio.run(main())
"""


@pytest.mark.parametrize("name", ["agent", "mcp", "starts"])
def test_what_a_command_or_a_plugin_starts_ends_with_the_controller(tmp_path: Path, name: str) -> None:
    """A process in a session of its own, below a shell; all of them hold one end of a pipe."""
    line, script, plugin = tmp_path / "line", tmp_path / "run.sh", tmp_path / "plugin.py"
    os.mkfifo(line)
    script.write_text(SCRIPT.format(line=line))
    plugin.write_text(PLUGIN.format(script=script))
    command = [sys.executable, "-c", CONTROLLER, name, str(script), str(plugin)]
    controller = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])})
    reader = os.open(line, os.O_RDONLY)
    try:
        assert os.read(reader, 1) == b"x"
        controller.kill()
        assert select.select([reader], [], [], 30)[0] and os.read(reader, 1) == b""
    finally:
        controller.kill()
        controller.wait()
        os.close(reader)


def test_options_name_one_server() -> None:
    for options in ({}, {"command": "a", "url": "http://b"}):
        with pytest.raises(ConfigError, match=r"environment.options.mcp: give either a command or a url"):
            made(Mcp, "mcp", options, no_grade, RewardWeights())
    with pytest.raises(ConfigError, match="environment.options.mcp: No closing quotation"):
        made(Mcp, "mcp", {"command": "a 'b"}, no_grade, RewardWeights())
