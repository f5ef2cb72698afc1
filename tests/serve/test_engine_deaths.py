"""Deaths of a real engine under a server: the request that kills it ends alone, what runs beside it goes on, and an
engine that stands still, or that its own start kills, is replaced.

`Mortal` dies of a token, as one with a faulty kernel would of a length. The rules of the watch: test_engine_watch.py.
"""

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import AsyncGenerator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollout.start import engine_processes
from rollout.warm_up import LENGTHS
from serve import engine_deaths
from serve.app import create_app
from serve.engine import Delta, SamplingParameters
from serve.server import Server
from serve.settings import ServerSettings
from serve.vllm_engine import VllmEngine
from shared.launch import adaptive_deadline
from tests.rollout.tiny_llama import random_weights, write_model
from tests.serve.conftest import eventually, running
from tests.shared.test_chat import make_folder

DEADLY = 99
"""in a prompt: kills the engine some tokens later"""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(540)]


class Mortal(VllmEngine):
    """Its process is killed where a prompt holds the deadly token, once the request is decoded; and by its next start
    if that is said: "dies" of a short prompt, or "freezes"."""

    def __init__(self, model: Path):
        super().__init__(str(model), max_tokens=512, max_sequences=16, cache_bytes=64 << 20, dtype="float32")
        self.deaths = self.starts = 0
        self.next_start = ""
        self.tried: list[int] = []
        """lengths of all prompts"""

    async def _sample(self, prompt_ids: list[int], sampling: SamplingParameters) -> AsyncGenerator[Delta, None]:
        self.tried.append(len(prompt_ids))
        if self.next_start == "dies" and len(prompt_ids) == 1:
            self.next_start = ""
            await self.die()
        number = 0
        async for delta in super()._sample(prompt_ids, sampling):
            number += 1
            if DEADLY in prompt_ids and number == 3:
                await self.die()
            yield delta

    def _begin(self) -> Any:
        self.starts += 1
        if self.next_start == "freezes":
            self.next_start = ""
            threading.Thread(target=freeze_another, args=(engine_processes(),), daemon=True).start()
        return super()._begin()

    def signal(self, number: int) -> None:
        """Send it to the engine's process."""
        for process in self.watch._processes:
            os.kill(process.pid or 0, number)

    async def die(self) -> None:
        """At once, without a word."""
        self.deaths += 1
        self.signal(signal.SIGKILL)
        while any(process.is_alive() for process in self.watch._processes):
            await asyncio.sleep(0.01)


def freeze_another(others: set[Any]) -> None:
    """Stop the engine process that will be there besides these."""
    while not (begun := engine_processes() - others):
        time.sleep(0.01)
    for process in begun:
        os.kill(process.pid, signal.SIGSTOP)


class Scene:
    """A server of one mortal engine."""

    def __init__(self, url: str, engine: Mortal, server: Server, pool: ThreadPoolExecutor):
        self.url, self.engine, self.server, self.pool = url, engine, server, pool

    def begin(self, prompt: list[int], **body: Any) -> Future[httpx.Response]:
        """Ask for a completion in a thread."""
        values = {"prompt": prompt, "max_tokens": 150, "temperature": 0, "logprobs": 1, **body}
        return self.pool.submit(httpx.post, f"{self.url}/v1/completions", json=values, timeout=300)

    def ask(self, prompt: list[int], **body: Any) -> httpx.Response:
        """The same, to its end."""
        return self.begin(prompt, **body).result()

    def calm_again(self) -> bool:
        """Whether the engine has been replaced and the server has noticed."""
        return self.server.ready and httpx.get(f"{self.url}/ready").is_success


def tokens_of(reply: httpx.Response) -> list[str]:
    assert reply.is_success, reply.text
    tokens: list[str] = reply.json()["choices"][0]["logprobs"]["tokens"]
    return tokens


def error_of(reply: httpx.Response) -> tuple[int, str]:
    """Its status and code."""
    return reply.status_code, reply.json()["error"]["code"]


@pytest.fixture(scope="module")
def module_scene(tmp_path_factory):
    """The tokenizer of its tiny model knows fewer tokens than it has."""
    model = Path(make_folder(write_model(tmp_path_factory.mktemp("models") / "mortal", random_weights(0))))
    engine = Mortal(model)
    app = create_app(ServerSettings(model=str(model), port=0, max_tokens=512), engine)
    with running(app) as url, ThreadPoolExecutor(16) as pool:
        yield Scene(url, engine, app.state.server, pool)


