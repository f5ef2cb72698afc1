"""Function calls against the values that are accepted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shared.jsonl import read_rows
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


def judge(**arguments: Any) -> str:
    return fault([FunctionCall("geo.area", {"base": 10, "height": 5, **arguments})], AREA)


@pytest.mark.parametrize("row", read_table("verify/calls"), ids=lambda row: json.dumps(row["arguments"]))
def test_right_and_wrong_arguments(row: dict[str, Any]) -> None:
    fault_found = judge(**row["arguments"])
    assert row["words"] in fault_found and bool(row["words"]) is bool(fault_found)


def test_wrong_functions_and_numbers_of_calls() -> None:
    right = FunctionCall("geo.area", {"base": 10, "height": 5})
    assert fault([right._replace(name="geo_area")], AREA) == "", "tools have no dots in their names"
    assert fault([right._replace(name="volume")], AREA) == "calls volume, wanted geo.area"
    assert fault([], AREA) == "0 calls, wanted 1" and fault([right, right], AREA) == "2 calls, wanted 1"
    assert fault([FunctionCall("geo.area", {"base": 10})], AREA) == "geo.area: height is missing"
    none = {"functions": AREA["functions"], "ground_truth": [], "expect": "no_call"}
    assert fault([], none) == "" and "no function fits" in fault([right], none)


def test_several_calls_may_come_in_any_order() -> None:
    truth = [{"f": {"x": [1]}}, {"f": {"x": [2]}}]
    tests = {"functions": [{"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}}],
             "ground_truth": truth}  # fmt: skip
    assert fault([FunctionCall("f", {"x": 2}), FunctionCall("f", {"x": 1})], tests) == ""
    assert fault([FunctionCall("f", {"x": 1}), FunctionCall("f", {"x": 1})], tests) == "f: x = 1 is not accepted"


def test_calls_are_read_from_text() -> None:
    call = FunctionCall("f", {"x": 1})
    assert read_calls('[{"name": "f", "arguments": {"x": 1}}]') == [call]
    last = '```json\n{"name": "f", "arguments": "{\\"x\\": 1}"}\n```'
    assert read_calls(f"So:\n```json\n[]\n```\nor rather\n{last}\nDone.") == [call]
    assert read_calls("```json\n[]\n```") == [] and read_calls("[]") == []
    for text in ("none fits", '{"x": 1}', '[{"name": 3}]', '{"name": "f", "arguments": [1]}', "[" * 90_000,
                 '{"name": "f", "arguments": "{"}', '```json\n[{"name": "f"', "[] " * 50_000):  # fmt: skip
        assert read_calls(text) is None
    assert read_call({"name": "f", "arguments": ""}) == FunctionCall("f", {})


def test_schemas_become_json_schemas() -> None:
    found = plain_schema({"type": "dict", "properties": {"type": {"type": "any", "optional": True},
                          "a": {"type": "tuple", "items": {"type": "float"}}}})  # fmt: skip
    assert found == {"type": "object", "properties": {"type": {}, "a": {"type": "array", "items": {"type": "number"}}}}
    assert tool_name("math.sqrt/2") == "math_sqrt_2"


def test_an_accepted_call_of_every_row_is_right_and_an_empty_one_is_not(data_folder: Path) -> None:
    rows = [row.fields for row in read_rows(data_folder / "bfcl_simple_irrelevance.jsonl.gz")]
    assert len(rows) == 640

    def first(values: list[Any]) -> Any:
        """The first accepted value; None where the argument is best left out."""
        value = next((one for one in values if one != ""), None)
        if isinstance(value, dict):
            return {key: first(inner) for key, inner in value.items() if first(inner) is not None}
        if isinstance(value, list):
            return [first([one]) for one in value]
        return value

    for row in rows:
        tests = row["tests"]
        calls = [
            FunctionCall(name, first([arguments])) for one in tests["ground_truth"] for name, arguments in one.items()
        ]
        assert fault(calls, tests) == "", row["id"]
        assert bool(fault([], tests)) == bool(calls), row["id"]
        text = json.dumps([{"name": call.name, "arguments": call.arguments} for call in calls])
        assert read_calls(text) == calls
