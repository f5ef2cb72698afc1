"""The messages of a conversation, as clients send them: texts, calls of tools, reasoning of earlier turns."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator, model_validator
from pydantic_core import PydanticCustomError

from serve.parameters import Items, RequestPart, needs
from serve.tools import Name
from shared.json_reader import parse_json

MOST_TOOLS = 128
MOST_PARTS = 1024


class TextPart(RequestPart):
    """A text part of a message."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class ThinkingPart(RequestPart):
    """Reasoning in a message, in the form of Mistral's API."""

    type: Literal["thinking"]
    thinking: str | Items[TextPart]


def read_part(value: Any) -> Any:
    """Return the part. Raises PydanticCustomError if it holds no text."""
    if not isinstance(value, dict):
        raise PydanticCustomError("part", "a part of a content is an object: give type and text")
    kind = value.get("type")
    if kind in ("text", "input_text", "output_text", "thinking"):
        return value
    if not isinstance(kind, str):
        raise PydanticCustomError("part", 'type is missing: give "type": "text"')
    message = "this model reads text only: leave out the part of type {kind}"
    raise PydanticCustomError("part", message, {"kind": kind[:40]})


# names of alternatives have a hyphen, which keeps them out of the names of fields in errors
Part = Annotated[
    Annotated[TextPart, Tag("-text")] | Annotated[ThinkingPart, Tag("-thinking")],
    Discriminator(lambda value: "-thinking" if value["type"] == "thinking" else "-text"),
    BeforeValidator(read_part),
]
Content = Annotated[
    Annotated[str, Tag("-text")] | Annotated[Items[Part], Field(max_length=MOST_PARTS), Tag("-parts")],
    Discriminator(lambda content: "-parts" if isinstance(content, list) else "-text"),
]


class CalledFunction(RequestPart):
    """The function of a tool call in an earlier turn."""

    name: Name
    arguments: str = "{}"
    """JSON"""

    @field_validator("arguments", mode="before")
    @classmethod
    def fill_arguments(cls, value: Any) -> Any:
        """Return {} for a text of blanks, which servers stream for calls without arguments."""
        return "{}" if isinstance(value, str) and not value.strip() else value

    @field_validator("arguments")
    @classmethod
    def read_arguments(cls, value: str) -> str:
        """Raises ValueError if the arguments are not a JSON object."""
        if not isinstance(parse_json(value), dict):
            raise ValueError("must be a JSON object, as text")
        return value


class ToolCall(RequestPart):
    """A tool call of an earlier turn."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(RequestPart):
    """One turn of a conversation."""

    model_config = needs("role", "tool", "content")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    reasoning: Any = None
    """Reasoning of an earlier turn, here, in `reasoning_content`, or as parts of the content. Only models that were
    trained on whole histories read it."""
    reasoning_content: Any = None
    tool_calls: Annotated[Items[ToolCall], Field(max_length=MOST_TOOLS)] | None = None
    """Calls of the assistant's turn."""
    tool_call_id: str = ""
    """In a turn of role "tool": the call that it answers; without it the turns answer the calls in their order."""

    @model_validator(mode="after")
    def need_content(self) -> ChatMessage:
        """Raises ValueError for a turn of a tool without content."""
        if self.role == "tool" and self.content is None:
            raise ValueError("content of a turn with role tool is missing")
        return self

    @property
    def text(self) -> str:
        """The text of the turn, without its reasoning and calls."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text for part in self.content if isinstance(part, TextPart))

    @property
    def thoughts(self) -> str:
        """The reasoning of the turn, "" where the client does not send it."""
        for text in (self.reasoning, self.reasoning_content):
            if text and isinstance(text, str):
                return text
        parts = self.content if isinstance(self.content, list) else []
        thoughts = [part.thinking for part in parts if isinstance(part, ThinkingPart)]
        return "".join(
            thinking if isinstance(thinking, str) else "".join(text.text for text in thinking) for thinking in thoughts
        )
