"""The environment "openenv" against a small server that speaks its wire."""

import json
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve

from environments.environment import Observation
from environments.openenv import OpenEnv, OpenEnvOptions
from shared.types import Problem
from tests.environments.agents import action
from verify.plugins import Failed


async def answer(socket: ServerConnection) -> None:
    """Find the number 3."""
    assert socket.request is not None and socket.request.path == "/ws"
    async for text in socket:
        asked = json.loads(text)
        hint = f"seed {asked['data'].get('seed')}"
        told: dict[str, Any] = {"observation": {"hint": hint}, "reward": None, "done": False}
        reply = {"type": "observation", "data": told}
        if asked["type"] == "step":
            guess = asked["data"].get("guess")
            if guess == "die":
                return
            if str(guess).isdigit():
                right = int(guess) == 3
                told.update(observation={"hint": "right" if right else "more"}, reward=float(right), done=right)
            else:
                error = {"message": "guess: no number", "code": "VALIDATION_ERROR" if guess else "EXECUTION_ERROR"}
                reply = {"type": "error", "data": error}
        await socket.send(json.dumps(reply))


async def run(*turns: str, url: str = "", **options: str) -> list[Observation]:
    async with serve(answer, "127.0.0.1", 0) as server:
        environment, port = OpenEnv(), next(iter(server.sockets)).getsockname()[1]
        environment.options = OpenEnvOptions.model_validate({"url": url or f"http://127.0.0.1:{port}", **options})
        try:
            seen = [await environment.reset(Problem("p", "Find it.", ""), 7)]
            return [*seen, *[await environment.step(action(turn)) for turn in turns]]
        finally:
            await environment.close()


async def test_an_episode_by_one_field():
    first, wrong, second, end = await run("<think>x</think>word", "2", "3", action="guess", observation="hint")
    assert [message.text for message in first.messages] == ["Find it.\n\nseed 7"]
    assert [message.text for message in wrong.messages] == ["Error: guess: no number"] and wrong.reward == 0
    assert [message.text for message in second.messages] == ["more"] and not second.done
    assert end.done and end.reward == 1.0


async def test_an_episode_in_json():
    _, wrong, end = await run("three", '{"guess": "3"}')
    assert "JSON object" in wrong.messages[0].text and not wrong.done
    assert end.done and [message.text for message in end.messages] == ['{"hint": "right"}']


@pytest.mark.parametrize(("turn", "options", "reason"), [
    ("die", {"action": "guess"}, "no answer to step: ConnectionClosed"),
    ('{"other": 1}', {}, "the server says of step: guess: no number"),
    ("2", {"action": "guess", "observation": "clue"}, "KeyError: 'clue'"),
    ("2", {"url": "http://127.0.0.1:1"}, "ws://127.0.0.1:1/ws does not answer"),
])  # fmt: skip
async def test_what_fails_costs_the_episode(turn, options, reason):
    with pytest.raises(Failed, match=reason):
        await run(turn, **options)
