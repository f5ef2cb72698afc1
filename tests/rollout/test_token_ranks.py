"""Ranks of tokens are those that vLLM's own formula gives, and vLLM uses ours where its function is not compiled."""

from __future__ import annotations

import pytest
import torch

from rollout import vllm_config
from rollout.vllm_config import count_at_least, count_ranks_by_row


def test_ranks_are_counted_by_hand_and_as_vllm_counts_them() -> None:
    x = torch.tensor([[-1.0, -3.0, -2.0], [-5.0, -5.0, -0.1], [0.0, float("-inf"), float("-inf")]])
    values = torch.tensor([[-2.0], [-5.0], [0.0]])
    counts = count_at_least(x, values)
    assert counts.tolist() == [2, 3, 1] and counts.dtype == torch.int64
    logprobs = torch.randn(7, 4099, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    sampled = logprobs.gather(-1, torch.arange(7)[:, None])
    assert torch.equal(count_at_least(logprobs, sampled), (logprobs >= sampled).sum(-1))


@pytest.mark.parametrize("compiled", [False, True])
def test_vllm_counts_so_unless_it_compiles(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    vllm_config.prepare_environment()
    from vllm.v1.sample import sampler

    theirs = object()
    monkeypatch.setattr(sampler, "batched_count_greater_than", theirs)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0" if compiled else "1")
    count_ranks_by_row()
    assert sampler.batched_count_greater_than is (theirs if compiled else count_at_least)
