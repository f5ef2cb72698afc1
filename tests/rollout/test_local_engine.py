"""A real engine of this process: bounded sampling, weights replaced in place, an engine that is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rollout.local_engine import QUEUE_FACTOR, LocalEngine
from rollout.vllm_config import THREADS_VARIABLE
from shared.errors import ConfigError, RunError
from shared.types import Completion
from tests.rollout.test_agreement import make_folder
from tests.rollout.tiny_llama import engine_config, random_weights, write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
MAX_SEQUENCES = 4


Scene = tuple[asyncio.Runner, LocalEngine, list[str]]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """A started engine with the event loop it lives in, and what it warned of."""
    model_dir = write_model(tmp_path_factory.mktemp("model"), random_weights(0))
    told: list[str] = []
    config = engine_config(max_sequences=MAX_SEQUENCES, max_completion_tokens=100, temperature=1.0)
    with asyncio.Runner() as runner:
        engine = LocalEngine(config, str(model_dir), told.append)
        runner.run(engine.start())
        yield runner, engine, told
        runner.run(engine.close())


def prompt(index: int) -> list[int]:
    """150 tokens, longer than a block of the prefix cache."""
    return [1] + [(7 * index + 3 * position) % 500 for position in range(149)]


async def four(engine: LocalEngine) -> list[list[int]]:
    """Tokens of a completion of each of four prompts."""
    found = await asyncio.gather(*(engine.sample(prompt(index), [index]) for index in range(4)))
    return [completion.token_ids for [completion] in found]


def test_many_requests_come_back_in_order_and_no_more_than_the_bound_are_under_way(scene: Scene) -> None:
    runner, engine, _ = scene
    most = 0

    async def one(index: int) -> list[Completion]:
        nonlocal most
        completions = await engine.sample(prompt(index), [10 * index + 1, 10 * index + 2])
        most = max(most, engine.client.live[0])
        return completions

    async def story() -> list[list[Completion]]:
        return await asyncio.gather(*(one(index) for index in range(20)))

    before = engine.client.generated_tokens
    found = runner.run(story())
    assert [[c.seed for c in pair] for pair in found] == [[10 * i + 1, 10 * i + 2] for i in range(20)]
    assert all(c.finish_reason for pair in found for c in pair)
    tokens = sum(len(c.token_ids) for pair in found for c in pair)
    assert engine.client.generated_tokens - before == tokens > 0
    assert 0 < most <= QUEUE_FACTOR * MAX_SEQUENCES + 1
    assert engine.client.live == {0: 0}


def test_weights_are_replaced_in_place_and_back(scene: Scene) -> None:
    runner, engine, told = scene
    weights = {name: torch.nn.Parameter(value) for name, value in random_weights(0).items()}

    async def become(seed: int) -> list[list[int]]:
        with torch.no_grad():
            for name, value in random_weights(seed).items():
                weights[name].copy_(value)
        assert (await engine.update()).bytes > 0
        return await four(engine)

    async def story() -> None:
        of_folder = await four(engine)
        await engine.follow(list(weights.items()))
        first, other, again = await become(0), await become(1), await become(0)
        assert of_folder == first == again != other

        sampling = asyncio.ensure_future(asyncio.gather(*(engine.sample(prompt(i), [i]) for i in range(4))))
        while not (running := engine.rank.engine.snapshot()) or min(len(one.token_ids) for one in running) < 2:
            await asyncio.sleep(0.002)
        assert engine.rank.engine.llm is not None
        os.kill(engine.rank.engine.llm.pids()[0], signal.SIGKILL)
        assert all(completion.finish_reason and completion.restarts == 1 for [completion] in await sampling)
        assert await four(engine) == first
        assert len(told) == 2 and "starting another" in told[0] and "started again" in told[1]

    runner.run(story())


def test_what_ends_the_engine_reaches_everyone(tmp_path: Path) -> None:
    model_dir = write_model(tmp_path / "model", random_weights(0))

    async def story() -> None:
        engine = LocalEngine(engine_config(), str(model_dir))
        with pytest.raises(RunError, match="not started"):
            await engine.sample([1], [0])
        await engine.start()
        with pytest.raises(RunError, match="before it follows"):
            await engine.update()
        waiting = asyncio.ensure_future(engine.sample(prompt(0), [0]))
        await asyncio.sleep(0.05)
        with pytest.raises(ConfigError, match=r"model\.max_tokens = 640"):
            await engine.sample([1] * 640, [0])
        with pytest.raises(ConfigError):
            await waiting
        with pytest.raises(ConfigError):
            await engine.sample(prompt(1), [0])
        await engine.close()

    asyncio.run(story())


def test_an_engine_of_two_threads_computes_with_the_weights_it_was_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(THREADS_VARIABLE, "2")
    decoder = make_folder(tmp_path, "LlamaForCausalLM")

    async def story() -> None:
        async with LocalEngine(engine_config(), str(tmp_path)) as engine:
            await engine.follow(list(decoder.named_parameters()))
            await engine.update()
            with torch.no_grad():
                for parameter in decoder.parameters():
                    parameter.mul_(1.1)
            await engine.update()

    asyncio.run(story())


def test_completions_end_with_the_tokens_of_the_chat_template_too(tmp_path: Path) -> None:
    folder = str(write_model(tmp_path, random_weights(0)))
    named = LocalEngine(engine_config(), folder).rank.engine.stop_token_ids
    assert LocalEngine(engine_config(), folder, stop_ids=(9, 5)).rank.engine.stop_token_ids == [5, 9] != named
