"""Demonstrations as they are published become the rows that are imitated, or are refused with the place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shared.errors import DataError
from tests.published import SETS
from trainer.data.demonstration_rows import to_demonstration
from verify.published import NATIVE

SYSTEM, ASKED, REPLY = ({"role": role, "content": role[0]} for role in ("system", "user", "assistant"))
SAME = {"problem": "u", "completion": "a"}
WHOLE = SAME | {"system": "s"}


@pytest.mark.parametrize(
    ("row", "made"),
    [
        ({"messages": [ASKED, REPLY]}, SAME),
        ({"messages": [SYSTEM, ASKED, REPLY]}, WHOLE),
        ({"messages": json.dumps([SYSTEM, ASKED, REPLY])}, WHOLE),
        ({"messages": [ASKED, REPLY], "prompt": "u", "prompt_id": "7"}, SAME | {"prompt_id": "7"}),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "u"}]}, REPLY]}, SAME),
        ({"prompt": "u", "completion": "a"}, SAME),
        ({"prompt": [SYSTEM, ASKED], "completion": [REPLY]}, WHOLE),
        ({"prompt": "u", "completion": [REPLY]}, SAME),
        ({"completion": [SYSTEM, ASKED, REPLY]}, WHOLE),
        ({"conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}]}, SAME),
        ({"conversations": [{"from": "user", "value": "u"}, {"from": "model", "value": "a"}], "system": "s"}, WHOLE),
        ({"conversations": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]}, SAME),
        ({"instruction": "u", "input": "", "output": "a"}, SAME),
        ({"instruction": "u", "input": "x", "output": "a", "system": "s"}, WHOLE | {"problem": "u\n\nx"}),
        ({"instruction": "u", "context": "x", "response": "a"}, SAME | {"problem": "u\n\nx"}),
        ({"query": "u", "response": "a"}, SAME),
        ({"input": "u", "output": "a"}, SAME),
        ({"messages": str([ASKED, REPLY])}, SAME),
        ({"problem": "u", "generated_solution": "a", "expected_answer": "6"}, SAME | {"expected_answer": "6"}),
        ({"messages": [ASKED, ASKED, REPLY]}, SAME | {"problem": "u\n\nu"}),
        (
            {"instruction": "v", "output": "b", "history": [["u", "a"]]},
            {"problem": "u", "completion": [REPLY, ASKED | {"content": "v"}, REPLY | {"content": "b"}]},
        ),
        (
            {"messages": [ASKED, {"role": "assistant", "content": "a", "reasoning_content": "Hm."}]},
            SAME | {"completion": "<think>\nHm.\n</think>\na"},
        ),
    ],
)  # fmt: skip
def test_each_published_form(row: dict[str, Any], made: dict[str, Any]) -> None:
    found, name = to_demonstration(row, "rows.jsonl:1")
    assert found == made and name != NATIVE
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


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [SYSTEM, ASKED]}, "ends with the assistant, and this is: system user"),
        ({"messages": [REPLY]}, "begins with the user and .* this is: assistant"),
        ({"messages": [ASKED, SYSTEM, REPLY]}, "the system stands within the conversation"),
        (
            {"messages": [ASKED, {"role": "critic", "content": "x"}]},
            "message 1 has the role 'critic': it must be one of",
        ),
        ({"messages": "hello"}, "a conversation is a list of messages"),
        ({"question": "u", "answer": "a"}, r"nothing to imitate: it has 'question', 'answer'\. .* data\.columns = "),
        ({"text": "raw"}, "nothing to imitate: it has 'text'"),
        ({"messages": [1]}, "a conversation is a list of messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}, REPLY]}, "content that is no text"),
        ({"prompt": "u", "chosen": "a", "rejected": "b"}, r"data\.offline takes pairs"),
        ({"messages": [ASKED, {"role": "assistant", "tool_calls": [{}]}]}, "not understood"),
    ],
)
def test_what_is_no_demonstration_is_refused_with_its_place_once(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as error:
        to_demonstration(row, "rows.jsonl:1")
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
