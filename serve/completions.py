"""POST /v1/completions, streamed or not: prompts go to the model as they are, without a system prompt or a language.

It requires a key with the scope "raw". Control tokens that a prompt spells are control tokens here.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from fastapi.responses import Response as HttpResponse
from pydantic import BeforeValidator, Field, field_validator, model_validator

from serve import parameters
from serve.engine import Candidate, SamplingParameters
from serve.errors import ApiError
from serve.limits import RawClient
from serve.parameters import Items, body_error
from serve.schemas import MOST_CHOICES, StreamedRequest
from serve.server import Server, engine_errors, exhaust, in_thread_if_long
from serve.streams import STREAMED, EventStream, Json, merge, until_disconnect

router = APIRouter()
MOST_PROMPT_CANDIDATES = 1_000_000
"""log-probs of prompts in one response; each takes 200 bytes of memory"""
MOST_PIECES = 4
"""tokens that one letter can have: its bytes"""
Text = Annotated[str, Field(min_length=1)]


def whole(ids: Any) -> Any:
    """Return token ids such as 5.0, which are integers in JSON, as such; the rest as it is."""
    if not isinstance(ids, list) or float not in set(map(type, ids)):
        return ids
    return [int(number) if isinstance(number, float) and number.is_integer() else number for number in ids]


TokenId = Annotated[int, Field(ge=0, strict=True)]
Tokens = Annotated[Items[TokenId], Field(max_length=1_000_000), BeforeValidator(whole)]
Prompt = Annotated[Tokens, Field(min_length=1)]
SEVERAL = Field(min_length=1, max_length=MOST_CHOICES)


class CompletionRequest(StreamedRequest):
    """The body of POST /v1/completions."""

    model_config = parameters.body_rules(parameters.USAGE_RULE, parameters.PROMPT_RULE)
    prompt: Text | Prompt | Annotated[Items[Text], SEVERAL] | Annotated[Items[Prompt], SEVERAL]
    """a text, its token ids, or several of either"""
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    """completions of each prompt"""
    max_tokens: int | None = Field(16, ge=0)
    """tokens that a completion may have, at most the model's context; where the prompt leaves less room, less. 0 for
    none, where log-probs of the prompt are wanted"""
    logprobs: int | None = Field(None, ge=0, le=20)
    """so many most probable tokens for each sampled one, which is always among them, and with `echo` for each of the
    prompt"""
    echo: bool = False
    """the prompt, as the model reads it, is put before its completion, also in `logprobs`; at temperature 1 there"""
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    """the same of the prompt, at temperature 1, as vLLM's server names and returns it; not streamed"""
    skip_special_tokens: bool = False
    """special tokens are not returned"""

    @field_validator("prompt", mode="before")
    @classmethod
    def need_prompt(cls, value: Any) -> Any:
        """Raises ValueError if there is no prompt or an empty one among several."""
        if value in ("", []) or (isinstance(value, list) and any(entry in ("", []) for entry in value)):
            raise ValueError("is empty")
        return value

    @model_validator(mode="after")
    def check_prompt_logprobs(self) -> CompletionRequest:
        """Raises PydanticCustomError for prompt log-probs in a stream."""
        if self.stream and self.prompt_logprobs is not None:
            raise body_error("prompt_logprobs", "prompt_logprobs cannot be streamed")
        return self

    @property
    def prompt_candidates(self) -> int | None:
        """So many most probable tokens are needed at each place of the prompts; None where no log-probs of them are."""
        numbers = (self.prompt_logprobs, self.logprobs if self.echo else None)
        return max((number for number in numbers if number is not None), default=None)

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts as a list, even if there is only one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


class TokenPlaces:
    """Finds where tokens begin in the text that they decode to, in letters. A token that goes on with a letter begins
    where the letter does."""

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int] = ()):
        """before: the last tokens before the text."""
        self._decode = decode
        self._ids: list[int] = []
        """the last tokens: `_known` of them have `_letters` letters together, and end before `_place`"""
        self._known = self._letters = self._place = self._begun = 0
        self.add(before)
        self._place = -self._begun

    def add(self, token_ids: Iterable[int]) -> list[int]:
        """Return the places of the next tokens."""
        places = []
        for token in token_ids:
            places.append(self._place + self._begun)
            self._ids.append(token)
            text = self._decode(self._ids)
            whole = text.rstrip("\ufffd")  # which stands for the beginning of a letter
            self._begun = max(len(whole) - self._letters, 0)
            if text == whole or len(self._ids) - self._known > MOST_PIECES:
                self._place, self._begun = self._place + max(len(text) - self._letters, 0), 0
                self._ids = self._ids[self._known :]
                self._known, self._letters = len(self._ids), len(self._decode(self._ids))
        return places


