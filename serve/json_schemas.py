"""JSON schemas of requests: refused where an engine needs too long for them, or where its grammar cannot hold them.

The engine's grammar (llguidance) gives each named key one place in an object. A pattern's keys come after them, without
those that are named; where no such key is left, the grammar offers a comma and then nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any
from urllib.parse import unquote

from pydantic import AfterValidator

MOST_SCHEMA_LETTERS = 32_768
MOST_DEPTH = 24
MOST_REPEATS = 1024
"""largest repetition count in a schema's bounds and patterns, since the engine unrolls repetitions"""
COUNTS = {
    **dict.fromkeys(("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"), MOST_REPEATS),
    "multipleOf": 1000,
}
MOST_PATTERN = 200
MOST_COMPARED = 3000
"""largest number of keys that are compared with patterns of keys"""
MOST_WAYS = 64
VALUES = ("const", "enum", "default", "examples")
"""keywords whose values are no schemas"""
NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
"""keywords whose values are objects of schemas"""


def bounded(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema if an engine can compile it in reasonable time and hold answers to it. Raises ValueError
    if it cannot."""

    def check(value: Any, depth: int) -> None:
        if depth > MOST_DEPTH:
            raise ValueError(f"the schema is nested more than {MOST_DEPTH} deep")
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            if name in COUNTS and isinstance(inner, (int, float)) and inner > COUNTS[name]:
                raise ValueError(f"{name} = {inner} is more than {COUNTS[name]}")
            patterns = inner if name == "patternProperties" and isinstance(inner, dict) else [inner]
            for pattern in patterns if name in ("pattern", "patternProperties") else []:
                if isinstance(pattern, str) and any(mark in pattern for mark in "{*+") and len(pattern) > MOST_PATTERN:
                    raise ValueError(f"a pattern with repetitions has more than {MOST_PATTERN} letters")
            if isinstance(inner, (dict, list)):
                check(inner, depth + 1)
            if name == "allOf" and alternatives(inner) > MOST_WAYS:
                raise ValueError(f"allOf combines more than {MOST_WAYS} alternatives")

    try:
        letters = len(json.dumps(schema, allow_nan=False))
    except RecursionError:
        raise ValueError(f"the schema is nested more than {MOST_DEPTH} deep") from None
    if letters > MOST_SCHEMA_LETTERS:  # first: what follows takes long for a large one
        raise ValueError(f"the schema has more than {MOST_SCHEMA_LETTERS} letters")
    check(schema, 1)
    KeyCheck(schema).run()
    return schema


def alternatives(schema: Any) -> int:
    """Return the number of alternatives in a schema, combinations of nested ones included."""
    if isinstance(schema, dict):
        branches = [branch for name in ("anyOf", "oneOf") if isinstance(branch := schema.get(name), (list, dict))]
        return max(sum(map(len, branches)), 1) * math.prod(map(alternatives, schema.values()))
    return math.prod(map(alternatives, schema)) if isinstance(schema, list) else 1


Schema = Annotated[dict[str, Any], AfterValidator(bounded)]


@dataclass
class Keys:
    """The keys that an object's schema names, and the patterns of further keys, with those of its parts."""

    names: set[str] = field(default_factory=set)
    patterns: set[str] = field(default_factory=set)

    def add(self, other: Keys) -> None:
        """Add the keys of another schema."""
        self.names |= other.names
        self.patterns |= other.patterns


class KeyCheck:
    """Looks for objects of a schema whose keys the engine's grammar cannot hold."""

    def __init__(self, root: dict[str, Any]):
        self._root = root
        self._keys: dict[int, Keys] = {}
        """by the id of a schema"""
        self._apart: dict[frozenset[str], set[str]] = {}
        """patterns -> names that match none of them"""
        self._compared = 0
        named = (one for _, one in subschemas(root, "#") if isinstance(one.get("$anchor"), str))
        self._anchors = {one["$anchor"]: one for one in named}

    def run(self) -> None:
        """Raises ValueError with the place of the first such object."""
        try:
            for pointer, schema in subschemas(self._root, "#"):
                self._check_counts(schema, pointer)
                self._check_required(schema, pointer)
                self._keys_of(schema, pointer)
        except RecursionError:
            raise ValueError("the schema follows too many $ref, one after the other") from None

    def _check_counts(self, schema: dict[str, Any], pointer: str) -> None:
        """Further keys may repeat in the engine's grammar, so it can count on one of them only."""
        least, named = schema.get("minProperties"), {*mapping(schema, "properties"), *listed(schema, "required")}
        is_open = mapping(schema, "patternProperties") or schema.get("additionalProperties") is not False
        if isinstance(least, (int, float)) and least > len(named) + 1 and is_open:
            raise ValueError(
                f"{pointer}: minProperties = {least}, but the engine does not see whether keys without a name repeat: "
                "name the keys in properties, or make minProperties smaller"
            )

    def _check_required(self, schema: dict[str, Any], pointer: str) -> None:
        """A required key has a place of its own too, and its pattern must have others."""
        names = {name for name in listed(schema, "required") if isinstance(name, str)}
        names -= mapping(schema, "properties").keys()
        for pattern in mapping(schema, "patternProperties") if names else ():
            self._count(names)
            if has_no_other(pattern, names):
                raise ValueError(
                    f"{pointer}: every key of the pattern {quoted(pattern)} of patternProperties is required: name "
                    "these keys in properties instead of the pattern"
                )

    def _keys_of(self, schema: Any, pointer: str) -> Keys:
        """Return the keys of a schema and of all that applies to the same object. Raises ValueError where a name
        matches a pattern, unless they are in different alternatives."""
        if not isinstance(schema, dict):
            return Keys()
        if id(schema) in self._keys:
            return self._keys[id(schema)]
        every = self._keys[id(schema)] = Keys()  # at first: a schema may refer to itself
        every.add(Keys(set(mapping(schema, "properties")), set(mapping(schema, "patternProperties"))))
        for number, branch in enumerate(listed(schema, "allOf")):
            every.add(self._keys_of(branch, f"{pointer}/allOf/{number}"))
        if isinstance(target := schema.get("$ref"), str):
            every.add(self._keys_of(self._resolve(target), target))
        self._check(every.names, every.patterns, pointer)
        for kind in ("anyOf", "oneOf"):
            either = Keys()
            for number, branch in enumerate(listed(schema, kind)):
                either.add(self._keys_of(branch, f"{pointer}/{kind}/{number}"))
            self._check(either.names, every.patterns, pointer)
            self._check(every.names, either.patterns, pointer)
            every.add(either)
        return every

    def _check(self, names: set[str], patterns: set[str], pointer: str) -> None:
        """Raises ValueError for a name that matches a pattern."""
        apart = self._apart.setdefault(frozenset(patterns), set())
        left = names - apart
        if not patterns or not left:
            return
        self._count(left)
        if (name := first_match(patterns, sorted(left))) is not None:
            pattern = next((one for one in sorted(patterns) if first_match([one], [name]) is not None), "")
            raise ValueError(
                f"{pointer}: the key {quoted(name)} of properties matches the pattern {quoted(pattern)} of "
                "patternProperties, and the engine cannot hold an answer to both: change the pattern until it "
                "matches no key of properties, or leave one of the two out"
            )
        apart |= left

    def _count(self, names: Collection[str]) -> None:
        """Raises ValueError where too many keys are compared."""
        self._compared += len(names)
        if self._compared > MOST_COMPARED:
            raise ValueError(f"more than {MOST_COMPARED} keys next to patternProperties: name fewer")

    def _resolve(self, target: str) -> Any:
        """Return the schema that a $ref means; None for one that only the engine may know."""
        base, _, fragment = target.partition("#")
        if base and base != self._root.get("$id"):
            return None
        if fragment and not fragment.startswith("/"):
            return self._anchors.get(fragment)
        value: Any = self._root
        for step in fragment.split("/")[1:]:
            name = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
                value = value[int(name)]
            else:
                value = value.get(name) if isinstance(value, dict) else None
        return value


def subschemas(schema: Any, pointer: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a schema and all schemas inside it, each with its JSON pointer."""
    if isinstance(schema, list):
        for number, branch in enumerate(schema):
            yield from subschemas(branch, f"{pointer}/{number}")
    if not isinstance(schema, dict):
        return
    yield pointer, schema
    for name, value in schema.items():
        if name in NAMED_SCHEMAS and isinstance(value, dict):
            for key, branch in value.items():
                yield from subschemas(branch, f"{pointer}/{name}/{key}")
        elif name not in VALUES:
            yield from subschemas(value, f"{pointer}/{name}")


def quoted(text: str) -> str:
    """Return a text as it is in a JSON file, in letters that people read."""
    return json.dumps(text, ensure_ascii=False)


def mapping(schema: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a keyword's object; {} where it has none."""
    value = schema.get(name)
    return value if isinstance(value, dict) else {}


def listed(schema: dict[str, Any], name: str) -> list[Any]:
    """Return a keyword's list; [] where it has none."""
    value = schema.get(name)
    return value if isinstance(value, list) else []


def first_match(patterns: Iterable[str], names: Iterable[str]) -> str | None:
    """Return the first name that matches a pattern, as the engine reads patterns, in time that grows with the letters
    of both; None also where it cannot read a pattern, which it then says itself."""
    from llguidance import LLMatcher, LLTokenizer

    form = {"type": "string", "pattern": "|".join(f"(?:{pattern})" for pattern in patterns)}
    letters = LLTokenizer("byte")
    matcher = LLMatcher(letters, LLMatcher.grammar_from_json_schema(json.dumps(form)), log_level=0)
    for name in () if matcher.is_error() else names:
        tokens = letters.tokenize_str(quoted(name))
        if matcher.validate_tokens(tokens) == len(tokens):
            return name
    return None


def has_no_other(pattern: str, names: Collection[str]) -> bool:
    """Return whether the engine finds no key of a pattern besides these names, and some of them match it."""
    from llguidance import LLMatcher, LLTokenizer

    form = {
        "type": "object", "properties": dict.fromkeys(names, {"const": 0}), "required": list(names),
        "patternProperties": {pattern: {"const": 0}}, "additionalProperties": False,
    }  # fmt: skip
    letters = LLTokenizer("byte")
    given = LLMatcher.grammar_from_json_schema(json.dumps(form), defaults={"whitespace_flexible": False})
    matcher = LLMatcher(letters, given, log_level=0)
    begun = json.dumps(dict.fromkeys(names, 0), separators=(",", ":"), ensure_ascii=False)[:-1] + ","
    if matcher.is_error() or not matcher.consume_tokens(letters.tokenize_str(begun)):
        return False
    matcher.compute_bitmask()
    return matcher.is_error()
