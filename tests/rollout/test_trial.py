"""A completion that kills every engine is found among others, given up alone, and everything else comes to its end."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutputs

from rollout import warm_up
from rollout.engine import Engine
from rollout.stream import TokenLLM
from rollout.trial import GIVEN_UP, Trial
from rollout.worker import EngineRank
from shared.config import Config
from shared.errors import EngineLost
from shared.types import Completion
from tests.rollout.test_worker import Line, place, snapshot
from tests.rollout.tiny_llama import Trainers, engine_config, random_weights, request, write_model

DEADLY = 3
"""index of the completion that kills its engine"""


def test_suspects_run_one_at_a_time_and_one_of_them_is_given_up() -> None:
    trial, requests = Trial(), [request(index) for index in range(4)]

    def die(running: list[Any]) -> tuple[list[int], list[int]]:
        for one in running:
            one.completion.restarts += 1
        innocent, guilty = trial.sort(running)
        return [one.completion.index for one in innocent], [one.completion.index for one in guilty]

    assert die(requests) == ([0, 1, 2, 3], []) and trial.next() is None
    new = request(9)
    assert die([*requests, new]) == ([9], []) and len(trial.waiting) == 4
    first = trial.next()
    assert first is requests[0] and trial.next() is None, "one at a time"
    requests[0].completion.finish_reason = "stop"
    second = trial.next()
    assert second is requests[1]
    assert die([second, new]) == ([], [1]) and "completion 1 of group 0 was running at 3 deaths" in trial.report
    assert [one.completion.index for one in trial.waiting] == [9, 2, 3], "and what was new is suspected now"
    assert die([]) == ([], []) and trial.report == ""


@pytest.mark.slow
@pytest.mark.timeout(450)
def test_a_completion_that_kills_every_engine_is_given_up_alone(tmp_path: Path) -> None:
    async def play() -> tuple[list[Completion], list[Completion], list[str]]:
        store, line = dist.HashStore(), Line()
        trainers = Trainers(0, store)
        worker = EngineRank(line, engine_config(), place(store), str(write_model(tmp_path, random_weights(0))))
        take_step = worker.engine.outputs.take_step

        def die_of_it(outputs: EngineCoreOutputs) -> None:
            take_step(outputs)
            for running in worker.engine.outputs.running.values():
                completion = running.completion
                if completion.group == 1 and completion.index == DEADLY and len(completion.token_ids) >= 20:
                    assert worker.engine.llm is not None
                    os.kill(worker.engine.llm.pids()[0], signal.SIGKILL)

        worker.engine.outputs.take_step = die_of_it  # type: ignore[method-assign]
        running = asyncio.create_task(worker.run())
        try:
            await line.call(EngineRank.attach, [trainers.sender.describe()])
            trainers.sender.write(0)
            await line.call(EngineRank.update, 0)
            for group in (0, 1):
                line.generate([request(index, 100, group=group) for index in range(6)])
                if group == 1:
                    while len(line.restarted) < 2:
                        await asyncio.sleep(0.01)
                    assert len(await snapshot(line, tmp_path)) == 6, "those that wait are not lost"
                done = asyncio.create_task(line.wait(group, 6))
                await asyncio.wait({done, running}, timeout=200, return_when=asyncio.FIRST_COMPLETED)
                assert done.done(), running
            told = [restarted.reason for restarted in line.restarted]
            await line.call(EngineRank.stop)
            return await line.wait(0, 6), await line.wait(1, 6), told
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            trainers.sender.close()

    calm, harmed, told = asyncio.run(play())
    assert [one.finish_reason == GIVEN_UP for one in harmed] == [index == DEADLY for index in range(6)]
    for before, after in zip(calm, harmed, strict=True):
        if after.index != DEADLY:
            assert after.token_ids == before.token_ids and after.finish_reason == before.finish_reason
    assert len(told) == 3, "the third death finds it, or one before it in the row would have been blamed"
    assert "completion 3 of group 1" in told[-1] and "given up" in told[-1]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_engine_meets_the_shortest_prompts_before_it_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the dtype of the run; one that dies of them is an error that names the prompt and the setting."""
    model = write_model(tmp_path, random_weights(0))
    config = Config.model_validate({**engine_config().model_dump(), "model": {"dtype": "bfloat16", "max_tokens": 640}})
    submit = TokenLLM.submit

    async def start(deadly: int) -> list[int]:
        engine, tried = Engine(config, str(model), rank=1, engine=0), []

        async def watched(llm: TokenLLM, name: str, tokens: list[int], params: SamplingParams, salt: str) -> None:
            tried.append(len(tokens))
            if len(tokens) == deadly:
                os.kill(llm.pids()[0], signal.SIGKILL)
            await submit(llm, name, tokens, params, salt)

        monkeypatch.setattr(TokenLLM, "submit", watched)
        try:
            await engine.start()
            assert engine.outputs.running == {}
            return tried
        finally:
            await engine.stop()

    assert asyncio.run(start(0)) == list(warm_up.LENGTHS)
    with pytest.raises(EngineLost, match=r"died of a prompt of 2 tokens in bfloat16.*model\.dtype"):
        asyncio.run(start(2))
