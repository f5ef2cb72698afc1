"""vLLM's AsyncLLM with a queue per request that keeps the engine's steps separate.

vLLM joins outputs that accumulate while a reader lags behind, so that the contents of a delta depend on the load of the
machine. Here they are joined too, but the end of each step is recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from vllm import SamplingParams
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import RequestOutputCollector


class EngineStep(NamedTuple):
    """The part of a completion that one step of the engine added."""

    text: str
    token_ids: list[int]
    logprobs: list[Any]
    """[token_ids], [] unless requested"""
    last: bool
    """whether it is the last of the steps that were taken together"""


class StepQueue(RequestOutputCollector):
    """The queue between the engine and the reader of one request."""

    _ends: list[tuple[int, int]]
    """(tokens, letters) of each step that is waiting"""

    def put(self, output: Any) -> None:
        """Add a step's output, or the exception that ended the engine."""
        if self.output is None:
            self._ends = []
        if isinstance(output, RequestOutput):
            found = output.outputs[0]
            self._ends.append((len(found.token_ids), len(found.text)))
        super().put(output)

    async def take(self) -> tuple[RequestOutput, list[EngineStep]]:
        """Wait for output; returns all of it joined, and its separate steps. Raises EngineDeadError."""
        output = self.get_nowait() or await self.get()
        assert isinstance(output, RequestOutput)
        return output, list(split(output.outputs[0], self._ends))


def split(found: CompletionOutput, ends: list[tuple[int, int]]) -> Iterator[EngineStep]:
    """Split joined output into its steps, which end at `ends`."""
    ids, ranked = list(found.token_ids), list(found.logprobs or [])
    if len(ends) == 1:
        yield EngineStep(found.text, ids, ranked, True)
        return
    token = letter = 0
    for number, (tokens, letters) in enumerate(ends, 1):
        part = slice(token, token + tokens)
        yield EngineStep(found.text[letter : letter + letters], ids[part], ranked[part], number == len(ends))
        token, letter = token + tokens, letter + letters


class StepLLM(AsyncLLM):
    """AsyncLLM whose requests have a `StepQueue` each."""

    async def submit(
        self, request_id: str, token_ids: list[int], params: SamplingParams, adapter: LoRARequest | None = None
    ) -> StepQueue:
        """Queue a request. Raises EngineDeadError; VLLMValidationError where vLLM refuses it.

        A request with a seed shares no cached keys and values with earlier requests: how much of a prompt is recomputed
        changes the rounding, and a seed must give the same tokens whatever came before.
        """
        if self.errored:
            raise EngineDeadError()
        salt = None if params.seed is None else request_id
        prompt = tokens_input(token_ids, cache_salt=salt)
        request = self.input_processor.process_inputs(
            request_id, prompt, params, supported_tasks=("generate",), lora_request=adapter
        )
        self.input_processor.assign_request_id(request)
        self._run_output_handler()
        queue = StepQueue(params.output_kind, request.request_id)
        await self._add_request(request, None, None, 0, queue)
        return queue
