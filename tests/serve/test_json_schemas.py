"""JSON schemas that the engine's grammar cannot hold are refused, with the engine's own library; others are held."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from serve.json_schemas import MOST_COMPARED, bounded

INT: dict[str, Any] = {"type": "integer"}
LETTERS = LLTokenizer("byte")


def named(*names: str, patterns: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    """An object's schema that requires the names, and allows keys of the patterns."""
    found = {"properties": dict.fromkeys(names, INT), "required": list(names)} if names else {}
    found |= {"patternProperties": dict.fromkeys(patterns, INT)} if patterns else {}
    return {"type": "object", **found, "additionalProperties": False, **more}


def ends_early(schema: dict[str, Any], begun: str) -> bool:
    """Whether the grammar offers nothing behind a text that it has accepted."""
    form = LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults={"whitespace_flexible": False})
    matcher = LLMatcher(LETTERS, form, log_level=0)
    assert matcher.consume_tokens(LETTERS.tokenize_str(begun)), matcher.get_error()
    matcher.compute_bitmask()
    return matcher.is_error() and not matcher.is_accepting()


BOTH = named("a", patterns=("^a$",))


@pytest.mark.parametrize(
    ("schema", "place", "key"),
    [
        (BOTH, "#:", "a"),
        (named("ab", patterns=("^a",)), "#:", "ab"),
        (named("concat", patterns=("cat",)), "#:", "concat"),
        (named("x", "k7", patterns=("^b", "^k[0-9]+$")), "#:", "k7"),
        (named("a", patterns=("",)), "#:", "a"),
        (named("a", patterns=(".*",)), "#:", "a"),
        (named("größe", patterns=("ö",)), "#:", "größe"),
        (named('q"', patterns=('^q"$',)), "#:", r'q\"'),
        (named("A", patterns=("(?i)^a$",)), "#:", "A"),
        ({"type": "object", "properties": {"a": False}, "patternProperties": {"^a$": INT}}, "#:", "a"),
        (named("o", properties={"o": BOTH}), "#/properties/o:", "a"),
        ({"type": "array", "items": BOTH}, "#/items:", "a"),
        ({"type": "array", "prefixItems": [INT, BOTH]}, "#/prefixItems/1:", "a"),
        ({"type": "object", "additionalProperties": BOTH}, "#/additionalProperties:", "a"),
        ({"type": "object", "patternProperties": {"^x": BOTH}}, "#/patternProperties/^x:", "a"),
        ({"$defs": {"p": BOTH}, "$ref": "#/$defs/p"}, "#/$defs/p:", "a"),
        ({"$defs": {"p": named(patterns=("^a$",))}, "$ref": "#/$defs/p", "properties": {"a": INT}}, "#:", "a"),
        ({"$defs": {"p": {"$anchor": "n", "patternProperties": {"^a": INT}}}, "allOf": [{"$ref": "#n"}, named("a")]},
         "#:", "a"),
        ({"allOf": [named("a"), {"patternProperties": {"^a$": INT}}]}, "#:", "a"),
        ({"properties": {"a": INT}, "anyOf": [{"patternProperties": {"^a$": INT}}, {"required": ["a"]}]}, "#:", "a"),
        ({"anyOf": [{"type": "null"}, BOTH]}, "#/anyOf/1:", "a"),
        ({"oneOf": [named("b"), BOTH]}, "#/oneOf/1:", "a"),
        (named(patterns=("^z$",), required=["z"]), "#:", "z"),
        (named("a", patterns=("^[yz]$",), required=["a", "y", "z"]), "#:", "yz"),
        (named(patterns=("^k[0-9]$",), minProperties=2), "#:", "minProperties"),
        ({"type": "object", "additionalProperties": INT, "minProperties": 3}, "#:", "minProperties"),
    ],
)  # fmt: skip
def test_keys_that_the_grammar_cannot_hold_are_refused(schema: dict[str, Any], place: str, key: str) -> None:
    with pytest.raises(ValueError, match="patternProperties|minProperties") as caught:
        bounded(schema)
    assert place in str(caught.value) and key in str(caught.value)


@pytest.mark.parametrize(
    ("schema", "answer"),
    [
        (named("a"), '{"a":1}'),
        (named("b", patterns=("^a$",)), '{"b":1,"a":2}'),
        (named("cat", patterns=("^[0-9]+$", "^x_")), '{"cat":1,"12":2,"x_":3}'),
        (named(patterns=("^k[0-9]$",), minProperties=1, maxProperties=1), '{"k7":1}'),
        (named(patterns=("^k[0-9]$",), required=["k1"]), '{"k1":1,"k2":2}'),
        (named("a", "b", minProperties=2), '{"a":1,"b":2}'),
        ({"type": "object", "additionalProperties": INT, "minProperties": 1}, '{"a":1}'),
        ({"anyOf": [named("a"), named(patterns=("^a$",))]}, '{"a":1}'),
        (named("o", properties={"o": named(patterns=("^o$",))}), '{"o":{"o":1}}'),
        (named("patternProperties", "properties", patterns=("^x$",)), '{"patternProperties":1,"properties":2}'),
        ({"const": {"properties": {"a": 1}, "patternProperties": {"a": 1}}},
         '{"properties":{"a":1},"patternProperties":{"a":1}}'),
        ({"$defs": {"n": named("v", properties={"v": INT, "n": {"$ref": "#/$defs/n"}})}, "$ref": "#/$defs/n"},
         '{"v":1,"n":{"v":2}}'),
        ({"allOf": [named("a", additionalProperties=True), {"patternProperties": {"^b$": INT}}]}, '{"a":1,"b":2}'),
        (named("A", patterns=("^a$",)), '{"A":1,"a":2}'),
    ],
)  # fmt: skip
def test_other_schemas_are_held(schema: dict[str, Any], answer: str) -> None:
    form = LLMatcher.grammar_from_json_schema(json.dumps(bounded(schema)), defaults={"whitespace_flexible": False})
    matcher = LLMatcher(LETTERS, form, log_level=0)
    assert matcher.consume_tokens(LETTERS.tokenize_str(answer)) and matcher.is_accepting(), matcher.get_error()


def test_the_library_still_ends_in_the_middle() -> None:
    """Why they are refused; where this fails, the library holds them."""
    assert ends_early(BOTH, '{"a":1,')
    assert ends_early(named(patterns=("^z$",), required=["z"]), '{"z":1,')
    assert not ends_early(named("b", patterns=("^a$",)), '{"b":1,')


def test_hostile_keys_cost_little() -> None:
    assert bounded(named("a" * 10_000, patterns=("(a+)+!$",)))
    assert bounded(named(*(f"a{number}" for number in range(500))))
    many = {"properties": {f"a{number}": {} for number in range(MOST_COMPARED // 2 + 1)}}
    levels = {"allOf": [{"allOf": [many], "patternProperties": {"^b": {}}}], "patternProperties": {"^c": {}}}
    with pytest.raises(ValueError, match="more than"):
        bounded(levels)
    around: dict[str, Any] = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    assert bounded(around) == around
