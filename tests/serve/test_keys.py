"""Keys, their scopes and bounds, and who may come in without one."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve.app import create_app
from serve.errors import ApiError
from serve.keys import ApiKey, Client, digest_of, load, main
from serve.settings import ServerSettings
from serve.settings import load as load_settings
from shared.errors import ConfigError
from tests.serve.conftest import Serve, Served

QUESTION = {"messages": [{"role": "user", "content": "How many apples are there in the basket?"}]}


def make_key(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """A new key, made by the command."""
    assert main([str(path), *options]) == 0
    return capsys.readouterr().out.strip()


def post(served: Served, key: str, path: str = "/v1/chat/completions", body: Any = QUESTION) -> Any:
    """The response to a request with a key."""
    return served.client.post(path, json=body, headers={"Authorization": f"Bearer {key}"})


def test_a_key_is_shown_once_and_its_hash_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.json"
    secret = make_key(path, capsys, "--name", "anna", "--scopes", "chat,metrics", "--completions", "3")
    assert secret not in path.read_text() and path.stat().st_mode & 0o077 == 0
    (key,) = load(str(path), {}).clients
    assert key.key == ApiKey(name="anna", sha256=digest_of(secret), scopes={"chat", "metrics"}, completions=3)
    assert main([str(path), "--name", "anna"]) == 2 and "there is one already" in capsys.readouterr().err
    assert main([str(path), "--name", "b", "--scopes", "chats"]) == 2 and "--scopes" in capsys.readouterr().err
    assert main([str(path), "--name", "anna", "--revoke"]) == 0
    assert main([str(path), "--name", "anna", "--revoke"]) == 2
    with pytest.raises(ConfigError, match="it holds no key"):
        load(str(path), {})
    path.write_text('{"keys": [{"name": "x"}]}')
    with pytest.raises(ConfigError, match="keys.0.sha256"):
        load(str(path), {})
    with pytest.raises(ConfigError, match="python -m serve.keys"):
        load(str(tmp_path / "nowhere.json"), {})


def test_the_command_teaches() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "serve.keys", "--help"], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert "raw" in shown and "without the server's system prompt" in shown


def test_without_a_valid_key_nothing_is_answered(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys.json"
    secret = make_key(path, capsys, "--name", "anna")
    served = serve("x", keys=str(path))
    for key in ("x", "mk-wrong", secret[:-1], secret + "x", "\xff"):
        reply = served.client.post("/v1/chat/completions", json=QUESTION,
                                   headers={"Authorization": f"Bearer {key}".encode("latin-1")})  # fmt: skip
        assert reply.status_code == 401 and reply.json()["error"]["code"] == "invalid_api_key"
    assert served.client.get("/v1/models").status_code == 401
    assert served.client.get("/v1/models", headers={"Authorization": f"Basic {secret}"}).status_code == 401
    for path_ in ("/v1/completions", "/v1/responses", "/tokenize", "/detokenize", "/v1/chat/completions/control"):
        assert served.client.post(path_, json={}).status_code == 401
    assert served.client.get("/health").status_code == served.client.get("/ready").status_code == 200
    assert post(served, secret).status_code == 200 and served.engine.told > 0


def test_the_body_of_a_stranger_is_not_read(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAESTRALE_API_KEY", "k" * 20)
    served = serve("x")
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as stranger:
        stranger.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500000\r\n\r\n")
        assert b" 401 " in stranger.recv(100)
    assert post(served, "k" * 20).status_code == 200
    with pytest.raises(ConfigError, match="at least 16"):
        load("", {"MAESTRALE_API_KEY": "short"})


def test_a_key_does_what_its_scopes_say(serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.json"
    chat, raw, metrics = (make_key(path, capsys, "--name", s, "--scopes", s) for s in ("chat", "raw", "metrics"))
    served = serve("x", keys=str(path))
    prompt = {"prompt": "Hello"}
    assert [post(served, key).status_code for key in (chat, raw, metrics)] == [200, 403, 403]
    assert [post(served, key, "/v1/completions", prompt).status_code for key in (chat, raw, metrics)] == [403, 200, 403]
    found = [served.client.get("/metrics", headers={"Authorization": f"Bearer {key}"}) for key in (chat, raw, metrics)]
    assert [reply.status_code for reply in found] == [403, 403, 200]
    assert 'key="chat"' in found[-1].text and chat not in found[-1].text


def test_a_keys_own_language_and_bounds(serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.json"
    secret = make_key(path, capsys, "--name", "a", "--reasoning-language", "de-AT", "--requests-per-minute", "2")
    served = serve("x", keys=str(path), reasoning_language="fr")
    told = post(served, secret).json()["reasoning_language"]
    assert (told["requested"], told["source"]) == ("de", "key")
    body = {**QUESTION, "reasoning_language": "ru"}
    assert post(served, secret, body=body).json()["reasoning_language"]["source"] == "body"
    reply = post(served, secret)
    assert (reply.status_code, reply.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 50 <= int(reply.headers["retry-after"]) <= 60 and served.server.admitted == 0


def test_completions_at_a_time() -> None:
    client = Client(ApiKey(name="a", sha256="0" * 64, completions=3))
    client.admitted = 2
    client.check(1)
    with pytest.raises(ApiError, match="2 completions under way of 3") as caught:
        client.check(2)
    assert caught.value.status == 429


def test_a_minute_passes() -> None:
    client = Client(ApiKey(name="a", sha256="0" * 64, requests_per_minute=2))
    client.check(1, now_s=0.0)
    client.check(1, now_s=30.0)
    with pytest.raises(ApiError) as caught:
        client.check(1, now_s=59.0)
    assert caught.value.headers == {"Retry-After": "1"}
    client.check(1, now_s=60.0)
    with pytest.raises(ApiError) as caught:
        client.check(1, now_s=61.0)
    assert caught.value.headers == {"Retry-After": "29"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200), ({"Host": "localhost:99"}, 200), ({"Host": "evil.example"}, 403), ({"Host": "a b"}, 400),
        ({"Host": "x/../y?"}, 400), ({"Host": "127.0.0.1:1/v1"}, 400), ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403), ({"Host": "localhost:5", "Origin": "http://localhost:5"}, 200),
    ],
)  # fmt: skip
def test_a_server_without_keys_answers_to_its_own_name_only(serve: Serve, headers: dict[str, str], status: int) -> None:
    served = serve("x")
    assert served.client.post("/v1/chat/completions", json=QUESTION, headers=headers).status_code == status
    assert served.client.get("/v1/models", headers=headers).status_code == status


def test_keys_open_other_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MAESTRALE_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="serve.keys"):
        load_settings(["--host", "0.0.0.0"])
    assert load_settings(["--host", "0.0.0.0", "--anybody"]).anybody
    assert load_settings(["--host", "0.0.0.0", "--keys", "keys.json"]).keys == "keys.json"
    monkeypatch.setenv("MAESTRALE_API_KEY", "k" * 20)
    assert "kkkk" not in json.dumps(load_settings(["--host", "0.0.0.0"]).model_dump())


@pytest.mark.parametrize(
    ("peer", "status"), [("10.0.0.5", 403), ("of a header", 403), ("127.0.0.1", 200), ("::1", 200)]
)
def test_a_server_without_keys_answers_its_own_machine_only(serve: Serve, peer: str, status: int) -> None:
    """Whatever address uvicorn was told to listen on."""
    app = serve("x").app

    async def ask() -> int:
        transport = httpx.ASGITransport(app, client=(peer, 1234))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return (await client.get("/v1/models")).status_code

    assert asyncio.run(ask()) == status


def test_only_a_folder_can_be_followed() -> None:
    with pytest.raises(ConfigError, match="follow"):
        create_app(ServerSettings(model="some/model-of-the-hub", follow=True))