@pytest.fixture
def scene(module_scene):
    """It, with nothing counted yet."""
    eventually(module_scene.calm_again, 200)
    module_scene.engine.deaths = module_scene.engine.starts = module_scene.server.restarts = 0
    return module_scene


def test_an_engine_is_tried_before_it_is_ready(scene):
    assert scene.engine.tried[: len(LENGTHS)] == list(LENGTHS) and set(range(1, 9)) < set(LENGTHS)


def test_a_request_that_kills_its_engine_ends_alone(scene):
    innocents = [[number, 6, 7] for number in range(10, 14)]

    def begin() -> list[Future[httpx.Response]]:
        return [*(scene.begin(prompt) for prompt in innocents),
                *(scene.begin(prompt, temperature=1, seed=3) for prompt in innocents)]  # fmt: skip

    calm = [tokens_of(each.result()) for each in begin()]
    before, others = len(scene.engine.tried), begin()
    # so cold that the end token is as unlikely as in a greedy run, but not to be repeated
    drawn = scene.begin([4, 4], temperature=0.001)
    eventually(lambda: len(scene.engine.tried) == before + 9)
    killer = scene.ask([DEADLY, 5])
    assert error_of(killer) == (500, "engine_killed") and killer.headers["x-should-retry"] == "false"
    assert [tokens_of(each.result()) for each in others] == calm, "the others have the tokens of a calm run"
    assert len(tokens_of(drawn.result())) == 150
    eventually(scene.calm_again, 200)
    assert 2 <= scene.engine.deaths == scene.server.restarts <= 3
    killer, other = scene.ask([DEADLY, 5]), scene.ask([5, 6], max_tokens=60)
    assert error_of(killer) == (500, "engine_killed") and len(tokens_of(other)) == 60
    assert scene.engine.deaths == scene.server.restarts, "it is known now"


@pytest.mark.soak  # in make test: the request that kills its engine
def test_what_its_client_sends_again_is_known_too_and_what_waits_outlives_a_start_that_fails(scene, caplog):
    """What cannot go on by itself (a stop string, no seed) is sent again by its client, and kills no third engine."""
    caplog.set_level(logging.ERROR)
    calm = scene.ask([5, 6])
    before, under_way = len(scene.engine.tried), scene.begin([5, 6])
    eventually(lambda: len(scene.engine.tried) > before)
    scene.engine.next_start = "dies"
    deadly: dict[str, Any] = {"stop": ["x"], "temperature": 1}
    first = scene.ask([DEADLY, 5], **deadly)
    assert error_of(first) == (503, "engine_restarting") and first.headers["retry-after"]
    assert tokens_of(under_way.result()) == tokens_of(calm)
    assert scene.engine.starts == 2 and "died of a prompt of 1 token (float32): try another dtype" in caplog.text
    eventually(scene.calm_again, 200)
    for _ in range(2):
        again = scene.ask([DEADLY, 5], **deadly)
        assert error_of(again) == (500, "engine_killed")
        eventually(scene.calm_again, 200)
    assert scene.engine.deaths == 3, "with that of the start"


@pytest.mark.soak  # in make test: test_engine_watch.py
def test_an_engine_that_stands_still_is_replaced_also_while_it_starts(scene, monkeypatch, caplog):
    """The first start may take half an hour; a later one ten times as long as those before."""
    for name, value in (("LEAST_S", 10.0), ("OFTEN", 1)):
        monkeypatch.setattr(adaptive_deadline, name, value)
    monkeypatch.setattr("serve.vllm_engine.START_DEADLINE_S", 100.0)
    caplog.set_level(logging.ERROR)
    calm = scene.ask([5, 6])
    monkeypatch.setattr(engine_deaths, "QUIET_S", 2.0)
    before, under_way = len(scene.engine.tried), scene.begin([5, 6])
    eventually(lambda: len(scene.engine.tried) > before)
    scene.engine.next_start = "freezes"
    scene.engine.signal(signal.SIGSTOP)
    eventually(lambda: not scene.server.ready, 60)
    monkeypatch.setattr(engine_deaths, "QUIET_S", 60.0)
    assert httpx.get(f"{scene.url}/health").is_success
    assert error_of(httpx.get(f"{scene.url}/ready")) == (503, "not_ready")
    assert error_of(scene.ask([7])) == (503, "engine_starting")
    assert tokens_of(under_way.result()) == tokens_of(calm)
    assert scene.engine.starts >= 2 and "had not started after" in caplog.text
    assert "has neither answered nor computed for 2 s" in caplog.text
