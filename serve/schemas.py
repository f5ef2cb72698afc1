"""The body of a chat request: OpenAI's fields, common extensions of other servers, and our own.

Parameters without effect are refused (parameters.py), and so are those that would let a client replace what the server
decides (templates, raw prompts). Numbers and lists are bounded, texts by the size of the body.
"""

from __future__ import annotations

import itertools
import json
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic.config import JsonDict

from serve import parameters
from serve.engine import Constraint, SamplingParameters
from serve.json_schemas import Schema
from serve.messages import MOST_TOOLS, ChatMessage
from serve.parameters import Items, RequestBody, RequestPart, body_error, needs
from serve.reasoning import ReasoningFormat
from serve.reasoning_language import Enforcement, LanguageTag
from serve.tools import Name, Tool, constrain_calls

MOST_CHOICES = 16
MOST_STOPS = 16
MOST_IDS = 1_000_000
MOST_BIASED = 1024
MOST_BAD_WORDS = 128
MOST_MESSAGES = 1024
MOST_SCHEMA_LETTERS = 65_536
"""largest total length of the schemas of all tools of a request"""
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class StreamOptions(RequestBody):
    """Options of a streamed response."""

    include_usage: bool = False


class NamedFunction(RequestPart):
    """The one function that must be called."""

    name: Name


