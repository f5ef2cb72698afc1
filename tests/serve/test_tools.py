"""Tools and structured answers over a scripted engine; test_vllm.py has them with the engine that enforces them."""

import json
import re

import pytest

from shared.tool_calls import CallReader, NoCallError, ParsedCall, call_text, parse_call

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}
CALLS = call_text("add", '{"a": 1, "b": 2}') + "\n" + call_text("add", '{"a": 3, "b": 4}')
JSON = {"type": "json_object"}
THOUGHT = "<think>\nI add.</think>"


def in_two(answer):
    """A script that thinks in its first call, which ends at the closing tag, and answers in its second."""
    return lambda prompt, sampling, call: answer if sampling.constraint is not None else f"{THOUGHT}{answer}"


def chosen(served, **body):
    return served.ask(**body).json()["choices"][0]


def constraint_of(served):
    """What the last answer was held to."""
    constraint = served.engine.samplings[-1].constraint
    return constraint.kind, constraint.value


def history(arguments="{}", order=("c1", "c2"), results=("A", "B")):
    """A question, two calls, and their results in an order."""
    calls = [{"id": f"c{n}", "type": "function", "function": {"name": "add", "arguments": arguments}} for n in (1, 2)]
    return [{"role": "user", "content": "Add."}, {"role": "assistant", "content": None, "tool_calls": calls},
            *({"role": "tool", "tool_call_id": call, "content": text}
              for call, text in zip(order, results, strict=True))]  # fmt: skip


def test_calls_are_found_and_told(serve):
    served = serve(in_two(CALLS))
    choice = chosen(served, tools=[ADD])
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls" and message["content"] is None and message["reasoning"] == "I add."
    calls = [(call["type"], call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    assert calls == [("function", "add", '{"a": 1, "b": 2}'), ("function", "add", '{"a": 3, "b": 4}')]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    reasoning, answer = served.engine.samplings
    assert (reasoning.constraint, reasoning.through, answer.through) == (None, "</think>", "")
    kind, value = constraint_of(served)
    assert kind == "structural_tag" and value.startswith("start: (begin call)* TEXT\n")
    assert json.dumps(PARAMETERS)[:-1] in value and value.endswith('\nbegin[lazy]: TEXT "<tool_call>"')
    first, second = served.engine.prompts
    assert '"name": "add"' in first and first.endswith("<assistant>"), "as in training: the model opens its reasoning"
    assert second == first + THOUGHT
    served.engine.script = in_two(f"Let me see.\n{CALLS}")
    events = served.events(tools=[ADD])
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["index"] for call in calls] == [0, 1] and json.loads(calls[1]["function"]["arguments"])["a"] == 3
    assert "".join(delta.get("content") or "" for delta in deltas) == "Let me see."
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(("body", "parts", "repair"), [
    ({"tools": [ADD] * 9}, r"tools \d{3,}, system prompt \d+", "give fewer tools"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": PARAMETERS}}},
     r"response_format \d+, system prompt \d+", "give a smaller schema"),
    ({}, r"system prompt \d+", "shorten it"),
])  # fmt: skip
def test_a_prompt_that_is_too_long_says_what_fills_it(serve, body, parts, repair):
    """Tools and a form stand in the system prompt, which a client does not see."""
    served = serve("x", max_tokens=20, system_prompt="Think first.")
    error = served.ask(**body).json()["error"]
    wanted = rf"the prompt has (\d+) tokens \({parts}\), the model's context 20: {repair}, or take a model with a"
    found = re.match(wanted, error["message"])
    assert error["code"] == "context_length_exceeded" and found, error["message"]
    assert sum(map(int, re.findall(r"\d+", found[0])[1:-1])) <= int(found[1])


def test_a_raw_prompt_that_is_too_long_has_no_parts(serve):
    served = serve("x", max_tokens=4)
    body = {"prompt": "a b c d e f g", "max_tokens": 1}
    error = served.client.post("/v1/completions", json=body).json()["error"]["message"]
    assert re.fullmatch(r"the prompt has \d+ tokens, the model's context 4: shorten it, or take .*", error), error


def test_one_tool_at_most_and_none_at_all(serve):
    served = serve(in_two(CALLS + " and more and more"))
    for body in ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, {}):
        choice = chosen(served, tools=[ADD], parallel_tool_calls=False, **body)
        assert len(choice["message"]["tool_calls"]) == 1 and choice["message"]["content"] is None
        assert choice["finish_reason"] == "tool_calls", "sampling ends behind the last call that may be"
        kind, value = constraint_of(served)
        assert (kind, value.startswith("start: open call\ncall:")) == (("grammar", True) if body else (kind, False))
    message = chosen(served, tools=[ADD], tool_choice="none")["message"]
    assert "tool_calls" not in message and "Adds." not in served.engine.prompts[-1]


