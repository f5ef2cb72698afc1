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

from serve.api import parameters
from serve.api.base import Items, mistake
from serve.api.bounds import check_tokens, most_tokens
from serve.api.chat import told_as_errors
from serve.api.errors import ApiError
from serve.api.gate import RawClient
from serve.api.replies import DONE, Json, sse
from serve.api.schemas import MOST_CHOICES, NO_STREAM, Labels, SamplingBody, StreamOptions
from serve.api.streams import STREAMED, EventStream, apart, merge, together, unless_gone
from serve.engine import Candidate, Sampling
from serve.server import Server

router = APIRouter()
Tokens = Annotated[Items[Annotated[int, Field(ge=0, strict=True)]], Field(max_length=1_000_000)]


class CompletionRequest(SamplingBody, Labels):
    """The body of POST /v1/completions."""

    refused: ClassVar = parameters.COMPLETIONS
    model: str = ""
    """name of the model, as GET /v1/models tells it"""
    prompt: str | Tokens | Annotated[Items[str] | Items[Tokens], Field(max_length=MOST_CHOICES)]
    """a text, its token ids, or several of either"""
    stream: bool = False
    """the response comes in events"""
    stream_options: StreamOptions | None = None
    """include_usage: the last event counts the tokens"""
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
    def tell_prompts_whole(self) -> CompletionRequest:
        """Raises PydanticCustomError for prompt log-probs in a stream, and for stream options without a stream."""
        if self.stream and self.prompt_logprobs is not None:
            raise mistake("prompt_logprobs", "prompt_logprobs cannot be streamed")
        if not self.stream and self.stream_options is not None and self.stream_options.include_usage:
            raise mistake("stream_options", NO_STREAM)
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
class Raw:
    """One choice: its prompt and sampling, and what has been sampled so far."""

    prompt_ids: list[int]
    sampling: Sampling
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
    server.check_model(body.model)
    seats = server.admit(body.n * len(body.prompts), client)
    head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time()),
            "model": server.name}  # fmt: skip
    try:
        choices = []
        for number, prompt in enumerate(body.prompts):
            choices += await apart(len(prompt), plan, server, body, prompt, number)
        if body.stream:
            return EventStream(stream(server, body, choices, head), seats, {})
        await unless_gone(request, together([finish(server, raw) for raw in choices]))
        seats.close()
        done = [choice_object(index, raw, raw.text, raw.logprobs) for index, raw in enumerate(choices)]
        return JSONResponse({**head, "choices": done, "usage": usage(choices)})
    except BaseException:
        seats.close()
        raise


def plan(server: Server, body: CompletionRequest, prompt: str | list[int], number: int) -> list[Raw]:
    """Return the choices of one prompt; number: its index among the prompts. Raises ApiError."""
    chat, settings = server.prompts.chat, server.settings
    if isinstance(prompt, str):
        server.check_size(len(prompt), "prompt")
    ids = chat.encode(prompt) if isinstance(prompt, str) else prompt
    if max(ids) >= len(chat.tokenizer):
        raise ApiError(400, f"token {max(ids)} is not one of the model's {len(chat.tokenizer)}", param="prompt")
    check_tokens(server, body)
    most = most_tokens(server, body, [("max_tokens", body.max_tokens)], ids, "prompt")
    sampling = body.sampling(settings.temperature, settings.top_p, most, body.logprobs)
    sampling = replace(sampling, prompt_logprobs=body.prompt_logprobs, skip_special_tokens=body.skip_special_tokens)
    server.meters.count_tokens(len(ids), 0, 0)
    seeds = [None if body.seed is None else body.seed + number * body.n + index for index in range(body.n)]
    return [Raw(ids, replace(sampling, seed=seed)) for seed in seeds]


async def grow(server: Server, raw: Raw) -> AsyncGenerator[tuple[str, list[list[Candidate]]], None]:
    """Sample one choice; yields new text and its log-probs. Raises ApiError."""
    try:
        with told_as_errors():
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
        server.meters.count_tokens(0, 0, raw.tokens)


async def finish(server: Server, raw: Raw) -> None:
    """Sample one choice to its end."""
    async with contextlib.aclosing(grow(server, raw)) as parts:
        async for _ in parts:
            pass


async def stream(
    server: Server, body: CompletionRequest, choices: list[Raw], head: Json
) -> AsyncGenerator[bytes, None]:
    """Yield the server-sent events of all choices."""

    async def feed(index: int, raw: Raw) -> AsyncGenerator[bytes, None]:
        place = 0
        async with contextlib.aclosing(grow(server, raw)) as parts:
            async for text, ranked in parts:
                if text or ranked:
                    yield sse({**head, "choices": [choice_object(index, raw, text, ranked, place, last=False)]})
                place += len(text)
        yield sse({**head, "choices": [choice_object(index, raw, "", [], place)]})

    def last() -> bytes:
        wanted = body.stream_options is not None and body.stream_options.include_usage
        return (sse({**head, "choices": [], "usage": usage(choices)}) if wanted else b"") + DONE

    feeds = [feed(index, raw) for index, raw in enumerate(choices)]
    events = merge(feeds, server.settings.ping_s, last=last, failed=lambda error: sse(error.body()) + DONE)
    async with contextlib.aclosing(events):
        async for event in events:
            yield event


def choice_object(
    index: int, raw: Raw, text: str, ranked: list[list[Candidate]], place: int = 0, *, last: bool = True
) -> Json:
    """Return the object of one choice, or of a part of it that begins at letter `place` of its text."""
    prompt = {} if raw.sampling.prompt_logprobs is None else {"prompt_logprobs": prompt_logprobs(raw.prompt_logprobs)}
    return {
        "index": index, "text": text, "finish_reason": raw.finish_reason if last else None,
        "stop_reason": raw.stop_reason if last else None,
        "logprobs": logprobs(ranked, place) if raw.sampling.logprobs is not None else None, **prompt,
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


def usage(choices: Sequence[Raw]) -> Json:
    """Return the token counts of a request; a prompt counts once for each of its choices."""
    prompt, sampled = sum(len(raw.prompt_ids) for raw in choices), sum(raw.tokens for raw in choices)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
