"""The environment "openenv" against a small server that speaks its wire."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve

from environments.environment import OPTIONS, Observation
from environments.openenv import OpenEnv, OpenEnvOptions
from shared.errors import ConfigError
from shared.types import Problem
from tests.environments.agents import action
from verify.plugins import Failed, checked_options


async def answer(socket: ServerConnection) -> None:
    """Find the number 3."""
    assert socket.request is not None and socket.request.path == "/ws"
    async for text in socket:
        asked = json.loads(text)
        hint = f"seed {asked['data'].get('seed')}"
        told: dict[str, Any] = {"observation": {"hint": hint}, "reward": None, "done": False}
        if asked["type"] == "step":
            guess = asked["data"].get("guess")
            if guess == "die":
                return
            if not str(guess).isdigit():
                error = {"message": "guess: no number", "code": "VALIDATION_ERROR" if guess else "EXECUTION_ERROR"}
                await socket.send(json.dumps({"type": "error", "data": error}))
                continue
            right = int(guess) == 3
            told = {"observation": {"hint": "right" if right else "more"}, "reward": float(right), "done": right}
        await socket.send(json.dumps({"type": "observation", "data": told}))


def run(turns: list[str], **options: str) -> list[Observation]:
    async def scene() -> list[Observation]:
        async with serve(answer, "127.0.0.1", 0) as server, asyncio.timeout(120):
            url = f"http://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"
            one = OpenEnv()
            one.options = OpenEnvOptions.model_validate({"url": url, **options})
            try:
                seen = [await one.reset(Problem("p", "Find it.", ""), 7)]
                return [*seen, *[await one.step(action(turn)) for turn in turns]]
            finally:
                await one.close()

    return asyncio.run(scene())


def test_an_episode_by_one_field() -> None:
    first, wrong, second, end = run(["<think>x</think>word", "2", "3"], action="guess", observation="hint")
    assert [message.text for message in first.messages] == ["Find it.\n\nseed 7"]
    assert [message.text for message in wrong.messages] == ["Error: guess: no number"] and wrong.reward == 0
    assert [message.text for message in second.messages] == ["more"] and not second.done
    assert end.done and end.reward == 1.0


def test_an_episode_in_json() -> None:
    _, wrong, end = run(["three", '{"guess": "3"}'])
    assert "JSON object" in wrong.messages[0].text and not wrong.done
    assert end.done and [message.text for message in end.messages] == ['{"hint": "right"}']


@pytest.mark.parametrize(
    ("turn", "options", "reason"),
    [
        ("die", {"action": "guess"}, "no answer to step: ConnectionClosed"),
        ('{"other": 1}', {}, "the server says of step: guess: no number"),
        ("2", {"action": "guess", "observation": "clue"}, "KeyError: 'clue'"),
    ],
)
def test_what_fails_costs_the_episode(turn: str, options: dict[str, str], reason: str) -> None:
    with pytest.raises(Failed, match=reason):
        run([turn], **options)


def test_a_server_that_is_not_there() -> None:
    async def scene() -> None:
        one = OpenEnv()
        one.options = OpenEnvOptions(url="http://127.0.0.1:1")
        await one.reset(Problem("p", "", ""), 7)

    with pytest.raises(Failed, match="ws://127.0.0.1:1/ws does not answer"):
        asyncio.run(scene())
    with pytest.raises(ConfigError, match="openenv.url"):
        checked_options(OPTIONS, "openenv", OpenEnv.Options, {})
