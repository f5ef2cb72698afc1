"""Who may ask the dashboard for what: this machine, by its own name, to read, and nothing outside of the runs."""

import socket

import httpx
import psutil
import pytest
from fastapi.testclient import TestClient

from dashboard.__main__ import main, take_port
from dashboard.app import FILES, create_app
from tests.dashboard.run_folders import write_foreign, write_run
from tests.tables import read_table

URL, TOKEN = "http://127.0.0.1:8400", "a-token-of-a-link"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
NAME = "maestrale-8400"
WRONG = ("", "x", "Bearer", "Bearer x", f"Bearer {TOKEN}x", f"Basic {TOKEN}", f'"{TOKEN}', f"{TOKEN} x")


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    (folder / "secret").write_text("secret")
    write_run(folder / "runs/a", steps=12, rollouts=1)
    write_foreign(folder / "runs/old")
    app = create_app(folder / "runs", TOKEN)
    with TestClient(app, base_url=URL, client=("127.0.0.1", 5), headers=HEADERS) as client:
        yield client


ADDRESSES = read_table("dashboard/addresses")
READ = [row["address"] for row in ADDRESSES if row["is"] == "shown"]


@pytest.mark.parametrize("row", ADDRESSES, ids=str)
def test_runs_are_shown_nothing_outside_of_them_is_reached_and_wrong_questions_are_one_clear_error(client, row):
    address = row["address"]
    reply = client.get(address)
    if row["is"] == "shown":
        assert reply.status_code == 200 and reply.headers["x-content-type-options"] == "nosniff"
        assert "NaN" not in reply.text
    else:
        assert (
            reply.status_code in ((400,) if row["is"] == "wrong" else (400, 404)) and reply.json()["error"]["message"]
        )
        assert "secret" not in reply.text.replace(address, "").replace("/secret", "")


@pytest.mark.parametrize("headers", [
    {"host": "elsewhere.invalid"}, {"host": "elsewhere.invalid:8400"}, {"host": "127.0.0.1.elsewhere.invalid"},
    {"origin": "http://elsewhere.invalid"}, {"host": "127.0.0.1:8400", "origin": "null"},
])  # fmt: skip
def test_foreign_names_and_pages_are_refused(client, headers):
    for path in ("/", "/api/runs", "/api/events", "/dashboard/dashboard.js"):
        assert client.get(path, headers=headers).status_code == 403
    with TestClient(client.app, base_url=URL, client=("192.0.2.7", 5), headers=HEADERS) as other_machine:
        assert other_machine.get("/api/runs").status_code == 403


@pytest.mark.parametrize("path", [*READ, "/", "/api/events", "/dashboard/dashboard.js", "/page/prose.css", "/none"])
def test_another_user_of_the_machine_sees_nothing(client, path):
    with TestClient(client.app, base_url=URL, client=("127.0.0.1", 5)) as stranger:
        for headers in [
            {},
            *({"Authorization": key} for key in WRONG),
            *({"Cookie": f"{NAME}={key}"} for key in WRONG),
        ]:
            for query in ("", "token=", "token=x", f"token={TOKEN[:-1]}", f"Token={TOKEN}", "token=%ff%00"):
                reply = stranger.get(f"{path}{'&' if '?' in path else '?'}{query}", headers=headers)
                assert reply.status_code == 401 and "open the link" in reply.json()["error"]["message"]
                assert "set-cookie" not in reply.headers and len(reply.text) < 300
        assert stranger.post(path).status_code == 401


def test_the_link_is_exchanged_for_a_cookie(client):
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


def test_each_start_has_a_token_of_its_own_that_is_in_no_list_of_processes(dashboard, tmp_path):
    first, second = dashboard(tmp_path), dashboard(tmp_path)
    assert first.token != second.token
    for one, other in ((first, second), (second, first)):
        process = psutil.Process(one.process.pid)
        assert one.token not in " ".join(process.cmdline())
        assert {each.laddr.ip for each in process.net_connections() if each.status == "LISTEN"} == {"127.0.0.1"}
        for headers, status in (({}, 401), (one.link.headers, 200), (other.link.headers, 401)):
            assert httpx.get(f"{one.url}/api/runs", headers=headers, timeout=60).status_code == status


def test_it_only_reads(client):
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        for path in ("/", "/api/runs", "/api/runs/a"):
            assert client.request(method, path).status_code == 405


def test_the_page_takes_nothing_from_elsewhere(client):
    reply = client.get("/")
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy and "trusted-types dompurify" in policy
    for name, file in FILES.items():
        assert client.get(f"/dashboard/{name}").content == file.body
        words = file.body.decode().replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in words and "https://" not in words and "innerHTML" not in words, name


def test_a_wrong_start_is_one_clear_error(tmp_path, capsys):
    assert main([str(tmp_path / "none")]) == 2 and "there is no such folder" in capsys.readouterr().err
    held = take_port([0])
    assert held is not None
    port = held.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port)):
        pass  # it listens before its link is printed
    assert main([str(tmp_path), f"--port={port}"]) == 2 and f"port {port} is taken" in capsys.readouterr().err
    held.close()