@dataclass
class RawCompletion:
    """One choice: its prompt and sampling, and what has been sampled so far."""

    prompt_ids: list[int]
    sampling: SamplingParameters
    places: TokenPlaces
    first: str
    """the text of the prompt's first token"""
    echo: str | None = None
    """the prompt's text, until it has been sent"""
    nothing: bool = False
    """no token is wanted: the one that the engine samples is thrown away"""
    text: str = ""
    tokens: int = 0
    finish_reason: str = ""
    stop_reason: str | int | None = None
    logprobs: list[list[Candidate]] = field(default_factory=list)
    prompt_logprobs: Sequence[list[Candidate]] = ()
    """Candidates for the prompt's tokens from the second on."""


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
    echoed = sum(len(raw.prompt_ids) for raw in choices) if body.echo else 0
    done = await in_thread_if_long(echoed, choice_objects, body, choices)
    return JSONResponse({**head, "choices": done, "usage": usage(choices)})


def check_prompt_candidates(body: CompletionRequest, tokens: int) -> None:
    """Raise ApiError for more log-probs of prompts than one response may hold. tokens: of all prompts."""
    if body.prompt_candidates is None:
        return
    count = tokens * (body.prompt_candidates + 1) * (body.n if body.echo else 1)
    if count > MOST_PROMPT_CANDIDATES:
        message = f"{count:,} log-probs of prompts, at most {MOST_PROMPT_CANDIDATES:,} are returned in one response"
        name = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        raise ApiError(400, message, code="invalid_value", param=name)


def plan(server: Server, body: CompletionRequest, prompt: str | list[int], number: int) -> list[RawCompletion]:
    """Return the choices of one prompt; number: its index among the prompts. The first choice alone has the log-probs
    of the prompt, since those of the others are the same; in a stream each has them. Raises ApiError."""
    tokenizer = server.prompts.chat.tokenizer
    decode = partial(tokenizer.decode, skip_special_tokens=body.skip_special_tokens, clean_up_tokenization_spaces=False)
    ids = prompt
    if isinstance(ids, str):
        server.check_size(len(ids), "prompt")
        ids = server.prompts.chat.encode(ids)
    server.check_tokens(ids, "prompt")
    sampling = replace(
        server.sampling(body, {"max_tokens": body.max_tokens}, ids, "prompt"), logprobs=body.logprobs,
        skip_special_tokens=body.skip_special_tokens,
    )  # fmt: skip
    nothing, echo = sampling.max_tokens == 0, None
    if nothing:
        sampling = replace(sampling, max_tokens=1)  # engines sample at least one
    if body.echo:
        text = decode(ids)
        # the beginning of a letter is sent with the completion that ends it
        echo = text if nothing or isinstance(prompt, str) else text.rstrip("\ufffd")
    choices = []
    for index in range(body.n):
        seed = None if body.seed is None else body.seed + number * body.n + index
        scored = body.prompt_candidates if index == 0 or body.stream else None
        places = TokenPlaces(decode, () if body.echo else ids[-2 * MOST_PIECES :])
        asked = replace(sampling, seed=seed, prompt_logprobs=scored)
        choices.append(RawCompletion(ids, asked, places, tokenizer.decode(ids[:1]), echo, nothing))
    return choices


async def sample(server: Server, raw: RawCompletion) -> AsyncGenerator[tuple[str, list[list[Candidate]]], None]:
    """Sample one choice; yields new text and its log-probs. Raises ApiError."""
    try:
        with engine_errors():
            async with contextlib.aclosing(server.engine.generate(raw.prompt_ids, raw.sampling)) as deltas:
                async for delta in deltas:
                    raw.prompt_logprobs = raw.prompt_logprobs or delta.prompt_logprobs
                    if raw.nothing:
                        raw.finish_reason = "length"
                        continue
                    raw.text += delta.text
                    raw.tokens += len(delta.token_ids)
                    raw.logprobs += delta.logprobs
                    raw.finish_reason = delta.finish_reason or raw.finish_reason
                    raw.stop_reason = delta.stop_reason
                    yield delta.text, delta.logprobs
    finally:
        server.metrics.count_tokens(0, 0, raw.tokens)


