"""Base classes of all request bodies: a parameter that a body does not have is refused, with the nearest name.

So is one that OpenAI's or vLLM's server knows and this one does not serve, since the client would not get what it asks
for; docs/parameters.md says what to do instead. Values that ask for nothing are accepted.
"""

from __future__ import annotations

import difflib
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True)]
"""a list of which only the first mistake is reported: a body can hold a million"""
NEAR = 0.74
"""similarity from which a name is a hint: "max_output_tokens" for "max_tokens", not "stop" for "store\""""
OFF_BY_DEFAULT = (
    "add_special_tokens background continue_final_message continuous_usage_stats echo "
    "enable_response_messages flat_logprobs include_obfuscation logprobs moderation return_mm_kwargs "
    "return_prompt_text return_token_ids return_token_offsets return_tokens_as_token_ids skip_clone "
    "skip_reading_prefix_cache skip_special_tokens store use_beam_search watermarking"
)
EMPTY_BY_DEFAULT = (
    "audio cache_salt chat_template conversation documents function_call functions guided_choice guided_grammar "
    "guided_json guided_regex image kv_transfer_params logprob_token_ids media_io_kwargs mm_processor_kwargs "
    "prediction previous_response_id prompt prompt_embeds request_id response_format session_id structured_outputs "
    "suffix vllm_xargs web_search_options"
)
NO_EFFECT: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(EMPTY_BY_DEFAULT.split(), ()),
    **dict.fromkeys(OFF_BY_DEFAULT.split(), (False,)),
    "add_generation_prompt": (True,), "best_of": (1,), "generate_summary": ("auto",), "length_penalty": (1,),
    "mm_payload": ("tensors",), "modalities": (["text"],), "n": (1,), "priority": (0,),
    "routed_experts_prompt_start": (0,), "service_tier": ("auto", "default"), "spaces_between_special_tokens": (True,),
    "stream_interval": (1,), "stream_options": ({"include_obfuscation": False},), "summary": ("auto",),
    "top_logprobs": (0,), "truncation": ("disabled",), "verbosity": ("medium",),
}  # fmt: skip
"""parameters of other servers that this one does not serve -> values that ask for nothing, which clients send,
besides null and empty ones"""


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

    @model_validator(mode="before")
    @classmethod
    def refuse_unknown(cls, body: Any) -> Any:
        """Raises PydanticCustomError for the first parameter that this body does not have, if its value asks for
        something."""
        if not isinstance(body, dict):
            return body
        for name, value in body.items():
            nothing = name in NO_EFFECT and value in ("", [], {}, *NO_EFFECT[name])
            if name not in cls.model_fields and value is not None and not nothing:
                near = difflib.get_close_matches(name[:100], cls.model_fields, 1, cutoff=NEAR)
                hint = f'did you mean "{near[0]}"?' if near else "leave it out."
                message = f'there is no parameter "{name[:100]}" here: {hint} docs/parameters.md lists all parameters'
                raise body_error(name, message, "unknown_parameter")
        return {name: value for name, value in body.items() if name in cls.model_fields}


def where(**fields: Any) -> JsonDict:
    """Return the JSON schema of objects that have these fields, each with its own schema."""
    return {"required": [*fields], "properties": fields}


def needs(field: str, value: str, other: str) -> ConfigDict:
    """Return the configuration with a rule for OpenAPI: where `field` has this value, `other` is not left out."""
    rule: JsonDict = {"if": where(**{field: {"const": value}}), "then": where(**{other: {"not": {"type": "null"}}})}
    return ConfigDict(json_schema_extra=rule)


def body_rules(*rules: tuple[JsonDict, JsonDict]) -> ConfigDict:
    """Return the configuration of a whole body with rules for OpenAPI: what fits the first schema of a pair has to
    fit the second."""
    pairs: list[JsonValue] = [{"if": given, "then": then} for given, then in rules]
    return ConfigDict(json_schema_extra={"additionalProperties": False, "allOf": pairs})


TOOL_RULE = (
    where(tool_choice={"not": {"enum": ["none", "auto", None]}}), where(tools={"type": "array", "minItems": 1}),
)  # fmt: skip
"""where a tool must be called, there is one; that it has the name that is asked for cannot be expressed"""
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
"""tools that may be called go with no form of the answer"""
LOGPROBS_RULE = where(top_logprobs={"exclusiveMinimum": 0}), where(logprobs={"const": True})
STREAMLESS: JsonDict = {"properties": {"stream": {"const": False}}}
PROMPT_RULE = where(prompt_logprobs={"not": {"type": "null"}}), STREAMLESS
