"""Request ids, the access log, HEAD, pages of other origins."""

from __future__ import annotations

import json
import logging
import re
from typing import Any

import pytest

from serve.engine import SamplingParameters
from shared.errors import ConfigError
from tests.serve.conftest import Serve, Served, eventually
from tests.serve.test_hostile import head, speak

CHAT = "/v1/chat/completions"
SECRET = "a question that nobody else should read"


def test_every_response_has_a_request_id(serve: Serve) -> None:
    def fail(prompt: list[int], sampling: SamplingParameters, call: int) -> str:
        raise ZeroDivisionError

    served = serve(fail)
    for reply in (
        served.client.get("/health"), served.client.get("/nowhere"), served.client.put("/health"), served.ask(),
        served.client.post(CHAT, content=b"{"), served.client.get("/health", headers={"host": "evil.example"}),
        served.client.get("/", headers={"x-request-id": "a b\x7f"}), served.ask(stream=True),
    ):  # fmt: skip
        assert re.fullmatch(r"req_[0-9a-f]{32}", reply.headers["x-request-id"]), reply.status_code
    reply = served.client.get("/health", headers={"x-request-id": "Trace-1.2:3_4"})
    assert reply.headers["x-request-id"] == "Trace-1.2:3_4"
    for bad in (b"x" * 129, b"", "ä".encode(), b"a,b<script>"):
        assert served.client.get("/health", headers={"x-request-id": bad}).headers["x-request-id"].startswith("req_")
    for raw in (b"hello\r\n\r\n", b"GET /health HTTP/1.1\r\nX: " + b"a" * (65 << 10) + b"\r\n\r\n"):
        reply_of_none = speak(served, raw)
        assert not reply_of_none or b"\r\nX-Request-ID: req_" in reply_of_none


def access(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "serve.access"]


def errors(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR)


def test_one_line_a_request(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    served = serve("<think>a</think>" + "b" * 5)
    for number, stream in enumerate((False, True)):
        body = {"messages": [{"role": "user", "content": SECRET}], "stream": stream}
        headers = {"x-request-id": f"id-{number}", "authorization": "Bearer secret-key"}
        served.client.post(f"{CHAT}?key=secret-key", json=body, headers=headers)
    served.client.get("/now%0Ahere", headers={"x-request-id": "id-2"})
    served.client.head("/health", headers={"x-request-id": "id-3"})
    eventually(lambda: len(access(caplog)) == 4)
    tokens = len(served.server.prompts.chat.encode("<think>a</think>" + "b" * 5))
    for line in access(caplog)[:2]:
        assert re.fullmatch(rf"POST {CHAT} 200 \d+ ms \d\d+\+{tokens} tokens id-[01]", line), line
    assert re.fullmatch(r"GET /now%0Ahere 404 \d+ ms 0\+0 tokens id-2", access(caplog)[2])
    assert re.fullmatch(r"HEAD /health 200 \d+ ms 0\+0 tokens id-3", access(caplog)[3])
    ours = "\n".join(record.getMessage() for record in caplog.records if record.name.startswith("serve"))
    assert "secret" not in ours and SECRET not in ours


def test_a_failure_is_logged_under_its_request(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    def fail(prompt: list[int], sampling: SamplingParameters, call: int) -> str:
        raise ZeroDivisionError("inside")

    served = serve(fail)
    for number, stream in enumerate((False, True)):
        body = {"messages": [{"role": "user", "content": SECRET}], "stream": stream}
        served.client.post(CHAT, json=body, headers={"x-request-id": f"failed-{number}"})
        failed = f"failed-{number}"
        eventually(lambda failed=failed: failed in errors(caplog))  # type: ignore[misc]
    assert SECRET not in caplog.text


def test_the_log_can_be_turned_off(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert serve("x", access_log=False).ask().headers["x-request-id"]
    assert not access(caplog)


@pytest.mark.parametrize("path", ["/", "/health", "/ready", "/version", "/v1/models", "/v1/models/tiny", "/metrics",
                                  "/docs", "/openapi.json", "/nowhere", "/v1/models/other"])  # fmt: skip
def test_head_is_get_without_its_body(serve: Serve, path: str) -> None:
    served = serve("x")
    whole, top = served.client.get(path), served.client.head(path)
    assert top.status_code == whole.status_code and top.content == b""
    assert top.headers["content-type"] == whole.headers["content-type"]
    if path != "/metrics":
        assert top.headers["content-length"] == whole.headers["content-length"]
    assert served.client.head(CHAT).status_code == 405


def test_paths_with_a_slash_too_many(serve: Serve) -> None:
    served = serve("x")
    for path in ("/v1/models/", "/health/", "/v1/"):
        assert served.client.get(path).status_code == 404
    assert served.client.post(f"{CHAT}/", json={}).status_code == 404


# ---- pages of other origins --------------------------------------------------------------------------------------

PAGE = "https://chat.example"


def preflight(served: Served, origin: str) -> Any:
    wish = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, content-type"}
    return served.client.options(CHAT, headers={"origin": origin, **wish})


def test_pages_of_named_origins_may_use_the_server(serve: Serve) -> None:
    served = serve("x", origins=f"{PAGE}, http://localhost:3000")
    reply = preflight(served, PAGE)
    assert reply.is_success and reply.headers["access-control-allow-origin"] == PAGE
    assert "authorization" in reply.headers["access-control-allow-headers"].lower()
    body = {"messages": [{"role": "user", "content": "x"}]}
    reply = served.client.post(CHAT, json=body, headers={"origin": PAGE})
    assert reply.is_success and reply.headers["access-control-allow-origin"] == PAGE
    assert "x-request-id" in reply.headers["access-control-expose-headers"].lower()
    wrong = served.client.post(CHAT, json={}, headers={"origin": PAGE})
    assert wrong.status_code == 400 and wrong.headers["access-control-allow-origin"] == PAGE, "pages may read errors"
    for origin in ("https://evil.example", "null", f"{PAGE}.evil.example", "http://chat.example"):
        assert "access-control-allow-origin" not in preflight(served, origin).headers
        reply = served.client.post(CHAT, json=body, headers={"origin": origin})
        assert reply.status_code == 403 and "access-control-allow-origin" not in reply.headers


def test_no_page_may_without(serve: Serve) -> None:
    served = serve("x")
    reply = served.client.post(CHAT, json={"messages": [{"role": "user", "content": "x"}]}, headers={"origin": PAGE})
    assert reply.status_code == 403 and "access-control-allow-origin" not in reply.headers
    assert not preflight(served, PAGE).is_success


@pytest.mark.parametrize("origins", ["chat.example", "https://chat.example/path", "https://", "*", "https://a b"])
def test_origins_that_are_none(model_folder: Any, origins: str) -> None:
    from serve.settings import load

    with pytest.raises(ConfigError, match="origins"):
        load(model=str(model_folder), origins=origins)
    assert json.dumps(load(model=str(model_folder), origins=f"{PAGE},").allowed_origins) == json.dumps([PAGE])


def test_head_of_raw_sockets_sends_no_body(serve: Serve) -> None:
    reply = speak(serve("x"), head().replace(b"POST", b"HEAD", 1))
    assert reply.startswith(b"HTTP/1.1 405 ") and reply.endswith(b"\r\n\r\n")
