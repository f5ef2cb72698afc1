"""What strangers send: each gets a 4xx in OpenAI's form, or is closed, and nothing of it stays in memory. Bodies that
are JSON: test_bad_requests.py."""

import contextlib
import gc
import json
import socket
import time
from typing import Any

import httpx
import psutil
import pytest

from serve.reasoning_language import without_quotations
from shared.http_limits import HEAD_BYTES, PIPELINED, LimitedHttpProtocol
from tests.processor_time import at_most
from tests.serve.conftest import Served, eventually

CHAT = "/v1/chat/completions"
MESSAGES: Any = [{"role": "user", "content": "x"}]
HEALTH = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"


def connect(server: Served | str, wait_s: float = 60.0) -> socket.socket:
    """A connection to a server, or to an address."""
    url = server if isinstance(server, str) else server.url
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=wait_s)


def speak(served: Served, *parts: bytes, wait_s: float = 60.0) -> bytes:
    """Send raw bytes; what comes back until the server closes, or is quiet for a second after it spoke."""
    reply = b""
    with connect(served, wait_s) as client, contextlib.suppress(OSError):
        for part in parts:
            client.sendall(part)
        while part := client.recv(1 << 16):
            reply += part
            client.settimeout(1.0)
    return reply


def head(length: int | None = None, more: str = "") -> bytes:
    """A request line and headers."""
    size = "" if length is None else f"Content-Length: {length}\r\n"
    text = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n{size}{more}\r\n"
    return text.encode("latin-1")


CHUNKED = head(more="Transfer-Encoding: chunked\r\n")


def check(reply: bytes, status: int, code: str | None = None) -> None:
    """A raw response is an error of ours."""
    top, _, body = reply.partition(b"\r\n\r\n")
    assert top.startswith(b"HTTP/1.1 %d " % status), reply[:300]
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"} and (code is None or error["code"] == code)


# ---- bodies --------------------------------------------------------------------------------------------------------


def test_chunked_bodies_have_the_same_limit(serve):
    served = serve("x", body_bytes=2000)
    for size in (100, 100_000):
        reply = speak(served, CHUNKED, *[b"%x\r\n%s\r\n" % (size, b"y" * size)] * 30)
        if reply:  # a reset may overtake it while the client still sends
            check(reply, 413, "body_too_large")
    assert served.ask().is_success and len(served.engine.prompts) == 1


def test_a_length_that_lies_is_not_believed(serve):
    served = serve("x", body_s=0.3)
    check(speak(served, head(10**12), b"{}"), 408, "body_too_slow")
    assert b" 400 " in speak(served, head(-5), b"{}").partition(b"\r\n")[0]
    both = head(5, more="Transfer-Encoding: chunked\r\n") + b"0\r\n\r\n" + HEALTH + b"\r\n"
    check(speak(served, both), 400, "invalid_http")
    assert served.ask().is_success


# ---- headers, hosts, addresses -------------------------------------------------------------------------------------


def test_the_headers_of_each_request_have_a_deadline(serve, monkeypatch):
    monkeypatch.setattr(LimitedHttpProtocol, "head_s", 0.4)
    served = serve("ab", token_s=0.3)
    for half in (b"", b"POST /v1/chat", head(5)[:-2], b"\r\n\r\n"):
        check(speak(served, half), 408, "headers_too_slow")
    with connect(served) as client, pytest.raises(OSError):
        for letter in b"POST /v1/chat/completions HTTP/1.1\r\n" * 100:  # a letter at a time does not put it off
            client.sendall(bytes([letter]))
            time.sleep(0.02)
    body = json.dumps({"messages": MESSAGES}).encode()
    with connect(served) as client:
        for _ in range(2):
            client.sendall(head(len(body)) + body)
            got = b""
            while b"total_tokens" not in got:  # a response may take longer than headers
                got += client.recv(1 << 16)
            time.sleep(0.6)  # and so may a client before its next request
        client.sendall(b"GET /hea")
        assert b"408" in client.recv(1 << 16) and client.recv(10) == b""


