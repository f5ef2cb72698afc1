"""The items of the input of /v1/responses, and the turns of a chat that they are."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from serve.messages import Content
from serve.parameters import Items, RequestPart
from serve.schemas import MOST_MESSAGES
from serve.tools import Name


class MessageItem(RequestPart):
    """A turn of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class CallItem(RequestPart):
    """A tool call of an earlier turn."""

    type: Literal["function_call"]
    call_id: str
    name: Name
    arguments: str = "{}"


class ResultItem(RequestPart):
    """The result of a tool call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content


class ReasoningItem(RequestPart):
    """Reasoning of an earlier turn, for models that were trained on whole histories."""

    type: Literal["reasoning"]
    content: Items[dict[str, Any]] | None = None

    @property
    def text(self) -> str:
        """Its text; "" where it has none that can be read."""
        parts = [part.get("text") for part in self.content or ()]
        return "".join(part for part in parts if isinstance(part, str))


KINDS = ("message", "function_call", "function_call_output", "reasoning")


def kind_of(item: Any) -> str:
    """Return the tag of an item's type; a message may omit its type."""
    return f"-{item.get('type') or 'message'}"


def read_item(item: Any) -> Any:
    """Return the item. Raises PydanticCustomError if its type is not supported."""
    if not isinstance(item, dict):
        raise PydanticCustomError("item", "an item of the input is an object")
    if kind_of(item)[1:] not in KINDS:
        message = "items of type {kind} are not supported: send " + ", ".join(KINDS)
        raise PydanticCustomError("item", message, {"kind": str(item["type"])[:40]})
    return item


Item = Annotated[
    Annotated[MessageItem, Tag("-message")] | Annotated[CallItem, Tag("-function_call")]
    | Annotated[ResultItem, Tag("-function_call_output")] | Annotated[ReasoningItem, Tag("-reasoning")],
    Discriminator(kind_of), BeforeValidator(read_item),
]  # fmt: skip
Input = Annotated[
    Annotated[str, Tag("-text")] | Annotated[Items[Item], Field(min_length=1, max_length=MOST_MESSAGES), Tag("-items")],
    Discriminator(lambda given: "-items" if isinstance(given, list) else "-text"),
]


def add_item(messages: list[dict[str, Any]], item: Item) -> None:
    """Add an item to the turns of a chat; reasoning begins a turn of the assistant, and its text and calls are added to
    it."""
    begun = bool(messages) and messages[-1]["role"] == "assistant"
    if isinstance(item, ReasoningItem):
        messages.append({"role": "assistant", "reasoning": item.text})
        return
    if isinstance(item, CallItem):
        if not begun:
            messages.append({"role": "assistant"})
        call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
        messages[-1].setdefault("tool_calls", []).append(call)
        return
    content = item.output if isinstance(item, ResultItem) else item.content
    parts = content if isinstance(content, str) else [part.model_dump() for part in content]
    if isinstance(item, ResultItem):
        messages.append({"role": "tool", "content": parts, "tool_call_id": item.call_id})
    elif begun and item.role == "assistant" and messages[-1].keys() == {"role", "reasoning"}:
        messages[-1]["content"] = parts
    else:
        messages.append({"role": item.role, "content": parts})
