"""The HTTP client of an evaluation: requests to any OpenAI-compatible server, with retries while it is busy.

408, 425, 429, 500, 502, 503, 504, no connection, no response in time   retried, after the time in Retry-After
any other status                                                        `RequestRefused`: a retry would not help

Chat completions are parsed into reasoning, answer, calls and token counts. Depending on the server, reasoning is in
`reasoning`, `reasoning_content`, chunks of the content, or between tags in it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Annotated, Any, NamedTuple

import httpx
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from evaluation.settings import KEY_VARIABLE, EvaluationSettings, read_key
from serve.reasoning import Splitter
from shared.chat_endpoint import AGAIN, FAILURES, ApiEndpoint, HttpStatus, explain_error, read_count
from shared.errors import ConfigError
from shared.json_reader import parse_json
from verify.format import tags_of
from verify.verifiers.calls import FunctionCall, read_call

START_S = 30.0
"""deadline of requests for models and version"""
MAX_REPLY_BYTES = 16 << 20
FIRST_WAIT_S, MOST_WAIT_S = 1.0, 120.0


class RequestRefused(Exception):
    """Raised when the server refuses a request, so that a retry would not help."""

    def __init__(self, status: int, message: str, code: str):
        super().__init__(f"status {status}: {message}")
        self.status, self.message, self.code = status, message, code


class NoResponse(Exception):
    """Raised when there was no usable response after all tries."""

    def __init__(self, reason: str, tries: int):
        super().__init__(reason)
        self.tries = tries


class TimedCompletion(NamedTuple):
    """A response, with the number of tries and the latency."""

    reply: ChatCompletion
    tries: int
    latency_s: float
    """seconds of the last try"""
    left_out: tuple[str, ...]
    """parameters that were not sent"""


class EvaluationClient(ApiEndpoint):
    """Client of one server."""

    def __init__(self, settings: EvaluationSettings):
        self.tries, self._key = settings.tries, read_key()
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        super().__init__(settings.url, settings.model, headers, settings.deadline_s, settings.concurrency)
        self.left_out.update(settings.omit)

    async def models(self) -> list[dict[str, Any]]:
        """Return the server's models; [] without a list. Raises ConfigError without an answer, or a refused key."""
        try:
            async with asyncio.timeout(START_S):
                data = await self.request("GET", f"{self.url}/models", most_bytes=MAX_REPLY_BYTES)
            return [one for one in parse_json(data)["data"] if isinstance(one["id"], str)]
        except (TimeoutError, httpx.HTTPError) as error:
            raise ConfigError(
                f"url = {self.url}: nobody answers ({type(error).__name__}): start the server, or give its address"
            ) from None
        except (ValueError, LookupError, TypeError) as error:
            if isinstance(error, HttpStatus) and error.code in (401, 403):
                raise ConfigError(
                    f"url = {self.url}: status {error.code}: set {KEY_VARIABLE} to a key of this server"
                ) from None
            return []

    async def ask(self, body: dict[str, Any]) -> TimedCompletion:
        """Request one chat completion, with retries. Raises RequestRefused, NoResponse."""
        for number in range(1, self.tries + 1):
            began = time.monotonic()
            asked_s: float | None = None
            try:
                data, left_out = await self.complete(body, MAX_REPLY_BYTES)
                latency_s = time.monotonic() - began
                return TimedCompletion(ChatCompletion.model_validate_json(data), number, latency_s, left_out)
            except httpx.HTTPError as error:
                reason = f"{type(error).__name__}: {error}"[:300]
            except HttpStatus as error:
                message, code = explain_error(error.body, self._key)
                if error.code not in AGAIN:
                    raise RequestRefused(error.code, message, code) from None
                reason, asked_s = f"status {error.code}: {message}", retry_after_s(error.headers)
            except ValidationError as error:
                first = error.errors()[0]  # without a place where the reply is no JSON
                lacks = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
                reason = f"no chat completion: {lacks if first['loc'] else explain_error(data, self._key)[0]}"
            except ValueError as error:  # an error in its place, or it is too long
                reason = str(error)
            if number < self.tries:
                backoff = min(FIRST_WAIT_S * 2 ** (number - 1), MOST_WAIT_S) * random.uniform(0.5, 1.0)
                await asyncio.sleep(backoff if asked_s is None else min(asked_s, MOST_WAIT_S))
        raise NoResponse(reason, self.tries)


