"""A real engine of this process: bounded sampling, weights replaced in place, its death and its end."""

import asyncio
import multiprocessing
import os
import signal
from typing import Any

import pytest
import torch

from rollout.local_engine import QUEUE_FACTOR, LocalEngine
from rollout.trial import GIVEN_UP
from rollout.vllm_config import THREADS_VARIABLE
from shared.errors import ConfigError, RunError
from shared.types import Completion
from tests.rollout.test_agreement import make_folder
from tests.rollout.tiny_llama import engine_config, random_weights, request, write_model

MAX_SEQUENCES = 4
Story = dict[str, Any]


def prompt(index: int) -> list[int]:
    return request(index).prompt_ids


async def four(engine: LocalEngine) -> list[list[int]]:
    """Tokens of a completion of each of four prompts."""
    found = await asyncio.gather(*(engine.sample(prompt(index), [index]) for index in range(4)))
    return [completion.token_ids for [completion] in found]


async def play(engine: LocalEngine) -> Story:
    """Everything that such an engine does, to its end."""
    weights = {name: torch.nn.Parameter(value) for name, value in random_weights(0).items()}
    story: Story = {"most": 0, "others": multiprocessing.active_children()}

    async def pair(index: int) -> list[Completion]:
        completions = await engine.sample(prompt(index), [10 * index + 1, 10 * index + 2])
        story["most"] = max(story["most"], engine.client.live[0])
        return completions

    async def become(seed: int) -> list[list[int]]:
        with torch.no_grad():
            for name, value in random_weights(seed).items():
                weights[name].copy_(value)
        assert (await engine.update()).bytes > 0
        return await four(engine)

    def kill() -> None:
        assert engine.rank.engine.llm is not None
        os.kill(engine.rank.engine.llm.pids()[0], signal.SIGKILL)

    with pytest.raises(RunError, match="not started"):
        await engine.sample([1], [0])
    await engine.start()
    with pytest.raises(RunError, match="before it follows"):
        await engine.update()
    story["pairs"] = await asyncio.gather(*(pair(index) for index in range(12)))
    story["counted"], story["live"] = engine.client.generated_tokens, dict(engine.client.live)
    story["folder"] = await four(engine)
    await engine.follow(list(weights.items()))
    for name, seed in (("first", 0), ("other", 1), ("again", 0)):
        story[name] = await become(seed)
    sampling = asyncio.ensure_future(asyncio.gather(*(engine.sample(prompt(index), [index]) for index in range(4))))
    while not (running := engine.rank.engine.unfinished()) or min(len(one.token_ids) for one in running) < 2:
        await asyncio.sleep(0.002)
    kill()
    story["killed"] = [completion for [completion] in await sampling]
    story["after the death"] = await four(engine)

    waiting = asyncio.ensure_future(engine.sample(prompt(0), [0]))
    await asyncio.sleep(0)
    with pytest.raises(ConfigError, match=r"model\.max_tokens = 640"):
        await engine.sample([1] * 640, [0])
    for end in (waiting, engine.sample(prompt(1), [0])):
        with pytest.raises(ConfigError):
            await end
    await engine.close()
    while set(multiprocessing.active_children()) - set(story["others"]):  # it has been killed
        await asyncio.sleep(0.01)
    return story


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    warned: list[str] = []
    config = engine_config(max_sequences=MAX_SEQUENCES, max_completion_tokens=60, temperature=1.0)
    folder = write_model(tmp_path_factory.mktemp("model"), random_weights(0))
    return {**asyncio.run(play(LocalEngine(config, str(folder), warned.append))), "warned": warned}


pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_many_requests_come_back_in_order_and_no_more_than_the_bound_are_under_way(story):
    pairs: list[list[Completion]] = story["pairs"]
    assert [[one.seed for one in pair] for pair in pairs] == [[10 * i + 1, 10 * i + 2] for i in range(12)]
    assert all(one.finish_reason in ("stop", "length") for pair in pairs for one in pair)
    assert story["counted"] == sum(len(one.token_ids) for pair in pairs for one in pair) > 0
    assert 0 < story["most"] <= QUEUE_FACTOR * MAX_SEQUENCES + 1 and story["live"] == {0: 0}


def test_weights_are_replaced_in_place_and_back(story):
    assert story["folder"] == story["first"] == story["again"] != story["other"]


def test_after_its_death_completions_go_on_and_the_next_engine_has_the_weights(story):
    assert all(one.finish_reason != GIVEN_UP and one.restarts == 1 for one in story["killed"])
    assert story["after the death"] == story["first"]
    first, second = story["warned"]
    assert "starting another" in first and "started again" in second


def test_an_engine_of_two_threads_computes_with_the_weights_it_was_sent(tmp_path, monkeypatch):
    """Packed ahead with another number of threads than at its start, weights would lie in another order."""
    monkeypatch.setenv(THREADS_VARIABLE, "2")
    decoder = make_folder(tmp_path, "LlamaForCausalLM", intermediate_size=192)

    async def story() -> None:
        async with LocalEngine(engine_config(), str(tmp_path)) as engine:
            await engine.follow(list(decoder.named_parameters()))
            for _ in range(2):
                with torch.no_grad():
                    for parameter in decoder.parameters():
                        parameter.mul_(1.1)
                await engine.update()  # proved by what the engine computes with

    asyncio.run(story())
