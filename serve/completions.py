"""POST /v1/completions, streamed or not: prompts go to the model as they are, without a system prompt or a language.

It requires a key with the scope "raw". Control tokens that a prompt spells are control tokens here.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from fastapi.responses import Response as HttpResponse
from pydantic import Field, field_validator, model_validator

from serve import parameters
from serve.engine import Candidate, SamplingParameters
from serve.errors import ApiError
from serve.limits import RawClient
from serve.parameters import Items, body_error
from serve.schemas import MOST_CHOICES, StreamedRequest
from serve.server import Server
from serve.streams import (
    DONE,
    STREAMED,
    EventStream,
    Json,
    engine_errors,
    exhaust,
    in_thread_if_long,
    merge,
    sse,
    until_disconnect,
)

router = APIRouter()
MOST_PROMPT_CANDIDATES = 1_000_000
"""log-probs of prompts in one response; each takes 200 bytes of memory"""
Tokens = Annotated[Items[Annotated[int, Field(ge=0, strict=True)]], Field(max_length=1_000_000)]


class CompletionRequest(StreamedRequest):
    """The body of POST /v1/completions."""

    refused: ClassVar = parameters.COMPLETIONS
    prompt: str | Tokens | Annotated[Items[str] | Items[Tokens], Field(max_length=MOST_CHOICES)]
    """a text, its token ids, or several of either"""
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    """completions of each prompt"""
    max_tokens: int | None = Field(16, ge=1)
    """tokens that a completion may have, at most the model's context; where the prompt leaves less room, less"""
    logprobs: int | None = Field(None, ge=0, le=20)
    """so many most probable tokens beside each sampled one"""
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    """the same of the prompt, at temperature 1, as vLLM's server names it and tells it; not streamed"""
    skip_special_tokens: bool = False
    """special tokens are not told"""

    @field_validator("prompt")
    @classmethod
    def need_prompt(cls, value: Any) -> Any:
        """Raises ValueError if there is no prompt or an empty one among several."""
        if not value or (isinstance(value, list) and isinstance(value[0], (list, str)) and not all(value)):
            raise ValueError("is empty")
        return value

    @model_validator(mode="after")
    def check_prompt_logprobs(self) -> CompletionRequest:
        """Raises PydanticCustomError for prompt log-probs in a stream."""
        if self.stream and self.prompt_logprobs is not None:
            raise body_error("prompt_logprobs", "prompt_logprobs cannot be streamed")
        return self

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts as a list, even if there is only one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


@dataclass
class RawCompletion:
    """One choice: its prompt and sampling, and what has been sampled so far."""

    prompt_ids: list[int]
    sampling: SamplingParameters
    text: str = ""
    tokens: int = 0
    finish_reason: str = ""
    stop_reason: str | int | None = None
    logprobs: list[list[Candidate]] = field(default_factory=list)
    prompt_logprobs: Sequence[list[Candidate]] = ()


