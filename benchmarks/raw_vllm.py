"""vLLM itself, without a line of ours between: the peer of the rollout benchmark, in a process of its own.

Two ways to run it, of which the faster is the peer: `RawAsync` is AsyncLLM (an engine process, results in one piece at
the end of a completion), `RawOffline` is LLMEngine in one process, as vLLM's class LLM runs it. Settings of the engine
are those of our engines (rollout/vllm_config.py) without our weight transfer; log-probs come flat, without an object
for each token; nothing is detokenised.
"""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

from rollout.vllm_config import make_vllm_config, prepare_environment, read_stop_tokens
from shared.config import Config
from shared.launch.messages import GenerateRequest
from shared.types import Completion

prepare_environment()

from vllm import SamplingParams  # noqa: E402
from vllm.config import VllmConfig  # noqa: E402
from vllm.inputs import tokens_input  # noqa: E402
from vllm.outputs import RequestOutput  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402
from vllm.v1.engine.async_llm import AsyncLLM  # noqa: E402
from vllm.v1.engine.llm_engine import LLMEngine  # noqa: E402

from rollout.stream import sampling_params  # noqa: E402


class Asked(NamedTuple):
    """One completion to sample, at temperature 1."""

    prompt_ids: list[int]
    seed: int
    max_tokens: int


class Ran(NamedTuple):
    """What came of a number of requests."""

    seconds: float
    tokens: int

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


def settings_of(config: Config, model_dir: str) -> VllmConfig:
    """Return the settings of `rollout.vllm_config.build_vllm_config`, without the weight transfer."""
    rollout = config.rollout
    return make_vllm_config(
        model_dir, dtype=config.model.dtype, max_tokens=config.model.max_tokens, max_sequences=rollout.max_sequences,
        cache_bytes=rollout.cache_bytes, seed=config.seed, skip_tokenizer_init=True,
    )  # fmt: skip


def params_of(asked: Asked, stop: list[int], logprobs: bool) -> SamplingParams:
    """Return the parameters that our engine asks for, in the form that costs vLLM least."""
    request = GenerateRequest(asked.prompt_ids, Completion(0, 0, asked.seed), asked.max_tokens, temperature=1.0)
    params = sampling_params(request, stop)
    params.output_kind = RequestOutputKind.FINAL_ONLY
    params.flat_logprobs = logprobs
    params.logprobs = 0 if logprobs else None
    return params


def tokens_of(output: RequestOutput, logprobs: bool) -> int:
    """Return how many were sampled. Raises ValueError unless each has its log-prob, or none has."""
    (completion,) = output.outputs
    given = 0 if completion.logprobs is None else len(completion.logprobs)
    if given != (len(completion.token_ids) if logprobs else 0):
        raise ValueError(f"{len(completion.token_ids)} tokens came with {given} log-probs")
    return len(completion.token_ids)


class RawAsync:
    """AsyncLLM: engine and front end in two processes."""

    def __init__(self, config: Config, model_dir: str):
        self.loop = asyncio.new_event_loop()
        self.stop_ids, self.numbered = read_stop_tokens(model_dir), 0
        self.llm: AsyncLLM = self.loop.run_until_complete(self._start(config, model_dir))

    async def _start(self, config: Config, model_dir: str) -> AsyncLLM:
        return AsyncLLM.from_vllm_config(settings_of(config, model_dir), disable_log_stats=True)

    def run(self, requests: list[Asked], logprobs: bool = True) -> Ran:
        """All at once, until the last has ended."""
        return self.loop.run_until_complete(self._run(requests, logprobs))

    async def _run(self, requests: list[Asked], logprobs: bool) -> Ran:
        start = time.perf_counter()
        tokens = await asyncio.gather(*(self._one(asked, logprobs) for asked in requests))
        return Ran(time.perf_counter() - start, sum(tokens))

    async def _one(self, asked: Asked, logprobs: bool) -> int:
        self.numbered += 1
        params, tokens = params_of(asked, self.stop_ids, logprobs), 0
        async for output in self.llm.generate(tokens_input(asked.prompt_ids), params, str(self.numbered)):
            tokens = tokens_of(output, logprobs)
        return tokens

    def close(self) -> None:
        """End the engine process."""
        self.llm.shutdown(timeout=5)
        self.loop.close()


class RawOffline:
    """LLMEngine: engine and front end take turns in one process."""

    def __init__(self, config: Config, model_dir: str):
        self.stop_ids, self.numbered = read_stop_tokens(model_dir), 0
        self.engine = LLMEngine.from_vllm_config(settings_of(config, model_dir), disable_log_stats=True)

    def run(self, requests: list[Asked], logprobs: bool = True) -> Ran:
        """All at once, until the last has ended."""
        start, tokens = time.perf_counter(), 0
        for asked in requests:
            self.numbered += 1
            params = params_of(asked, self.stop_ids, logprobs)
            self.engine.add_request(str(self.numbered), tokens_input(asked.prompt_ids), params)
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                assert isinstance(output, RequestOutput)
                if output.finished:
                    tokens += tokens_of(output, logprobs)
        return Ran(time.perf_counter() - start, tokens)

    def close(self) -> None:
        """The engine ends with its process."""
