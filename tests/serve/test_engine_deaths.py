"""A request that kills its engine ends alone, what runs beside it goes on, and an engine is tried before it is ready.

The engines are real; `Mortal` dies of a token, as one with a faulty kernel would of a length.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollout.start import engine_processes, started_within
from rollout.warm_up import LENGTHS
from serve import vllm_engine
from serve.engine import CrashingRequest, Delta, EngineDied, SamplingParameters
from serve.engine_deaths import EngineFailover
from serve.server import Server
from serve.settings import ServerSettings
from serve.vllm_engine import VllmEngine
from serve.vllm_parts import StepLLM
from shared.errors import ModelError
from shared.launch import adaptive_deadline
from tests.rollout.tiny_llama import random_weights, write_model
from tests.shared.test_chat import make_folder

DEADLY = 99
"""in a prompt: kills the engine some tokens later"""
WORDS = 60
pytestmark = [pytest.mark.slow, pytest.mark.timeout(540)]


class Mortal(VllmEngine):
    """Its process is killed where a prompt holds the deadly token, once the request is decoded."""

    def __init__(self, model: Path, deadly: int = DEADLY, dtype: str = "float32"):
        super().__init__(str(model), max_tokens=512, max_sequences=16, cache_bytes=64 << 20, dtype=dtype)
        self.deadly, self.deaths = deadly, 0

    async def _sample(self, prompt_ids: list[int], sampling: SamplingParameters) -> AsyncGenerator[Delta, None]:
        number = 0
        async for delta in super()._sample(prompt_ids, sampling):
            number += 1
            if self.deadly in prompt_ids and number == 3:
                await self.die()
            yield delta

    async def die(self) -> None:
        """At once, without a word."""
        assert self.llm is not None
        self.deaths += 1
        processes = self.llm.engine_core.resources.engine_manager.processes
        for process in processes:
            os.kill(process.pid, signal.SIGKILL)
        while any(process.is_alive() for process in processes):
            await asyncio.sleep(0.01)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose tokenizer knows fewer tokens than it has."""
    folder = write_model(tmp_path_factory.mktemp("models") / "mortal", random_weights(0))
    return Path(make_folder(folder))


@asynccontextmanager
async def kept_alive(engine: VllmEngine) -> AsyncIterator[Server]:
    """An engine under the watch of a server."""
    server = Server.__new__(Server)
    server.engine, server.ready, server.restarts, server.settings = engine, True, 0, ServerSettings()
    await engine.start()
    watch = asyncio.create_task(server._keep_alive())
    try:
        yield server
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await engine.stop()


async def until_ready(server: Server) -> None:
    """An engine answers a moment before its server has counted the restart. Raises TimeoutError."""
    async with asyncio.timeout(60):
        while not server.ready:
            await asyncio.sleep(0.01)


async def whole(engine: VllmEngine, prompt: list[int], **sampling: object) -> list[int] | str:
    """The tokens of a completion, or what ended it."""
    ids: list[int] = []
    try:
        async for delta in engine.generate(prompt, SamplingParameters(**{"max_tokens": WORDS, **sampling})):  # type: ignore[arg-type]
            ids += delta.token_ids
    except (CrashingRequest, EngineDied) as error:
        return type(error).__name__
    return ids


def test_a_request_that_kills_its_engine_ends_alone(model: Path) -> None:
    async def play() -> tuple[int, int]:
        engine = Mortal(model)
        prompts = [[number, 6, 7] for number in range(5, 9)]

        def innocents() -> list[Coroutine[Any, Any, list[int] | str]]:
            greedy = [whole(engine, prompt, temperature=0, max_tokens=400) for prompt in prompts]
            return [*greedy, *(whole(engine, prompt, seed=3, max_tokens=400) for prompt in prompts)]

        async with kept_alive(engine) as server:
            calm = await asyncio.gather(*innocents())
            deadly = whole(engine, [DEADLY, 5], temperature=0)
            # so cold that the end token is as unlikely as in a greedy run, but not to be repeated
            drawn = whole(engine, [4, 4], temperature=0.001, max_tokens=400)
            first, *others, unseeded = await asyncio.gather(deadly, *innocents(), drawn)
            assert first == "CrashingRequest" and others == calm, "the others have the tokens of a calm run"
            assert isinstance(unseeded, list) and len(unseeded) == 400
            deaths = engine.deaths
            assert await whole(engine, [DEADLY, 5], temperature=0) == "CrashingRequest", "it is known now"
            assert engine.deaths == deaths
            assert len(await whole(engine, [5, 6], temperature=0)) == WORDS
            await until_ready(server)
            return deaths, server.restarts

    deaths, restarts = asyncio.run(play())
    assert 2 <= deaths <= 3 and restarts == deaths


def test_a_death_that_the_engine_outlives_ends_the_request() -> None:
    engine, calm = object(), SamplingParameters(max_tokens=3, temperature=0)

    async def sample(prompt: list[int], sampling: SamplingParameters) -> AsyncGenerator[Delta, None]:
        raise EngineDied
        yield  # it is a generator

    async def ask() -> None:
        async for _ in EngineFailover(lambda: engine, sample).generate([5], calm):
            pass

    with pytest.raises(EngineDied):
        asyncio.run(asyncio.wait_for(ask(), 5))


