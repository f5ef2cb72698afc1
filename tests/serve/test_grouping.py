"""What a response counts and holds does not depend on how its stream was cut: deltas of one token or of many."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest

from serve.engine import Delta, SamplingParameters
from serve.reasoning import ReasoningCounter
from shared.reasoning_tags import CONTROL, TEXT
from tests.serve.conftest import Serve, Served
from tests.serve.test_chat import ENGLISH, FRENCH, QUESTION, RIGHT, second_time

SIZES = (1, 2, 3, 7, 1000)


def group(served: Served, size: int) -> None:
    """From now on the engine tells `size` tokens at a time, as vLLM does where its reader lags behind."""
    single = served.engine.generate

    async def grouped(prompt_ids: list[int], sampling: SamplingParameters) -> AsyncGenerator[Delta, None]:
        held: list[Delta] = []
        async for delta in single(prompt_ids, sampling):
            held.append(delta)
            if len(held) == size or delta.finish_reason:
                text, ids = "".join(one.text for one in held), [token for one in held for token in one.token_ids]
                yield Delta(text, ids, [one for part in held for one in part.logprobs], delta.finish_reason)
                held = []

    served.engine.generate = grouped  # type: ignore[method-assign]


@pytest.mark.parametrize("said", [RIGHT, "<think>\nx</think>y", f"{FRENCH}", "<think>never closed", "<think></think>"])
def test_tokens_of_reasoning_are_those_of_single_deltas(serve: Serve, said: str) -> None:
    found = []
    for size in SIZES:
        served = serve(said)
        group(served, size)
        found.append(served.ask().json()["usage"])
        assert served.events(stream_options={"include_usage": True})[-1]["usage"] == found[-1]
    assert all(one == found[0] for one in found), found


@pytest.mark.parametrize(
    ("ids", "count"),
    [([6, 1, 2, 3, 4, 5, 5], 5), ([1, 2, 7, 3, 4, 5], 5), ([5, 1, 2, 3, 4], 0), ([1, 2, 2], 3), ([6, 7], 0), ([1], 1)],
)
def test_reasoning_is_counted_by_the_tokens_alone(ids: list[int], count: int) -> None:
    letters = {1: "<think>", 2: "a", 3: "</th", 4: "ink>", 5: "b", 6: " ", 7: "</"}
    for size in (1, 2, 3, 9):
        counter = ReasoningCounter(letters.__getitem__, TEXT)
        for start in range(0, len(ids), size):
            counter.feed(ids[start : start + size])
        assert counter.tokens == count, size


def test_control_tokens_are_counted_one_by_one() -> None:
    letters = {7: "[THINK]", 8: "[/THINK]", 1: "w", 2: "[/THINK]"}
    counter = ReasoningCounter(letters.__getitem__, CONTROL, control=(7, 8))
    counter.feed([7, 1, 2, 8, 1, 1])
    assert counter.tokens == 4, "letters of a tag that are no control token end nothing"


@pytest.mark.parametrize("stream", [False, True])
def test_the_first_try_is_counted_and_told(serve: Serve, stream: bool) -> None:
    def script(prompt: list[int], sampling: SamplingParameters, call: int) -> str:
        return f"<think>\n{ENGLISH} {ENGLISH}" if call == 0 else second_time(prompt, sampling, call)

    served = serve(script, token_s=0.001, reasoning_language="fr", reasoning_language_enforcement="retry")
    if stream:
        events = served.events(QUESTION, seed=4, stream_options={"include_usage": True})
        usage, told = events[-1]["usage"], events[-2]["reasoning_language"]
    else:
        body = served.ask(QUESTION, seed=4).json()
        usage, told = body["usage"], body["reasoning_language"]
    first: dict[str, Any] = told["first_try"]
    assert first["reasoning"].strip().startswith("There are three apples") and first["answer"] == ""
    assert (first["detected"], first["tokens"]) == ("en", first["reasoning_tokens"]) and first["tokens"] >= 80
    spoken = len(f" {FRENCH}".encode()) + 1  # and the closing tag; its tokens are bytes
    assert usage["completion_tokens_details"]["reasoning_tokens"] == first["tokens"] + spoken
    assert usage["completion_tokens"] == first["tokens"] + spoken + len("Cinq pommes, donc.")
