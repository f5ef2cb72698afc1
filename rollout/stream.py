"""vLLM's AsyncLLM, but all tokens of an engine step arrive in one call, not in one task per request.

vLLM's own front end wakes an asyncio task, detokenises and builds an output object for each token of each request; with
hundreds of short sequences that costs more than a small model. Here the step's outputs go to one function as they come,
each with the policy version that vLLM attached in the engine process to exactly this step.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
import time
from collections.abc import Callable

from vllm import SamplingParams
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from rollout.start import last_words
from shared.launch import deaths
from shared.launch.messages import GenerateRequest

SEED_MASK = (1 << 63) - 1


class TokenLLM(AsyncLLM):
    """Client of one engine process. Set `on_step` and `on_end` before the first request."""

    on_step: Callable[[EngineCoreOutputs], None] | None = None
    on_end: Callable[[BaseException], None] | None = None
    output_handler: asyncio.Task[None] | None

    def _run_output_handler(self) -> None:
        """Replaces vLLM's reader, which feeds one queue per request."""
        if self.output_handler is None:
            self.output_handler = asyncio.create_task(self._read_steps(), name="engine steps")

    async def _read_steps(self) -> None:
        try:
            while True:
                outputs = await self.engine_core.get_output_async()
                if self.on_step is not None:
                    self.on_step(outputs)
        except Exception as error:  # noqa: BLE001 - EngineDeadError, or what on_step raised; the owner decides
            if self.on_end is not None:
                self.on_end(error)

    async def submit(
        self,
        request_id: str,
        token_ids: list[int],
        params: SamplingParams,
        salt: str,
        adapter: LoRARequest | None = None,
    ) -> None:
        """Queue a request under a name never used before. Raises ValueError if vLLM refuses it (too long)."""
        if self.errored:
            raise EngineDeadError()
        request = self.input_processor.process_inputs(
            request_id,
            tokens_input(token_ids, cache_salt=salt),
            params,
            supported_tasks=("generate",),
            lora_request=adapter,
        )
        request.external_req_id = request_id
        await self.engine_core.add_request_async(request)

    async def abort_requests(self, request_ids: list[str]) -> None:
        """Take requests out of the engine without any output."""
        await self.engine_core.abort_requests_async(request_ids)

    async def pause(self) -> None:
        """Freeze all requests between two steps, their KV cache kept. Tokens sampled before are on their way already.

        vLLM's pause_generation would sleep 20 ms more for the order of events; here each step carries its version.
        """
        await self.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)

    async def resume(self) -> None:
        """Continue after `pause`."""
        await self.engine_core.resume_scheduler_async()

    def kill(self) -> None:
        """kill -9 of the engine process; its workers follow it (PR_SET_PDEATHSIG). Works on stopped processes too."""
        manager = self.engine_core.resources.engine_manager
        for process in getattr(manager, "processes", []):
            if process.pid is not None and process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)

    def how_it_ended(self) -> str:
        """Return e.g. "its process (pid 77) was killed by signal 9 (SIGKILL)"; "" if it lives."""
        words, manager = last_words(), self.engine_core.resources.engine_manager
        for process in getattr(manager, "processes", []):
            for _ in range(100):  # the line to it breaks first, and a thread of vLLM may be about to take its status
                if process.exitcode is None:
                    time.sleep(0.01)
            if process.exitcode is not None:
                return f"its process (pid {process.pid}) {deaths.how(process.exitcode, words)}"
        return ""

    def pids(self) -> list[int]:
        """Process ids of the engine."""
        manager = self.engine_core.resources.engine_manager
        return [process.pid for process in getattr(manager, "processes", []) if process.pid is not None]


def derive_seed(seed: int, tokens_there: int) -> int:
    """Seed for the rest of a completion that has `tokens_there` tokens: its own with none, else a new stream.

    Seeding again with the same number would repeat the random numbers that drew the first tokens.
    """
    if tokens_there == 0:
        return seed & SEED_MASK
    digest = hashlib.blake2b(f"{seed}/{tokens_there}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & SEED_MASK


def sampling_params(request: GenerateRequest, stop_token_ids: list[int], routed: int = 0) -> SamplingParams:
    """Parameters for what is left of a request. The stop token itself is kept in the completion. routed: tokens whose
    routes are there.

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
        routed_experts_prompt_start=routed,
    )


def scoring_params() -> SamplingParams:
    """Parameters that make the engine return the log-prob of every prompt token (and one token that is thrown away)."""
    return SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
