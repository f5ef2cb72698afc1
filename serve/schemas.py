"""What a chat request may hold: OpenAI's fields, the ones that other servers taught clients to send, and ours.

Unknown fields are ignored, as clients send many; refused are fields that would let a client replace what the server
decides (templates, raw prompts), and what it cannot do. Numbers and lists are bounded, texts by the size of the body.
What this does not do: responses (replies.py). Who calls this: chat.py.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from serve.language import read_tag
from serve.tools import Constraint, Name, Schema, Tool, call_text, constrain_calls

MOST_CHOICES = 16
MOST_STOPS = 16
MOST_MESSAGES = 1024
MOST_TOOLS = 128
REFUSED = (
    "chat_template", "chat_template_kwargs", "documents", "add_generation_prompt", "continue_final_message", "echo",
    "prompt_embeds", "add_special_tokens",
)  # fmt: skip
"""a client's template or raw prompt would undo the system prompt"""
LACKING = (
    "functions", "function_call", "logit_bias", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "structured_outputs",
)
"""without them the response would not be what the client asked for"""
Enforcement = Literal["prompt", "prefill", "retry", "strict"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ReasoningFormat = Literal["both", "openai", "deepseek", "mistral", "inline", "hidden"]


class Body(BaseModel):
    """Base of all bodies: NaN and infinities are refused."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, use_attribute_docstrings=True)


def whole(text: str) -> str:
    """Raises ValueError for text that no UTF-8 can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("holds half of a surrogate pair, which is no character") from error
    return text


Text = Annotated[str, AfterValidator(whole)]


class TextPart(Body):
    """A piece of a message, as text."""

    type: Literal["text", "input_text", "output_text"]
    text: Text


class ThinkingPart(Body):
    """Thoughts in a message, as Mistral's API has them."""

    type: Literal["thinking"]
    thinking: Text | list[TextPart]


Part = Annotated[TextPart | ThinkingPart, Field(discriminator="type")]


class CalledFunction(Body):
    """Of a tool call in an earlier turn."""

    name: Name
    arguments: Text = "{}"
    """JSON"""

    @field_validator("arguments")
    @classmethod
    def read_arguments(cls, value: str) -> str:
        """Raises ValueError for what is no JSON object."""
        if not isinstance(json.loads(value), dict):
            raise ValueError("must be a JSON object, as text")
        return value


class ToolCall(Body):
    """A tool call of an earlier turn."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[Part] | None = None
    """thoughts of earlier turns, as parts of this or in fields of their own, are not read"""
    tool_calls: Annotated[list[ToolCall], Field(max_length=MOST_TOOLS)] | None = None
    """of the assistant's turns; a turn of role "tool" answers them in their order"""

    @model_validator(mode="after")
    def need_content(self) -> Message:
        """Raises ValueError for a turn of a tool that says nothing."""
        if self.role == "tool" and self.content is None:
            raise ValueError("content of a turn with role tool is missing")
        return self

    @property
    def text(self) -> str:
        """What it says, without its thoughts; tool calls as the model writes them."""
        parts = [self.content or ""] if self.content is None or isinstance(self.content, str) else [
            part.text for part in self.content if isinstance(part, TextPart)
        ]  # fmt: skip
        calls = [call_text(call.function.name, call.function.arguments) for call in self.tool_calls or []]
        return "\n".join(filter(None, ["".join(parts), *calls]))


class StreamOptions(Body):
    """Of a streamed response."""

    include_usage: bool = False


class NamedFunction(Body):
    """The one function that must be called."""

    name: Name


class NamedTool(Body):
    """The one tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class NamedSchema(Body):
    """A JSON schema with a name."""

    name: str = ""
    json_schema: Schema = Field(alias="schema")


class ResponseFormat(Body):
    """What the answer must look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def need_schema(self) -> ResponseFormat:
        """Raises ValueError where the schema is missing."""
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("json_schema is missing")
        return self

    @property
    def constraint(self) -> Constraint | None:
        """For the engine; None for any text."""
        if self.json_schema is not None and self.type == "json_schema":
            return Constraint("json", json.dumps(self.json_schema.json_schema))
        return Constraint("json_object", "") if self.type == "json_object" else None


Stop = Annotated[Text, Field(min_length=1, max_length=200)]


class ChatRequest(Body):
    """The body of POST /v1/chat/completions."""

    model: Text = ""
    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)]
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=1_000_000)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    """stronger than max_tokens, its older name"""
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    reasoning_language: str | None = None
    """auto, off, or a BCP 47 code: the language of the thoughts and the answer"""
    reasoning_language_enforcement: Enforcement | None = None
    """prompt: ask for it; prefill: begin the thoughts in it; retry: look at the first words, and begin again with
    prefill where they are in another; strict: as retry, and an error instead of a response in another language"""
    reasoning_format: ReasoningFormat | None = None
    """where thoughts stand: both `reasoning` and `reasoning_content`; only one of them (openai, deepseek); a list of
    chunks (mistral); in the text, between tags (inline); nowhere (hidden)"""
    thinking_token_budget: int | None = Field(None, ge=0)
    """tokens after which the thoughts are ended with a phrase"""
    reasoning_effort: Effort | None = None
    """a budget by word, where no number is given"""
    response_format: ResponseFormat | None = None
    """the answer, not the thoughts, is held to it by the engine"""
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] = []
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True

    @model_validator(mode="before")
    @classmethod
    def refuse(cls, body: Any) -> Any:
        """Raises ValueError for fields that would replace what the server decides, and for what it cannot do."""
        if isinstance(body, dict):
            given = {name for name, value in body.items() if value not in (None, False, [], {})}
            for name in REFUSED:
                if name in given:
                    raise ValueError(f"{name} is not accepted: the server renders the prompt itself")
            for name in LACKING:
                if name in given:
                    raise ValueError(f"{name} is not supported by this server")
            # null is what clients send for a list that they do not use
            body = {name: value for name, value in body.items() if name != "tools" or value is not None}
        return body

    @model_validator(mode="after")
    def match_tools(self) -> ChatRequest:
        """Raises ValueError where a tool must be called that is not there, or the answer must be two things."""
        if isinstance(self.tool_choice, NamedTool) and not self.offered:
            raise ValueError(f"tool_choice: there is no tool {self.tool_choice.function.name}")
        if self.tool_choice == "required" and not self.tools:
            raise ValueError("tool_choice: required, but there are no tools")
        if self.offered and self.response_format is not None and self.response_format.constraint is not None:
            raise ValueError("response_format cannot stand beside tools that may be called")
        return self

    @field_validator("reasoning_language")
    @classmethod
    def read_language(cls, value: str | None) -> str | None:
        """Raises ValueError for a language that is none."""
        return None if value is None else read_tag(value)

    @property
    def most_tokens(self) -> int | None:
        """How long a completion may get; None: as long as the model's context allows."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def characters(self) -> int:
        """Of all messages."""
        return sum(len(message.text) for message in self.messages)

    @property
    def stops(self) -> list[str]:
        """Texts at which a completion ends."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    @property
    def offered(self) -> list[Tool]:
        """The tools that may be called."""
        if self.tool_choice == "none":
            return []
        if isinstance(self.tool_choice, NamedTool):
            return [tool for tool in self.tools if tool.function.name == self.tool_choice.function.name]
        return self.tools

    @property
    def constraint(self) -> Constraint | None:
        """What the engine must hold the answer to."""
        if self.offered:
            return constrain_calls(self.offered, must=self.tool_choice != "auto", parallel=self.parallel_tool_calls)
        return self.response_format.constraint if self.response_format is not None else None