@router.post("/v1/completions", response_model=None, responses=STREAMED)
async def completions(body: CompletionRequest, request: Request, client: RawClient) -> HttpResponse:
    """Sample one or more completions of one or more prompts."""
    server: Server = request.app.state.server
    model = server.check_model(body.model)
    with server.admit(body.n * len(body.prompts), client) as permit:
        head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time()),
                "model": model}  # fmt: skip
        choices = []
        for number, prompt in enumerate(body.prompts):
            choices += await in_thread_if_long(len(prompt), plan, server, body, prompt, number)
        check_prompt_candidates(body, sum(len(raw.prompt_ids) for raw in choices[:: body.n]))
        if body.stream:
            return EventStream(stream(server, body, choices, head), permit.keep(), {})
        await until_disconnect(request, exhaust(sample(server, raw) for raw in choices))
    done = [choice_object(index, raw, raw.text, raw.logprobs) for index, raw in enumerate(choices)]
    if body.prompt_logprobs is not None:
        told = [prompt_logprobs(raw.prompt_logprobs) for raw in choices[:: body.n]]
        done = [{**choice, "prompt_logprobs": told[index // body.n]} for index, choice in enumerate(done)]
    return JSONResponse({**head, "choices": done, "usage": usage(choices)})


def check_prompt_candidates(body: CompletionRequest, tokens: int) -> None:
    """Raise ApiError for more log-probs of prompts than one response may hold. tokens: of all prompts."""
    found = tokens * ((body.prompt_logprobs or 0) + 1)
    if body.prompt_logprobs is not None and found > MOST_PROMPT_CANDIDATES:
        message = f"{found:,} log-probs of prompts, at most {MOST_PROMPT_CANDIDATES:,} are told in one response"
        raise ApiError(400, message, code="invalid_value", param="prompt_logprobs")


def plan(server: Server, body: CompletionRequest, prompt: str | list[int], number: int) -> list[RawCompletion]:
    """Return the choices of one prompt; number: its index among the prompts. The first choice alone has the log-probs
    of the prompt, since those of the others are the same. Raises ApiError."""
    if isinstance(prompt, str):
        server.check_size(len(prompt), "prompt")
        prompt = server.prompts.chat.encode(prompt)
    server.check_tokens(prompt, "prompt")
    sampling = replace(
        server.sampling(body, {"max_tokens": body.max_tokens}, prompt, "prompt"), logprobs=body.logprobs,
        skip_special_tokens=body.skip_special_tokens,
    )  # fmt: skip
    seeds = [None if body.seed is None else body.seed + number * body.n + index for index in range(body.n)]
    found = [RawCompletion(prompt, replace(sampling, seed=seed)) for seed in seeds]
    found[0].sampling = replace(found[0].sampling, prompt_logprobs=body.prompt_logprobs)
    return found


async def sample(server: Server, raw: RawCompletion) -> AsyncGenerator[tuple[str, list[list[Candidate]]], None]:
    """Sample one choice; yields new text and its log-probs. Raises ApiError."""
    try:
        with engine_errors():
            async with contextlib.aclosing(server.engine.generate(raw.prompt_ids, raw.sampling)) as deltas:
                async for delta in deltas:
                    raw.text += delta.text
                    raw.tokens += len(delta.token_ids)
                    raw.logprobs += delta.logprobs
                    raw.prompt_logprobs = raw.prompt_logprobs or delta.prompt_logprobs
                    raw.finish_reason = delta.finish_reason or raw.finish_reason
                    raw.stop_reason = delta.stop_reason
                    yield delta.text, delta.logprobs
    finally:
        server.metrics.count_tokens(0, 0, raw.tokens)


def stream(
    server: Server, body: CompletionRequest, choices: list[RawCompletion], head: Json
) -> AsyncGenerator[bytes, None]:
    """Return the server-sent events of all choices."""

    async def feed(index: int, raw: RawCompletion) -> AsyncGenerator[bytes, None]:
        place = 0
        async with contextlib.aclosing(sample(server, raw)) as parts:
            async for text, ranked in parts:
                if text or ranked:
                    yield sse({**head, "choices": [choice_object(index, raw, text, ranked, place, last=False)]})
                place += len(text)
        yield sse({**head, "choices": [choice_object(index, raw, "", [], place)]})

    def last() -> bytes:
        return (sse({**head, "choices": [], "usage": usage(choices)}) if body.wants_usage else b"") + DONE

    return merge([feed(index, raw) for index, raw in enumerate(choices)], server.settings.ping_s, last=last)


def choice_object(
    index: int, raw: RawCompletion, text: str, ranked: list[list[Candidate]], place: int = 0, *, last: bool = True
) -> Json:
    """Return the object of one choice, or of a part of it that begins at letter `place` of its text."""
    return {
        "index": index, "text": text, "finish_reason": raw.finish_reason if last else None,
        "stop_reason": raw.stop_reason if last else None,
        "logprobs": logprobs(ranked, place) if raw.sampling.logprobs is not None else None,
    }  # fmt: skip


def logprobs(tokens: list[list[Candidate]], place: int) -> Json:
    """Return log-probs in the form of this endpoint: parallel lists."""
    offsets = []
    for sampled, *_ in tokens:
        offsets.append(place)
        place += len(sampled.text)
    return {
        "tokens": [sampled.text for sampled, *_ in tokens],
        "token_logprobs": [sampled.logprob for sampled, *_ in tokens],
        "top_logprobs": [{one.text: one.logprob for one in rest} for _, *rest in tokens],
        "text_offset": offsets,
    }


def prompt_logprobs(tokens: Sequence[list[Candidate]]) -> list[dict[int, Json] | None]:
    """Return [prompt_tokens] log-probs in the form of vLLM's server: by token id, None for the first token."""
    found = [{one.token_id: {"logprob": one.logprob, "decoded_token": one.text} for one in ranked} for ranked in tokens]
    return [None, *found]


def usage(choices: Sequence[RawCompletion]) -> Json:
    """Return the token counts of a request; a prompt counts once for each of its choices."""
    prompt, sampled = sum(len(raw.prompt_ids) for raw in choices), sum(raw.tokens for raw in choices)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
