"""POST /v1/responses with the real client, over a scripted engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.serve.clients.openai_types import KINDS, check
from tests.serve.conftest import Serve, Served
from tests.serve.test_chat import ENGLISH, FRENCH, QUESTION, RIGHT, WRONG
from tests.serve.test_completions import complete
from tests.serve.test_tools import CALLS, in_two

ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}


@pytest.fixture
def clients() -> Iterator[Any]:
    """clients(served): an unmodified client of the server."""
    made: list[openai.OpenAI] = []

    def make(served: Served) -> openai.OpenAI:
        made.append(openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0))
        return made[-1]

    yield make
    for client in made:
        client.close()


def test_a_response_has_reasoning_and_answer_as_items(serve: Serve, clients: Any) -> None:
    client = clients(serve(RIGHT))
    found = client.responses.create(model="tiny", input=QUESTION, instructions="Be brief.",
                                    extra_body={"reasoning_language": "fr"})  # fmt: skip
    assert found.output_text == "Il y a donc cinq pommes dans le panier." and found.status == "completed"
    reasoning, answer = found.output
    assert reasoning.type == "reasoning" and reasoning.content[0].text == FRENCH and answer.type == "message"
    assert 0 < found.usage.output_tokens_details.reasoning_tokens < found.usage.output_tokens
    assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens
    assert found.model_extra["reasoning_language"]["match"] is True and found.store is False


def test_a_stream_adds_up(serve: Serve, clients: Any) -> None:
    client = clients(serve(RIGHT))
    events = list(client.responses.create(model="tiny", input=QUESTION, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added", "response.reasoning_text.delta",
        "response.reasoning_text.done", "response.output_item.done", "response.content_part.added",
        "response.output_text.delta", "response.output_text.done", "response.content_part.done", "response.completed",
    ]  # fmt: skip
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    whole = events[-1].response
    assert text == whole.output_text == "Il y a donc cinq pommes dans le panier."
    with client.responses.stream(model="tiny", input=QUESTION) as stream:
        assert stream.get_final_response().output_text == text


@pytest.mark.parametrize("stream", [False, True])
def test_tools_and_their_results(serve: Serve, clients: Any, stream: bool) -> None:
    served = serve(in_two(CALLS))
    items: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "Add them."}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 0}'},
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
    ]
    found = clients(served).responses.create(model="tiny", input=items, tools=[ADD], stream=stream)
    if stream:
        found = list(found)[-1].response
    calls = [item for item in found.output if item.type == "function_call"]
    assert [(call.name, call.arguments) for call in calls] == [("add", '{"a": 1, "b": 2}'), ("add", '{"a": 3, "b": 4}')]
    assert [item.type for item in found.output] == ["reasoning", "function_call", "function_call"]
    assert '{"name": "add", "arguments": {"a": 0}}' in served.engine.prompts[0]
    assert "<tool_response>\n3\n</tool_response>" in served.engine.prompts[0]


def test_what_is_cut_or_fails_says_so(serve: Serve, clients: Any) -> None:
    client = clients(serve(RIGHT))
    found = client.responses.create(model="tiny", input="Hi", max_output_tokens=5)
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    events = list(client.responses.create(model="tiny", input="Hi", max_output_tokens=5, stream=True))
    assert events[-1].type == "response.incomplete"
    strict = {"reasoning_language": "fr", "reasoning_language_enforcement": "strict"}
    client = clients(serve(WRONG))
    with pytest.raises(openai.UnprocessableEntityError):
        client.responses.create(model="tiny", input=QUESTION, extra_body=strict)
    last = list(client.responses.create(model="tiny", input=QUESTION, extra_body=strict, stream=True))[-1]
    assert (last.type, last.response.error.code) == ("response.failed", "reasoning_language_mismatch")
    assert ENGLISH not in last.response.error.message
    assert last.response.model_extra["reasoning_language"]["match"] is False


@pytest.mark.parametrize(
    ("most", "statuses"),
    [(9, [("reasoning", "incomplete")]), (len(FRENCH) + 30, [("reasoning", "completed"), ("message", "incomplete")]),
     (500, [("reasoning", "completed"), ("message", "completed")])],
)  # fmt: skip
def test_only_the_last_item_of_a_cut_response_is_incomplete(
    serve: Serve, clients: Any, most: int, statuses: list[tuple[str, str]]
) -> None:
    client = clients(serve(RIGHT))
    whole = client.responses.create(model="tiny", input=QUESTION, max_output_tokens=most)
    streamed = list(client.responses.create(model="tiny", input=QUESTION, max_output_tokens=most, stream=True))
    for response in (whole, streamed[-1].response):
        assert [(item.type, item.status) for item in response.output] == statuses
    done = [event.item for event in streamed if event.type == "response.output_item.done"]
    assert [(item.type, item.status) for item in done] == statuses
    assert streamed[-1].type == f"response.{whole.status}"


def typed_objects(serve: Serve) -> list[tuple[str, str]]:
    """(type of openai, JSON) of all objects that some requests to all endpoints are answered with."""
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    more: dict[str, Any] = {"include_usage": True}
    rows: list[tuple[str, str]] = []
    for script in (RIGHT, in_two(CALLS)):
        served = serve(script, logprob=-0.5)
        tools = [] if script == RIGHT else [tool]
        ranked = {"messages": [{"role": "user", "content": QUESTION}], "tools": tools, "logprobs": True, "n": 2}
        asked = {"input": QUESTION, "tools": [ADD] if tools else []}
        calls: list[tuple[str, str, str, dict[str, Any]]] = [
            ("response", "event", "/v1/responses", asked),
            ("response", "event", "/v1/responses", {**asked, "max_output_tokens": 3, "include_reasoning": False}),
            ("chat", "chat chunk", "/v1/chat/completions", {**ranked, "top_logprobs": 1}),
        ]
        for whole, piece, path, body in calls:
            rows += [(whole, served.client.post(path, json=body).text)]
            options = {} if whole == "response" else {"stream_options": more}
            rows += streamed(piece, served.client.post(path, json={**body, "stream": True, **options}).text)
        raw = {"prompt": ["One", "Two"], "logprobs": 1, "n": 2}
        rows += [("completion", complete(served, **raw).text), ("completion", complete(served, echo=True).text)]
        told = complete(served, **raw, stream=True, stream_options=more).text
        # null until the end, as from OpenAI's server; its type knows the ends only
        rows += streamed("completion", told.replace('"finish_reason":null', '"finish_reason":"stop"'))
    return rows


def streamed(kind: str, text: str) -> list[tuple[str, str]]:
    """The objects of a stream."""
    return [(kind, line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]


def test_every_object_has_the_types_of_openai(serve: Serve) -> None:
    rows = typed_objects(serve)
    assert check(rows) == len(rows) > 300 and {kind for kind, _ in rows} == set(KINDS)
    usages = [json.loads(text).get("usage", "absent") for kind, text in rows if kind in ("chat chunk", "completion")]
    assert "absent" not in usages and None in usages, "null until the last event"


@pytest.mark.parametrize(
    "body",
    [{"previous_response_id": "resp_1"}, {"background": True}, {"input": []}, {"input": [{"type": "image"}]},
     {"tool_choice": "required"}, {"text": {"format": {"type": "json_schema"}}}, {"max_output_tokens": 0},
     {"input": [{"type": "function_call", "call_id": "c", "name": "add", "arguments": "[1"}]}],
)  # fmt: skip
def test_mistakes(serve: Serve, body: dict[str, Any]) -> None:
    served = serve("x")
    reply = served.client.post("/v1/responses", json={"input": "Hi", **body})
    assert reply.status_code == 400 and reply.json()["error"]["message"] and served.server.admitted == 0