class NamedTool(RequestPart):
    """The one tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class NamedSchema(RequestPart):
    """A JSON schema with a name."""

    name: str = ""
    json_schema: Schema = Field(alias="schema")


class ResponseFormat(RequestPart):
    """The form that the answer must have."""

    model_config = needs("type", "json_schema", "json_schema")
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def need_schema(self) -> ResponseFormat:
        """Raises ValueError if the schema is missing."""
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("json_schema is missing")
        return self

    @property
    def constraint(self) -> Constraint | None:
        """The constraint for the engine; None if any text is allowed."""
        if self.json_schema is not None and self.type == "json_schema":
            return Constraint("json", json.dumps(self.json_schema.json_schema, ensure_ascii=False))
        return Constraint("json_object", "") if self.type == "json_object" else None


Word = Annotated[str, Field(max_length=100)]
Stop = Annotated[str, Field(min_length=1, max_length=200)]
Token = Annotated[int, Field(ge=0)]
IDS: JsonDict = {"propertyNames": {"pattern": "^[0-9]{1,9}$"}}
Bias = Annotated[float, Field(ge=-100, le=100)]


class GenerationRequest(RequestBody):
    """What all requests for completions have in common, above all how completions are to be sampled; the server's
    settings apply where a request gives nothing."""

    model: str = ""
    """name of the model, as GET /v1/models names it"""
    stream: bool = False
    """the response comes in events"""
    temperature: float | None = Field(None, ge=0, le=2)
    """0 for the most probable token; else probabilities are sharpened below 1, flattened above"""
    top_p: float | None = Field(None, gt=0, le=1)
    """only the most probable tokens that have this probability together"""
    top_k: int | None = Field(None, ge=-1, le=1_000_000)
    """only so many most probable tokens; 0 or -1 for all"""
    min_p: float | None = Field(None, ge=0, le=1)
    """only tokens with this share of the most probable one's probability"""
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    """subtracted from the logits of tokens that were sampled before"""
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    """the same, once for each time"""
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    """above 1 it makes tokens of the prompt and the completion less probable, below 1 more"""
    logit_bias: Annotated[dict[Token, Bias], Field(max_length=MOST_BIASED, json_schema_extra=IDS)] | None = None
    """token id -> what is added to its logit"""
    allowed_token_ids: Annotated[Items[Token], Field(min_length=1, max_length=MOST_IDS)] | None = None
    """no other tokens are sampled"""
    bad_words: Annotated[Items[Stop], Field(max_length=MOST_BAD_WORDS)] = []
    """texts that are not sampled"""
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    """the same seed draws the same tokens; the second of `n` completions has the next one"""
    stop: Stop | Annotated[Items[Stop], Field(max_length=MOST_STOPS)] | None = None
    """texts at which the completion ends, in chats the answer: in the reasoning they change nothing"""
    stop_token_ids: Annotated[Items[Token], Field(max_length=MOST_STOPS)] = []
    """tokens at which it ends, as `stop`"""
    include_stop_str_in_output: bool = False
    """the text of `stop` is returned too"""
    ignore_eos: bool = False
    """the model's end of the text does not end the completion"""
    min_tokens: int = Field(0, ge=0)
    """the completion does not end before it has so many tokens"""
    user: str | None = None
    """whose request it is: a label for the client's own use, of which no response depends"""
    safety_identifier: str | None = None
    """the same as `user`"""
    prompt_cache_key: str | None = None
    """a label like `user`: equal beginnings of prompts are found in the cache without it"""
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    """labels like `user`; responses of /v1/responses repeat them"""

    @property
    def stops(self) -> list[str]:
        """Texts at which a completion ends."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    def sampling(self, temperature: float, top_p: float, max_tokens: int) -> SamplingParameters:
        """Return the sampling for the engine. temperature, top_p: defaults if the request gives none."""
        return SamplingParameters(
            max_tokens=max_tokens, temperature=temperature if self.temperature is None else self.temperature,
            top_p=top_p if self.top_p is None else self.top_p, top_k=max(self.top_k or 0, 0), min_p=self.min_p or 0.0,
            presence_penalty=self.presence_penalty, frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty, logit_bias=self.logit_bias or None,
            allowed_token_ids=None if self.allowed_token_ids is None else sorted(set(self.allowed_token_ids)),
            bad_words=self.bad_words, seed=self.seed, stop=self.stops, stop_token_ids=self.stop_token_ids,
            include_stop=self.include_stop_str_in_output, ignore_eos=self.ignore_eos, min_tokens=self.min_tokens,
        )  # fmt: skip


class ReasoningRequest(GenerationRequest):
    """What chats and responses have in common besides the sampling: the reasoning and its language, and tool calls."""

    include_reasoning: bool = True
    """false: the reasoning is not returned, as `reasoning_format` hidden"""
    reasoning_language: LanguageTag | None = None
    """auto, off, or a BCP 47 code: the language of the reasoning and the answer"""
    reasoning_language_enforcement: Enforcement | None = None
    """prompt: ask for it; constrain: and leave out words in foreign scripts; prefill: begin the reasoning in it; retry:
    look at the first words, and sample once more where they are in another; strict: as retry, and an error instead of a
    response in another language, cut or empty"""
    thinking_token_budget: int | None = Field(None, ge=0)
    """tokens after which the reasoning is ended with a phrase"""
    parallel_tool_calls: bool = True
    """false: one call at most"""
    chat_template_kwargs: Annotated[dict[Word, bool | int | float | Word], Field(max_length=16)] = {}
    """arguments of the model's chat template, e.g. {"enable_thinking": false}; one that it does not read is refused"""