def test_results_go_back_to_the_model_in_the_order_of_their_calls(serve):
    served = serve(in_two("3 and 7."))
    for order, results in ((("c1", "c2"), ("3", "<eos>")), (("c2", "c1"), ("<eos>", "3"))):
        body = {"messages": history('{"a": 1}', order, results), "tools": [ADD]}
        reply = served.client.post("/v1/chat/completions", json=body)
        assert reply.json()["choices"][0]["message"]["content"] == "3 and 7."
        call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
        texts = "<tool_response>\n3\n</tool_response>\n<tool_response>\n<eos>\n</tool_response>"
        assert f"<assistant>{call}\n{call}<eos><user>{texts}<eos><assistant>" in served.engine.prompts[0]
        served.engine.prompts.clear()
    reply = served.client.post("/v1/chat/completions", json={"messages": history(order=("c1", "c9"))})
    assert reply.status_code == 400 and "no call c9" in reply.text


def test_an_answer_of_a_form_is_sampled_apart_from_its_reasoning(serve):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    served = serve(in_two('{"n": 5}'))
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    message = chosen(served, response_format=form, max_tokens=100)["message"]
    assert (message["content"], message["reasoning"]) == ('{"n": 5}', "I add.")
    kind, value = constraint_of(served)
    assert (kind, json.loads(value)) == ("json", schema) and json.dumps(schema) in served.engine.prompts[0]
    used = len(served.server.prompts.chat.encode(THOUGHT))
    assert served.engine.samplings[-1].max_tokens == 100 - used


@pytest.mark.parametrize(("free", "formed", "expected", "prompts"), [
    (CALLS, CALLS, (None, None, 2), [""] * 2),
    ("", CALLS, (None, None, 2), [""] * 2),
    ("\n\n", CALLS, (None, None, 2), [""] * 2),
    ("Three or four.", " Or five.", (None, "Or five.", 0), ["", "Three"]),
    (CALLS, "<think>I add.</think>7", ("I add.", "7", 0), ["", "", "<think>I add.</think>"]),
    ("Three or four.", f" Or: {CALLS}", (None, "Or:", 2), ["", "Three"]),
])  # fmt: skip
def test_a_model_that_answers_at_once_is_held_to_calls_and_need_not_think(serve, free, formed, expected, prompts):
    """Models that were trained with tools often begin with a call. Its first words, sampled without the grammar, are
    sampled again where a call may have begun in them."""
    formed = formed.partition("</think>")
    script = [free, "".join(formed), formed[2]]
    served = serve(lambda prompt, sampling, call: script[call])
    choice = chosen(served, tools=[ADD], logprobs=True)
    message = choice["message"]
    assert (message["reasoning"], len(message.get("tool_calls", []))) == (expected[0], expected[2])
    assert (message["content"] or "").endswith(expected[1] or "")
    first = served.engine.prompts[0]
    behind = [prompt.removeprefix(first) for prompt in served.engine.prompts]
    assert all(map(str.startswith, behind, prompts)) and len(behind) == len(prompts), behind
    whole = "".join(token["token"] for token in choice["logprobs"]["content"])
    assert whole.count("<tool_call>") == expected[2] and whole.count("I add.") == bool(expected[0])


@pytest.mark.parametrize("form", [{"response_format": JSON}, {"tools": [ADD], "tool_choice": "required"}])
def test_an_answer_of_a_form_needs_no_reasoning(serve, form):
    answer = '{"a": 1}' if "response_format" in form else CALLS
    served = serve(lambda prompt, sampling, call: answer if sampling.constraint is not None else "Well, ")
    reply = served.ask(**form).json()
    message = reply["choices"][0]["message"]
    assert message["reasoning"] is None and (message["content"] == answer or len(message["tool_calls"]) == 2)
    assert reply["usage"]["completion_tokens"] == len(served.server.prompts.chat.encode(answer))
    assert len(set(served.engine.prompts)) == 1 and len(served.engine.prompts) == 2


@pytest.mark.parametrize("thoughts", ["hm " * 500, "hm <eos>"])
def test_reasoning_without_an_end_leaves_room_for_an_answer_of_a_form(serve, thoughts):
    free = f"<think>{thoughts}"
    served = serve(lambda prompt, sampling, call: '{"a": 1}' if sampling.constraint is not None else free)
    message = chosen(served, response_format=JSON, max_tokens=200)["message"]
    assert message["content"] == '{"a": 1}' and message["reasoning"].endswith("I'll answer now.")
    assert len(served.engine.prompts) == 2 and "hm <eos>" not in served.engine.prompts[1]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_calls_are_found_however_the_stream_is_cut(size):
    text = f"First <tool {CALLS} then <tool_call>{{</tool_call> and {call_text('other', '{}')} <tool_call>{{"
    reader = CallReader({"add"}, most=5)
    parts = [text[place : place + size] for place in range(0, len(text), size)]
    pieces = [piece for part in parts for piece in reader.feed(part)] + list(reader.feed("", last=True))
    assert [json.loads(piece.arguments)["a"] for piece in pieces if isinstance(piece, ParsedCall)] == [1, 3]
    rest = "".join(piece for piece in pieces if isinstance(piece, str))
    assert rest.split() == text.replace(CALLS, "").split() and "\n" not in pieces


