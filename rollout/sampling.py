"""vLLM's sampling parameters of a completion, and the seed of one that continues after an interruption."""

from __future__ import annotations

import hashlib

from vllm import SamplingParams

from shared.launch.messages import GenerateRequest

SEED_MASK = (1 << 63) - 1


def derive_seed(seed: int, tokens_there: int) -> int:
    """Seed for the rest of a completion that has `tokens_there` tokens: its own with none, else a new stream.

    Seeding again with the same number would repeat the random numbers that drew the first tokens.
    """
    if tokens_there == 0:
        return seed & SEED_MASK
    digest = hashlib.blake2b(f"{seed}/{tokens_there}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & SEED_MASK


def sampling_params(request: GenerateRequest, stop_token_ids: list[int]) -> SamplingParams:
    """Parameters for what is left of a request. The stop token itself is kept in the completion.

    Log-probs of sampled tokens only (logprobs=0), after temperature (the engine runs with processed_logprobs).
    """
    there = len(request.completion.token_ids)
    return SamplingParams(
        max_tokens=request.max_tokens - there,
        temperature=request.temperature,
        seed=derive_seed(request.completion.seed, there) if request.temperature > 0 else None,
        stop_token_ids=stop_token_ids,
        logprobs=0,
        detokenize=False,
        routed_experts_prompt_start=len(request.completion.routes),
    )


def scoring_params() -> SamplingParams:
    """Parameters that make the engine return the log-prob of every prompt token (and one token that is thrown away)."""
    return SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
