"""Tools and structured answers over a scripted engine; test_vllm.py has them with the engine that enforces them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serve.engine import SamplingParameters
from serve.json_schemas import bounded
from shared.tool_calls import CallReader, NoCallError, ParsedCall, call_text, parse_call
from tests.processor_time import at_most
from tests.serve.conftest import Serve

ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add", "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}  # fmt: skip
CALLS = call_text("add", '{"a": 1, "b": 2}') + "\n" + call_text("add", '{"a": 3, "b": 4}')


def in_two(answer: str) -> Any:
    """A script that thinks in its first call, which ends at the closing tag, and answers in its second."""

    def script(prompt: list[int], sampling: SamplingParameters, call: int) -> str:
        return answer if sampling.constraint is not None else f"I add.</think>{answer}"

    return script


def test_calls_are_found_and_told(serve: Serve) -> None:
    served = serve(in_two(CALLS))
    choice = served.ask(tools=[ADD]).json()["choices"][0]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls" and message["content"] is None and message["reasoning"] == "I add."
    found = [(call["type"], call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    assert found == [("function", "add", '{"a": 1, "b": 2}'), ("function", "add", '{"a": 3, "b": 4}')]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    reasoning, answer = served.engine.samplings
    assert (reasoning.constraint, reasoning.through, answer.through) == (None, "</think>", "")
    assert answer.constraint is not None and answer.constraint.kind == "structural_tag"
    form = json.loads(answer.constraint.value)
    assert form["triggers"] == ["<tool_call>"] and form["structures"][0]["schema"] == ADD["function"]["parameters"]
    first, second = served.engine.prompts
    assert '"name": "add"' in first and first.endswith("<assistant><think>\n")
    assert second == first + "I add.</think>"


def test_calls_are_streamed_with_their_index(serve: Serve) -> None:
    events = serve(in_two(f"Let me see.\n{CALLS}")).events(tools=[ADD])
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["index"] for call in calls] == [0, 1] and json.loads(calls[1]["function"]["arguments"])["a"] == 3
    assert "".join(delta.get("content") or "" for delta in deltas) == "Let me see."
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_one_tool_at_most_and_none_at_all(serve: Serve) -> None:
    served = serve(in_two(CALLS))
    named = {"type": "function", "function": {"name": "add"}}
    message = served.ask(tools=[ADD], tool_choice=named, parallel_tool_calls=False).json()["choices"][0]["message"]
    assert len(message["tool_calls"]) == 1
    constraint = served.engine.samplings[-1].constraint
    assert constraint is not None and constraint.kind == "grammar" and constraint.value.startswith("start: call\ncall:")
    message = served.ask(tools=[ADD], tool_choice="none").json()["choices"][0]["message"]
    assert "tool_calls" not in message and "Adds." not in served.engine.prompts[-1]


def test_results_go_back_to_the_model(serve: Serve) -> None:
    served = serve(in_two("3 and 7."))
    calls = [{"id": f"c{n}", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}} for n in (1, 2)]
    messages = [
        {"role": "user", "content": "Add them."}, {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "tool", "tool_call_id": "c2", "content": "<eos>"},
    ]  # fmt: skip
    reply = served.client.post("/v1/chat/completions", json={"messages": messages, "tools": [ADD]})
    assert reply.json()["choices"][0]["message"]["content"] == "3 and 7."
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    results = "<tool_response>\n3\n</tool_response>\n<tool_response>\n<eos>\n</tool_response>"
    assert f"<assistant>{call}\n{call}<eos><user>{results}<eos><assistant>" in served.engine.prompts[0]


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "no tool sub"),
        ({"tools": [ADD], "response_format": {"type": "json_object"}}, "cannot be combined with tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "name"),
        ({"tools": [ADD] * 200}, "tools"),
        ({"response_format": {"type": "json_schema"}}, "json_schema is missing"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"messages": [{"role": "tool"}]}, "content"),
    ],
)
def test_what_does_not_fit_together(serve: Serve, body: dict[str, Any], word: str) -> None:
    whole = {"messages": [{"role": "user", "content": "x"}], **body}
    reply = serve("x").client.post("/v1/chat/completions", json=whole)
    assert reply.status_code == 400 and word in reply.text


def test_an_answer_of_a_form_is_sampled_apart_from_its_reasoning(serve: Serve) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    served = serve(in_two('{"n": 5}'))
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    message = served.ask(response_format=form, max_tokens=100).json()["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == ('{"n": 5}', "I add.")
    constraint = served.engine.samplings[-1].constraint
    assert constraint is not None and (constraint.kind, json.loads(constraint.value)) == ("json", schema)
    assert json.dumps(schema) in served.engine.prompts[0]
    used = len(served.server.prompts.chat.encode("I add.</think>"))
    assert served.engine.samplings[-1].max_tokens == 100 - used


def test_reasoning_leaves_room_for_an_answer_of_a_form(serve: Serve) -> None:
    def script(prompt: list[int], sampling: SamplingParameters, call: int) -> str:
        return '{"a": 1}' if sampling.constraint is not None else "hm " * 500

    message = serve(script).ask(response_format={"type": "json_object"}, max_tokens=200).json()["choices"][0]["message"]
    assert message["content"] == '{"a": 1}' and message["reasoning"].endswith("I'll answer now.")


def test_reasoning_without_an_end_is_ended(serve: Serve) -> None:
    def script(prompt: list[int], sampling: SamplingParameters, call: int) -> str:
        return '{"a": 1}' if sampling.constraint is not None else "hm <eos>"

    served = serve(script)
    assert served.ask(response_format={"type": "json_object"}).json()["choices"][0]["message"]["content"] == '{"a": 1}'
    assert "hm <eos>" not in served.engine.prompts[1]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_calls_are_found_however_the_stream_is_cut(size: int) -> None:
    text = f"First <tool {CALLS} then <tool_call>{{</tool_call> and {call_text('other', '{}')} <tool_call>{{"
    reader = CallReader({"add"}, most=5)
    parts = [text[place : place + size] for place in range(0, len(text), size)]
    found = [one for part in parts for one in reader.feed(part)] + list(reader.feed("", last=True))
    assert [json.loads(one.arguments)["a"] for one in found if isinstance(one, ParsedCall)] == [1, 3]
    rest = "".join(one for one in found if isinstance(one, str))
    assert rest.split() == text.replace(CALLS, "").split() and not any(one == "\n" for one in found)


@pytest.mark.parametrize(
    "schema",
    [{"x": "y" * 40_000}, {"maxItems": 10**6}, {"properties": {"a": {"maxLength": 10**9}}},
     {"pattern": "(a{9}){9}" * 40}],
)  # fmt: skip
def test_schemas_that_would_hold_up_the_engine_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="more than"):
        bounded(schema)
    choice = {"anyOf": [{"const": number} for number in range(4)]}
    pattern = {"patternProperties": {"(a+)" * 80: {}}}
    for bad in ({"allOf": [choice] * 6}, {"multipleOf": 999983}, pattern, {"a": 1e999}):
        with pytest.raises(ValueError, match=r"more than|not JSON compliant"):
            bounded(bad)
    deep: dict[str, Any] = {}
    for _ in range(60):
        deep = {"items": deep}
    with pytest.raises(ValueError, match="deep"):
        bounded(deep)
    many: dict[str, Any] = {"allOf": [{"anyOf": [1, 1]}] * 200_000}
    with at_most(1), pytest.raises(ValueError, match="letters"):  # measured before its alternatives are counted
        bounded(many)
    assert bounded({"maxItems": 10, "pattern": "a+"}) == {"maxItems": 10, "pattern": "a+"}


def test_results_stand_in_the_order_of_their_calls(serve: Serve) -> None:
    served = serve(in_two("Done."))
    calls = [{"id": f"c{n}", "type": "function", "function": {"name": "add", "arguments": "{}"}} for n in (1, 2)]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c2", "content": "B"}, {"role": "tool", "tool_call_id": "c1", "content": "A"},
    ]  # fmt: skip
    assert served.client.post("/v1/chat/completions", json={"messages": messages}).is_success
    assert served.engine.prompts[0].index("\nA\n") < served.engine.prompts[0].index("\nB\n")
    messages[-1]["tool_call_id"] = "c9"
    reply = served.client.post("/v1/chat/completions", json={"messages": messages})
    assert reply.status_code == 400 and "no call c9" in reply.text


def test_sampling_ends_behind_the_last_call_that_may_be(serve: Serve) -> None:
    served = serve(in_two(CALLS + " and more and more"))
    choice = served.ask(tools=[ADD], parallel_tool_calls=False).json()["choices"][0]
    assert len(choice["message"]["tool_calls"]) == 1 and choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    "text", ['{"name": [], "arguments": {}}', '{"name": "add", "arguments": {"a": NaN}}', "[" * 100_000,
             '{"name": "add", "arguments": {"a": "\\ud800"}}', '{"name": "add", "arguments": []}', "5"],
)  # fmt: skip
def test_what_is_no_call_stays_text(text: str) -> None:
    with pytest.raises(NoCallError):
        parse_call(text, {"add"})


def test_arguments_without_end_are_a_mistake(serve: Serve) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "[" * 100_000}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    assert serve("x").client.post("/v1/chat/completions", json={"messages": messages}).status_code == 400
    tool = {"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}
    assert serve("x").ask(tools=[tool]).status_code == 400


@pytest.mark.parametrize("more", [{"tool_choice": "required"}, {"tool_choice": "required", "n": 2},
                                  {"tool_choice": {"type": "function", "function": {"name": "add"}}}, {}])  # fmt: skip
@pytest.mark.parametrize(
    "said", ['<tool_call>\n{"name": "add", "arguments": {"a":1,', '<tool_call>\n{"name": "add"</tool_call>',
             f'{call_text("add", "{}")}\n<tool_call>\n{{"name": "add", "arguments": {{', "<tool_call>"],
)  # fmt: skip
def test_what_should_be_a_call_and_is_none_is_an_error(serve: Serve, more: dict[str, Any], said: str) -> None:
    served = serve(in_two(said))
    reply = served.ask(tools=[ADD], **more)
    assert reply.status_code == 500 and reply.json()["error"]["code"] == "form_not_kept", reply.text
    assert reply.headers["x-should-retry"] == "false" and "tool_call>" not in reply.text
    *events, last = served.events(tools=[ADD], **more)
    assert last["error"]["code"] == "form_not_kept" and "tool_call>" not in json.dumps(events)
    assert not any(choice["finish_reason"] for event in events for choice in event["choices"])


def test_an_answer_that_breaks_off_is_an_error(serve: Serve) -> None:
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
    for said in ('{"a":1,', "{", " ", "[1] 2", "{}}", '"a'):
        served = serve(in_two(said))
        for form in (schema, {"type": "json_object"}):
            assert served.ask(response_format=form).json()["error"]["code"] == "form_not_kept"
            assert served.events(response_format=form)[-1]["error"]["code"] == "form_not_kept"
        ask = {"input": "x", "text": {"format": {"type": "json_schema", "schema": {"type": "object"}}}}
        assert served.client.post("/v1/responses", json=ask).status_code == 500
        events = served.client.post("/v1/responses", json={**ask, "stream": True}).text
        assert '"response.failed"' in events and '"response.completed"' not in events
    choice = serve(in_two('{"a": "' + "b" * 99)).ask(response_format=schema, max_tokens=40).json()["choices"][0]
    assert choice["finish_reason"] == "length" and choice["message"]["content"].startswith('{"a": "b')


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_a_call_that_the_limit_cuts_is_no_text(serve: Serve, choice: str) -> None:
    served = serve(in_two(call_text("add", '{"a": 1}') + "\n" + call_text("add", '{"a": "' + "b" * 99)))
    size = len(served.server.prompts.chat.encode("I add.</think>" + call_text("add", '{"a": 1}') + "\n<tool_call>{"))
    for most, calls in ((size, 1), (size - 15, 0)):
        cut = served.ask(tools=[ADD], tool_choice=choice, max_tokens=most).json()["choices"][0]
        assert cut["finish_reason"] == "length" and not cut["message"]["content"]
        assert len(cut["message"].get("tool_calls", ())) == calls
        events = served.events(tools=[ADD], tool_choice=choice, max_tokens=most)
        assert "tool_call>" not in json.dumps(events)


@pytest.mark.parametrize(
    "parameters", [{}, None, {"type": "object"}, {"type": "object", "properties": {}},
                   {"properties": {}, "required": []}, {"type": "object", "additionalProperties": False},
                   {"type": "object", "description": "None."},
                   {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object", "properties": None}],
)  # fmt: skip
def test_a_tool_without_parameters_takes_none(serve: Serve, parameters: Any) -> None:
    served = serve(in_two(call_text("now", "{}")))
    tool = {"type": "function", "function": {"name": "now", "parameters": parameters}}
    for tool_choice, kind in (("required", "grammar"), ("auto", "structural_tag")):
        call = served.ask(tools=[tool], tool_choice=tool_choice).json()["choices"][0]["message"]["tool_calls"][0]
        assert call["function"]["arguments"] == "{}"
        constraint = served.engine.samplings[-1].constraint
        assert constraint is not None and constraint.kind == kind
        assert '{"type": "object", "properties": {}, "additionalProperties": false' in constraint.value
    free = {"type": "function", "function": {"name": "now", "parameters": {"additionalProperties": True}}}
    assert served.ask(tools=[free]).is_success
    assert served.engine.samplings[-1].constraint is not None
    assert '"schema": {"additionalProperties": true}' in served.engine.samplings[-1].constraint.value


@pytest.mark.parametrize("arguments", ["", " ", "\n", None, "{}"])
def test_a_call_without_arguments_in_a_history(serve: Serve, arguments: Any) -> None:
    served = serve("It is noon.")
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": arguments}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c", "content": "12:00"}]  # fmt: skip
    assert served.client.post("/v1/chat/completions", json={"messages": messages}).is_success
    items = [{"role": "user", "content": "x"},
             {"type": "function_call", "call_id": "c", "name": "now", "arguments": arguments},
             {"type": "function_call_output", "call_id": "c", "output": "12:00"}]  # fmt: skip
    assert served.client.post("/v1/responses", json={"input": items}).is_success
    for prompt in served.engine.prompts:
        assert call_text("now", "{}") in prompt
