"""Log-probs that the real engine tells, of prompts and of what is sampled, against our own decoder on the same weights;
over HTTP: tests/trainer/objectives/test_teachers.py."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from examples.quickstart.prepare import Options, make_tiny_model
from serve.engine import Candidate, Delta, SamplingParameters
from serve.vllm_engine import MINUS_INFINITY, VllmEngine
from tests.model_folder import load_model
from tests.packed import pack_from

pytestmark = [pytest.mark.slow, pytest.mark.timeout(360)]

PROMPT = [5, 61, 7, 300, 12, 9, 42, 42, 7]
SAMPLINGS = [
    SamplingParameters(max_tokens=2, temperature=0.3, top_p=0.9, prompt_logprobs=3),
    SamplingParameters(max_tokens=2, temperature=1.7, prompt_logprobs=3),
    SamplingParameters(max_tokens=2, presence_penalty=1.5, prompt_logprobs=3),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model before any training."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny_model(folder, Options(), 0)
    return folder


@pytest.fixture(scope="module")
def told(model: Path) -> list[list[Delta]]:
    """What the engine tells of: each of SAMPLINGS, the first again, a prompt of one token, the most probable token."""

    async def work() -> list[list[Delta]]:
        engine = VllmEngine(str(model), max_tokens=64, max_sequences=4, cache_bytes=64 << 20, dtype="float32")
        await engine.start()
        try:
            requests = [(PROMPT, one) for one in [*SAMPLINGS, SAMPLINGS[0]]]
            requests += [([5], SAMPLINGS[0]), (PROMPT, SamplingParameters(max_tokens=1, top_k=1, logprobs=2))]
            return [[delta async for delta in engine.generate(*request)] for request in requests]
        finally:
            await engine.stop()

    return asyncio.run(work())


@pytest.fixture(scope="module")
def expected(model: Path) -> Tensor:
    """[prompt tokens - 1, vocabulary] log-probs of the tokens from the second on."""
    with torch.no_grad():
        logits: Tensor = load_model(model)(pack_from([PROMPT], [1]), output="logits")
    return logits.log_softmax(-1)[:-1]


@pytest.mark.parametrize("request_number", range(len(SAMPLINGS) + 1))
def test_of_a_prompt_they_are_those_of_the_model_whatever_the_sampling(
    told: list[list[Delta]], expected: Tensor, request_number: int
) -> None:
    """The last request is one whose keys and values the engine could have kept from the first."""
    found: Sequence[list[Candidate]]
    (found,) = [delta.prompt_logprobs for delta in told[request_number] if delta.prompt_logprobs]
    assert len(found) == len(PROMPT) - 1
    best = expected.topk(3).indices.tolist()
    for place, (itself, *ranked) in enumerate(found):
        assert itself.token_id == PROMPT[place + 1]
        assert [one.token_id for one in ranked] == best[place]
        for one in (itself, *ranked):
            assert abs(one.logprob - float(expected[place, one.token_id])) < 1e-4


def test_of_a_first_token_there_is_none(told: list[list[Delta]]) -> None:
    deltas = told[-2]
    assert sum(len(delta.token_ids) for delta in deltas) == 2 and not any(delta.prompt_logprobs for delta in deltas)


def test_what_cannot_be_sampled_has_a_log_prob_that_json_can_hold(told: list[list[Delta]]) -> None:
    ((sampled, *ranked),) = told[-1][0].logprobs
    assert [one.logprob for one in (sampled, *ranked)] == [0.0, 0.0, MINUS_INFINITY]


def test_a_start_that_is_cancelled_leaves_no_engine_process(model: Path) -> None:
    async def work() -> None:
        engine = VllmEngine(str(model), max_tokens=64, max_sequences=4, cache_bytes=64 << 20, dtype="float32")
        async with asyncio.timeout(0.5):
            await engine.start()

    before = set(multiprocessing.active_children())
    with pytest.raises(TimeoutError):
        asyncio.run(work())  # which waits for the thread that starts it
    assert set(multiprocessing.active_children()) <= before
