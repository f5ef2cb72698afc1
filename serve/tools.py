"""Tools of a request: their definitions, how a model reads them, and the constraint of calls to their schemas.

After <tool_call> the engine can only sample a call of one of the tools with arguments that fit its schema. The texts of
calls are those of `shared/tool_calls.py`, in which environments train.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field

from serve.engine import Constraint
from serve.json_schemas import Schema
from serve.parameters import RequestPart
from shared.tool_calls import CALL_END, CLOSE, OPEN, TOOLS_PROMPT, ToolDefinition, call_start, signatures

FEW_BLANKS = {"x-guidance": {"whitespace_pattern": "[ ]?"}}
"""added to the schema of a call: an unsure model would write blanks without end, and most write one after a colon"""
FORM_PROMPT = "Answer after your thoughts with JSON only, of this schema:\n\n{given}"
LETTERS, TOKENS = f'\nopen: "{OPEN}"\nclose: "{CLOSE}"', f"\nopen: {OPEN}\nclose: {CLOSE}"
TEXT_LETTERS, TEXT_TOKENS = '\nbegin[lazy]: TEXT "<tool_call>"', "\nbegin: TEXT <tool_call>"
"""the last rules of a grammar of calls: their tags, spelled in letters or as control tokens"""
WORDS_ONLY = ("type", "title", "description", "$schema", "$comment")
"""keywords of a tool's parameters that name no argument"""


def of_object(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a tool's arguments. Raises ValueError if it is not that of an object."""
    if schema.get("type", "object") != "object":
        raise ValueError("the arguments of a tool are an object")
    return schema


def arguments_of(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a call's arguments: where the parameters name none, {} is all that may be given."""
    empty = all(name in WORDS_ONLY or not value for name, value in parameters.items())
    return {"type": "object", "properties": {}, "additionalProperties": False} if empty else parameters


Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class Function(RequestPart):
    """The name, description and parameters of a tool."""

    name: Name
    description: str = ""
    parameters: Annotated[Schema, AfterValidator(of_object)] = {}


class Tool(RequestPart):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class AnswerForm(NamedTuple):
    """The part of the system prompt that describes the form of the answer."""

    text: str
    """the server's text; {given} stands for the client's part, if there is one"""
    given: str = ""


def describe_form(tools: Sequence[Tool], constraint: Constraint | None) -> AnswerForm | None:
    """Describe the tools that may be called, or the schema of the answer; None if the answer may have any form."""
    if tools:
        return AnswerForm(TOOLS_PROMPT, signatures([ToolDefinition(**tool.function.model_dump()) for tool in tools]))
    if constraint is not None and constraint.kind == "json":
        return AnswerForm(FORM_PROMPT, constraint.value)
    return None


def constrain_calls(tools: Sequence[Tool], *, must: bool, parallel: bool) -> Constraint:
    """Return a constraint to calls of these tools with arguments that fit their schemas. must: nothing but calls;
    parallel: allow more than one. Its value is a grammar as llguidance has it, for a tokenizer that spells the tags of
    calls in letters (`with_control_tokens`)."""
    kinds = []
    for tool in tools:
        start, schema = call_start(tool.function.name), arguments_of(tool.function.parameters)
        name, end = json.dumps(start.removeprefix(OPEN)), json.dumps(CALL_END.removesuffix(CLOSE))
        kinds.append(f"{name} %json {json.dumps(schema | FEW_BLANKS)} {end} close")
    calls = "\ncall: " + "\n    | ".join(kinds)
    if must:
        more = ' ("\\n" open call)*' if parallel else ""
        return Constraint("grammar", f"start: open call{more}{calls}{LETTERS}")
    return Constraint("structural_tag", f"start: (begin call)* TEXT\nTEXT: /(.|\\n)*/{calls}{LETTERS}{TEXT_LETTERS}")


def with_control_tokens(grammar: str) -> str:
    """Return a grammar of `constrain_calls` for a tokenizer in which the tags of calls are tokens of their own, which
    letters in a grammar do not match; any other grammar as it is."""
    rules, text, rest = grammar.partition(TEXT_LETTERS)
    if rest or not rules.endswith(LETTERS):
        return grammar
    return rules.removesuffix(LETTERS) + TOKENS + TEXT_TOKENS * bool(text)
