"""The request body of the Responses API, and its conversion into a chat request."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from serve.api import parameters
from serve.api.base import Body, Items, Parameters
from serve.api.errors import explain_first
from serve.api.parameters import of
from serve.api.schemas import (
    MOST_MESSAGES,
    MOST_TOOLS,
    ChatRequest,
    Content,
    Effort,
    Enforcement,
    Labels,
    SamplingBody,
)  # fmt: skip
from serve.response.tools import Name, Schema


class MessageItem(Body):
    """A turn of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class CallItem(Body):
    """A tool call of an earlier turn."""

    type: Literal["function_call"]
    call_id: str
    name: Name
    arguments: str


class ResultItem(Body):
    """The result of a tool call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content


class ReasoningItem(Body):
    """Thoughts of an earlier turn; they are not read."""

    type: Literal["reasoning"]


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


class Reasoning(Parameters):
    """How much the model is to think."""

    refused: ClassVar = of("summary generate_summary", "the thoughts are told themselves, not summed up", "auto")
    effort: Effort | None = None


class TextFormat(Body):
    """The form that the answer must have."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    json_schema: Schema | None = Field(None, alias="schema")


class TextSettings(Parameters):
    """Settings of the answer's text."""

    refused: ClassVar = of("verbosity", "say in a message how long the answer is to be", "medium")
    format: TextFormat = TextFormat()


class ResponsesRequest(SamplingBody, Labels):
    """The body of POST /v1/responses."""

    refused: ClassVar = parameters.RESPONSES
    model: str = ""
    """name of the model, as GET /v1/models tells it"""
    input: Input
    """the conversation: a text, or items"""
    instructions: str | None = None
    """a system message before it"""
    stream: bool = False
    """the response comes in events"""
    max_output_tokens: int | None = Field(None, ge=1)
    """as max_tokens of chats"""
    tools: Annotated[Items[FunctionTool], Field(max_length=MOST_TOOLS)] = []
    """functions that the model may call"""
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    """whether it may or must call one"""
    parallel_tool_calls: bool = True
    """false: one call at most"""
    text: TextSettings | None = None
    """format: the answer, not the thoughts, is held to it by the engine"""
    reasoning: Reasoning | None = None
    """effort: how much to think, as reasoning_effort of chats"""
    include: list[Literal["reasoning.encrypted_content"]] = []
    """reasoning.encrypted_content is no mistake, but thoughts are told in the clear, and those of earlier turns not
    read; nothing else can be included"""
    include_reasoning: bool = True
    """false: the thoughts are not told"""
    reasoning_language: str | None = None
    """as in chats, like the next two"""
    reasoning_language_enforcement: Enforcement | None = None
    """as in chats"""
    thinking_token_budget: int | None = Field(None, ge=0)
    """as in chats"""

    def as_chat(self) -> ChatRequest:
        """Return the equivalent chat request. Raises ApiError."""
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
            **self.model_dump(include=set(SamplingBody.model_fields), exclude_unset=True),
            "model": self.model, "messages": messages, "max_tokens": self.max_output_tokens,
            "parallel_tool_calls": self.parallel_tool_calls, "include_reasoning": self.include_reasoning,
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
            found = explain_first(error.errors())
            if found.param is not None and found.param.startswith("messages"):
                found.param = found.param.replace("messages", "input", 1)
            raise found from error


CHAT = TypeAdapter(ChatRequest)


def add_item(messages: list[dict[str, Any]], item: CallItem | ResultItem | MessageItem) -> None:
    """Add an item to the turns of a chat; calls are added to the assistant's turn before them."""
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
    """Return a tool's function in the form of a chat request."""
    return {"name": tool.name, "description": tool.description or "", "parameters": tool.parameters or {}}
