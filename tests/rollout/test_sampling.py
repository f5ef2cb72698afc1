"""Seeds and parameters of one completion."""

from __future__ import annotations

from rollout.stream import derive_seed, sampling_params
from shared.launch.messages import GenerateRequest
from shared.types import Completion


def test_a_new_completion_keeps_its_seed_and_a_continued_one_gets_a_new_stream_each_time() -> None:
    assert derive_seed(11, 0) == 11
    seeds = {derive_seed(11, tokens) for tokens in range(100)}
    assert len(seeds) == 100 and all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(11, 5) == derive_seed(11, 5) != derive_seed(12, 5)


def test_the_token_limit_counts_tokens_already_there() -> None:
    completion = Completion(group=0, index=0, seed=3, token_ids=[4, 5, 6], logprobs=[-1.0] * 3, routes=[b"a"] * 3)
    params = sampling_params(GenerateRequest([1], completion, 10, 0.7), [9])
    assert (params.max_tokens, params.temperature, params.logprobs) == (7, 0.7, 0)
    assert params.routed_experts_prompt_start == 3, "routes that are there are not sent again"
    assert params.stop_token_ids == [9] and params.seed == derive_seed(3, 3)


def test_greedy_sampling_has_no_seed() -> None:
    params = sampling_params(GenerateRequest([1], Completion(group=0, index=0, seed=3), 10, 0.0), [9])
    assert params.seed is None
