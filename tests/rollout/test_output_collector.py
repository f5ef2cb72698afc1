"""What a completion is asked of vLLM with; tokens of engine steps land in it, labelled; what is not finite is named."""

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import LogprobsLists

from rollout.output_collector import OutputCollector, StepTimer, copy_unfinished, extend
from rollout.stream import derive_seed, sampling_params
from shared import route_files
from shared.errors import NonFinite, RunError
from shared.launch.messages import GenerateRequest
from shared.types import Completion, VersionSpan


def output(name: str, token: int, logprob: float = -0.5, finish: FinishReason | None = None) -> EngineCoreOutput:
    """One token of one request."""
    lists = LogprobsLists(np.array([[token]]), np.array([[logprob]]), np.array([1]))
    return EngineCoreOutput(name, [token], new_logprobs=lists, finish_reason=finish)


class Collected(OutputCollector):
    """With one running request, "r", and steps of engine 3."""

    def __init__(self, run_dir: Path = Path()) -> None:
        super().__init__(3, run_dir)
        self.request = self.running["r"] = GenerateRequest([1, 2], Completion(group=7, index=4, seed=0), 10, 1.0)

    def step(self, version: int, *outputs: EngineCoreOutput) -> None:
        """One engine step under a version."""
        self.take_step(EngineCoreOutputs(outputs=list(outputs), timestamp=1.0, weight_version=str(version)))


def test_spans_follow_the_version_of_each_step():
    box = Collected()
    for version, token in ((4, 50), (4, 51), (5, 52), (7, 53)):
        box.step(version, output("r", token))
    completion = box.request.completion
    assert completion.token_ids == [50, 51, 52, 53] and completion.logprobs == [-0.5] * 4
    assert completion.spans == [VersionSpan(4, 0, 2), VersionSpan(5, 2, 3), VersionSpan(7, 3, 4)]


def routed(rows: int) -> EngineCoreOutput:
    """A token of "r" with the routes of so many tokens, [layers, experts of a token] each."""
    token = output("r", 50)
    token.routed_experts = np.arange(rows * 6, dtype=np.uint8).reshape(rows, 3, 2)
    return token


def test_routes_follow_each_other_token_by_token_and_only_where_they_are_wanted(tmp_path):
    """Of the prompt with the first token, then the last token's."""
    box = Collected(tmp_path)
    for rows in (2, 1, 0):
        box.step(1, routed(rows))
    completion = box.request.completion
    assert box.routes.known(completion) == 3
    asyncio.run(box.routes.put_away([completion]))
    assert [file.name for file in completion.routes] == ["7/4.0.0"] and box.routes.known(completion) == 3
    assert route_files.read(tmp_path, completion.routes[0]) == [bytes(range(6)), bytes(range(6, 12)), bytes(range(6))]
    box.request.keep_routes = False
    box.step(1, routed(1))
    assert box.routes.known(completion) == 3


def test_an_ended_request_is_handed_on_once_and_later_output_is_ignored():
    box, ended = Collected(), list[GenerateRequest]()
    box.on_finished = ended.append
    box.step(1, output("r", 50, finish=FinishReason.STOP))
    box.step(1, output("r", 51), output("unknown", 51))
    assert ended == [box.request] and box.request.completion.finish_reason == "stop" and not box.running
    assert box.request.completion.token_ids == [50]


@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
def test_a_logprob_that_is_not_finite_names_completion_and_position(value):
    box = Collected()
    box.step(2, output("r", 50))
    with pytest.raises(NonFinite, match="engine 3: log-prob .* of token 1 in completion 4 of group 7.*version 2"):
        box.step(2, output("r", 51, value))


def test_an_abort_that_nobody_asked_for_and_tokens_without_logprobs_are_errors():
    with pytest.raises(RunError, match="completion 4 of group 7"):
        Collected().step(2, output("r", 50, finish=FinishReason.ABORT))
    with pytest.raises(RunError, match="2 tokens with 0 log-probs"):
        extend(Completion(group=0, index=0, seed=0), [1, 2], [], 0, engine=0)


def test_only_requests_without_a_token_are_requeued_and_their_late_output_is_ignored():
    box = Collected()
    fresh = box.running["s"] = GenerateRequest([1], Completion(group=8, index=0, seed=0), 10, 1.0)
    box.step(0, output("r", 50))
    assert box.requeue_unstarted() == ["s"]
    box.step(0, output("s", 50))
    assert fresh.completion.token_ids == [] and set(box.running) == {"r", "requeued s"}
    assert box.request.completion.token_ids == [50]


def test_a_snapshot_does_not_grow():
    completion = Completion(group=0, index=0, seed=0)
    extend(completion, [1], [-1.0], 0, engine=0)
    copy = copy_unfinished(completion)
    extend(completion, [2], [-1.0], 0, engine=0)
    assert (copy.token_ids, copy.logprobs, copy.spans) == ([1], [-1.0], [VersionSpan(0, 0, 1)])


def test_the_longest_silence_is_kept_from_the_first_tokens_on(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    box, longest = Collected(), []
    for wait_s, tokens in ((50.0, False), (2.0, True), (9.0, False), (1.0, True)):
        now[0] += wait_s
        box.alive(tokens)
        longest.append(box.longest_s)
    assert longest == [None, 2.0, 9.0, 9.0], "loading a model is no silence"


def test_the_interval_is_the_median_of_busy_ones_and_idle_time_does_not_count():
    timer = StepTimer()
    for time_s in (1.0, 1.1, 1.2, 1.5):
        timer.step(time_s)
    timer.stop()
    timer.step(100.0)
    assert timer.median_s() == pytest.approx(0.1)


def test_the_next_step_after_an_update_wakes_the_watcher():
    async def story() -> float:
        timer = StepTimer()
        timer.step(1.0)
        waiting = timer.next_step()
        timer.step(1.25)
        timer.step(1.5)
        return await waiting

    assert asyncio.run(story()) == 1.25


def test_a_new_completion_keeps_its_seed_and_a_continued_one_gets_a_new_stream_each_time():
    assert derive_seed(11, 0) == 11
    seeds = {derive_seed(11, tokens) for tokens in range(100)}
    assert len(seeds) == 100 and all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(11, 5) == derive_seed(11, 5) != derive_seed(12, 5)


def test_the_token_limit_counts_tokens_already_there():
    completion = Completion(group=0, index=0, seed=3, token_ids=[4, 5, 6], logprobs=[-1.0] * 3)
    params = sampling_params(GenerateRequest([1], completion, 10, 0.7), [9], 3)
    assert (params.max_tokens, params.temperature, params.logprobs) == (7, 0.7, 0)
    assert params.routed_experts_prompt_start == 3, "routes that are there are not sent again"
    assert params.stop_token_ids == [9] and params.seed == derive_seed(3, 3)
    assert sampling_params(GenerateRequest([1], completion, 10, 0.0), [9]).seed is None, "greedy"
