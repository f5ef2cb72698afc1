"""JSON schemas that the engine's grammar cannot hold are refused, with the engine's own library; others are held."""

import json
from contextlib import nullcontext

import pytest
from llguidance import LLMatcher, LLTokenizer

from serve.json_schemas import MOST_COMPARED, bounded
from tests.processor_time import at_most
from tests.tables import read_table

LETTERS = LLTokenizer("byte")


def matcher_behind(schema, text):
    """The grammar of a schema, that has accepted a text."""
    form = LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults={"whitespace_flexible": False})
    matcher = LLMatcher(LETTERS, form, log_level=0)
    assert matcher.consume_tokens(LETTERS.tokenize_str(text)), matcher.get_error()
    return matcher


def test_keys_that_the_grammar_cannot_hold_are_refused_and_other_schemas_are_held():
    for row in read_table("serve/json_schemas", kind="refused"):
        with pytest.raises(ValueError, match="patternProperties|minProperties") as caught:
            bounded(row["schema"])
        assert row["place"] in str(caught.value) and row["key"] in str(caught.value), row
    for row in read_table("serve/json_schemas", kind="held"):
        assert matcher_behind(bounded(row["schema"]), row["answer"]).is_accepting(), row


@pytest.mark.parametrize(
    ("names", "pattern", "begun", "ends"),
    [(["a"], "^a$", '{"a":1,', True), (["z"], "^z$", '{"z":1,', True), (["b"], "^a$", '{"b":1,', False)],
)
def test_the_library_still_ends_in_the_middle(names, pattern, begun, ends):
    """Why they are refused; where this fails, the library holds them."""
    schema = {"type": "object", "properties": dict.fromkeys(names, {"type": "integer"}), "required": names,
              "patternProperties": {pattern: {"type": "integer"}}, "additionalProperties": False}  # fmt: skip
    matcher = matcher_behind(schema, begun)
    matcher.compute_bitmask()
    assert (matcher.is_error() and not matcher.is_accepting()) is ends


def deep(levels):
    return {"items": deep(levels - 1)} if levels else {}


@pytest.mark.parametrize(
    ("schema", "why"),
    [({"x": "y" * 40_000}, "letters"), ({"maxItems": 10**6}, "maxItems"), ({"multipleOf": 999983}, "multipleOf"),
     ({"properties": {"a": {"maxLength": 10**9}}}, "maxLength"), ({"pattern": "(a{9}){9}" * 40}, "pattern"),
     ({"patternProperties": {"(a+)*" * 80: {}}}, "pattern"), ({"a": 1e999}, "JSON"), (deep(60), "deep"),
     ({"allOf": [{"anyOf": [{"const": number} for number in range(4)]}] * 6}, "alternatives"),
     ({"allOf": [{"anyOf": [1, 1]}] * 200_000}, "letters"),  # measured before its alternatives are counted
     ({"allOf": [{"allOf": [{"properties": dict.fromkeys(map(str, range(MOST_COMPARED // 2 + 1)), {})}],
                  "patternProperties": {"^b": {}}}], "patternProperties": {"^c": {}}}, "more than"),
     ({"properties": {"a" * 10_000: {}}, "patternProperties": {"(a+)+!$": {}}}, ""),
     ({"maxItems": 10, "pattern": "a+", "properties": {f"a{number}": {} for number in range(500)}}, ""),
     ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "")],
    ids=range(14),
)  # fmt: skip
def test_schemas_that_would_hold_up_the_engine_are_refused_and_hostile_keys_cost_little(schema, why):
    with at_most(1), pytest.raises(ValueError, match=why) if why else nullcontext():
        assert bounded(schema) is schema
