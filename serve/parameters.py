"""Base classes of all request bodies, and the parameters of OpenAI's and vLLM's APIs that are refused.

Parameters of other servers that this one does not know or cannot honour are refused by name, with what to do instead,
since the client would not get what it asks for. tests/serve/test_parameters.py reads the names from the installed
packages, so that none is missing; `python -m serve.parameter_table` writes docs/parameters.md.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True)]
"""a list of which only the first mistake is reported: a body can hold a million"""


class RefusedParameter(NamedTuple):
    """A parameter that other servers know and this one does not accept."""

    why: str
    """the reason, and what to do instead"""
    nothing: tuple[Any, ...] = (False,)
    """values that have no effect, besides null and empty ones; they are accepted"""

    def asks(self, value: Any) -> bool:
        """Whether a value would have an effect."""
        return value not in (None, "", [], {}, *self.nothing)


def body_error(field: str, message: str, code: str = "invalid_value") -> PydanticCustomError:
    """Return the error of a validator of a whole body about one of its fields."""
    return PydanticCustomError(code, "{message}", {"message": message, "field": field})


class RequestPart(BaseModel):
    """Base of all parts of bodies: NaN and infinities are refused, and null means that a field is absent."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def drop_nulls(cls, body: Any) -> Any:
        """Drop fields that are null: clients send null for what they do not use."""
        return {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else body


class RequestBody(RequestPart):
    """Base of whole bodies and of groups of parameters in them: a parameter without effect is refused."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": False})
    refused: ClassVar[Mapping[str, RefusedParameter]] = {}
    """parameters that clients may know from other servers"""

    @model_validator(mode="before")
    @classmethod
    def refuse_unknown(cls, body: Any) -> Any:
        """Raises PydanticCustomError for the first parameter that is refused or unknown."""
        if not isinstance(body, dict):
            return body
        known = cls.model_fields
        for name, value in body.items():
            if name in known or value is None:
                continue
            if (found := cls.refused.get(name)) is None:
                raise body_error(name, unknown(name, [*known, *cls.refused]), "unknown_parameter")
            if found.asks(value):
                raise body_error(name, f"{name} is not supported: {found.why}", "unsupported_parameter")
        return {name: value for name, value in body.items() if name in known}


def where(**fields: Any) -> JsonDict:
    """Return the JSON schema of objects that have these fields, each with its own schema."""
    return {"required": [*fields], "properties": fields}


def needs(field: str, value: str, other: str) -> ConfigDict:
    """Return the configuration that tells OpenAPI a rule: where `field` has this value, `other` is not left out."""
    rule: JsonDict = {"if": where(**{field: {"const": value}}), "then": where(**{other: {"not": {"type": "null"}}})}
    return ConfigDict(json_schema_extra=rule)


def body_rules(*rules: tuple[JsonDict, JsonDict]) -> ConfigDict:
    """Return the configuration of a whole body that tells OpenAPI rules: what fits the first schema of a pair has to
    fit the second."""
    pairs: list[JsonValue] = [{"if": given, "then": then} for given, then in rules]
    return ConfigDict(json_schema_extra={"additionalProperties": False, "allOf": pairs})


TOOL_RULE = (
    where(tool_choice={"not": {"enum": ["none", "auto", None]}}), where(tools={"type": "array", "minItems": 1}),
)  # fmt: skip
"""where a tool must be called, there is one; that it has the name that is asked for cannot be told"""
USAGE_RULE = (
    where(stream_options={"type": "object", **where(include_usage={"const": True})}), where(stream={"const": True}),
)  # fmt: skip
OFFERED: JsonDict = {
    "required": ["tools"],
    "properties": {"tools": {"type": "array", "minItems": 1}, "tool_choice": {"not": {"const": "none"}}},
}
PLAIN: JsonDict = {"properties": {"type": {"const": "text"}}}
FORM_RULE: tuple[JsonDict, JsonDict] = OFFERED, {"properties": {"response_format": PLAIN}}
TEXT_RULE: tuple[JsonDict, JsonDict] = OFFERED, {"properties": {"text": {"properties": {"format": PLAIN}}}}
"""tools that may be called stand beside no form of the answer"""
LOGPROBS_RULE = where(top_logprobs={"exclusiveMinimum": 0}), where(logprobs={"const": True})
STREAMLESS: JsonDict = {"properties": {"stream": {"const": False}}}
PROMPT_RULE = where(prompt_logprobs={"not": {"type": "null"}}), STREAMLESS


def unknown(name: str, names: list[str]) -> str:
    """Return the error message for an unknown parameter, with the nearest name if there is one."""
    near = difflib.get_close_matches(name[:100], names, 1)
    hint = f'did you mean "{near[0]}"?' if near else "leave it out"
    return f'there is no parameter "{name[:100]}": {hint}'


def refuse(names: str, why: str, *nothing: Any) -> dict[str, RefusedParameter]:
    """Return several parameters that are refused for one reason; nothing: values without effect."""
    return {name: RefusedParameter(why, nothing or (False,)) for name in names.split()}


INTERNAL = refuse(
    "detokenize extra_args flat_logprobs output_kind output_text_buffer_length prompt_logprob_start skip_clone "
    "prompt_logprob_token_ids skip_reading_prefix_cache trace_decode_token_ids",
    "it is a field inside vLLM, which its own server does not take either",
)
EVERYWHERE = {
    **INTERNAL,
    **refuse("structured_outputs guided_json guided_regex guided_choice guided_grammar guided_decoding_backend "
         "guided_whitespace_pattern", "in chats give response_format, or tools"),
    **refuse("use_beam_search", "completions are sampled"),
    **refuse("length_penalty", "it belongs to beam search, and completions are sampled", 1),
    **refuse("watermarking", "no watermark is put into texts"),
    **refuse("spaces_between_special_tokens", "texts are told as the tokenizer writes them", True),
    **refuse("truncate_prompt_tokens truncation_side", "prompts are never cut: shorten it"),
    **refuse("logprob_token_ids", "ask for the most probable tokens (top_logprobs in chats, logprobs in completions)"),
    **refuse("priority", "requests are served in their order", 0),
    **refuse("request_id session_id", "send the header X-Request-ID"),
    **refuse("return_tokens_as_token_ids return_token_ids return_token_offsets return_prompt_text",
         "POST /tokenize tells the tokens of a text"),
    **refuse("routed_experts_prompt_start", "the experts of a model are not told", 0),
    **refuse("mm_payload", "this server reads and writes text only", "tensors"),
    **refuse("return_mm_kwargs media_io_kwargs mm_processor_kwargs", "this server reads and writes text only"),
    **refuse("cache_salt", "start another server for prompts that must share no cache"),
    **refuse("kv_transfer_params ec_transfer_params vllm_xargs", "it steers an arrangement of several vLLM servers"),
    **refuse("repetition_detection", "give repetition_penalty or max_tokens"),
    **refuse("stream_interval", "tokens are sent as they come", 1),
    **refuse("moderation", "nothing is moderated"),
    **refuse("prompt_cache_options prompt_cache_retention", "prompts stay in the cache while there is room"),
    **refuse("prompt_embeds", "prompts are text or tokens"),
}  # fmt: skip
OF_THE_PROMPT = refuse("chat_template documents add_special_tokens echo",
                   "the server renders the prompt itself, with its own system prompt")  # fmt: skip
CHAT = {
    **EVERYWHERE, **OF_THE_PROMPT,
    **refuse("add_generation_prompt", "the server renders the prompt itself, with its own system prompt", True),
    **refuse("continue_final_message", "the server renders the prompt itself, with its own system prompt"),
    **refuse("functions function_call", "give tools and tool_choice"),
    **refuse("store", "nothing is stored: leave it out or send false"),
    **refuse("service_tier", "all requests are served alike", "auto", "default"),
    **refuse("modalities", "this server reads and writes text only", ["text"]),
    **refuse("audio", "this server reads and writes text only"),
    **refuse("prediction", "nothing is predicted"),
    **refuse("web_search_options", "the server asks nobody: give tools"),
    **refuse("verbosity", "say in a message how long the answer is to be", "medium"),
    **refuse("prompt_logprobs", "only POST /v1/completions tells them"),
    **refuse("skip_special_tokens", "tags of reasoning may be special tokens; the end of the text is not told"),
}  # fmt: skip
COMPLETIONS = {
    **EVERYWHERE,
    **refuse("suffix", "models here write on, and do not fill in"),
    **refuse("best_of", "give n, and choose", 1),
    **refuse("add_special_tokens", "prompts go to the model as they stand: write special tokens into them", False),
    **refuse("response_format thinking_token_budget",
             "prompts go to the model as they stand: use /v1/chat/completions"),
}  # fmt: skip
MEMORY = "this server remembers nothing: send the whole input"
RESPONSES = {
    **{name: refused for name, refused in CHAT.items() if name not in (
        "functions", "function_call", "modalities", "audio", "prediction", "web_search_options", "verbosity")},
    **refuse("previous_response_id conversation prompt previous_input_messages", MEMORY),
    **refuse("background background_options", MEMORY),
    **refuse("context_management", "prompts are never cut: shorten the input"),
    **refuse("stream_options", "events are not padded, and the last one tells the usage",
             {"include_obfuscation": False}),
    **refuse("truncation", "prompts are never cut: shorten the input", "disabled"),
    **refuse("max_tool_calls", "the client runs the tools, and may stop"),
    **refuse("image", "this server reads and writes text only"),
    **refuse("access_programs", "there are none"),
    **refuse("top_logprobs logprobs", "chats tell them: /v1/chat/completions with logprobs and top_logprobs", 0, False),
    **refuse("n", "one response a request; chats have n", 1),
    **refuse("max_tokens", "it is called max_output_tokens here"),
    **refuse("enable_response_messages", "the items of the output are what the model said"),
}  # fmt: skip
"""refused parameters of POST /v1/responses, by name"""
