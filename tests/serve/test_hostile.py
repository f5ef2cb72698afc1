"""What strangers send: each gets a 4xx in OpenAI's form, or is closed, and nothing of it stays in memory."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from serve.reasoning_language import without_quotations
from shared.http_limits import HEAD_BYTES, PIPELINED, LimitedHttpProtocol
from tests.processor_time import at_most
from tests.serve.conftest import Serve, Served, eventually

CHAT = "/v1/chat/completions"
MESSAGES: Any = [{"role": "user", "content": "x"}]


def speak(served: Served, *parts: bytes, wait_s: float = 5.0) -> bytes:
    """Send raw bytes; what comes back until the server closes, or is quiet for a second after it spoke."""
    host, port = served.url.removeprefix("http://").split(":")
    found = b""
    with socket.create_connection((host, int(port)), timeout=wait_s) as client, contextlib.suppress(OSError):
        for part in parts:
            client.sendall(part)
        while part := client.recv(1 << 16):
            found += part
            client.settimeout(1.0)
    return found


def head(length: int | None = None, *, path: str = CHAT, host: str = "127.0.0.1", more: str = "") -> bytes:
    """A request line and headers."""
    size = "" if length is None else f"Content-Length: {length}\r\n"
    lines = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n{size}{more}\r\n"
    return lines.encode("latin-1")


def check(reply: bytes, status: int, code: str | None = None) -> None:
    """A raw response is an error of ours."""
    top, _, body = reply.partition(b"\r\n\r\n")
    assert top.startswith(b"HTTP/1.1 %d " % status), reply[:300]
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"} and (code is None or error["code"] == code)


# ---- bodies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        b"\xff\xfe\x00", b'{"messages": [{"role": "user", "content": "\xc3\x28"}]}', b"\x00" * 100,
        b'{"messages": ' + b"[" * 200_000, b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        b'{"messages": [{"role": "user", "content": "x"}], "x": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001,
        b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1' + b"0" * 5000 + b"}",
        b'{"messages": [{"role": "user", "content": "x"}], "n": 1e400}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": Infinity}',
        b'{"messages": [{"role": "user", "content": "x"}], "n": 99999999999999999999999}',
        b'{"messages": [{"role": "user", "content": "x"}], "seed": true, "stop": {"a": 1}}',
        b'{"model": "tiny", "model": "other", "messages": 1, "messages": []}',
        b'"text"', b"1", b"null", b"true", b"[{}]", b'{"messages": {"role": "user"}}',
        b'{"messages": [[{"role": "user", "content": "x"}]]}', b'{"messages": [{"role": "user", "content": 5}]}',
        b'{"messages": [{"role": "user", "content": [{"type": "text", "text": null}]}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "stop": ["' + b"y" * 1000 + b'"]}',
        b'{"messages": [{"role": "user", "content": "x"}], "top_logprobs": 100000, "logprobs": true}',
    ],
)  # fmt: skip
def test_broken_bodies(serve: Serve, text: bytes) -> None:
    served = serve("x")
    reply = served.client.post(CHAT, content=text, headers={"content-type": "application/json"})
    assert reply.status_code == 400 and set(reply.json()["error"]) == {"message", "type", "param", "code"}
    assert len(reply.text) < 1000, "nothing of a body is sent back at length"
    assert served.ask().is_success and served.server.admitted == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"model": "\ud800", "messages": MESSAGES}),
        (CHAT, {"messages": MESSAGES, "reasoning_language": "\udfff"}),
        (CHAT, {"messages": MESSAGES, "\ud800": 1}),
        (CHAT, {"messages": MESSAGES, "tools": [{"type": "function", "function": {
            "name": "f", "description": "\ud800"}}]}),
        ("/v1/responses", {"input": "x", "metadata": {"a": "\udc00"}}),
        ("/v1/completions", {"prompt": ["\udc00"]}),
        ("/tokenize", {"prompt": "\udc00"}),
    ],
)  # fmt: skip
def test_half_characters(serve: Serve, path: str, body: Any) -> None:
    reply = serve("x").client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert reply.status_code == 400 and "surrogate" in reply.json()["error"]["message"]


def test_whole_characters_are_none_of_these(serve: Serve) -> None:
    served = serve("x")
    body = json.dumps({"messages": [{"role": "user", "content": "🍎\\ud800"}]})
    assert served.client.post(CHAT, content=body, headers={"content-type": "application/json"}).is_success
    assert "🍎\\ud800" in served.engine.prompts[0]


def test_compressed_bodies_are_not_inflated(serve: Serve) -> None:
    bomb = gzip.compress(b" " * (64 << 20))
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    assert serve("x").client.post(CHAT, content=bomb, headers=headers).status_code in (400, 415)


def test_chunked_bodies_have_the_same_limit(serve: Serve) -> None:
    served = serve("x", body_bytes=2000)
    for part in (b"y" * 100, b"y" * 100_000):
        chunk = b"%x\r\n%s\r\n" % (len(part), part)
        reply = speak(served, head(more="Transfer-Encoding: chunked\r\n"), *[chunk] * 30)
        if reply:  # a reset may overtake it while the client still sends
            check(reply, 413, "body_too_large")
    served.ask()
    assert len(served.engine.prompts) == 1


def test_a_length_that_lies_is_not_believed(serve: Serve) -> None:
    served = serve("x", body_s=0.3)
    check(speak(served, head(10**12), b"{}"), 408, "body_too_slow")
    assert b" 400 " in speak(served, head(-5), b"{}").partition(b"\r\n")[0]
    both = head(5, more="Transfer-Encoding: chunked\r\n") + b"0\r\n\r\nGET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    check(speak(served, both), 400, "invalid_http")


def test_other_content_types(serve: Serve) -> None:
    served = serve("x")
    body = json.dumps({"messages": MESSAGES})
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        assert served.client.post(CHAT, content=body, headers={"content-type": kind}).status_code == 415


# ---- headers, hosts, addresses -------------------------------------------------------------------------------------


def test_headers_have_a_deadline(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LimitedHttpProtocol, "head_s", 0.4)
    served = serve("x")
    for half in (b"", b"POST /v1/chat", head(5)[:-2], b"\r\n\r\n"):
        check(speak(served, half), 408, "headers_too_slow")
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as client, pytest.raises(OSError):
        for letter in b"POST /v1/chat/completions HTTP/1.1\r\n" * 100:  # a letter at a time does not put it off
            client.sendall(bytes([letter]))
            time.sleep(0.02)
    assert served.client.get("/health").is_success, "one that waits between two requests is another matter"


def test_a_second_request_has_a_deadline_of_its_own(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LimitedHttpProtocol, "head_s", 0.4)
    served = serve("ab", token_s=0.3)
    body = json.dumps({"messages": MESSAGES}).encode()
    whole = head(len(body)) + body
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as client:
        for _ in range(2):
            client.sendall(whole)
            got = b""
            while b"total_tokens" not in got:  # a response may take longer than headers
                got += client.recv(1 << 16)
            time.sleep(0.6)  # and so may a client before its next request
        client.sendall(b"GET /hea")
        assert b"408" in client.recv(1 << 16) and client.recv(10) == b""


@pytest.mark.parametrize(
    "top",
    [
        b"GET /" + b"a" * (HEAD_BYTES + 1) + b" HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nX: " + b"a" * (HEAD_BYTES + 1) + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"X: a\r\n" * HEAD_BYTES + b"\r\n",
        b"GET /health HTTP/1.1\r\nX: " + b"a" * (8 << 20),
        b"GET /" + b"a" * (8 << 20),
    ],
    ids=["address", "header", "many headers", "endless header", "endless address"],
)
def test_headers_have_a_size(serve: Serve, top: bytes) -> None:
    served = serve("x")
    reply = speak(served, top)
    if reply:  # a reset may overtake it while the client still sends
        check(reply, 431, "headers_too_large")
    assert served.client.get("/health").is_success


def test_trailers_have_the_same_size(serve: Serve) -> None:
    served = serve("x")
    chunked = head(more="Transfer-Encoding: chunked\r\n")
    for flood in (b"0\r\n" + b"X: a\r\n" * HEAD_BYTES, b"0\r\nX: " + b"a" * (4 << 20), b"2;a=" + b"a" * (4 << 20)):
        assert b" 200 " not in speak(served, chunked, flood)
    eventually(lambda: served.server.admitted == 0)
    assert served.ask().is_success


def test_requests_that_wait_in_one_connection_are_few(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs time and memory before any of them is answered."""
    waiting = []

    def begin(self: LimitedHttpProtocol) -> None:
        waiting.append(len(self._cycles))
        LimitedHttpProtocol.__base__.on_message_begin(self)  # type: ignore[union-attr,misc]

    monkeypatch.setattr(LimitedHttpProtocol, "on_message_begin", begin)
    served = serve("x")
    replies = speak(served, b"GET /none HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20_000)
    assert max(waiting) <= PIPELINED and len(waiting) < 20_000 > replies.count(b"HTTP/1.1 404")
    few = speak(served, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * PIPELINED)
    assert few.count(b"HTTP/1.1 200") == PIPELINED, "those that wait are answered in turn"


@pytest.mark.parametrize(
    "text",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"hello\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost : x\r\n\r\n", b"GET /health HTTP/1.1\r\nX: \x00\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\n\r\n", b"CONNECT evil.example:443 HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    ],
)  # fmt: skip
def test_what_is_no_http(serve: Serve, text: bytes) -> None:
    check(speak(serve("x"), text), 400)


def test_hosts_are_not_believed(serve: Serve) -> None:
    served = serve("x")
    for host in ("evil.example", "127.0.0.1/v1/models?", "a b", "x" * 5000, "127.0.0.1:8000@evil.example"):
        reply = served.client.get("/health/", headers={"host": host})
        assert reply.status_code in (400, 403) and "location" not in reply.headers and "x" * 300 not in reply.text
    assert served.client.get("/health/", follow_redirects=False).status_code == 404, "no redirection"
    twice = speak(served, b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\n\r\n")
    check(twice, 400, "invalid_host")
    absolute = b"GET http://evil.example/health HTTP/1.1\r\nHost: %s\r\n\r\n"
    assert b" 403 " in speak(served, absolute % b"evil.example")
    assert b" 200 " in speak(served, absolute % b"127.0.0.1"), "the address is only a path to us"


def test_old_http(serve: Serve) -> None:
    served = serve("x")
    assert speak(served, b"GET /health HTTP/1.0\r\n\r\n").endswith(b'{"status":"ok"}')


@pytest.mark.parametrize(
    "name",
    ["../../etc/passwd", "..%2f..%2fetc%2fpasswd", "%2e%2e/%2e%2e/config.json", "tiny/../../x", "tiny%00", "%ED%A0%80",
     "..\\..\\x", "a" * 10_000, "%0d%0aX-Evil:%20yes"],
)  # fmt: skip
def test_names_of_models_are_no_paths(serve: Serve, name: str) -> None:
    served = serve("x")
    reply = speak(served, f"GET /v1/models/{name} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
    check(reply, 404)
    assert b"\nX-Evil" not in reply and b"root:" not in reply and len(reply) < 2000
    body = {"model": name, "messages": MESSAGES}
    assert served.client.post(CHAT, json=body).json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "TRACE", "OPTIONS"])
def test_other_methods(serve: Serve, method: str) -> None:
    reply = serve("x").client.request(method, CHAT)
    assert reply.status_code in (401, 405) and set(reply.json()) == {"error"}
    assert "access-control-allow-origin" not in reply.headers


# ---- long texts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mark", ["“", "„", "«", "「", '"', ">", "$", "`", "\\(", "<", "http://", "\n", " ", "a"])
def test_no_text_takes_long_to_read(mark: str) -> None:
    with at_most(2):
        without_quotations(mark * 1_000_000)


def test_a_long_turn_does_not_hold_up_others(serve: Serve) -> None:
    served = serve("x", reasoning_language="auto")
    with at_most(20):
        reply = served.ask("“ab cd " * 200_000)
    assert reply.status_code == 400 and reply.json()["error"]["code"] == "context_length_exceeded"


# ---- memory --------------------------------------------------------------------------------------------------------


class Lone:
    """A server in a process of its own, whose memory is its own."""

    def __init__(self, model: Path):
        command = [sys.executable, "-m", "tests.serve.server_process", str(model), "<think>\nOne.\n</think>\n\nTwo."]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60)

    def memory_bytes(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def sockets(self) -> int:
        return len(psutil.Process(self.process.pid).net_connections())

    def close(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def lone(model_folder: Path) -> Iterator[Lone]:
    """It."""
    found = Lone(model_folder)
    try:
        yield found
    finally:
        found.close()


def attack(lone: Lone) -> None:
    """140 hostile requests of all kinds."""
    for number in range(10):
        for body in (
            {"messages": MESSAGES, "model": f"../{number}" * 100}, {"messages": MESSAGES, "n": 10**9},
            {"messages": [{"role": "user", "content": f"{number} <think></think><eos>" * 2000}]},
            {"messages": [{"role": f"r{number}", "content": "x"}] * 500}, {"messages": MESSAGES, "stop": ["x"] * 5000},
            {"messages": MESSAGES, "chat_template": "{{ 1 }}" * 1000}, {"messages": MESSAGES, "top_logprobs": 10**9},
            {"messages": MESSAGES, f"field{number}": {"a": [1] * 10_000}},
        ):  # fmt: skip
            assert lone.client.post(CHAT, json=body).status_code in (200, 400, 404)
        for text in (b"[" * 100_000, b"\xff" * 100_000, b'"' + b"y" * (2 << 20), b'{"n": 1' + b"0" * 5000 + b"}"):
            headers = {"content-type": "application/json"}
            with contextlib.suppress(httpx.TransportError):  # closed while the body was still coming
                assert lone.client.post(CHAT, content=text, headers=headers).status_code in (400, 413)
        lone.client.get(f"/v1/models/{number}/../{'x' * 1000}", headers={"host": f"h{number}.example"})
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", lone.port)) as client:
            client.sendall(b"GET /" + bytes([97 + number % 26]) * (1 << 20))


@pytest.mark.soak
@pytest.mark.timeout(720)
def test_memory_stays_flat(lone: Lone) -> None:
    attack(lone)  # what grows once: pools, caches, the allocator's own
    attack(lone)
    before = lone.memory_bytes()
    for _ in range(5):
        attack(lone)
    grown = lone.memory_bytes() - before
    assert grown < 16 << 20, f"{grown >> 20} MiB more after 700 hostile requests"
    assert lone.client.post(CHAT, json={"messages": MESSAGES}).is_success


@pytest.mark.slow
@pytest.mark.timeout(720)
def test_half_requests_are_closed_and_forgotten(lone: Lone) -> None:
    halves = [b"", b"POST /v1/chat", head(5)[:-2], head(100_000) + b"{", head(more="Transfer-Encoding: chunked\r\n")]
    before = lone.memory_bytes()
    clients = [socket.create_connection(("127.0.0.1", lone.port)) for _ in range(1000)]
    try:
        for number, client in enumerate(clients):
            client.sendall(halves[number % len(halves)])
        assert lone.client.post(CHAT, json={"messages": MESSAGES}).is_success, "others are served meanwhile"
        eventually(lambda: lone.sockets() <= 2, 60)
    finally:
        for client in clients:
            client.close()
    assert lone.memory_bytes() - before < 64 << 20
