"""POST /v1/responses with the real client, over a scripted engine."""

import json

import openai
import pytest

from tests.serve.clients.openai_types import KINDS, check
from tests.serve.test_chat import ENGLISH, FRENCH, QUESTION, RIGHT, WRONG
from tests.serve.test_completions import complete
from tests.serve.test_tools import CALLS, in_two

ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}
STRICT = {"reasoning_language": "fr", "reasoning_language_enforcement": "strict"}


def client_of(served):
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def ask(served, **fields):
    """What an unmodified client gets; with `stream`, the events."""
    with client_of(served) as client:
        reply = client.responses.create(**{"model": "tiny", "input": QUESTION} | fields)
        return list(reply) if fields.get("stream") else reply


def test_a_response_has_reasoning_and_answer_as_items(serve):
    served = serve(RIGHT)
    whole = ask(served, instructions="Be brief.", extra_body={"reasoning_language": "fr"})
    assert whole.output_text == "Il y a donc cinq pommes dans le panier." and whole.status == "completed"
    reasoning, answer = whole.output
    assert reasoning.type == "reasoning" and reasoning.content[0].text == FRENCH and answer.type == "message"
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    assert whole.model_extra["reasoning_language"]["match"] is True and whole.store is False
    events = ask(served, stream=True, extra_body={"reasoning_language": "fr"})
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert list(dict.fromkeys(event.type.removeprefix("response.") for event in events)) == [
        "created", "in_progress", "output_item.added", "reasoning_text.delta", "reasoning_text.done",
        "output_item.done", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "completed",
    ]  # fmt: skip
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-1].response.output_text == whole.output_text
    assert events[-1].response.model_extra["reasoning_language"] == whole.model_extra["reasoning_language"]
    with client_of(served) as client, client.responses.stream(model="tiny", input=QUESTION) as stream:
        assert stream.get_final_response().output_text == text


@pytest.mark.parametrize("stream", [False, True])
def test_tools_and_their_results(serve, stream):
    served = serve(in_two(CALLS))
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Add them."}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 0}'},
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
    ]
    whole = ask(served, input=items, tools=[ADD], stream=stream)
    output = whole[-1].response.output if stream else whole.output
    calls = [(item.name, item.arguments) for item in output if item.type == "function_call"]
    assert calls == [("add", '{"a": 1, "b": 2}'), ("add", '{"a": 3, "b": 4}')]
    assert [item.type for item in output] == ["reasoning", "function_call", "function_call"]
    prompt = served.engine.prompts[0]
    assert '{"name": "add", "arguments": {"a": 0}}' in prompt and "<tool_response>\n3\n</tool_response>" in prompt


def test_what_fails_says_so(serve):
    served = serve(WRONG)
    with pytest.raises(openai.UnprocessableEntityError):
        ask(served, extra_body=STRICT)
    last = ask(served, extra_body=STRICT, stream=True)[-1]
    assert (last.type, last.response.error.code) == ("response.failed", "reasoning_language_mismatch")
    assert ENGLISH not in last.response.error.message
    assert last.response.model_extra["reasoning_language"]["match"] is False


def test_only_the_last_item_of_a_cut_response_is_incomplete(serve):
    served = serve(RIGHT)
    for most, *statuses in ((9, "incomplete"), (len(FRENCH) + 30, "completed", "incomplete"),
                            (500, "completed", "completed")):  # fmt: skip
        expected = list(zip(("reasoning", "message"), statuses, strict=False))
        whole, streamed = ask(served, max_output_tokens=most), ask(served, max_output_tokens=most, stream=True)
        done = [event.item for event in streamed if event.type == "response.output_item.done"]
        for items in (whole.output, streamed[-1].response.output, done):
            assert [(item.type, item.status) for item in items] == expected
        assert whole.status == statuses[-1] and streamed[-1].type == f"response.{whole.status}"
        assert (whole.incomplete_details and whole.incomplete_details.reason) == (
            "max_output_tokens" if whole.status == "incomplete" else None
        )


def typed_objects(serve):
    """(type of openai, JSON) of all objects that some requests to all endpoints are answered with."""
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    more, rows = {"include_usage": True}, []
    for script in (RIGHT, in_two(CALLS)):
        served = serve(script, logprob=-0.5)
        tools = [] if script == RIGHT else [tool]
        ranked = {"messages": [{"role": "user", "content": QUESTION}], "tools": tools, "logprobs": True, "n": 2}
        asked = {"input": QUESTION, "tools": [ADD] if tools else []}
        for whole, piece, path, body in (
            ("response", "event", "/v1/responses", asked),
            ("response", "event", "/v1/responses", {**asked, "max_output_tokens": 3, "include_reasoning": False}),
            ("chat", "chat chunk", "/v1/chat/completions", {**ranked, "top_logprobs": 1}),
        ):
            rows += [(whole, served.client.post(path, json=body).text)]
            options = {} if whole == "response" else {"stream_options": more}
            rows += streamed(piece, served.client.post(path, json={**body, "stream": True, **options}).text)
        raw = {"prompt": ["One", "Two"], "logprobs": 1, "n": 2}
        rows += [("completion", complete(served, **raw).text), ("completion", complete(served, echo=True).text)]
        pieces = complete(served, **raw, stream=True, stream_options=more).text
        # null until the end, as from OpenAI's server; its type knows the ends only
        rows += streamed("completion", pieces.replace('"finish_reason":null', '"finish_reason":"stop"'))
    return rows


def streamed(kind, text):
    """The objects of a stream."""
    return [(kind, line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]


def test_every_object_has_the_types_of_openai(serve):
    rows = typed_objects(serve)
    assert check(rows) == len(rows) > 300 and {kind for kind, _ in rows} == set(KINDS)
    usages = [json.loads(text).get("usage", "absent") for kind, text in rows if kind in ("chat chunk", "completion")]
    assert "absent" not in usages and None in usages, "null until the last event"
