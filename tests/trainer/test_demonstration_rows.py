"""Demonstrations as they are published become the rows that are imitated, or are refused with the place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shared.errors import DataError
from tests.published import SETS
from trainer.data.demonstration_rows import to_demonstration
from verify.published import NATIVE

SYSTEM, ASKED, REPLY = ({"role": role, "content": role[0]} for role in ("system", "user", "assistant"))


TABLE = [json.loads(line) for line in Path(__file__).with_name("demonstrations.jsonl").read_text("utf-8").splitlines()]
"""a published row, and the row that is `made` of it or why it is `refused`"""


@pytest.mark.parametrize("case", [case for case in TABLE if "made" in case])
def test_each_published_form(case: dict[str, Any]) -> None:
    found, name = to_demonstration(case["row"], "rows.jsonl:1")
    assert found == case["made"] and name != NATIVE
    assert to_demonstration(found, "rows.jsonl:1") == (found, NATIVE)


def test_tools_their_calls_and_their_results_are_told_as_in_episodes() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        REPLY,
    ]
    tools = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {}}}]
    found, _ = to_demonstration({"messages": messages, "tools": tools}, "")
    called = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert found["completion"] == [{"role": "assistant", "content": called}, messages[2], REPLY]
    assert '{"name": "add", "description": "adds", "parameters": {}}' in found["system"]
    turns = [
        ("human", "u"),
        ("function_call", '{"name": "add", "arguments": {"a": 1}}'),
        ("observation", "2"),
        ("gpt", "a"),
    ]
    chat = [{"from": role, "value": text} for role, text in turns]
    assert to_demonstration({"conversations": chat}, "")[0]["completion"] == found["completion"]


def test_our_own_form_wins_and_a_conversation_before_a_worked_solution() -> None:
    own = {"problem": "p", "solution": "s", "answer": "2", "messages": [ASKED, REPLY]}
    assert to_demonstration(own, "") == (own, NATIVE)
    assert to_demonstration(SETS["numina_cot"][0].row, "")[1] == "a conversation in 'messages'"
    found, _ = to_demonstration(SETS["gsm8k"][0].row, "")
    assert found["answer"] == "13" and found["solution"] == "She has 10 + 3 = 13."


@pytest.mark.parametrize("case", [case for case in TABLE if "refused" in case])
def test_what_is_no_demonstration_is_refused_with_its_place_once(case: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=case["refused"]) as error:
        to_demonstration(case["row"], "rows.jsonl:1")
    assert str(error.value).startswith("rows.jsonl:1: ") and str(error.value).count("rows.jsonl:1") == 1


def test_a_cell_of_any_type_is_read_or_refused_with_the_place() -> None:
    odd: list[Any] = [None, 1, "", "x", "[", "{}", [], {}, [None], [[]], {"a": 1}, [{"role": 1}], [{"from": None}]]
    whole = {"messages": [SYSTEM, ASKED, REPLY], "tools": [], "system": "s", "history": [], "prompt": "u"}
    for row in (
        whole,
        {"instruction": "u", "input": "x", "output": "a", "history": []},
        {"prompt": "u", "completion": "a"},
    ):
        for column in row:
            for cell in odd:
                try:
                    to_demonstration(row | {column: cell}, "rows.jsonl:1")
                except DataError as error:
                    assert str(error).startswith("rows.jsonl:1: "), error