def stream(
    server: Server, body: CompletionRequest, choices: list[RawCompletion], head: Json
) -> AsyncGenerator[bytes, None]:
    """Return the server-sent events of all choices."""

    if body.wants_usage:
        head = {**head, "usage": None}  # only in the last event

    async def feed(index: int, raw: RawCompletion) -> AsyncGenerator[list[Json], None]:
        async def event(text: str, ranked: list[list[Candidate]], *, last: bool) -> list[Json]:
            long = len(raw.prompt_ids) if raw.echo is not None else 0
            choice = await in_thread_if_long(long, choice_object, index, raw, text, ranked, last=last)
            return [{**head, "choices": [choice]}]

        async with contextlib.aclosing(sample(server, raw)) as parts:
            async for text, ranked in parts:
                if text or ranked or raw.echo is not None:
                    yield await event(text, ranked, last=False)
        yield await event("", [], last=True)

    def last() -> list[Json]:
        return [{**head, "choices": [], "usage": usage(choices)}] if body.wants_usage else []

    return merge([feed(index, raw) for index, raw in enumerate(choices)], server.settings.ping_s, last=last)


def choice_objects(body: CompletionRequest, choices: Sequence[RawCompletion]) -> list[Json]:
    """Return the objects of all choices of a response that is not streamed."""
    done = []
    for index, raw in enumerate(choices):
        raw.prompt_logprobs = choices[index - index % body.n].prompt_logprobs
        choice = choice_object(index, raw, raw.text, raw.logprobs)
        if (most := body.prompt_logprobs) is not None:
            choice["prompt_logprobs"] = prompt_logprobs([ranked[: most + 1] for ranked in raw.prompt_logprobs])
        done.append(choice)
    return done


def choice_object(
    index: int, raw: RawCompletion, text: str, ranked: list[list[Candidate]], *, last: bool = True
) -> Json:
    """Return the object of one choice, or of a part of it; the first part has the prompt that is to be returned."""
    echo, raw.echo = raw.echo, None
    return {
        "index": index, "text": (echo or "") + text, "finish_reason": raw.finish_reason if last else None,
        "stop_reason": raw.stop_reason if last else None,
        "logprobs": logprobs(raw, ranked, echo is not None) if raw.sampling.logprobs is not None else None,
    }  # fmt: skip


def logprobs(raw: RawCompletion, sampled: list[list[Candidate]], echo: bool) -> Json:
    """Return log-probs in the form of this endpoint: parallel lists. echo: those of the prompt come first, null for
    its first token."""
    rows = [*raw.prompt_logprobs, *sampled] if echo else sampled
    most = raw.sampling.logprobs
    assert most is not None
    # the token itself, which clients rely on, and the best; of equal texts the best
    tables = [sorted((itself, *rest[:most]), key=lambda ranked: ranked.logprob) for itself, *rest in rows]
    top = [{ranked.text: ranked.logprob for ranked in table} for table in tables]
    first = [raw.first] if echo else []
    return {
        "tokens": [*first, *(itself.text for itself, *_ in rows)],
        "token_logprobs": [*([None] * echo), *(itself.logprob for itself, *_ in rows)],
        "top_logprobs": [*([None] * echo), *(dict(reversed(table.items())) for table in top)],
        "text_offset": raw.places.add([*raw.prompt_ids[:echo], *(itself.token_id for itself, *_ in rows)]),
    }


def prompt_logprobs(tokens: Sequence[list[Candidate]]) -> list[dict[int, Json] | None]:
    """Return [prompt_tokens] log-probs in the form of vLLM's server: by token id, None for the first token."""
    objects = ([(token.token_id, {"logprob": token.logprob, "decoded_token": token.text}) for token in ranked]
               for ranked in tokens)  # fmt: skip
    return [None, *map(dict, objects)]


def usage(choices: Sequence[RawCompletion]) -> Json:
    """Return the token counts of a request; a prompt counts once for each of its choices."""
    prompt, sampled = sum(len(raw.prompt_ids) for raw in choices), sum(raw.tokens for raw in choices)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
