"""What a chat request may hold: OpenAI's fields, the ones that other servers taught clients to send, and ours.

Unknown fields are ignored, as clients send many; refused are fields that would let a client replace what the server
decides (templates, raw prompts), and what it cannot do. Numbers and lists are bounded, texts by the size of the body.
What this does not do: responses (replies.py). Who calls this: chat.py.
"""

from __future__ import annotations

import itertools
import json
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from serve.api.base import UNSUPPORTED, Body, Items, refuse_fields
from serve.engine import Sampling
from serve.response.language import read_tag
from serve.response.tools import Constraint, Name, Schema, Tool, constrain_calls

MOST_CHOICES = 16
MOST_STOPS = 16
MOST_MESSAGES = 1024
MOST_TOOLS = 128
MOST_PARTS = 1024
MOST_SCHEMA_LETTERS = 65_536
"""of all tools of a request"""
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


class TextPart(Body):
    """A piece of a message, as text."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class ThinkingPart(Body):
    """Thoughts in a message, as Mistral's API has them."""

    type: Literal["thinking"]
    thinking: str | Items[TextPart]


Part = Annotated[TextPart | ThinkingPart, Field(discriminator="type")]


class CalledFunction(Body):
    """Of a tool call in an earlier turn."""

    name: Name
    arguments: str = "{}"
    """JSON"""

    @field_validator("arguments")
    @classmethod
    def read_arguments(cls, value: str) -> str:
        """Raises ValueError for what is no JSON object."""
        try:
            found = json.loads(value)
        except RecursionError:
            found = None
        if not isinstance(found, dict):
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
    content: str | Annotated[Items[Part], Field(max_length=MOST_PARTS)] | None = None
    """thoughts of earlier turns, as parts of this or in fields of their own, are not read"""
    tool_calls: Annotated[Items[ToolCall], Field(max_length=MOST_TOOLS)] | None = None
    """of the assistant's turns"""
    tool_call_id: str = ""
    """of a turn of role "tool": the call that it answers; without it the turns answer the calls in their order"""

    @model_validator(mode="after")
    def need_content(self) -> Message:
        """Raises ValueError for a turn of a tool that says nothing."""
        if self.role == "tool" and self.content is None:
            raise ValueError("content of a turn with role tool is missing")
        return self

    @property
    def text(self) -> str:
        """What it says, without its thoughts and calls."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text for part in self.content if isinstance(part, TextPart))


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
            return Constraint("json", json.dumps(self.json_schema.json_schema, ensure_ascii=False))
        return Constraint("json_object", "") if self.type == "json_object" else None


Stop = Annotated[str, Field(min_length=1, max_length=200)]


class SamplingBody(Body):
    """How completions are to be sampled; where a request says nothing, the server's settings do."""

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=1_000_000)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: Stop | Annotated[Items[Stop], Field(max_length=MOST_STOPS)] | None = None

    @property
    def stops(self) -> list[str]:
        """Texts at which a completion ends."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    def sampling(self, temperature: float, top_p: float, max_tokens: int, logprobs: int | None) -> Sampling:
        """For the engine. temperature, top_p: where the request names none."""
        return Sampling(
            max_tokens=max_tokens,
            temperature=temperature if self.temperature is None else self.temperature,
            top_p=top_p if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            min_p=self.min_p or 0.0,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=self.seed,
            stop=self.stops,
            logprobs=logprobs,
        )


class ChatRequest(SamplingBody):
    """The body of POST /v1/chat/completions."""

    model: str = ""
    messages: Annotated[Items[Message], Field(min_length=1, max_length=MOST_MESSAGES)]
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1, le=MOST_CHOICES)
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
    tools: Annotated[Items[Tool], Field(max_length=MOST_TOOLS)] = []
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True

    @model_validator(mode="before")
    @classmethod
    def refuse(cls, body: Any) -> Any:
        """Raises ValueError for fields that would replace what the server decides, and for what it cannot do."""
        refuse_fields(body, REFUSED, "accepted: the server renders the prompt itself")
        refuse_fields(body, LACKING, UNSUPPORTED)
        return body

    @model_validator(mode="after")
    def match_tools(self) -> ChatRequest:
        """Raises ValueError where a tool must be called that is not there, or the answer must be two things."""
        if isinstance(self.tool_choice, NamedTool) and not self.offered:
            raise ValueError(f"tool_choice: there is no tool {self.tool_choice.function.name}")
        if self.tool_choice == "required" and not self.tools:
            raise ValueError("tool_choice: required, but there are no tools")
        if sum(len(json.dumps(tool.function.parameters)) for tool in self.tools) > MOST_SCHEMA_LETTERS:
            raise ValueError(f"tools: their schemas have more than {MOST_SCHEMA_LETTERS} letters together")
        if self.offered and self.response_format is not None and self.response_format.constraint is not None:
            raise ValueError("response_format cannot stand beside tools that may be called")
        return self

    @field_validator("messages")
    @classmethod
    def order_results(cls, messages: list[Message]) -> list[Message]:
        """Results of tools in the order of the calls that they answer. Raises ValueError for one of an unknown call."""
        places: dict[str, int] = {}
        ordered: list[Message] = []
        for is_result, run in itertools.groupby(messages, lambda message: message.role == "tool"):
            turns = list(run)
            if is_result and places and all(turn.tool_call_id for turn in turns):
                for turn in turns:
                    if turn.tool_call_id not in places:
                        raise ValueError(f"no call {turn.tool_call_id[:60]} stands before its result")
                turns.sort(key=lambda turn: places[turn.tool_call_id])
            elif not is_result:
                calls = [call for call in turns[-1].tool_calls or [] if call.id]
                places = {call.id: place for place, call in enumerate(calls)}
            ordered += turns
        return ordered

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
