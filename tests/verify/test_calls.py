"""Function calls against the values that are accepted, and how they are read from text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tables import read_table
from verify.verifiers.calls import FunctionCall, fault, plain_schema, read_call, read_calls, tool_name

AREA = {
    "functions": [{"name": "geo.area", "parameters": {"type": "dict", "required": ["base", "height"], "properties": {
        "base": {"type": "integer"}, "height": {"type": "float"}, "unit": {"type": "string"},
        "flags": {"type": "array", "items": {"type": "string"}}, "where": {"type": "dict"},
        "exact": {"type": "boolean"},
    }}}],
    "ground_truth": [{"geo.area": {
        "base": [10], "height": [5.5, 5], "unit": ["square units", ""], "flags": [["a", "b"], ""],
        "where": [{"city": ["Bonn", "Berlin"], "zip": [1, ""]}, ""], "exact": [True, ""],
    }}],
}  # fmt: skip
RIGHT = FunctionCall("geo.area", {"base": 10, "height": 5})


@pytest.mark.parametrize("row", read_table("verify/calls"), ids=lambda row: json.dumps(row["arguments"]))
def test_right_and_wrong_arguments(row: dict[str, Any]) -> None:
    found = fault([RIGHT._replace(arguments=RIGHT.arguments | row["arguments"])], AREA)
    assert row["words"] in found and bool(row["words"]) is bool(found)


def test_wrong_functions_and_numbers_of_calls() -> None:
    assert fault([RIGHT._replace(name="geo_area")], AREA) == "", "tools have no dots in their names"
    assert fault([RIGHT._replace(name="volume")], AREA) == "calls volume, wanted geo.area"
    assert fault([], AREA) == "0 calls, wanted 1" and fault([RIGHT, RIGHT], AREA) == "2 calls, wanted 1"
    assert fault([FunctionCall("geo.area", {"base": 10})], AREA) == "geo.area: height is missing"
    none = {"functions": AREA["functions"], "ground_truth": [], "expect": "no_call"}
    assert fault([], none) == "" and "no function fits" in fault([RIGHT], none)
    truth = [{"f": {"x": [1]}}, {"f": {"x": [2]}}]
    two = {
        "functions": [{"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}}],
        "ground_truth": truth,
    }
    assert fault([FunctionCall("f", {"x": 2}), FunctionCall("f", {"x": 1})], two) == "", "in any order"
    assert fault([FunctionCall("f", {"x": 1}), FunctionCall("f", {"x": 1})], two) == "f: x = 1 is not accepted"


ARGUMENTS = st.dictionaries(st.text(max_size=5), st.recursive(st.none() | st.booleans() | st.integers() | st.text(),
                                                              lambda inner: st.lists(inner, max_size=3)))  # fmt: skip


@settings(max_examples=30)
@given(st.lists(st.builds(FunctionCall, st.text(min_size=1, max_size=9), ARGUMENTS), max_size=3))
def test_calls_are_read_from_text(calls: list[FunctionCall]) -> None:
    text = json.dumps([{"name": call.name, "arguments": call.arguments} for call in calls])
    assert read_calls(text) == read_calls(f"So:\n```json\n[]\n```\nor rather\n```json\n{text}\n```\nDone.") == calls


def test_other_texts_are_no_calls() -> None:
    assert read_calls('```json\n{"name": "f", "arguments": "{\\"x\\": 1}"}\n```') == [FunctionCall("f", {"x": 1})]
    assert read_call({"name": "f", "arguments": ""}) == FunctionCall("f", {})
    for text in ("none fits", '{"x": 1}', '[{"name": 3}]', '{"name": "f", "arguments": [1]}', "[" * 90_000,
                 '{"name": "f", "arguments": "{"}', '```json\n[{"name": "f"', "[] " * 50_000):  # fmt: skip
        assert read_calls(text) is None


def test_schemas_become_json_schemas() -> None:
    found = plain_schema({"type": "dict", "properties": {"type": {"type": "any", "optional": True},
                          "a": {"type": "tuple", "items": {"type": "float"}}}})  # fmt: skip
    assert found == {"type": "object", "properties": {"type": {}, "a": {"type": "array", "items": {"type": "number"}}}}
    assert tool_name("math.sqrt/2") == "math_sqrt_2"
