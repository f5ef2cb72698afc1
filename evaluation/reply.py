"""Chat completions as servers send them, and what they say: thoughts, answer, calls, token counts.

Thoughts stand in `reasoning`, in `reasoning_content`, in chunks of the content, or between tags in it, by the server.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from serve.response.reasoning import Splitter
from verify.calls import Call, read_call
from verify.format import tags_of


class Lenient(BaseModel):
    """Base: fields that are not known are left out, numbers and texts are not converted."""

    model_config = ConfigDict(extra="ignore", strict=True)


class ToolCall(Lenient):
    """A call."""

    function: dict[str, Any]


class Message(Lenient):
    """The assistant's turn."""

    content: str | list[dict[str, Any]] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class Choice(Lenient):
    """One completion."""

    message: Message
    finish_reason: str | None = None
    reasoning_language: dict[str, Any] | None = None
    """what our own server measured"""


class Details(Lenient):
    """Of the completion's tokens."""

    reasoning_tokens: int | None = None


class Usage(Lenient):
    """Token counts."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    completion_tokens_details: Details | None = None


class Reply(Lenient):
    """A response of /chat/completions."""

    choices: list[Choice] = Field(min_length=1)
    usage: Usage | None = None
    model: str = ""


class Said(NamedTuple):
    """What a response says."""

    thoughts: str
    answer: str
    calls: list[Call] | None
    """of the API's tools; None where one is not understood"""


def said(message: Message) -> Said:
    """Thoughts, answer and calls of a message, wherever the server puts them."""
    content = message.content
    thoughts = message.reasoning or message.reasoning_content or ""
    if isinstance(content, list):
        answer = "".join(_text(part) for part in content if part.get("type") != "thinking")
        thoughts = thoughts or "".join(_text(part) for part in content if part.get("type") == "thinking")
    elif thoughts:
        answer = content or ""
    else:
        thoughts, answer = split(content or "")
    found = [read_call({**call.function}) for call in message.tool_calls or []]
    calls = None if None in found else [call for call in found if call is not None]
    return Said(thoughts, answer, calls)


def split(content: str) -> tuple[str, str]:
    """Thoughts and answer of a text with tags; an opening tag may be missing, where the prompt ended in it."""
    tags = tags_of(content.lstrip())
    opened = not content.lstrip().startswith(tags.open)
    tags = tags_of(content, opened=True) if opened else tags
    if opened and tags.close not in content:
        return "", content
    splitter = Splitter(tags, opened=opened)
    pieces = [*splitter.feed(content), *splitter.end()]
    thoughts = "".join(piece.text for piece in pieces if piece.thinking)
    return thoughts.strip(), "".join(piece.text for piece in pieces if not piece.thinking).strip()


def _text(part: dict[str, Any]) -> str:
    """Of a chunk: {"text": ...}, or {"thinking": text or chunks}."""
    inner = part.get("thinking", part.get("text", ""))
    if isinstance(inner, list):
        return "".join(_text(one) for one in inner if isinstance(one, dict))
    return inner if isinstance(inner, str) else ""
