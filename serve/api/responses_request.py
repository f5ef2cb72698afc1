"""What a request of the Responses API may hold, and the chat that it is.

What this does not do: answer it (responses.py). Who calls this: responses.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from serve.api.base import Body, Items, refuse_fields
from serve.api.errors import ApiError
from serve.api.schemas import MOST_MESSAGES, MOST_PARTS, MOST_TOOLS, ChatRequest, Effort, Enforcement, Part
from serve.response.tools import Name, Schema

LACKING = ("previous_response_id", "conversation", "background", "prompt", "max_tool_calls")
"""they need a server that remembers"""


class MessageItem(Body):
    """A turn."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[Items[Part], Field(max_length=MOST_PARTS)]


class CallItem(Body):
    """A tool call of an earlier turn."""

    type: Literal["function_call"]
    call_id: str
    name: Name
    arguments: str


class ResultItem(Body):
    """What a tool gave back."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Annotated[Items[Part], Field(max_length=MOST_PARTS)]


class ReasoningItem(Body):
    """Thoughts of an earlier turn; they are not read."""

    type: Literal["reasoning"]


class FunctionTool(Body):
    """A tool that may be called."""

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class NamedTool(Body):
    """The one tool that must be called."""

    type: Literal["function"]
    name: Name


class Reasoning(Body):
    """How much to think."""

    effort: Effort | None = None


class TextFormat(Body):
    """What the answer must look like."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    json_schema: Schema | None = Field(None, alias="schema")


class TextSettings(Body):
    """Of the answer."""

    format: TextFormat = TextFormat()


class ResponsesRequest(Body):
    """The body of POST /v1/responses."""

    model: str = ""
    input: str | Annotated[
        Items[CallItem | ResultItem | ReasoningItem | MessageItem], Field(min_length=1, max_length=MOST_MESSAGES)
    ]
    instructions: str | None = None
    stream: bool = False
    store: bool = False
    """nothing is stored, whatever this says"""
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    tools: Annotated[Items[FunctionTool], Field(max_length=MOST_TOOLS)] = []
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    text: TextSettings | None = None
    reasoning: Reasoning | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    reasoning_language: str | None = None
    """as in chats, like the next two"""
    reasoning_language_enforcement: Enforcement | None = None
    thinking_token_budget: int | None = Field(None, ge=0)

    @model_validator(mode="before")
    @classmethod
    def refuse(cls, body: Any) -> Any:
        """Raises ValueError for what would need a memory."""
        refuse_fields(body, LACKING, "supported: this server remembers nothing, send the whole input")
        return body

    def as_chat(self) -> ChatRequest:
        """The same as a chat. Raises ApiError."""
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            for item in self.input:
                if not isinstance(item, ReasoningItem):
                    add_item(messages, item)
        chat: dict[str, Any] = {
            "model": self.model, "messages": messages, "max_tokens": self.max_output_tokens,
            "temperature": self.temperature, "top_p": self.top_p, "parallel_tool_calls": self.parallel_tool_calls,
            "tools": [{"type": "function", "function": as_function(tool)} for tool in self.tools],
            "tool_choice": self.tool_choice, "reasoning_language": self.reasoning_language,
            "reasoning_language_enforcement": self.reasoning_language_enforcement,
            "thinking_token_budget": self.thinking_token_budget,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
        }  # fmt: skip
        if isinstance(self.tool_choice, NamedTool):
            chat["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice.name}}
        if self.text and self.text.format.type != "text":
            form = self.text.format
            schema = {"json_schema": {"schema": form.json_schema}} if form.json_schema is not None else {}
            chat["response_format"] = {"type": form.type, **schema}
        try:
            return CHAT.validate_python(chat)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"]))
            text = first["msg"].removeprefix("Value error, ")
            raise ApiError(400, f"{field}: {text}" if field else text, code="invalid_value") from error


CHAT = TypeAdapter(ChatRequest)


def add_item(messages: list[dict[str, Any]], item: CallItem | ResultItem | MessageItem) -> None:
    """Add an item to the turns of a chat; calls belong to the assistant's turn before them."""
    if isinstance(item, CallItem):
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant"})
        call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
        messages[-1].setdefault("tool_calls", []).append(call)
        return
    content = item.output if isinstance(item, ResultItem) else item.content
    parts = content if isinstance(content, str) else [part.model_dump() for part in content]
    if isinstance(item, ResultItem):
        messages.append({"role": "tool", "content": parts, "tool_call_id": item.call_id})
    else:
        messages.append({"role": item.role, "content": parts})


def as_function(tool: FunctionTool) -> dict[str, Any]:
    """A tool's function as in a chat."""
    return {"name": tool.name, "description": tool.description or "", "parameters": tool.parameters or {}}
