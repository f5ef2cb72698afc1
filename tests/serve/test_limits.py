"""What the server bounds and survives, over a scripted engine: capacity, clients that leave, deaths, faults."""

import asyncio
import logging
import threading
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
from tests.serve.conftest import eventually, running
from tests.serve.test_chat import RIGHT
from tests.serve.test_hostile import CHAT, MESSAGES, connect, head


def test_pieces_of_a_body_are_limited_together():
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


def test_paths_and_models(served):
    card = served.client.get("/v1/models").json()["data"][0]
    assert card["id"] == "tiny" and served.client.get("/v1/models/tiny").json() == card
    assert served.client.get("/v1/models/other").json()["error"]["code"] == "model_not_found"
    assert served.client.get("/nowhere").json()["error"]["type"] == "not_found_error"
    assert served.client.get("/health").json() == {"status": "ok"}
    assert served.client.get("/ready").json()["status"] == "ready"
    assert served.client.get("/version").json()["weights"] == "7"
    for path in ("/v1/models/", "/health/", "/v1/"):
        assert served.client.get(path).status_code == 404, "a slash too many is no redirection"
    assert served.client.post(f"{CHAT}/", json={}).status_code == 404


def test_a_fault_of_ours_ends_its_request_alone_and_is_counted_and_logged(serve, caplog):
    def fail(prompt: list[int], sampling: SamplingParameters, call: int) -> str:
        raise ZeroDivisionError("a secret")

    def errors() -> str:
        return "\n".join(record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR)

    served, question = serve(fail), "a question that nobody else should read"
    for stream in (False, True):
        body = {"messages": [{"role": "user", "content": question}], "stream": stream}
        reply = served.client.post(CHAT, json=body, headers={"x-request-id": f"failed-{stream:d}"})
        assert reply.status_code == (200 if stream else 500)
        assert '"code":"internal_error"' in reply.text and "secret" not in reply.text
    eventually(lambda: served.server.admitted == 0 and all(name in errors() for name in ("failed-0", "failed-1")))
    assert question not in caplog.text
    assert f'requests_total{{key="",route="{CHAT}",status="500"}} 1.0' in served.client.get("/metrics").text


def test_beyond_capacity_is_503_at_once(serve):
    served = serve(RIGHT, token_s=0.02, max_sequences=1, queue=1)
    assert served.ask(n=3).status_code == 400, "more than ever fits is no matter of time"
    with served.client.stream("POST", CHAT, json={"stream": True, "messages": MESSAGES}) as first:
        lines = first.iter_lines()
        next(lines)
        reply = served.ask(n=2)
        assert reply.status_code == 503 and reply.headers["retry-after"] == "2"
        assert reply.json()["error"]["code"] == "server_overloaded"
    eventually(lambda: served.server.admitted == 0)
    assert served.ask().is_success


def test_places_are_given_back_once(served):
    server, client = served.server, Client(None)
    with server.admit(1, client), server.admit(2, client) as permit:
        permit.close()
        permit.close()
        assert (server.admitted, client.admitted) == (1, 1)
    assert (server.admitted, client.admitted) == (0, 0)


@pytest.mark.parametrize(
    ("stream", "more"),
    [(b"true", b""), (b"false", b""), (b"true", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")],
)
def test_a_client_that_leaves_frees_its_tokens(serve, stream, more):
    """more: a second request in its connection; uvicorn tells the last one alone that it has left."""
    served = serve(RIGHT * 20, token_s=0.01)
    body = b'{"stream": %s, "messages": [{"role": "user", "content": "x"}]}' % stream
    with connect(served) as client:
        client.sendall(head(len(body)) + body + more)
        eventually(lambda: served.engine.told > 3)
    eventually(lambda: served.engine.running == 0 and served.server.admitted == 0)
    assert served.engine.told < len(RIGHT) * 20


def test_a_client_that_takes_nothing_loses_its_place(monkeypatch):
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

    with running(app) as url, connect(url) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert ended.wait(60)


def test_draining_lets_responses_end_and_admits_no_more(serve):
    served = serve("<think>a</think>" + "b" * 40, token_s=0.01)
    replies: list[Any] = []
    thread = threading.Thread(target=lambda: replies.append(served.ask()))
    thread.start()
    eventually(lambda: served.engine.running == 1)
    served.server.draining = True
    late = served.client.post(CHAT, json={"messages": MESSAGES})
    assert late.status_code == 503 and late.json()["error"]["code"] == "draining"
    assert served.client.get("/ready").status_code == 503
    thread.join(60)
    assert replies[0].json()["choices"][0]["message"]["content"] == "b" * 40


def test_a_quiet_stream_is_pinged(serve):
    text = serve("ab", token_s=0.4, ping_s=0.1).ask(stream=True).text
    assert text.count(": ping") >= 2 and text.rstrip().endswith("[DONE]")


def test_formulas_are_held_back_for_so_long_only(serve):
    """Reasoning without words never tells its language; it is told as it is, long before it ends."""
    served = serve("<think>" + "1+1=2; " * 2000, reasoning_language="fr", reasoning_language_enforcement="retry",
                   system_prompt="", max_tokens=4096, token_s=0.0005)  # fmt: skip
    with served.client.stream("POST", CHAT, json={"messages": MESSAGES, "stream": True}) as stream:
        lines = (line for line in stream.iter_lines() if '"reasoning":"' in line)
        next(lines)
        assert MOST_HELD <= served.engine.told < MOST_HELD + 1000 < served.engine.samplings[0].max_tokens


def test_reasoning_is_never_more_than_all_tokens(serve):
    usage = serve("4").ask(reasoning_effort="none", max_tokens=1).json()["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] <= usage["completion_tokens"] == 1