def test_headers_and_trailers_have_a_size(served):
    for top in (
        b"GET /" + b"a" * (HEAD_BYTES + 1) + b" HTTP/1.1\r\n\r\n", HEALTH + b"X: " + b"a" * (HEAD_BYTES + 1) + b"\r\n",
        HEALTH + b"X: a\r\n" * HEAD_BYTES + b"\r\n", HEALTH + b"X: " + b"a" * (8 << 20), b"GET /" + b"a" * (8 << 20),
    ):  # fmt: skip
        reply = speak(served, top)
        if reply:  # a reset may overtake it while the client still sends
            check(reply, 431, "headers_too_large")
        assert served.client.get("/health").is_success
    for flood in (b"0\r\n" + b"X: a\r\n" * HEAD_BYTES, b"0\r\nX: " + b"a" * (4 << 20), b"2;a=" + b"a" * (4 << 20)):
        assert b" 200 " not in speak(served, CHUNKED, flood)
    eventually(lambda: served.server.admitted == 0)
    assert served.ask().is_success


def test_requests_that_wait_in_one_connection_are_few(serve, monkeypatch):
    """Each costs time and memory before any of them is answered."""
    waiting = []

    def begin(self: LimitedHttpProtocol) -> None:
        waiting.append(len(self._cycles))
        LimitedHttpProtocol.__base__.on_message_begin(self)  # type: ignore[union-attr,misc]

    monkeypatch.setattr(LimitedHttpProtocol, "on_message_begin", begin)
    served = serve("x")
    replies = speak(served, b"GET /none HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20_000, wait_s=1.0)
    assert max(waiting) <= PIPELINED and len(waiting) < 20_000 > replies.count(b"HTTP/1.1 404")
    few = speak(served, (HEALTH + b"\r\n") * PIPELINED)
    assert few.count(b"HTTP/1.1 200") == PIPELINED, "those that wait are answered in turn"


def test_what_is_no_http_and_what_is_old(served):
    for text in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"hello\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost : x\r\n\r\n", b"GET /health HTTP/1.1\r\nX: \x00\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\n\r\n", b"CONNECT evil.example:443 HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    ):  # fmt: skip
        check(speak(served, text), 400)
    assert speak(served, b"GET /health HTTP/1.0\r\n\r\n").endswith(b'{"status":"ok"}')


@pytest.mark.parametrize(("headers", "status"), [
    ({}, 200), ({"Host": "localhost:99"}, 200), ({"Host": "evil.example"}, 403), ({"Host": "a b"}, 400),
    ({"Host": "x/../y?"}, 400), ({"Host": "127.0.0.1:1/v1"}, 400), ({"Host": "x" * 5000}, 400),
    ({"Host": "127.0.0.1:8000@evil.example"}, 400), ({"Origin": "https://evil.example"}, 403),
    ({"Origin": "null"}, 403),
    ({"Host": "localhost:5", "Origin": "http://localhost:5"}, 200),
])  # fmt: skip
def test_a_server_without_keys_answers_to_its_own_name_only(served, headers, status):
    for reply in (
        served.client.post(CHAT, json={"messages": MESSAGES}, headers=headers),
        served.client.get("/v1/models", headers=headers), served.client.get("/health/", headers=headers),
    ):  # fmt: skip
        assert reply.status_code in (status, 404 if status == 200 else status)
        assert not {"location", "access-control-allow-origin"} & set(reply.headers) and "x" * 300 not in reply.text


def test_a_host_is_one_name(served):
    check(speak(served, HEALTH + b"Host: evil.example\r\n\r\n"), 400, "invalid_host")
    absolute = b"GET http://evil.example/health HTTP/1.1\r\nHost: %s\r\n\r\n"
    assert b" 403 " in speak(served, absolute % b"evil.example")
    assert b" 200 " in speak(served, absolute % b"127.0.0.1"), "the address is only a path to us"


@pytest.mark.parametrize("name", [
    "../../etc/passwd", "..%2f..%2fetc%2fpasswd", "%2e%2e/%2e%2e/config.json", "tiny/../../x", "tiny%00", "%ED%A0%80",
    "..\\..\\x", "a" * 10_000, "%0d%0aX-Evil:%20yes",
])  # fmt: skip
def test_names_of_models_are_no_paths(served, name):
    reply = speak(served, f"GET /v1/models/{name} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
    check(reply, 404)
    assert b"\nX-Evil" not in reply and b"root:" not in reply and len(reply) < 2000
    body = {"model": name, "messages": MESSAGES}
    assert served.client.post(CHAT, json=body).json()["error"]["code"] == "model_not_found"


def test_other_methods(served):
    for method in ("PUT", "DELETE", "PATCH", "TRACE", "OPTIONS", "GET"):
        reply = served.client.request(method, CHAT)
        assert reply.status_code in (401, 405) and set(reply.json()) == {"error"}
        assert "access-control-allow-origin" not in reply.headers


# ---- long texts ----------------------------------------------------------------------------------------------------


def test_no_text_takes_long_to_read(served):
    for mark in ("“", "„", "«", "「", '"', ">", "$", "`", "\\(", "<", "http://", "\n", " ", "a"):
        with at_most(2):
            without_quotations(mark * 1_000_000)
    with at_most(20):
        error = served.ask("“ab cd " * 200_000, reasoning_language="auto").json()["error"]
    assert error["code"] == "context_length_exceeded"


# ---- memory --------------------------------------------------------------------------------------------------------


def memory_bytes() -> int:
    """Of this process, in which server and clients are."""
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def attack(served: Served) -> None:
    """140 hostile requests of all kinds."""
    for number in range(10):
        for body in (
            {"messages": MESSAGES, "model": f"../{number}" * 100}, {"messages": MESSAGES, "n": 10**9},
            {"messages": [{"role": "user", "content": f"{number} <think></think><eos>" * 2000}]},
            {"messages": [{"role": f"r{number}", "content": "x"}] * 500}, {"messages": MESSAGES, "stop": ["x"] * 5000},
            {"messages": MESSAGES, "chat_template": "{{ 1 }}" * 1000}, {"messages": MESSAGES, "top_logprobs": 10**9},
            {"messages": MESSAGES, f"field{number}": {"a": [1] * 10_000}},
        ):  # fmt: skip
            assert served.client.post(CHAT, json=body).status_code in (400, 404)
        for text in (b"[" * 100_000, b"\xff" * 100_000, b'"' + b"y" * (2 << 20), b'{"n": 1' + b"0" * 5000 + b"}"):
            headers = {"content-type": "application/json"}
            with contextlib.suppress(httpx.TransportError):  # closed while the body was still coming
                assert served.client.post(CHAT, content=text, headers=headers).status_code in (400, 413)
        served.client.get(f"/v1/models/{number}/../{'x' * 1000}", headers={"host": f"h{number}.example"})
        with contextlib.suppress(OSError), connect(served) as client:
            client.sendall(b"GET /" + bytes([97 + number % 26]) * (1 << 20))


@pytest.mark.soak
@pytest.mark.timeout(720)
def test_memory_stays_flat(serve):
    served = serve("x", body_bytes=1 << 20)
    for _ in range(2):
        attack(served)  # what grows once: pools, caches, the allocator's own
    before = memory_bytes()
    for _ in range(5):
        attack(served)
    grown = memory_bytes() - before
    assert grown < 16 << 20, f"{grown >> 20} MiB more after 700 hostile requests"
    assert served.ask().is_success


def test_half_requests_are_closed_and_forgotten(serve, monkeypatch):
    monkeypatch.setattr(LimitedHttpProtocol, "head_s", 1.0)
    served = serve("x", body_s=1.0)
    halves = [b"", b"POST /v1/chat", head(5)[:-2], head(100_000) + b"{", CHUNKED]
    assert served.ask().is_success
    before = memory_bytes()
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connect(served)) for _ in range(300)]
        for number, client in enumerate(clients):
            with contextlib.suppress(OSError):  # on a slow machine its time may be over
                client.sendall(halves[number % len(halves)])
        assert served.ask().is_success, "others are served meanwhile"
        for client in clients:
            with contextlib.suppress(OSError):
                while client.recv(1 << 12):
                    pass
        assert memory_bytes() - before < 32 << 20
