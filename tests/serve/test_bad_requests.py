"""What is wrong with a request is told in one clear line, with the field and the repair."""

import json
from typing import Any

import pytest

from tests.processor_time import at_most
from tests.serve.conftest import Served
from tests.tables import read_table

CHAT = "/v1/chat/completions"
MESSAGES: Any = [{"role": "user", "content": "x"}]
JSON = {"content-type": "application/json"}
ROWS = read_table("serve/bad_requests")


def check(served: Served, path: str, body: bytes, status: int = 400) -> dict[str, Any]:
    """The error that a body gets; the server is none the worse, and sends nothing of a body back at length."""
    reply = served.client.post(path, content=body, headers=JSON)
    assert reply.status_code == status and len(reply.text) < 1000, reply.text
    error: dict[str, Any] = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"].endswith("_error")
    assert "\n" not in error["message"] and served.server.admitted == 0
    return error


@pytest.mark.parametrize("row", ROWS, ids=[row["name"] for row in ROWS])
def test_an_error_names_the_field_and_the_repair(served, row):
    """text: the bytes of a body, as ISO 8859-1; else body."""
    body = row["text"].encode("latin-1") if "text" in row else json.dumps(row["body"]).encode()
    error = check(served, row.get("path", CHAT), body, row.get("status", 400))
    assert row.get("code") in (None, error["code"]) and (error["param"] or "").startswith(row.get("param", ""))
    assert all(words in error["message"] for words in row.get("words", "").split("|"))


def test_bodies_that_would_take_long_are_mistakes_too(served):
    begun = b'{"messages": [{"role": "user", "content": "x"}], '
    with at_most(20):
        for text in (
            b"[" * 200_000, b'{"messages": ' + b"[" * 200_000, b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
            begun + b'"x": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001,
            begun + b'"max_tokens": 1' + b"0" * 5000 + b"}",
            json.dumps({"messages": [{"role": "user", "content": [{}] * 100_000}]}).encode(),
            json.dumps({"messages": MESSAGES * 1025}).encode(),
        ):  # fmt: skip
            check(served, CHAT, text)
    error = check(served, CHAT, json.dumps({"messages": MESSAGES, "x": "z" * (4 << 20)}).encode(), 413)
    assert error["code"] == "body_too_large" and "shorten" in error["message"]
    assert served.ask().is_success


def test_whole_characters_are_no_halves(serve):
    served = serve("x")
    assert served.ask("🍎\\ud800").is_success and "🍎\\ud800" in served.engine.prompts[0]


def test_content_types(served):
    body = json.dumps({"messages": MESSAGES})
    for kind in ("application/json", "application/json; charset=utf-8", "APPLICATION/JSON", "application/problem+json"):
        assert served.client.post(CHAT, content=body, headers={"content-type": kind}).is_success
    for kind in ("", "text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded",
                 "application/jsonx"):  # fmt: skip
        reply = served.client.post(CHAT, content=body, headers={"content-type": kind} if kind else {})
        error = reply.json()["error"]
        assert (reply.status_code, error["code"], error["param"]) == (415, "unsupported_media_type", "content-type")
        assert "send Content-Type: application/json" in error["message"]
    packed = served.client.post(CHAT, content=body, headers={**JSON, "content-encoding": "gzip"})
    assert packed.status_code == 415 and packed.json()["error"]["param"] == "content-encoding", "it is not inflated"


def test_null_is_a_field_that_is_not_there(served):
    names = ["n", "stream", "logprobs", "top_logprobs", "presence_penalty", "tool_choice", "parallel_tool_calls"]
    names += ["tools", "stop", "seed", "max_tokens", "response_format", "stream_options"]
    assert served.ask(**dict.fromkeys(names)).is_success
    assert served.client.post("/v1/completions", json={"prompt": "a", "n": None, "frequency_penalty": None}).is_success
    names = ["store", "stream", "tool_choice", "parallel_tool_calls", "text", "tools"]
    assert served.client.post("/v1/responses", json={"input": "a", **dict.fromkeys(names)}).is_success


def test_what_is_said_beside_texts_is_measured_too(served, monkeypatch):
    """What cannot fit is refused before it is made into tokens."""
    monkeypatch.setattr(served.server.prompts.chat, "encode", lambda *_: pytest.fail("it was"))
    much = "y " * 100_000
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": much})}}
    tool = {"type": "function", "function": {"name": "f", "description": much}}
    answered = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": "z"}]
    for body in (
        {"messages": [{"role": "user", "content": much}]}, {"messages": [*MESSAGES, *answered]},
        {"messages": MESSAGES, "tools": [tool]},
    ):  # fmt: skip
        error = served.client.post(CHAT, json=body).json()["error"]
        assert error["code"] == "context_length_exceeded" and "characters" in error["message"]


def test_schemas_of_any_shape_are_mistakes_at_most(serve):
    served = serve("{}")
    shapes: list[Any] = [{"patternProperties": 5}, {"allOf": 5}, {"allOf": [{"anyOf": 5}]}, {"anyOf": {"a": 1}}]
    for schema in shapes:
        form = {"type": "json_schema", "json_schema": {"schema": schema}}
        assert served.ask(response_format=form).status_code in (200, 400)
    deep = '{"allOf": [' * 400 + "{}" + "]}" * 400
    form_of = '"response_format": {"type": "json_schema", "json_schema": {"schema": '
    error = check(served, CHAT, f'{{"messages": {json.dumps(MESSAGES)}, {form_of}{deep}}}}}}}'.encode())
    assert "deep" in error["message"]
