"""What a chat request may hold: OpenAI's fields, the ones that other servers taught clients to send, and ours.

Unknown fields are ignored, as clients send many; refused are fields that would let a client replace what the server
decides (templates, raw prompts), and what it cannot do (tools). Numbers and lists are bounded, texts by the size of the
body.
What this does not do: responses (replies.py). Who calls this: chat.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from serve.language import read_tag

MOST_CHOICES = 16
MOST_STOPS = 16
MOST_MESSAGES = 1024
REFUSED = (
    "chat_template", "chat_template_kwargs", "documents", "add_generation_prompt", "continue_final_message", "echo",
    "prompt_embeds", "add_special_tokens",
)  # fmt: skip
"""a client's template or raw prompt would undo the system prompt"""
LACKING = ("tools", "functions", "logit_bias")
"""without them the response would not be what the client asked for"""
Enforcement = Literal["prompt", "prefill", "retry", "strict"]
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


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[Part] | None = None
    """thoughts of earlier turns, as parts of this or in fields of their own, are not read"""

    @property
    def text(self) -> str:
        """What it says, without its thoughts."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text for part in self.content if isinstance(part, TextPart))


class StreamOptions(Body):
    """Of a streamed response."""

    include_usage: bool = False


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
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """a budget by word, where no number is given"""

    @model_validator(mode="before")
    @classmethod
    def refuse(cls, body: Any) -> Any:
        """Raises ValueError for fields that would replace what the server decides, and for what it cannot do."""
        if isinstance(body, dict):
            given = {name for name, value in body.items() if value not in (None, False, [], {}, {"type": "text"})}
            for name in REFUSED:
                if name in given:
                    raise ValueError(f"{name} is not accepted: the server renders the prompt itself")
            for name in (*LACKING, "response_format"):
                if name in given:
                    raise ValueError(f"{name} is not supported by this server")
            if {"stream", "logprobs"} <= given:
                raise ValueError("logprobs are told in responses that are not streamed only")
        return body

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
    def stops(self) -> list[str]:
        """Texts at which a completion ends."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])