@pytest.mark.parametrize(
    "text", ['{"name": [], "arguments": {}}', '{"name": "add", "arguments": {"a": NaN}}', "[" * 100_000,
             '{"name": "add", "arguments": {"a": "\\ud800"}}', '{"name": "add", "arguments": []}', "5"],
)  # fmt: skip
def test_what_is_no_call_stays_text(text):
    with pytest.raises(NoCallError):
        parse_call(text, {"add"})


@pytest.mark.parametrize(
    "answer", ['<tool_call>\n{"name": "add", "arguments": {"a":1,', '<tool_call>\n{"name": "add"</tool_call>',
             f'{call_text("add", "{}")}\n<tool_call>\n{{"name": "add", "arguments": {{', "<tool_call>"],
)  # fmt: skip
def test_what_should_be_a_call_and_is_none_is_an_error(serve, answer):
    served = serve(in_two(answer))
    named = {"type": "function", "function": {"name": "add"}}
    for more in ({"tool_choice": "required"}, {"tool_choice": "required", "n": 2}, {"tool_choice": named}, {}):
        reply = served.ask(tools=[ADD], **more)
        assert reply.status_code == 500 and reply.json()["error"]["code"] == "form_not_kept", reply.text
        assert reply.headers["x-should-retry"] == "false" and "tool_call>" not in reply.text
        *events, last = served.events(tools=[ADD], **more)
        assert last["error"]["code"] == "form_not_kept" and "tool_call>" not in json.dumps(events)
        assert not any(choice["finish_reason"] for event in events for choice in event["choices"])


def test_an_answer_that_breaks_off_is_an_error(serve):
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
    served = serve("")
    for text in ('{"a":1,', "{", " ", "[1] 2", "{}}", '"a'):
        served.engine.script = in_two(text)
        for form in (schema, JSON):
            assert served.ask(response_format=form).json()["error"]["code"] == "form_not_kept"
            assert served.events(response_format=form)[-1]["error"]["code"] == "form_not_kept"
        ask = {"input": "x", "text": {"format": {"type": "json_schema", "schema": {"type": "object"}}}}
        assert served.client.post("/v1/responses", json=ask).status_code == 500
        events = served.client.post("/v1/responses", json={**ask, "stream": True}).text
        assert '"response.failed"' in events and '"response.completed"' not in events
    served.engine.script = in_two('{"a": "' + "b" * 99)
    choice = chosen(served, response_format=schema, max_tokens=40)
    assert choice["finish_reason"] == "length" and choice["message"]["content"].startswith('{"a": "b')


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_a_call_that_the_limit_cuts_is_no_text(serve, choice):
    served = serve(in_two(call_text("add", '{"a": 1}') + "\n" + call_text("add", '{"a": "' + "b" * 99)))
    size = len(served.server.prompts.chat.encode(THOUGHT + call_text("add", '{"a": 1}') + "\n<tool_call>{"))
    for most, calls in ((size, 1), (size - 15, 0)):
        cut = chosen(served, tools=[ADD], tool_choice=choice, max_tokens=most)
        assert cut["finish_reason"] == "length" and not cut["message"]["content"]
        assert len(cut["message"].get("tool_calls", ())) == calls
        assert "tool_call>" not in json.dumps(served.events(tools=[ADD], tool_choice=choice, max_tokens=most))


def test_a_tool_without_parameters_takes_none(serve):
    served = serve(in_two(call_text("now", "{}")))
    for parameters in (
        {}, None, {"type": "object"}, {"type": "object", "properties": {}}, {"properties": {}, "required": []},
        {"type": "object", "additionalProperties": False}, {"type": "object", "description": "None."},
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object", "properties": None},
    ):  # fmt: skip
        tool = {"type": "function", "function": {"name": "now", "parameters": parameters}}
        for tool_choice, expected in (("required", "grammar"), ("auto", "structural_tag")):
            call = chosen(served, tools=[tool], tool_choice=tool_choice)["message"]["tool_calls"][0]
            kind, value = constraint_of(served)
            assert (call["function"]["arguments"], kind) == ("{}", expected), parameters
            assert '{"type": "object", "properties": {}, "additionalProperties": false' in value
    free = {"type": "function", "function": {"name": "now", "parameters": {"additionalProperties": True}}}
    assert served.ask(tools=[free]).is_success
    assert '%json {"additionalProperties": true' in constraint_of(served)[1]


def test_a_call_without_arguments_in_a_history(serve):
    served = serve("It is noon.")
    for arguments in ("", " ", "\n", None, "{}"):
        assert served.client.post("/v1/chat/completions", json={"messages": history(arguments)}).is_success
        items = [{"role": "user", "content": "x"},
                 {"type": "function_call", "call_id": "c", "name": "add", "arguments": arguments},
                 {"type": "function_call_output", "call_id": "c", "output": "12:00"}]  # fmt: skip
        assert served.client.post("/v1/responses", json={"input": items}).is_success
        assert all(call_text("add", "{}") in prompt for prompt in served.engine.prompts[-2:])
