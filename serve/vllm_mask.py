"""Enforces letter_mask.py in vLLM: a grammar of its structured output that is a table instead of a parser.

vLLM knows grammars by backend. Ours is its backend `guidance`, which the server uses for answers of a form, except for
grammars that stand for a mask. Structured output works in all of vLLM's samplers, with speculative decoding and
asynchronous scheduling; rows without it cost nothing. Importing this module puts the backend in its place.
"""

from __future__ import annotations

from typing import Any

import torch
import vllm.v1.structured_output
from vllm.v1.structured_output.backend_guidance import GuidanceBackend
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar, StructuredOutputOptions

from serve.letter_mask import MaskRequest
from serve.token_mask import TokenMask


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
        for place, token in enumerate(tokens):
            if not int(self.mask.row(number)[token // 32]) >> token % 32 & 1:
                return tokens[:place]
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

    def compile_grammar(
        self, request_type: StructuredOutputOptions, grammar_spec: str, stop_token_ids: set[int] | None = None
    ) -> StructuredOutputGrammar:
        """Return the state of a new request."""
        request = MaskRequest.read(grammar_spec)
        if request is None:
            return super().compile_grammar(request_type, grammar_spec, stop_token_ids)
        if grammar_spec not in self._masks:
            table = self.ll_tokenizer
            tokens = [b"" if table.is_special_token(i) else table.decode_bytes([i]) for i in range(table.vocab_size)]
            self._masks[grammar_spec] = TokenMask(request, tokens)
        return LetterGrammar(self._masks[grammar_spec])


class EngineSettings(dict[str, Any]):
    """vLLM's `additional_config`. vLLM sends it to each of its processes, which import this module for it."""


vllm.v1.structured_output.GuidanceBackend = MaskingBackend
