"""Keys, their scopes and bounds, and who may come in without one: this machine, and pages of named origins."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve.errors import ApiError
from serve.keys import ApiKey, Client, digest_of, load, main
from serve.settings import load as load_settings
from shared.errors import ConfigError
from tests.serve.conftest import Served
from tests.serve.test_hostile import CHAT, MESSAGES, connect

MakeKey = Callable[..., str]


@pytest.fixture
def path(tmp_path):
    """File of keys."""
    return tmp_path / "keys.json"


def new_key(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """A new key, made by the command."""
    assert main([str(path), *options]) == 0
    return capsys.readouterr().out.strip()


@pytest.fixture
def make_key(path, capsys):
    """make_key(name, option, ...)"""
    return lambda name, *options: new_key(path, capsys, "--name", name, *options)


def post(served: Served, key: str, path: str = CHAT, **body: Any) -> Any:
    """The response to a request with a key."""
    body = body or {"messages": MESSAGES}
    return served.client.post(path, json=body, headers={"Authorization": f"Bearer {key}".encode("latin-1")})


def test_a_key_is_shown_once_and_its_hash_is_kept(path, make_key, capsys):
    secret = make_key("anna", "--scopes", "chat,metrics", "--completions", "3")
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
    for given, variables in ((str(path.with_name("nowhere.json")), {}), ("", {"MAESTRALE_API_KEY": "short"})):
        with pytest.raises(ConfigError, match="python -m serve.keys"):
            load(given, variables)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "without the server's system prompt" in capsys.readouterr().out, "it teaches the scope raw"


def test_without_a_valid_key_nothing_is_answered(serve, path, make_key):
    secret = make_key("anna")
    served = serve("x", keys=str(path))
    for key in ("x", "mk-wrong", secret[:-1], secret + "x", "\xff"):
        reply = post(served, key)
        assert reply.status_code == 401 and reply.json()["error"]["code"] == "invalid_api_key"
    assert served.client.get("/v1/models").status_code == 401
    assert served.client.get("/v1/models", headers={"Authorization": f"Basic {secret}"}).status_code == 401
    for route in ("/v1/completions", "/v1/responses", "/tokenize", "/detokenize", f"{CHAT}/control"):
        assert served.client.post(route, json={}).status_code == 401
    assert served.client.get("/health").status_code == served.client.get("/ready").status_code == 200
    assert served.engine.told == 0 and post(served, secret).is_success


def test_the_body_of_a_stranger_is_not_read(serve, monkeypatch):
    monkeypatch.setenv("MAESTRALE_API_KEY", "k" * 20)
    served = serve("x")
    with connect(served) as stranger:
        stranger.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500000\r\n\r\n")
        assert b" 401 " in stranger.recv(100)
    assert post(served, "k" * 20).is_success


def test_a_key_does_what_its_scopes_say(serve, path, make_key):
    keys = [make_key(scope, "--scopes", scope) for scope in ("chat", "raw", "metrics")]
    served = serve("x", keys=str(path))
    assert [post(served, key).status_code for key in keys] == [200, 403, 403]
    assert [post(served, key, "/v1/completions", prompt="Hello").status_code for key in keys] == [403, 200, 403]
    replies = [served.client.get("/metrics", headers={"Authorization": f"Bearer {key}"}) for key in keys]
    assert [reply.status_code for reply in replies] == [403, 403, 200]
    assert 'key="chat"' in replies[-1].text and keys[0] not in replies[-1].text


def test_a_keys_language_and_bounds(serve, path, make_key):
    secret = make_key("a", "--reasoning-language", "de-AT", "--requests-per-minute", "2")
    served = serve("x", keys=str(path), reasoning_language="fr")
    language = post(served, secret).json()["reasoning_language"]
    assert (language["requested"], language["source"]) == ("de", "key")
    language = post(served, secret, messages=MESSAGES, reasoning_language="ru").json()["reasoning_language"]
    assert language["source"] == "body"
    reply = post(served, secret)
    assert (reply.status_code, reply.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 1 <= int(reply.headers["retry-after"]) <= 60 and served.server.admitted == 0


def test_completions_at_a_time_and_requests_a_minute():
    client = Client(ApiKey(name="a", sha256="0" * 64, completions=3))
    client.admitted = 2
    client.check(1)
    with pytest.raises(ApiError, match="2 completions under way of 3") as caught:
        client.check(2)
    assert caught.value.status == 429
    client = Client(ApiKey(name="a", sha256="0" * 64, requests_per_minute=2))
    for now_s, retry_after in ((0.0, ""), (30.0, ""), (59.0, "1"), (60.0, ""), (61.0, "29")):
        if not retry_after:
            client.check(1, now_s=now_s)
            continue
        with pytest.raises(ApiError) as caught:
            client.check(1, now_s=now_s)
        assert caught.value.headers == {"Retry-After": retry_after}


def test_keys_open_other_addresses(monkeypatch):
    monkeypatch.delenv("MAESTRALE_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="serve.keys"):
        load_settings(["--host", "0.0.0.0"])
    assert load_settings(["--host", "0.0.0.0", "--anybody"]).anybody
    assert load_settings(["--host", "0.0.0.0", "--keys", "keys.json"]).keys == "keys.json"
    monkeypatch.setenv("MAESTRALE_API_KEY", "k" * 20)
    assert "kkkk" not in json.dumps(load_settings(["--host", "0.0.0.0"]).model_dump())


def test_a_server_without_keys_answers_its_own_machine_only(served):
    """Whatever address uvicorn was told to listen on."""

    async def ask(peer: str) -> int:
        transport = httpx.ASGITransport(served.app, client=(peer, 1234))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return (await client.get("/v1/models")).status_code

    peers = ("10.0.0.5", "of a header", "127.0.0.1", "::1")
    assert [asyncio.run(ask(peer)) for peer in peers] == [403, 403, 200, 200]


PAGE = "https://chat.example"


def preflight(served: Served, origin: str) -> Any:
    wish = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, content-type"}
    return served.client.options(CHAT, headers={"origin": origin, **wish})


def test_pages_of_named_origins_may_use_the_server(serve):
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


def test_origins_that_are_none(model_folder, served):
    assert not preflight(served, PAGE).is_success, "where no origin is named no page may"
    for origins in ("chat.example", "https://chat.example/path", "https://", "*", "https://a b"):
        with pytest.raises(ConfigError, match="origins"):
            load_settings(model=str(model_folder), origins=origins)
    assert list(load_settings(model=str(model_folder), origins=f"{PAGE},").allowed_origins) == [PAGE]
