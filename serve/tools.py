"""Tools of a request: their definitions, how they are told to a model, and the constraint of calls to their schemas.

After <tool_call> the engine can only sample a call of one of the tools with arguments that fit its schema. The texts of
calls are those of `shared/tool_calls.py`, in which environments train.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field

from serve.engine import Constraint
from serve.parameters import RequestPart
from shared.tool_calls import CALL_END, OPEN, TOOLS_PROMPT, ToolDefinition, call_start, signatures

NO_BLANKS = {"x-guidance": {"whitespace_flexible": False}}
"""added to a schema inside a grammar, since the engine's own setting applies to bare schemas only"""
MOST_SCHEMA_LETTERS = 32_768
MOST_DEPTH = 24
MOST_REPEATS = 1024
"""largest repetition count in a schema's bounds and patterns, since the engine unrolls repetitions"""
FORM_PROMPT = "Answer after your thoughts with JSON only, of this schema:\n\n{given}"
COUNTS = {
    **dict.fromkeys(("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"), MOST_REPEATS),
    "multipleOf": 1000,
}
MOST_PATTERN = 200
MOST_WAYS = 64


def bounded(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema if an engine can compile it in reasonable time. Raises ValueError if it is too complex."""

    def check(value: Any, depth: int) -> None:
        if depth > MOST_DEPTH:
            raise ValueError(f"the schema is nested more than {MOST_DEPTH} deep")
        for name, part in value.items() if isinstance(value, dict) else enumerate(value):
            if name in COUNTS and isinstance(part, (int, float)) and part > COUNTS[name]:
                raise ValueError(f"{name} = {part} is more than {COUNTS[name]}")
            patterns = part if name == "patternProperties" and isinstance(part, dict) else [part]
            for pattern in patterns if name in ("pattern", "patternProperties") else []:
                if isinstance(pattern, str) and any(mark in pattern for mark in "{*+") and len(pattern) > MOST_PATTERN:
                    raise ValueError(f"a pattern with repetitions has more than {MOST_PATTERN} letters")
            if isinstance(part, (dict, list)):
                check(part, depth + 1)
            if name == "allOf" and alternatives(part) > MOST_WAYS:
                raise ValueError(f"allOf combines more than {MOST_WAYS} alternatives")

    try:
        letters = len(json.dumps(schema, allow_nan=False))
    except RecursionError:
        raise ValueError(f"the schema is nested more than {MOST_DEPTH} deep") from None
    if letters > MOST_SCHEMA_LETTERS:  # first: what follows takes long for a large one
        raise ValueError(f"the schema has more than {MOST_SCHEMA_LETTERS} letters")
    check(schema, 1)
    return schema


def alternatives(schema: Any) -> int:
    """Return the number of alternatives in a schema, combinations of nested ones included."""
    if isinstance(schema, dict):
        found = [one for name in ("anyOf", "oneOf") if isinstance(one := schema.get(name), (list, dict))]
        return max(sum(map(len, found)), 1) * math.prod(map(alternatives, schema.values()))
    return math.prod(map(alternatives, schema)) if isinstance(schema, list) else 1


def of_object(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a tool's arguments. Raises ValueError if it is not that of an object."""
    if schema.get("type", "object") != "object":
        raise ValueError("the arguments of a tool are an object")
    return schema


Schema = Annotated[dict[str, Any], AfterValidator(bounded)]
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
    """the server's text; {given} stands for the client's part"""
    given: str


def describe_form(tools: Sequence[Tool], constraint: Constraint | None) -> AnswerForm | None:
    """Describe the tools that may be called, or the schema of the answer; None if the answer may have any form."""
    if tools:
        return AnswerForm(TOOLS_PROMPT, signatures([ToolDefinition(**tool.function.model_dump()) for tool in tools]))
    if constraint is not None and constraint.kind == "json":
        return AnswerForm(FORM_PROMPT, constraint.value)
    return None


def constrain_calls(tools: Sequence[Tool], *, must: bool, parallel: bool) -> Constraint:
    """Return a constraint to calls of these tools with arguments that fit their schemas. must: nothing but calls;
    parallel: allow more than one."""
    calls = [(call_start(tool.function.name), tool.function.parameters or {"type": "object"}) for tool in tools]
    if must:  # a grammar as llguidance has it
        kinds = [f"{json.dumps(start)} %json {json.dumps(schema | NO_BLANKS)} {json.dumps(CALL_END)}"
                 for start, schema in calls]  # fmt: skip
        more = ' ("\\n" call)*' if parallel else ""
        return Constraint("grammar", f"start: call{more}\ncall: " + "\n    | ".join(kinds))
    structures = [{"begin": start, "schema": schema, "end": CALL_END} for start, schema in calls]
    return Constraint("structural_tag", json.dumps({"triggers": [OPEN], "structures": structures}))
