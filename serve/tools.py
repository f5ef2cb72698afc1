"""Tool calls: describing tools to a model, constraining calls to their schemas, and finding calls in an answer.

Calls have the form of the templates of Hermes and Qwen, for every model:

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>

After <tool_call> the engine can only sample a call of one of the tools with arguments that fit its schema.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Collection, Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field

from serve.engine import Constraint
from serve.parameters import RequestPart
from serve.reasoning import unfinished

OPEN, CLOSE = "<tool_call>", "</tool_call>"
CALL_END = f"}}\n{CLOSE}"
NO_BLANKS = {"x-guidance": {"whitespace_flexible": False}}
"""added to a schema inside a grammar, since the engine's own setting applies to bare schemas only"""
RESULT_OPEN, RESULT_CLOSE = "<tool_response>", "</tool_response>"
MOST_SCHEMA_LETTERS = 32_768
MOST_DEPTH = 24
MOST_REPEATS = 1024
"""largest repetition count in a schema's bounds and patterns, since the engine unrolls repetitions"""
TOOLS_PROMPT = """You may call tools. Their signatures, one JSON object a line:

{given}

To call one, write after your thoughts, for each call:

<tool_call>
{"name": <name of the tool>, "arguments": <object of its arguments>}
</tool_call>"""
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

    check(schema, 1)
    if len(json.dumps(schema, allow_nan=False)) > MOST_SCHEMA_LETTERS:
        raise ValueError(f"the schema has more than {MOST_SCHEMA_LETTERS} letters")
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


class ParsedCall(NamedTuple):
    """A tool call in a completion."""

    id: str
    name: str
    arguments: str
    """JSON"""


def call_start(name: str) -> str:
    """Return the text of a call before its arguments."""
    return f'{OPEN}\n{{"name": {json.dumps(name)}, "arguments": '


def call_text(name: str, arguments: str) -> str:
    """Return the text of a call in a prompt or completion; arguments: JSON."""
    return call_start(name) + arguments + CALL_END


class AnswerForm(NamedTuple):
    """The part of the system prompt that describes the form of the answer."""

    text: str
    """the server's text; {given} stands for the client's part"""
    given: str


def describe_form(tools: Sequence[Tool], constraint: Constraint | None) -> AnswerForm | None:
    """Describe the tools that may be called, or the schema of the answer; None if the answer may have any form."""
    if tools:
        return AnswerForm(
            TOOLS_PROMPT, "\n".join(json.dumps(tool.function.model_dump(), ensure_ascii=False) for tool in tools)
        )
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


class CallReader:
    """Finds the calls in the streamed text of an answer, however the stream is divided."""

    def __init__(self, names: Collection[str], most: int):
        """names: of the tools. most: calls beyond this number stay text."""
        self._names, self._left = names, most
        self._held = ""
        self._searched = 0
        """number of characters of the held text that were searched for the end of a call"""
        self._called = False

    def feed(self, text: str, last: bool = False) -> Iterator[str | ParsedCall]:
        """Take the next text of the answer; yield the text and calls that are settled. last: no more text follows, and
        an unfinished call is text."""
        self._held += text
        while self._held:
            place = self._held.find(OPEN) if self._left else -1
            if place < 0:
                keep = 0 if last or not self._left else self._unclear()
                clear, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
                if clear.strip() or (clear and not self._called):  # blanks behind a call say nothing
                    yield clear
                return
            before = len(self._held[:place].rstrip())
            if before:
                yield self._held[:before]
                self._held, place, self._searched = self._held[before:], place - before, 0
            end = self._held.find(CLOSE, max(place, self._searched))
            if end < 0:
                self._searched = max(len(self._held) - len(CLOSE), 0)
                if last:
                    yield self._held
                    self._held = ""
                return
            self._searched = 0
            whole, self._held = self._held[: end + len(CLOSE)], self._held[end + len(CLOSE) :]
            call = read_call(whole[place + len(OPEN) : -len(CLOSE)], self._names)
            self._left -= call is not None
            self._called = self._called or call is not None
            yield call or whole  # blanks before a call say nothing

    def _unclear(self) -> int:
        """Return how many letters at the end of the held text may belong to a call or be blanks before one."""
        begun = unfinished(self._held, OPEN)
        rest = self._held[: len(self._held) - begun]
        return begun + len(rest) - len(rest.rstrip())


def read_call(text: str, names: Collection[str]) -> ParsedCall | None:
    """Parse the text between the tags as a call; None if it is not a call of a known tool."""
    try:
        found = json.loads(text)
        name, arguments = found["name"], found["arguments"]
        encoded = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        encoded.encode()  # not with half a character in it
    except (ValueError, TypeError, LookupError, RecursionError):
        return None
    if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
        return None
    return ParsedCall(f"call_{uuid.uuid4().hex[:24]}", name, encoded)
