"""Both sides of the rollout benchmark are asked for the same, and the ratio is made of the faster raw vLLM."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from benchmarks.controller_run import Letters, ScriptedScorer, problems
from benchmarks.raw_vllm import Asked, Ran, params_of, tokens_of
from benchmarks.rollout import LONGEST, OURS, PEERS, SMOLLM2, TINY, WITHOUT, Load, Ours, figures
from shared.errors import RunError
from shared.launch.batch_queue import BatchQueue
from shared.launch.messages import EngineRestarted, Finished, Message
from shared.types import VersionSpan
from trainer.data.data_source import DataSource, PromptFormat
from trainer.stages import Stages

SMALL = Load("small", None, "float32", seats=8, prompts=3, group_size=4, mean_tokens=10.0, steps=5, target=None)


class Instant:
    """A hub whose engine ends everything at once, with as many tokens as were asked for."""

    def __init__(self, restarts: bool = False) -> None:
        self.events: BatchQueue[tuple[int, Message]] = BatchQueue()
        self.asked: list[Asked] = []
        self.restarts = restarts

    async def receive(self) -> None:
        await asyncio.Event().wait()

    async def post(self, rank: int, called: Any) -> None:
        for request in called.message.requests:
            tokens = request.max_tokens
            self.asked.append(Asked(request.prompt_ids, request.completion.seed, tokens))
            done = msgspec.structs.replace(
                request.completion, token_ids=[1] * tokens, logprobs=[-1.0] * tokens, finish_reason="length",
                spans=[VersionSpan(0, 0, tokens)],
            )  # fmt: skip
            self.events.put((rank, Finished([done])))
        if self.restarts:
            self.events.put((rank, EngineRestarted(0, 1.0, 0, "killed")))


def our_side(hub: Any) -> Ours:
    config = SMALL.config()
    source = DataSource(problems(40), Stages(config), PromptFormat(Letters(), config.data))  # type: ignore[arg-type]
    return Ours(SMALL, hub, ScriptedScorer(), source)  # type: ignore[arg-type]


async def closed(ours: Ours) -> None:
    for task in ours.background:
        task.cancel()
    await asyncio.gather(*ours.background, return_exceptions=True)


def test_our_path_asks_for_exactly_the_requests_of_the_raw_side() -> None:
    async def story() -> None:
        hub = Instant()
        ours = our_side(hub)
        requests = ours.same_requests()
        for repeat in range(2):
            hub.asked.clear()
            ran = await ours.run(SMALL.steps)
            assert hub.asked == requests, f"repeat {repeat}"
            assert ran.tokens == sum(asked.max_tokens for asked in requests) and ran.seconds > 0
        assert len(requests) == 5 * 3 * 4
        lengths = {asked.max_tokens for asked in requests}
        assert len(lengths) > 5 and max(lengths) <= LONGEST * 10.0
        await closed(ours)

    asyncio.run(story())


def test_figures_of_an_engine_that_died_are_refused() -> None:
    async def story() -> None:
        ours = our_side(Instant(restarts=True))
        with pytest.raises(RunError, match="the engine died"):
            await ours.run(1)
        await closed(ours)

    asyncio.run(story())


@pytest.mark.parametrize("load", [SMOLLM2, TINY], ids=lambda load: load.name)
def test_the_ledger_has_more_completions_under_way_than_the_engine_decodes(load: Load) -> None:
    config = load.config()
    under_way = (config.rollout.max_async_level + 1) * config.rollout.prompts_per_step * config.rollout.group_size
    assert under_way >= 2 * config.rollout.max_sequences == 2 * load.seats
    assert max(load.lengths()) <= config.rollout.max_completion_tokens


def test_the_ratio_is_of_the_faster_raw_vllm() -> None:
    found = {OURS: [90.0, 120.0], PEERS[0]: [100.0, 100.0], PEERS[1]: [60.0, 150.0], WITHOUT: [120.0, 200.0]}
    rows = {row.name: row for row in figures(SMOLLM2, found)}
    name = SMOLLM2.name
    beside = rows[f"{name}: worker, wire, ledger and verifier, of raw vLLM"]
    assert beside.values == [90.0 / 60.0, 120.0 / 150.0] and beside.target == 0.95, "105 is the higher median"
    assert rows[f"{name}: raw vLLM with per-token log-probs"].values == [0.5, 0.75]


def test_vllm_is_asked_as_our_engine_asks_and_log_probs_are_counted() -> None:
    params = params_of(Asked([1, 2], seed=7, max_tokens=5), stop=[3], logprobs=True)
    assert (params.seed, params.max_tokens, params.logprobs, params.stop_token_ids) == (7, 5, 0, [3])
    assert params.temperature == 1.0 and params.flat_logprobs and not params.detokenize
    assert params_of(Asked([1], 7, 5), [3], logprobs=False).logprobs is None
    output: Any = SimpleNamespace(outputs=[SimpleNamespace(token_ids=[4, 5, 3], logprobs=[0.0, 0.0, 0.0])])
    assert tokens_of(output, logprobs=True) == 3
    with pytest.raises(ValueError, match="3 tokens came with 3 log-probs"):
        tokens_of(output, logprobs=False)
    assert Ran(seconds=2.0, tokens=100).rate == 50.0
