"""Who may ask the dashboard for what: this machine, by its own name, to read, and nothing outside of the runs."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from fastapi.testclient import TestClient

from dashboard.__main__ import main, take_port
from dashboard.app import FILES, create_app
from tests.dashboard.conftest import Dashboard
from tests.dashboard.run_folders import write_foreign, write_run

URL, TOKEN = "http://127.0.0.1:8400", "a-token-of-a-link"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
NAME = "maestrale-8400"
WRONG = ("", "x", "Bearer", "Bearer x", f"Bearer {TOKEN}x", f"Basic {TOKEN}", f'"{TOKEN}', f"{TOKEN} x")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    folder = tmp_path_factory.mktemp("place")
    (folder / "secret").write_text("secret")
    write_run(folder / "runs/a", steps=12, rollouts=1)
    write_foreign(folder / "runs/old")
    app = create_app(folder / "runs", TOKEN)
    with TestClient(app, base_url=URL, client=("127.0.0.1", 5), headers=HEADERS) as found:
        yield found


READ = (
    "/api/runs", "/api/runs/a", "/api/runs/old", "/api/runs/a/series?metric=reward/mean&metric=loss&axis=tokens",
    "/api/differences?run=a&run=old", "/api/runs/a/rollouts", "/api/runs/a/rollouts/12", "/api/runs/old/rollouts/3",
    "/api/runs/a/search?mark=wrong&text=x", "/api/runs/a/rollouts/12/0", "/api/runs/a/rollouts/12/0/1/tokens",
    "/api/runs/a/rollouts/12/0/1/test", "/api/runs/old/rollouts/3/1/0/tokens",
)  # fmt: skip


@pytest.mark.parametrize("path", READ)
def test_everything_that_the_page_asks_for_is_answered(client: TestClient, path: str) -> None:
    reply = client.get(path)
    assert reply.status_code == 200 and reply.headers["x-content-type-options"] == "nosniff"
    assert "NaN" not in reply.text


OUTSIDE = (
    "/api/runs/..", "/api/runs/%2e%2e", "/api/runs/..%2fsecret", "/api/runs/%2fetc", "/api/runs/a%00",
    "/dashboard/../app.py", "/dashboard/%2e%2e/app.py", "/dashboard/..%2f..%2fpyproject.toml", "/dashboard//etc/passwd",
    "/page/..%2f..%2f..%2fsecret", "/api/runs/a/rollouts/..%2f..%2fsecret", "/api/runs/a/rollouts/13",
    "/api/runs/a/rollouts/12/99", "/api/runs/a/rollouts/-1", "/api/runs/a/rollouts/12/0/99/tokens",
    "/api/runs/none/search", "/docs", "/openapi.json", "/v1/models",
)  # fmt: skip


@pytest.mark.parametrize("path", OUTSIDE)
def test_nothing_outside_of_the_runs_is_reached(client: TestClient, path: str) -> None:
    reply = client.get(path)
    assert reply.status_code in (400, 404) and "secret" not in reply.text.replace(path, "").replace("/secret", "")
    assert reply.json()["error"]["message"]


@pytest.mark.parametrize(
    "headers",
    [{"host": "elsewhere.invalid"}, {"host": "elsewhere.invalid:8400"}, {"host": "127.0.0.1.elsewhere.invalid"},
     {"origin": "http://elsewhere.invalid"}, {"host": "127.0.0.1:8400", "origin": "null"}],
)  # fmt: skip
def test_foreign_names_and_pages_are_refused(client: TestClient, headers: dict[str, str]) -> None:
    for path in ("/", "/api/runs", "/api/events", "/dashboard/dashboard.js"):
        assert client.get(path, headers=headers).status_code == 403


def test_other_machines_are_refused(client: TestClient) -> None:
    with TestClient(client.app, base_url=URL, client=("192.0.2.7", 5), headers=HEADERS) as stranger:
        assert stranger.get("/api/runs").status_code == 403


@pytest.mark.parametrize("path", [*READ, "/", "/api/events", "/dashboard/dashboard.js", "/page/prose.css", "/none"])
def test_another_user_of_the_machine_sees_nothing(client: TestClient, path: str) -> None:
    with TestClient(client.app, base_url=URL, client=("127.0.0.1", 5)) as stranger:
        for headers in (
            {},
            *({"Authorization": one} for one in WRONG),
            *({"Cookie": f"{NAME}={one}"} for one in WRONG),
        ):
            for query in ("", "token=", "token=x", f"token={TOKEN[:-1]}", f"Token={TOKEN}", "token=%ff%00"):
                reply = stranger.get(f"{path}{'&' if '?' in path else '?'}{query}", headers=headers)
                assert reply.status_code == 401 and "open the link" in reply.json()["error"]["message"]
                assert "set-cookie" not in reply.headers and len(reply.text) < 300
        assert stranger.post(path).status_code == 401


def test_the_link_is_exchanged_for_a_cookie(client: TestClient) -> None:
    with TestClient(client.app, base_url=URL, client=("127.0.0.1", 5)) as visitor:
        reply = visitor.get(f"/?token={TOKEN}", follow_redirects=False)
        assert (reply.status_code, reply.headers["location"]) == (303, "/")
        assert reply.headers["referrer-policy"] == "no-referrer" and reply.headers["cache-control"] == "no-store"
        cookie = reply.headers["set-cookie"]
        assert cookie.startswith(f"{NAME}={TOKEN};") and "HttpOnly" in cookie and "SameSite=lax" in cookie
        assert visitor.get("/").status_code == visitor.get("/api/runs").status_code == 200
        other = visitor.get(f"/?token={TOKEN}", headers={"host": "localhost:9000"}, follow_redirects=False)
        assert other.headers["set-cookie"].startswith(f"maestrale-9000={TOKEN};"), "through a tunnel"
    with TestClient(client.app, base_url=URL, client=("127.0.0.1", 5)) as stranger:
        foreign = {"host": "elsewhere.invalid"}
        assert stranger.get(f"/?token={TOKEN}", headers=foreign, follow_redirects=False).status_code == 403


def test_each_start_has_a_token_of_its_own_that_is_in_no_list_of_processes(
    dashboard: Callable[..., Dashboard], tmp_path: Path
) -> None:
    first, second = dashboard(tmp_path), dashboard(tmp_path)
    assert first.token != second.token
    for one in (first, second):
        process = psutil.Process(one.process.pid)
        assert one.token not in " ".join(process.cmdline())
        assert {each.laddr.ip for each in process.net_connections() if each.status == "LISTEN"} == {"127.0.0.1"}
        assert httpx.get(f"{one.url}/api/runs", timeout=60).status_code == 401
        assert httpx.get(f"{one.url}/api/runs", headers=one.link.headers, timeout=60).status_code == 200
        assert httpx.get(f"{one.url}/api/runs", headers=(first if one is second else second).link.headers,
                         timeout=60).status_code == 401  # fmt: skip


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_it_only_reads(client: TestClient, method: str) -> None:
    for path in ("/", "/api/runs", "/api/runs/a"):
        assert client.request(method, path).status_code == 405


@pytest.mark.parametrize(
    "path",
    ["/api/runs/a/series", "/api/runs/a/series?metric=x&axis=width", "/api/runs/a/series?metric=x&points=100000",
     "/api/runs/a/search?mark=other", "/api/runs/a/search?text=" + "x" * 501, "/api/runs/a/rollouts/x",
     "/api/differences"],
)  # fmt: skip
def test_wrong_questions_are_one_clear_error(client: TestClient, path: str) -> None:
    reply = client.get(path)
    assert reply.status_code == 400 and reply.json()["error"]["message"]


def test_the_page_takes_nothing_from_elsewhere(client: TestClient) -> None:
    reply = client.get("/")
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy and "trusted-types dompurify" in policy
    for name, file in FILES.items():
        assert client.get(f"/dashboard/{name}").content == file.body
        words = file.body.decode().replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in words and "https://" not in words and "innerHTML" not in words, name


def test_a_wrong_start_is_one_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none")]) == 2 and "is no folder" in capsys.readouterr().err
    held = take_port([0])
    assert held is not None
    port = held.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port)):
        pass  # it listens before its link is printed
    assert main([str(tmp_path), f"--port={port}"]) == 2 and f"port {port} is taken" in capsys.readouterr().err
    held.close()
