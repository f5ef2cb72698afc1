"""Tokens of engine steps land in their completions, labelled; what is not finite is named."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import LogprobsLists

from rollout.output_collector import OutputCollector, StepTimer, copy_unfinished, extend
from shared.errors import NonFinite, RunError
from shared.launch.messages import GenerateRequest
from shared.types import Completion, VersionSpan


def output(name: str, token: int, logprob: float, finish: FinishReason | None = None) -> EngineCoreOutput:
    """One token of one request."""
    lists = LogprobsLists(np.array([[token]]), np.array([[logprob]]), np.array([1]))
    return EngineCoreOutput(name, [token], new_logprobs=lists, finish_reason=finish)


def intake() -> tuple[OutputCollector, GenerateRequest]:
    """An intake with one running request named "r"."""
    box = OutputCollector(engine=3)
    request = GenerateRequest([1, 2], Completion(group=7, index=4, seed=0), 10, 1.0)
    box.running["r"] = request
    return box, request


def step(box: OutputCollector, version: int, *outputs: EngineCoreOutput, time_s: float = 1.0) -> None:
    """One engine step under a version."""
    box.take_step(EngineCoreOutputs(outputs=list(outputs), timestamp=time_s, weight_version=str(version)))


def test_spans_follow_the_version_of_each_step() -> None:
    box, request = intake()
    for version, token in ((4, 50), (4, 51), (5, 52), (7, 53)):
        step(box, version, output("r", token, -0.5))
    completion = request.completion
    assert completion.token_ids == [50, 51, 52, 53] and completion.logprobs == [-0.5] * 4
    assert completion.spans == [VersionSpan(4, 0, 2), VersionSpan(5, 2, 3), VersionSpan(7, 3, 4)]


def test_routes_follow_each_other_token_by_token() -> None:
    """Of the prompt with the first token, then the last token's: [layers, experts of a token] each."""
    box, request = intake()
    for rows in (2, 1, 0):
        one = output("r", 50, -0.5)
        one.routed_experts = np.arange(rows * 6, dtype=np.uint8).reshape(rows, 3, 2)
        step(box, 1, one)
    assert request.completion.routes == [bytes(range(6)), bytes(range(6, 12)), bytes(range(6))]
    copy = copy_unfinished(request.completion)
    assert copy.routes == request.completion.routes and copy.routes is not request.completion.routes


def test_an_ended_request_is_handed_on_once_and_later_output_is_ignored() -> None:
    box, request = intake()
    ended: list[GenerateRequest] = []
    box.on_finished = ended.append
    step(box, 1, output("r", 50, -1.0, FinishReason.STOP))
    step(box, 1, output("r", 51, -1.0), output("unknown", 51, -1.0))
    assert ended == [request] and request.completion.finish_reason == "stop" and not box.running
    assert request.completion.token_ids == [50]


@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
def test_a_logprob_that_is_not_finite_names_completion_and_position(value: float) -> None:
    box, _ = intake()
    step(box, 2, output("r", 50, -1.0))
    with pytest.raises(NonFinite, match="engine 3: log-prob .* of token 1 in completion 4 of group 7.*version 2"):
        step(box, 2, output("r", 51, value))


def test_an_abort_that_nobody_asked_for_is_an_error() -> None:
    box, _ = intake()
    with pytest.raises(RunError, match="engine 3 ended completion 4 of group 7"):
        step(box, 2, output("r", 50, -1.0, FinishReason.ABORT))


def test_tokens_without_logprobs_are_an_error() -> None:
    with pytest.raises(RunError, match="2 tokens with 0 log-probs"):
        extend(Completion(group=0, index=0, seed=0), [1, 2], [], 0, engine=0)


def test_only_requests_without_a_token_are_requeued_and_their_late_output_is_ignored() -> None:
    box, started = intake()
    fresh = GenerateRequest([1], Completion(group=8, index=0, seed=0), 10, 1.0)
    box.running["s"] = fresh
    step(box, 0, output("r", 50, -1.0))
    assert box.requeue_unstarted() == ["s"]
    step(box, 0, output("s", 50, -1.0))
    assert fresh.completion.token_ids == [] and set(box.running) == {"r", "requeued s"}
    assert started.completion.token_ids == [50]


def test_a_snapshot_does_not_grow() -> None:
    completion = Completion(group=0, index=0, seed=0)
    extend(completion, [1], [-1.0], 0, engine=0)
    copy = copy_unfinished(completion)
    extend(completion, [2], [-1.0], 0, engine=0)
    assert copy.token_ids == [1] and copy.spans == [VersionSpan(0, 0, 1)]


def test_the_interval_is_the_median_of_busy_ones_and_idle_time_does_not_count() -> None:
    timer = StepTimer()
    for time_s in (1.0, 1.1, 1.2, 1.5):
        timer.step(time_s)
    timer.stop()
    timer.step(100.0)
    assert timer.median_s() == pytest.approx(0.1)


def test_the_next_step_after_an_update_wakes_the_watcher() -> None:
    async def story() -> float:
        timer = StepTimer()
        timer.step(1.0)
        waiting = timer.next_step()
        timer.step(1.25)
        timer.step(1.5)
        return await waiting

    assert asyncio.run(story()) == 1.25
