"""The parts of vLLM that the server replaces. Importing this module puts the backend in its place.

`StepLLM` is vLLM's AsyncLLM with a queue per request that keeps the engine's steps separate. vLLM joins outputs that
accumulate while a reader lags, so that the contents of a delta depend on the load of the machine. Here they are
joined too, but the end of each step is recorded.

`MaskingBackend` enforces letter_mask.py: a grammar of vLLM's structured output that is a table instead of a parser.
vLLM knows grammars by backend. Ours is its backend `guidance`, which the server uses for answers of a form, except for
grammars that stand for a mask. Structured output works in all of vLLM's samplers, with speculative decoding and
asynchronous scheduling; rows without it cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import vllm.v1.structured_output
from vllm import SamplingParams
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import RequestOutputCollector
from vllm.v1.structured_output.backend_guidance import GuidanceBackend
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar, StructuredOutputOptions

from serve.letter_mask import MaskRequest
from serve.token_mask import TokenMask
from serve.tools import with_control_tokens
from shared.tool_calls import CLOSE, OPEN


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
            completion = output.outputs[0]
            self._ends.append((len(completion.token_ids), len(completion.text)))
        super().put(output)

    async def take(self) -> tuple[RequestOutput, list[EngineStep]]:
        """Wait for output; returns all of it joined, and its separate steps. Raises EngineDeadError."""
        output = self.get_nowait() or await self.get()
        assert isinstance(output, RequestOutput)
        return output, list(split(output.outputs[0], self._ends))


def split(completion: CompletionOutput, ends: list[tuple[int, int]]) -> Iterator[EngineStep]:
    """Split joined output into its steps, which end at `ends`."""
    ids, ranked = list(completion.token_ids), list(completion.logprobs or [])
    if len(ends) == 1:
        yield EngineStep(completion.text, ids, ranked, True)
        return
    token = letter = 0
    for number, (tokens, letters) in enumerate(ends, 1):
        these = slice(token, token + tokens)
        yield EngineStep(completion.text[letter : letter + letters], ids[these], ranked[these], number == len(ends))
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


class LetterGrammar(StructuredOutputGrammar):
    """The mask of one request."""

    def __init__(self, mask: TokenMask):
        self.mask, self._places = mask, [mask.start]

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Take sampled tokens."""
        for token in tokens:
            self._places.append(self.mask.advance(self._places[-1], token))
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """Return the first of these tokens that may follow."""
        number = self._places[-1]
        for index, token in enumerate(tokens):
            if not int(self.mask.row(number)[token // 32]) >> token % 32 & 1:
                return tokens[:index]
            number = self.mask.advance(number, token)
        return tokens

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens."""
        del self._places[len(self._places) - num_tokens :]

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        """Write the tokens that may follow into one row."""
        row = self.mask.row(self._places[-1])
        bitmask[batch_index, : len(row)] = row

    def is_terminated(self) -> bool:
        """Whether the rest is free."""
        return False

    def reset(self) -> None:
        """Begin again."""
        del self._places[1:]


class MaskingBackend(GuidanceBackend):
    """vLLM's backend, and masks of letters."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._masks: dict[str, TokenMask] = {}
        self._calls_in_tokens = {OPEN, CLOSE} <= self.tokenizer.get_added_vocab().keys()

    def compile_grammar(
        self, request_type: StructuredOutputOptions, grammar_spec: str, stop_token_ids: set[int] | None = None
    ) -> StructuredOutputGrammar:
        """Return the state of a new request."""
        request = MaskRequest.read(grammar_spec)
        if request is None:
            if self._calls_in_tokens and request_type is StructuredOutputOptions.GRAMMAR:
                grammar_spec = with_control_tokens(grammar_spec)
            return super().compile_grammar(request_type, grammar_spec, stop_token_ids)
        if grammar_spec not in self._masks:
            table = self.ll_tokenizer
            tokens = [b"" if table.is_special_token(i) else table.decode_bytes([i]) for i in range(table.vocab_size)]
            self._masks[grammar_spec] = TokenMask(request, tokens)
        return LetterGrammar(self._masks[grammar_spec])


class EngineSettings(dict[str, Any]):
    """vLLM's `additional_config`. vLLM sends it to each of its processes, which import this module for it."""


vllm.v1.structured_output.GuidanceBackend = MaskingBackend
