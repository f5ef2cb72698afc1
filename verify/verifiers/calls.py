"""The domain "calls": a model calls the wanted functions with accepted values, as in rows of BFCL.

`tests` of a row: {"functions": [JSON schemas, "dict" for object], "ground_truth": [{name: {argument: [accepted
values]}}], "expect"?: "no_call"}. An argument with "" among its accepted values may be left out.

As in BFCL: exactly the wanted calls, in any order; no argument that the schema lacks; values of the schema's type, and
an integer where a float is wanted but not the other way round; strings are compared without case, blanks and the signs
, . / - _ * ^. Nothing is evaluated: arguments are JSON.
Source: Patil et al., Berkeley Function Calling Leaderboard (its rules for abstract syntax trees).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shared.chat import AnswerFormat
from shared.errors import DataError
from shared.json_reader import parse_json
from shared.types import Problem, Verdict
from verify.code_block import blocks
from verify.verifiers import Answer, Finding, verifier

MAX_CHARACTERS = 100_000
"""a longer text is not read as a call"""
_TYPES = {"dict": "object", "float": "number", "tuple": "array"}
_IGNORED = re.compile(r"[ ,./\-_*^]")
_NAME = re.compile(r"[^A-Za-z0-9_-]")


class FunctionCall(NamedTuple):
    """One function call: the function's name and its arguments."""

    name: str
    arguments: dict[str, Any]


def _validate(problem: Problem) -> None:
    try:
        named = all(isinstance(one["name"], str) for one in problem.tests["functions"])
        if not named or not all(isinstance(one, dict) for one in problem.tests["ground_truth"]):
            raise DataError("functions need a name, ground_truth is a list of objects")
    except (KeyError, TypeError, ValueError, DataError) as error:
        raise DataError(f"its tests are not understood: {error}") from error


FORM = AnswerFormat("the calls as a JSON list in a Markdown block, ```json", "the calls in such a block")


@verifier("calls", ground_truth="tests", answer_in="response", form=FORM, validate=_validate)
def calls_as_wanted(answer: Answer) -> Finding:
    """Read the calls in a response, and compare them with those wanted."""
    calls = read_calls(answer.text)
    if calls is None:
        return Finding(Verdict.NO_ANSWER, 0.0, "no JSON list of calls")
    wrong = fault(calls, answer.problem.tests)
    return Finding(Verdict.WRONG if wrong else Verdict.CORRECT, float(not wrong), wrong or "as wanted")


def plain_schema(schema: Any) -> Any:
    """Convert a BFCL schema to JSON Schema: types become object, number and array; "any" and "optional" are dropped."""
    if isinstance(schema, list):
        return [plain_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {key: plain_schema(value) for key, value in schema.items() if key != "optional"}
    if isinstance(plain.get("type"), str):
        plain["type"] = _TYPES.get(plain["type"], plain["type"])
        if plain["type"] == "any":
            del plain["type"]
    return plain


def tool_name(name: str) -> str:
    """Return a function's name in the characters that OpenAI's API allows for tools: "math.sqrt" -> "math_sqrt"."""
    return _NAME.sub("_", name)[:64]


def read_calls(text: str) -> list[FunctionCall] | None:
    """Return the calls in a text: a JSON list of {"name", "arguments"} (or one such object), alone or in the last
    fenced block that holds one; [] for an empty list, None where there is no such JSON."""
    if len(text) > MAX_CHARACTERS:
        return None
    for candidate in (*reversed([block.source for block in blocks(text)]), text):
        calls = _calls_of(candidate)
        if calls is not None:
            return calls
    return None


def _calls_of(text: str) -> list[FunctionCall] | None:
    try:
        value = parse_json(text)
    except ValueError:
        return None
    calls = [read_call(one) for one in (value if isinstance(value, list) else [value])]
    return None if any(call is None for call in calls) else [call for call in calls if call is not None]


def read_call(value: Any) -> FunctionCall | None:
    """Read a call from {"name", "arguments"}, the arguments as an object or its JSON text, or return None."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments[:MAX_CHARACTERS] or "{}")
        except ValueError:
            return None
    return FunctionCall(value["name"], arguments) if isinstance(arguments, dict) else None


def fault(calls: Sequence[FunctionCall], tests: Mapping[str, Any]) -> str:
    """Return what is wrong with the calls of one answer, "" when they are right. `tests`: see the module docstring."""
    expected: list[tuple[str, Any]] = [one for truth in tests["ground_truth"] for one in truth.items()]
    if not expected:
        return f"calls {calls[0].name[:60]}, though no function fits" if calls else ""
    if len(calls) != len(expected):
        return f"{len(calls)} calls, wanted {len(expected)}"
    schemas = {tool_name(one["name"]): one.get("parameters", {}) for one in tests["functions"]}
    left = list(calls)
    for name, accepted in expected:
        faults = [_fault_of(call, name, accepted, schemas.get(tool_name(name), {})) for call in left]
        if "" not in faults:
            return faults[0]
        del left[faults.index("")]
    return ""


def _fault_of(call: FunctionCall, name: str, accepted: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    if tool_name(call.name) != tool_name(name):
        return f"calls {call.name[:60]}, wanted {name}"
    properties = schema.get("properties", {})
    for argument, value in call.arguments.items():
        if argument not in properties or argument not in accepted:
            return f"{name}: there is no argument {argument[:60]}"
        if not _has_type(value, properties[argument].get("type", "any"), accepted[argument]):
            return f"{name}: {argument} is not of type {properties[argument]['type']}"
        if not _is_accepted(value, accepted[argument]):
            return f"{name}: {argument} = {json.dumps(value)[:80]} is not accepted"
    required = set(schema.get("required", []))
    for argument, values in accepted.items():
        if argument not in call.arguments and (argument in required or "" not in values):
            return f"{name}: {argument} is missing"
    return ""


def _has_type(value: Any, declared: str, accepted: Sequence[Any]) -> bool:
    """Whether a value is of the schema's type, or of the type of an accepted value: some rows contradict themselves.

    "" among them says that the argument may be left out: it is no text that is accepted."""
    if any(type(value) is type(option) for option in accepted if option != ""):
        return True
    kind = _TYPES.get(declared, declared)
    if isinstance(value, bool):
        return kind in ("boolean", "any")
    types: dict[str, type | tuple[type, ...]] = {
        "string": str, "integer": int, "number": (int, float), "array": list, "object": dict,
    }  # fmt: skip
    return isinstance(value, types[kind]) if kind in types else kind != "boolean"


def _is_accepted(value: Any, accepted: Sequence[Any]) -> bool:
    return any(_equal(value, option) for option in accepted)


def _equal(value: Any, option: Any) -> bool:
    if isinstance(value, str) and isinstance(option, str):
        return _bare(value) == _bare(option)
    if isinstance(value, list) and isinstance(option, list):
        return len(value) == len(option) and all(map(_equal, value, option))
    if isinstance(value, dict) and isinstance(option, dict):
        missing = option.keys() - value.keys()
        return (
            value.keys() <= option.keys()
            and all("" in option[key] for key in missing)
            and all(_is_accepted(value[key], option[key]) for key in value)
        )
    return isinstance(value, bool) == isinstance(option, bool) and bool(value == option)


def _bare(text: str) -> str:
    return _IGNORED.sub("", text).lower().replace("'", '"')
