"""What the server refuses, bounds and survives, over a scripted engine: bad bodies, capacity, clients that leave."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.types import Message

from serve.engine import SamplingParameters
from serve.generation import MOST_HELD
from serve.keys import Client
from serve.limits import BodyLimitMiddleware
from serve.streams import EventStream
from tests.serve.conftest import Serve, eventually, running
from tests.serve.test_chat import ENGLISH, FRENCH, QUESTION, RIGHT


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 0}, "n"), ({"n": 1000000}, "n"), ({"temperature": 3}, "temperature"), ({"top_p": 0}, "top_p"),
        ({"stop": [""]}, "stop"), ({"stop": ["x"] * 99}, "stop"), ({"max_tokens": -1}, "max_tokens"),
        ({"top_logprobs": 10**6}, "top_logprobs"), ({"messages": []}, "messages"), ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages"), ({"messages": [{"role": "tool"}]}, "messages"),
        ({"seed": 2**70}, "seed"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"reasoning_language": "klingon!"}, ""), ({"reasoning_language_enforcement": "maybe"}, "reasoning_language_e"),
        ({"model": "../../etc/passwd"}, "model"), ({"stream": "perhaps"}, "stream"),
    ],
)  # fmt: skip
def test_what_is_wrong_gets_an_error_object(serve: Serve, body: dict[str, Any], param: str) -> None:
    reply = (
        serve("x").ask(**body) if "messages" not in body else serve("x").client.post("/v1/chat/completions", json=body)
    )
    assert reply.status_code == (404 if "model" in body else 400)
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"].endswith("_error")
    assert (error["param"] or "").startswith(param) and "\n" not in error["message"]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"messages": NaN}', '{"temperature": NaN, "messages": [{"role": "user", "content": "x"}]}',
     "[" * 100_000, '{"messages": [{"role": "user", "content": "\\ud800"}]}'],
)  # fmt: skip
def test_broken_bodies(serve: Serve, text: str) -> None:
    reply = serve("x").client.post("/v1/chat/completions", content=text, headers={"content-type": "application/json"})
    assert reply.status_code == 400 and reply.json()["error"]["type"] == "invalid_request_error"


def test_bodies_are_limited_in_size_and_time(serve: Serve) -> None:
    served = serve("x", body_bytes=2000, body_s=0.3)
    assert served.ask("y" * 3000).status_code == 413
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as slow:
        slow.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n\r\n{")
        slow.settimeout(30)
        assert b"408" in slow.recv(100)
    assert served.ask().is_success


def test_pieces_of_a_body_are_limited_together() -> None:
    pieces = iter([b"x" * 600] * 4)
    statuses: list[int] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": next(pieces), "more_body": True}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    limited = BodyLimitMiddleware(FastAPI(), most_bytes=2000, deadline_s=300)
    asyncio.run(limited({"type": "http", "method": "POST", "headers": []}, receive, send))
    assert statuses == [413]


def test_a_conversation_that_is_too_long(serve: Serve) -> None:
    reply = serve("x", max_tokens=64).ask("y" * 100)
    assert reply.status_code == 400 and reply.json()["error"]["code"] == "context_length_exceeded"


def test_paths_and_models(serve: Serve) -> None:
    served = serve("x")
    card = served.client.get("/v1/models").json()["data"][0]
    assert card["id"] == "tiny" and served.client.get("/v1/models/tiny").json() == card
    assert served.client.get("/v1/models/other").json()["error"]["code"] == "model_not_found"
    assert served.client.get("/nowhere").json()["error"]["type"] == "not_found_error"
    assert served.client.get("/v1/chat/completions").status_code == 405
    assert served.client.get("/health").json() == {"status": "ok"}
    assert served.client.get("/ready").json()["status"] == "ready"
    assert served.client.get("/version").json()["weights"] == "7"


@pytest.mark.parametrize("body", [{"functions": [{}]}, {"echo": True}, {"guided_json": {"type": "object"}}])
def test_what_the_server_cannot_do_is_told(serve: Serve, body: dict[str, Any]) -> None:
    reply = serve("x").ask(**body)
    assert reply.status_code == 400 and "docs/parameters.md" in reply.text
    harmless = {"tools": [], "response_format": {"type": "text"}, "logit_bias": None, "logprobs": False, "stream": True}
    assert serve("x").ask(**harmless).is_success


def test_an_unforeseen_failure_ends_the_request_and_frees_its_slots(serve: Serve) -> None:
    def fail(prompt: list[int], sampling: SamplingParameters, call: int) -> str:
        raise ZeroDivisionError("secret")

    served = serve(fail)
    assert served.events()[-1]["error"]["code"] == "internal_error"
    reply = served.ask()
    assert reply.status_code == 500 and "secret" not in reply.text and served.server.admitted == 0


def test_beyond_capacity_is_503_at_once(serve: Serve) -> None:
    served = serve(RIGHT, token_s=0.02, max_sequences=1, queue=1)
    with served.client.stream("POST", "/v1/chat/completions", json={"stream": True, "messages": [
        {"role": "user", "content": "x"}]}) as first:  # fmt: skip
        lines = first.iter_lines()
        next(lines)
        reply = served.ask(n=2)
        assert reply.status_code == 503 and reply.headers["retry-after"] == "2"
        assert reply.json()["error"]["code"] == "server_overloaded"
    eventually(lambda: served.server.admitted == 0)
    assert served.ask().is_success


def test_places_are_given_back_once(serve: Serve) -> None:
    server, client = serve("x").server, Client(None)
    with server.admit(1, client), server.admit(2, client) as permit:
        permit.close()
        permit.close()
        assert (server.admitted, client.admitted) == (1, 1)
    assert (server.admitted, client.admitted) == (0, 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_tokens(serve: Serve, stream: bool) -> None:
    served = serve(RIGHT * 20, token_s=0.01)
    host, port = served.url.removeprefix("http://").split(":")
    body = b'{"stream": %s, "messages": [{"role": "user", "content": "x"}]}' % (b"true" if stream else b"false")
    with socket.create_connection((host, int(port))) as client:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        eventually(lambda: served.engine.told > 3)
    eventually(lambda: served.engine.running == 0 and served.server.admitted == 0, 5)


def test_a_client_that_leaves_behind_its_second_request_frees_its_tokens(serve: Serve) -> None:
    """uvicorn tells the last request of a connection alone."""
    served = serve(RIGHT * 20, token_s=0.01)
    host, port = served.url.removeprefix("http://").split(":")
    body = b'{"stream": true, "messages": [{"role": "user", "content": "x"}]}'
    with socket.create_connection((host, int(port))) as client:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        second = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body + second)
        eventually(lambda: served.engine.told > 3)
    eventually(lambda: served.engine.running == 0 and served.server.admitted == 0, 5)


def test_a_client_that_takes_nothing_loses_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.streams.STALLED_S", 0.3)
    app, ended = FastAPI(), threading.Event()

    class Permit:
        def close(self) -> None:
            ended.set()

    async def much() -> AsyncGenerator[bytes, None]:
        for _ in range(1000):
            yield b"x" * 100_000
        await asyncio.sleep(3600)

    @app.get("/")
    async def stream() -> EventStream:
        return EventStream(much(), Permit(), {})  # type: ignore[arg-type]

    with running(app) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert ended.wait(20)


@pytest.mark.parametrize(
    "more",
    [
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "%s"}' % ("y " * 100_000)}}]},
            {"role": "tool", "tool_call_id": "1", "content": "z"}]},
        {"tools": [{"type": "function", "function": {"name": "f", "description": "y " * 100_000}}]},
    ],
)  # fmt: skip
def test_what_is_said_beside_texts_is_measured_too(serve: Serve, more: dict[str, Any]) -> None:
    """It is tokenised in a thread, and refused before that where it cannot fit."""
    reply = serve(RIGHT).client.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], **more}
    )
    assert reply.status_code == 400 and "characters" in reply.json()["error"]["message"]


def test_a_dead_engine_is_started_again(serve: Serve) -> None:
    served = serve(RIGHT, token_s=0.01)
    asked, start = threading.Event(), served.engine.start

    async def start_later() -> None:
        await asyncio.to_thread(asked.wait, 60)
        await start()

    served.engine.start = start_later  # type: ignore[method-assign]
    served.engine.dead = True
    reply = served.ask()
    asked.set()
    assert reply.status_code == 503 and reply.headers["retry-after"]
    eventually(lambda: served.engine.starts == 2 and served.server.ready)
    assert served.ask().is_success and served.server.restarts == 1


def test_draining_lets_responses_end_and_admits_no_more(serve: Serve) -> None:
    served = serve("<think>a</think>" + "b" * 40, token_s=0.01)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(served.ask()))
    thread.start()
    eventually(lambda: served.engine.running == 1)
    served.server.draining = True
    late = served.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
    assert late.status_code == 503 and late.json()["error"]["code"] == "draining"
    assert served.client.get("/ready").status_code == 503
    thread.join(10)
    assert found[0].json()["choices"][0]["message"]["content"] == "b" * 40


def test_a_quiet_stream_is_pinged(serve: Serve) -> None:
    served = serve("ab", token_s=0.4, ping_s=0.1)
    text = served.ask(stream=True).text
    assert text.count(": ping") >= 2 and text.rstrip().endswith("[DONE]")


# ---- what reviewers found ----------------------------------------------------------------------------------------


def test_null_is_a_field_that_is_not_there(serve: Serve) -> None:
    served = serve("x")
    names = ["n", "stream", "logprobs", "top_logprobs", "presence_penalty", "tool_choice", "parallel_tool_calls"]
    names += ["tools", "stop", "seed", "max_tokens", "response_format", "stream_options"]
    assert served.ask(**dict.fromkeys(names)).is_success
    assert served.client.post("/v1/completions", json={"prompt": "a", "n": None, "frequency_penalty": None}).is_success
    names = ["store", "stream", "tool_choice", "parallel_tool_calls", "text", "tools"]
    assert served.client.post("/v1/responses", json={"input": "a", **dict.fromkeys(names)}).is_success


def test_a_list_of_mistakes_tells_one(serve: Serve) -> None:
    served = serve("x")
    begun = time.process_time()
    body = {"messages": [{"role": "user", "content": [{}] * 100_000}]}
    reply = served.client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400 and time.process_time() - begun < 5
    reply = served.ask(stop=["x" * 300])
    assert reply.status_code == 400 and "0x" not in reply.text and "function" not in reply.text


def test_an_empty_conversation_is_a_mistake(serve: Serve) -> None:
    served = serve("x", system_prompt="")
    reply = served.client.post("/v1/chat/completions", json={"messages": [{"role": "system", "content": ""}]})
    assert reply.status_code == 400 and "nobody has said anything" in reply.text


def test_texts_that_cannot_fit_are_not_made_into_tokens(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve("x", max_tokens=64)
    monkeypatch.setattr(served.server.prompts.chat, "encode", lambda *_: pytest.fail("it was"))
    reply = served.ask("y" * 100_000)
    assert reply.status_code == 400 and reply.json()["error"]["code"] == "context_length_exceeded"


def test_more_than_ever_fits_is_no_matter_of_time(serve: Serve) -> None:
    assert serve("x", max_sequences=2, queue=2).ask(n=5).status_code == 400


def test_formulas_are_held_back_for_so_long_only(serve: Serve) -> None:
    """Reasoning without words never tells its language; it is told as it is, long before it ends."""
    served = serve("<think>" + "1+1=2; " * 2000, reasoning_language="fr", reasoning_language_enforcement="retry",
                   system_prompt="", max_tokens=4096, token_s=0.0005)  # fmt: skip
    with served.client.stream("POST", "/v1/chat/completions", json={
        "messages": [{"role": "user", "content": "x"}], "stream": True}) as stream:  # fmt: skip
        lines = (line for line in stream.iter_lines() if '"reasoning":"' in line)
        next(lines)
        assert MOST_HELD <= served.engine.told < MOST_HELD + 1000 < served.engine.samplings[0].max_tokens


def test_an_answer_without_reasoning_is_looked_at_too(serve: Serve) -> None:
    served = serve(lambda prompt, sampling, call: ENGLISH if call == 0 else f" {FRENCH}</think>Cinq pommes.",
                   reasoning_language="fr", reasoning_language_enforcement="retry")  # fmt: skip
    reply = served.ask(QUESTION).json()
    assert reply["reasoning_language"]["match"] is True and reply["reasoning_language"]["tries"] == 2
    assert reply["choices"][0]["message"]["content"] == "Cinq pommes."


def test_schemas_of_any_shape_are_mistakes_at_most(serve: Serve) -> None:
    served = serve("{}")
    shapes: list[Any] = [{"patternProperties": 5}, {"allOf": 5}, {"allOf": [{"anyOf": 5}]}, {"anyOf": {"a": 1}}]
    for schema in shapes:
        form = {"type": "json_schema", "json_schema": {"schema": schema}}
        assert served.ask(response_format=form).status_code in (200, 400)
    deep = '{"allOf": [' * 400 + "{}" + "]}" * 400
    body = '{"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_schema", "json_schema": '
    text = f'{body}{{"schema": {deep}}}}}}}'
    reply = served.client.post("/v1/chat/completions", content=text, headers={"content-type": "application/json"})
    assert reply.status_code == 400 and "deep" in reply.text


def test_reasoning_is_never_more_than_all_tokens(serve: Serve) -> None:
    usage = serve("4").ask(reasoning_effort="none", max_tokens=1).json()["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] <= usage["completion_tokens"] == 1
