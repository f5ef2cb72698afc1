"""Request ids, the access log, HEAD, pages of other origins."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from serve.engine import SamplingParameters
from serve.settings import load
from shared.errors import ConfigError
from tests.serve.conftest import Serve, Served, eventually
from tests.serve.test_hostile import CHAT, HEALTH, MESSAGES, head, speak


def test_every_response_has_a_request_id(serve: Serve) -> None:
    def fail(prompt: list[int], sampling: SamplingParameters, call: int) -> str:
        raise ZeroDivisionError

    served = serve(fail)
    client = served.client

    def id_of(given: bytes) -> str:
        return client.get("/health", headers={"x-request-id": given}).headers["x-request-id"]

    for reply in (
        client.get("/health"), client.get("/nowhere"), client.put("/health"), served.ask(), served.ask(stream=True),
        client.post(CHAT, content=b"{"), client.get("/health", headers={"host": "evil.example"}),
    ):  # fmt: skip
        assert re.fullmatch(r"req_[0-9a-f]{32}", reply.headers["x-request-id"]), reply.status_code
    assert id_of(b"Trace-1.2:3_4") == "Trace-1.2:3_4"
    assert all(id_of(bad).startswith("req_") for bad in (b"x" * 129, b"", "ä".encode(), b"a,b<script>", b"a b\x7f"))
    for raw in (b"hello\r\n\r\n", HEALTH + b"X: " + b"a" * (65 << 10) + b"\r\n\r\n"):
        refusal = speak(served, raw)
        assert not refusal or b"\r\nX-Request-ID: req_" in refusal


def test_one_line_a_request(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    def access() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "serve.access"]

    caplog.set_level(logging.INFO)
    assert serve("x", access_log=False).ask().is_success and not access()
    served = serve("<think>a</think>" + "b" * 5)
    for number, stream in enumerate((False, True)):
        body = {"messages": [{"role": "user", "content": "a secret question"}], "stream": stream}
        headers = {"x-request-id": f"id-{number}", "authorization": "Bearer secret-key"}
        served.client.post(f"{CHAT}?key=secret-key", json=body, headers=headers)
    served.client.get("/now%0Ahere", headers={"x-request-id": "id-2"})
    served.client.head("/health", headers={"x-request-id": "id-3"})
    eventually(lambda: len(access()) == 4)
    tokens = len(served.server.prompts.chat.encode("<think>a</think>" + "b" * 5))
    for line in access()[:2]:
        assert re.fullmatch(rf"POST {CHAT} 200 \d+ ms \d\d+\+{tokens} tokens id-[01]", line), line
    assert re.fullmatch(r"GET /now%0Ahere 404 \d+ ms 0\+0 tokens id-2", access()[2])
    assert re.fullmatch(r"HEAD /health 200 \d+ ms 0\+0 tokens id-3", access()[3])
    assert not any("secret" in record.getMessage() for record in caplog.records if record.name.startswith("serve"))


def test_head_is_get_without_its_body(served: Served) -> None:
    for path in ("/", "/health", "/ready", "/version", "/v1/models", "/v1/models/tiny", "/metrics", "/docs",
                 "/openapi.json", "/nowhere", "/v1/models/other"):  # fmt: skip
        whole, top = served.client.get(path), served.client.head(path)
        assert top.status_code == whole.status_code and top.content == b""
        same = ["content-type"] if path == "/metrics" else ["content-type", "content-length"]
        assert [top.headers[name] for name in same] == [whole.headers[name] for name in same]
    reply = speak(served, head().replace(b"POST", b"HEAD", 1))
    assert reply.startswith(b"HTTP/1.1 405 ") and reply.endswith(b"\r\n\r\n")


# ---- pages of other origins --------------------------------------------------------------------------------------

PAGE = "https://chat.example"


def preflight(served: Served, origin: str) -> Any:
    wish = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, content-type"}
    return served.client.options(CHAT, headers={"origin": origin, **wish})


def test_pages_of_named_origins_may_use_the_server(serve: Serve) -> None:
    served = serve("x", origins=f"{PAGE}, http://localhost:3000")
    allowed = preflight(served, PAGE)
    assert allowed.is_success and "authorization" in allowed.headers["access-control-allow-headers"].lower()
    answered, wrong = (
        served.client.post(CHAT, json=body, headers={"origin": PAGE}) for body in ({"messages": MESSAGES}, {})
    )
    assert answered.is_success and wrong.status_code == 400, "pages may read errors"
    for reply in (allowed, answered, wrong):
        assert reply.headers["access-control-allow-origin"] == PAGE
    assert "x-request-id" in answered.headers["access-control-expose-headers"].lower()
    for origin in ("https://evil.example", "null", f"{PAGE}.evil.example", "http://chat.example"):
        assert "access-control-allow-origin" not in preflight(served, origin).headers
        reply = served.client.post(CHAT, json={"messages": MESSAGES}, headers={"origin": origin})
        assert reply.status_code == 403 and "access-control-allow-origin" not in reply.headers


def test_origins_that_are_none(model_folder: Path, served: Served) -> None:
    assert not preflight(served, PAGE).is_success, "where no origin is named no page may"
    for origins in ("chat.example", "https://chat.example/path", "https://", "*", "https://a b"):
        with pytest.raises(ConfigError, match="origins"):
            load(model=str(model_folder), origins=origins)
    assert list(load(model=str(model_folder), origins=f"{PAGE},").allowed_origins) == [PAGE]