def test_what_was_sent_again_by_its_client_is_known_too(model: Path) -> None:
    """What cannot go on by itself (a stop string, no seed) is sent again by its client, and kills no third engine."""

    async def play() -> list[list[int] | str]:
        engine = Mortal(model)
        async with kept_alive(engine) as server:
            found = []
            for _ in range(4):
                while not (server.ready and await engine.is_alive()):
                    await asyncio.sleep(0.05)
                found.append(await whole(engine, [DEADLY, 5], stop=["x"], temperature=1))
            assert engine.deaths == 2
            return found

    assert asyncio.run(play()) == ["EngineDied", "CrashingRequest", "CrashingRequest", "CrashingRequest"]


def test_deltas_stay_single_where_the_reader_lags(model: Path) -> None:
    async def play() -> tuple[list[Delta], list[Delta]]:
        engine = Mortal(model)
        await engine.start()
        try:
            quick = [
                delta async for delta in engine.generate([5, 6], SamplingParameters(max_tokens=WORDS, temperature=0))
            ]
            slow = []
            async for delta in engine.generate([5, 6], SamplingParameters(max_tokens=WORDS, temperature=0, logprobs=1)):
                slow.append(delta._replace(logprobs=[]) if delta.logprobs else delta)
                await asyncio.sleep(0.1 if len(slow) in (1, 5, 20) else 0)
            return quick, slow
        finally:
            await engine.stop()

    quick, slow = asyncio.run(play())
    assert quick == slow and all(len(delta.token_ids) == 1 for delta in slow) and len(slow) == WORDS


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_is_tried_before_it_is_ready(model: Path, dtype: str) -> None:
    tried: list[int] = []

    class Told(Mortal):
        async def _sample(self, prompt_ids: list[int], sampling: SamplingParameters) -> AsyncGenerator[Delta, None]:
            tried.append(len(prompt_ids))
            async for delta in super()._sample(prompt_ids, sampling):
                yield delta

    async def play() -> float:
        engine = Told(model, dtype=dtype)
        try:
            await engine.start()
            return engine.warm_up_s
        finally:
            await engine.stop()

    seconds = asyncio.run(play())
    print(f"{dtype}: warm-up of {seconds:.2f} s")
    assert tried == list(LENGTHS) and set(range(1, 9)) < set(tried) and seconds < 5


def test_an_engine_that_dies_of_a_short_prompt_is_an_error_of_the_start(model: Path) -> None:
    class Frail(Mortal):
        async def _sample(self, prompt_ids: list[int], sampling: SamplingParameters) -> AsyncGenerator[Delta, None]:
            if len(prompt_ids) == 1:
                await self.die()
            async for delta in super()._sample(prompt_ids, sampling):
                yield delta

    async def play() -> None:
        engine = Frail(model)
        try:
            await engine.start()
        finally:
            await engine.stop()

    with pytest.raises(ModelError, match=r"died of a prompt of 1 token \(float32\): try another dtype"):
        asyncio.run(play())


@pytest.mark.parametrize("late", [pytest.param(False, marks=pytest.mark.soak), True])
def test_what_waits_for_an_engine_outlives_a_start_that_fails(model: Path, late: bool) -> None:
    """late: the start fails once the process is there."""

    class Stumbling(Mortal):
        starts = 0

        def _begin(self) -> StepLLM:
            self.starts += 1
            if self.starts == 2 and not late:
                raise ModelError("no memory, this time")
            return super()._begin()

        async def _warm_up(self) -> None:
            if self.starts == 2:
                raise ModelError("no adapter, this time")
            await super()._warm_up()

    async def play() -> tuple[list[int] | str, list[int] | str]:
        engine = Stumbling(model)
        async with kept_alive(engine):
            calm = await whole(engine, [5, 6], temperature=0, max_tokens=400)
            under_way = asyncio.create_task(whole(engine, [5, 6], temperature=0, max_tokens=400))
            await asyncio.sleep(0.2)
            await engine.die()
            found = await under_way
            assert engine.starts == 3
            return calm, found

    calm, found = asyncio.run(play())
    assert found == calm


def test_an_engine_that_stands_still_while_it_starts_again_is_started_once_more(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first start may take half an hour; a later one ten times as long as those before."""
    monkeypatch.setattr(vllm_engine, "START_DEADLINE_S", 100.0)
    for name, value in (("LEAST_S", 10.0), ("OFTEN", 1)):
        monkeypatch.setattr(adaptive_deadline, name, value)
    deadlines: list[float] = []

    def within(deadline_s: float) -> AbstractContextManager[None]:
        deadlines.append(deadline_s)
        return started_within(deadline_s)

    monkeypatch.setattr(vllm_engine, "started_within", within)

    class Stopped(Mortal):
        starts = 0

        def _begin(self) -> StepLLM:
            self.starts += 1
            if self.starts == 2:
                threading.Thread(target=self.freeze, args=(engine_processes(),), daemon=True).start()
            return super()._begin()

        def freeze(self, others: set[Any]) -> None:
            while not (begun := engine_processes() - others):
                time.sleep(0.01)
            for process in begun:
                os.kill(process.pid, signal.SIGSTOP)

    async def play() -> list[int] | str:
        engine = Stopped(model)
        async with kept_alive(engine):
            await engine.die()
            tokens = await whole(engine, [5, 6], temperature=0, max_tokens=20)
            assert engine.starts == 3
            return tokens

    assert len(asyncio.run(play())) == 20 and deadlines[0] == 100 > max(deadlines[1:])