async def weights_of(server: ApiEndpoint, model: str) -> str:
    """Return the name of a served model's weights or adapter, "" if the server does not report it as ours does."""
    try:
        async with asyncio.timeout(START_S):
            reply = parse_json(await server.request("GET", f"{server.url.removesuffix('/v1')}/version"))
        weights = reply.get("adapters", {}).get(model, reply["weights"])
        return weights if isinstance(weights, str) else ""
    except (TimeoutError, AttributeError, *FAILURES):
        return ""


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that the header Retry-After asks for, as a number or a date; None without one."""
    value = headers.get("Retry-After", "").strip()
    if value.isdecimal():
        return float(value)
    try:
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return None


def _dropped(kind: type) -> BeforeValidator:
    """Drop a field that is for information, where it is not of this kind: a response is worth more."""
    return BeforeValidator(lambda value: value if isinstance(value, kind) else None)


def _reasoning(value: Any) -> str | None:
    """Return reasoning as text: some servers send chunks of it, or an object."""
    chunks = value if isinstance(value, list) else [value]
    texts = [one if isinstance(one, str) else _text(one) for one in chunks if isinstance(one, str | dict)]
    return "".join(texts) or None


def _chunks(value: Any) -> Any:
    if isinstance(value, list):
        return [{"type": "text", "text": one} if isinstance(one, str) else one for one in value]
    return [value] if isinstance(value, dict) else value


def _first(value: Any) -> Any:
    return value[:1] if isinstance(value, list) else value


Count = Annotated[int | None, BeforeValidator(read_count)]


class Lenient(BaseModel):
    """Base class: unknown fields are ignored, numbers and texts are not converted."""

    model_config = ConfigDict(extra="ignore", strict=True)


class CompletionToolCall(Lenient):
    """A tool call."""

    function: dict[str, Any]


class CompletionMessage(Lenient):
    """The assistant's turn."""

    content: Annotated[str | list[dict[str, Any]] | None, BeforeValidator(_chunks)] = None
    reasoning: Annotated[str | None, BeforeValidator(_reasoning)] = None
    reasoning_content: Annotated[str | None, BeforeValidator(_reasoning)] = None
    tool_calls: Annotated[list[CompletionToolCall] | None, BeforeValidator(lambda value: value or None)] = None


class CompletionChoice(Lenient):
    """One completion."""

    message: CompletionMessage
    finish_reason: Annotated[str | None, _dropped(str)] = None
    reasoning_language: Annotated[dict[str, Any] | None, _dropped(dict)] = None
    """the measurement of our own server"""


class UsageDetails(Lenient):
    """Details of the completion's token count."""

    reasoning_tokens: Count = None


class CompletionUsage(Lenient):
    """Token counts."""

    prompt_tokens: Count = None
    completion_tokens: Count = None
    completion_tokens_details: Annotated[UsageDetails | None, _dropped(dict)] = None


class ChatCompletion(Lenient):
    """A response of /chat/completions, of which the first choice is read."""

    choices: Annotated[list[CompletionChoice], BeforeValidator(_first)] = Field(min_length=1)
    usage: Annotated[CompletionUsage | None, _dropped(dict)] = None


class ParsedResponse(NamedTuple):
    """The contents of a response."""

    reasoning: str
    answer: str
    calls: list[FunctionCall] | None
    """calls of the API's tools; None if one of them cannot be parsed"""


def parse_message(message: CompletionMessage) -> ParsedResponse:
    """Return reasoning, answer and calls of a message, wherever the server puts them."""
    content = message.content
    reasoning = message.reasoning or message.reasoning_content or ""
    if isinstance(content, list):
        answer = "".join(_text(part) for part in content if part.get("type") != "thinking")
        reasoning = reasoning or "".join(_text(part) for part in content if part.get("type") == "thinking")
    elif reasoning:
        answer = content or ""
    else:
        reasoning, answer = split(content or "")
    read = [read_call({**call.function}) for call in message.tool_calls or []]
    calls = None if None in read else [call for call in read if call is not None]
    return ParsedResponse(reasoning, answer, calls)


def split(content: str) -> tuple[str, str]:
    """Return reasoning and answer of a text with tags; the opening tag may be missing if the prompt ended with it."""
    tags = tags_of(content.lstrip())
    opened = not content.lstrip().startswith(tags.open)
    tags = tags_of(content, opened=True) if opened else tags
    if opened and tags.close not in content:
        return "", content
    splitter = Splitter(tags, opened=opened)
    chunks = [*splitter.feed(content), *splitter.end()]
    reasoning = "".join(chunk.text for chunk in chunks if chunk.thinking)
    return reasoning.strip(), "".join(chunk.text for chunk in chunks if not chunk.thinking).strip()


def _text(chunk: dict[str, Any]) -> str:
    """Return the text of a chunk: {"text": ...}, or {"thinking": text or chunks}; other names are servers' own."""
    inner = next((chunk[name] for name in ("thinking", "text", "content", "summary") if chunk.get(name)), "")
    if isinstance(inner, list):
        return "".join(_text(one) for one in inner if isinstance(one, dict))
    return inner if isinstance(inner, str) else ""
