"""A real engine of this process: bounded sampling, weights replaced in place, an engine that is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rollout.sampler import QUEUE_FACTOR, Sampler
from shared.errors import ConfigError, RunError
from shared.messages import GenerateRequest
from shared.types import Completion
from tests.rollout.tiny_llama import engine_config, random_weights, request, write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
MAX_SEQUENCES = 4


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[asyncio.Runner, Sampler, list[str]]]:
    """A started sampler with the event loop it lives in, and what it warned of."""
    model_dir = write_model(tmp_path_factory.mktemp("model"), random_weights(0))
    told: list[str] = []
    with asyncio.Runner() as runner:
        sampler = Sampler(engine_config(max_sequences=MAX_SEQUENCES), str(model_dir), told.append)
        runner.run(sampler.start())
        yield runner, sampler, told
        runner.run(sampler.close())


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


def test_many_requests_come_back_in_order_and_no_more_than_the_bound_are_under_way(
    scene: tuple[asyncio.Runner, Sampler, list[str]],
) -> None:
    runner, sampler, _ = scene
    most = 0

    async def one(index: int) -> list[Completion]:
        nonlocal most
        pair = [request(index, 12, 1.0, group=index, seed=seed) for seed in (1, 2)]
        completions = await sampler.complete(pair)
        most = max(most, len(sampler._waiting))
        return completions

    async def story() -> list[list[Completion]]:
        return await asyncio.gather(*(one(index) for index in range(20)))

    before = sampler.tokens
    found = runner.run(story())
    assert [[c.group, c.seed] for pair in found for c in pair] == [[i, s] for i in range(20) for s in (1, 2)]
    assert all(c.finish_reason for pair in found for c in pair)
    assert sampler.tokens - before == sum(len(c.token_ids) for pair in found for c in pair)
    assert 0 < most <= QUEUE_FACTOR * MAX_SEQUENCES + 1


def test_weights_are_replaced_in_place_and_back(scene: tuple[asyncio.Runner, Sampler, list[str]]) -> None:
    runner, sampler, told = scene
    weights = {name: torch.nn.Parameter(value) for name, value in random_weights(0).items()}

    async def become(seed: int) -> list[list[int]]:
        with torch.no_grad():
            for name, value in random_weights(seed).items():
                weights[name].copy_(value)
        assert (await sampler.update()).checksums
        return tokens(await sampler.complete([request(index) for index in range(4)]))

    async def story() -> None:
        of_folder = tokens(await sampler.complete([request(index) for index in range(4)]))
        await sampler.follow(list(weights.items()))
        first, other, again = await become(0), await become(1), await become(0)
        assert of_folder == first == again != other

        long = [request(index, 300) for index in range(4)]
        sampling = asyncio.ensure_future(sampler.complete(long))
        while len(long[0].completion.token_ids) < 10:
            await asyncio.sleep(0.002)
        assert sampler._worker.engine.llm is not None
        os.kill(sampler._worker.engine.llm.pids()[0], signal.SIGKILL)
        assert all(completion.finish_reason and completion.restarts == 1 for completion in await sampling)
        assert tokens(await sampler.complete([request(index) for index in range(4)])) == first
        assert len(told) == 1 and "started again" in told[0]

    runner.run(story())


def test_what_ends_the_engine_reaches_everyone(tmp_path: Path) -> None:
    model_dir = write_model(tmp_path / "model", random_weights(0))

    async def story() -> None:
        sampler = Sampler(engine_config(), str(model_dir))
        with pytest.raises(RunError, match="not started"):
            await sampler.complete([request(0)])
        await sampler.start()
        with pytest.raises(RunError, match="before it follows"):
            await sampler.update()
        waiting = asyncio.ensure_future(sampler.complete([request(0, 400)]))
        await asyncio.sleep(0.05)
        with pytest.raises(ConfigError, match=r"model\.max_tokens = 640"):
            await sampler.complete([GenerateRequest([1] * 640, Completion(group=0, index=0, seed=0), 10, 0.0)])
        with pytest.raises(ConfigError):
            await waiting
        with pytest.raises(ConfigError):
            await sampler.complete([request(1)])
        await sampler.close()

    asyncio.run(story())