class StreamedRequest(GenerationRequest):
    """What chats and completions have in common besides the sampling: the options of their streams."""

    stream_options: StreamOptions | None = None
    """include_usage: the last event counts the tokens"""

    @property
    def wants_usage(self) -> bool:
        """Whether the last event of the stream is to count the tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    @model_validator(mode="after")
    def check_stream_options(self) -> Self:
        """Raises PydanticCustomError for stream options without a stream."""
        if self.wants_usage and not self.stream:
            message = "stream_options.include_usage is for streams; other responses tell the usage"
            raise body_error("stream_options", message)
        return self


class ChatRequest(ReasoningRequest, StreamedRequest):
    """The body of POST /v1/chat/completions."""

    model_config = parameters.body_rules(
        parameters.TOOL_RULE, parameters.FORM_RULE, parameters.USAGE_RULE, parameters.LOGPROBS_RULE
    )
    messages: Annotated[Items[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES)]
    """the conversation, as text"""
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    """responses to sample"""
    max_tokens: int | None = Field(None, ge=1)
    """tokens that a completion may have, reasoning included, at most the model's context; where the prompt leaves less
    room, less"""
    max_completion_tokens: int | None = Field(None, ge=1)
    """stronger than max_tokens, its older name"""
    logprobs: bool = False
    """log-probs of the sampled tokens are returned"""
    top_logprobs: int = Field(0, ge=0, le=20)
    """and so many of the most probable ones; needs `logprobs`"""
    reasoning_format: ReasoningFormat | None = None
    """where reasoning is: both `reasoning` and `reasoning_content`; only one of them (openai, deepseek); a list of
    chunks (mistral); in the text, between tags (inline); nowhere (hidden)"""
    reasoning_effort: Effort | None = None
    """a budget by word, where no number is given"""
    response_format: ResponseFormat | None = None
    """the answer, not the reasoning, is held to it by the engine"""
    tools: Annotated[Items[Tool], Field(max_length=MOST_TOOLS)] = []
    """functions that the model may call"""
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    """whether it may or must call one"""

    @model_validator(mode="after")
    def match_tools(self) -> ChatRequest:
        """Raises ValueError or PydanticCustomError if a required tool is missing, schemas are too long, or tools
        conflict with a format."""
        if isinstance(self.tool_choice, NamedTool) and not self.offered:
            message = f"tool_choice: there is no tool {self.tool_choice.function.name} in tools"
            raise body_error("tool_choice", message, "unknown_tool")
        if self.tool_choice == "required" and not self.tools:
            raise body_error("tool_choice", "tool_choice: required, but there are no tools")
        if sum(len(json.dumps(tool.function.parameters)) for tool in self.tools) > MOST_SCHEMA_LETTERS:
            raise ValueError(f"tools: their schemas have more than {MOST_SCHEMA_LETTERS} letters together")
        if self.offered and self.response_format is not None and self.response_format.constraint is not None:
            raise ValueError("response_format cannot be combined with tools that may be called")
        return self

    @model_validator(mode="after")
    def match_parameters(self) -> ChatRequest:
        """Raises PydanticCustomError for parameters that have no effect, or no place, next to the others."""
        if self.top_logprobs and not self.logprobs:
            raise body_error("top_logprobs", "top_logprobs needs logprobs: true")
        if self.min_tokens and (self.stops or self.stop_token_ids or self.constraint is not None):
            why = "what ends or forms the answer only: leave out stop, stop_token_ids, response_format and tools"
            raise body_error("min_tokens", f"min_tokens cannot be combined with {why}")
        return self

    @field_validator("messages")
    @classmethod
    def order_results(cls, messages: list[ChatMessage]) -> list[ChatMessage]:
        """Sort results of tools into the order of their calls. Raises PydanticCustomError for an unknown call's."""
        places: dict[str, int] = {}
        ordered: list[ChatMessage] = []
        for is_result, run in itertools.groupby(messages, lambda message: message.role == "tool"):
            turns = list(run)
            if is_result and places and all(turn.tool_call_id for turn in turns):
                for turn in turns:
                    if turn.tool_call_id not in places:
                        message = f"no call {turn.tool_call_id[:60]} comes before its result"
                        raise body_error("messages", message, "unknown_form")
                turns.sort(key=lambda turn: places[turn.tool_call_id])
            elif not is_result:
                calls = [call for call in turns[-1].tool_calls or [] if call.id]
                places = {call.id: place for place, call in enumerate(calls)}
            ordered += turns
        return ordered

    @property
    def characters(self) -> int:
        """Number of characters of all messages, of their calls' arguments and of the tools' descriptions."""
        calls = sum(len(call.function.arguments) for message in self.messages for call in message.tool_calls or [])
        descriptions = sum(len(tool.function.description) for tool in self.tools)
        return sum(len(message.text) + len(message.thoughts) for message in self.messages) + calls + descriptions

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
        """The constraint that the engine enforces on the answer; None for none."""
        if self.offered:
            return constrain_calls(self.offered, must=self.tool_choice != "auto", parallel=self.parallel_tool_calls)
        return self.response_format.constraint if self.response_format is not None else None
