"""Parses chat completions of servers into thoughts, answer, calls and token counts.

Depending on the server, thoughts are in `reasoning`, `reasoning_content`, chunks of the content, or between tags in it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from serve.reasoning import Splitter
from verify.calls import Call, read_call
from verify.format import tags_of


class Lenient(BaseModel):
    """Base class: unknown fields are ignored, numbers and texts are not converted."""

    model_config = ConfigDict(extra="ignore", strict=True)


class ToolCall(Lenient):
    """A tool call."""

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
    """Details of the completion's token count."""

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
    """The contents of a response."""

    thoughts: str
    answer: str
    calls: list[Call] | None
    """calls of the API's tools; None if one of them cannot be parsed"""


def said(message: Message) -> Said:
    """Return thoughts, answer and calls of a message, wherever the server puts them."""
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
    """Return thoughts and answer of a text with tags; the opening tag may be missing if the prompt ended with it."""
    tags = tags_of(content.lstrip())
    opened = not content.lstrip().startswith(tags.open)
    tags = tags_of(content, opened=True) if opened else tags
    if opened and tags.close not in content:
        return "", content
    splitter = Splitter(tags, opened=opened)
    chunks = [*splitter.feed(content), *splitter.end()]
    thoughts = "".join(chunk.text for chunk in chunks if chunk.thinking)
    return thoughts.strip(), "".join(chunk.text for chunk in chunks if not chunk.thinking).strip()


def _text(part: dict[str, Any]) -> str:
    """Return the text of a chunk: {"text": ...}, or {"thinking": text or chunks}."""
    inner = part.get("thinking", part.get("text", ""))
    if isinstance(inner, list):
        return "".join(_text(one) for one in inner if isinstance(one, dict))
    return inner if isinstance(inner, str) else ""
