"""The port of a server: who has it, and what clients hear there before the model has loaded."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from serve.__main__ import DrainingServer
from serve.app import create_app
from serve.settings import ServerSettings
from shared.chat import Chat
from shared.errors import ConfigError, ModelError
from shared.http_limits import take_address
from tests.serve.conftest import eventually
from tests.serve.fake_engine import ScriptedEngine

ADDRESSES = ["127.0.0.1", "localhost", "0.0.0.0", "::", "::1"]


def bound(host: str, port: int = 0) -> socket.socket:
    """A socket that is bound with SO_REUSEADDR and does not listen yet."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.bind((host, port))
    return found


def test_sockets_that_are_only_bound_share_a_port_until_one_listens() -> None:
    """Why take_address listens at once."""
    with bound("127.0.0.1") as first, bound("127.0.0.1", first.getsockname()[1]) as second:
        second.listen()
        with pytest.raises(OSError, match="in use"):
            first.listen()


@pytest.mark.parametrize("first", ADDRESSES)
@pytest.mark.parametrize("second", ADDRESSES)
def test_a_port_has_one_owner(first: str, second: str) -> None:
    if "::1" in (first, second) and {first, second} != {"::1", "::"} and first != second:
        pytest.skip("the IPv6 loopback is another address")
    with take_address(first, 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"^port = {port}: another program listens at .*--port"):
            take_address(second, port)
    take_address(second, port).close()


def test_a_port_is_taken_from_nobody_who_has_bound_it_and_would_listen_later() -> None:
    with bound("127.0.0.1") as other, take_address("127.0.0.1", other.getsockname()[1]), pytest.raises(OSError):
        other.listen()


def test_a_restart_takes_its_port_while_old_connections_linger() -> None:
    with take_address("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            taken.accept()[0].close()  # who closes first is left with TIME_WAIT
            assert client.recv(1) == b""
    with socket.socket() as strict, pytest.raises(OSError, match="in use"):
        strict.bind(("127.0.0.1", port))
    take_address("127.0.0.1", port).close()


class SlowEngine(ScriptedEngine):
    """One that starts when `go` is set, or then fails."""

    def __init__(self, folder: Path):
        super().__init__(Chat(folder), lambda *_: "x")
        self.go, self.fails, self.stopped = threading.Event(), False, False

    async def start(self) -> None:
        while not self.go.is_set():
            await asyncio.sleep(0.01)
        if self.fails:
            raise ModelError("a damaged shard")

    async def stop(self) -> None:
        self.stopped = True


class Starting:
    """A server as `python -m serve` runs it, whose engine starts when a test says so."""

    def __init__(self, folder: Path, address: socket.socket):
        self.engine, self.address, self.errors = SlowEngine(folder), address, list[Exception]()
        port = address.getsockname()[1]
        settings = ServerSettings(model=str(folder), port=port)
        self.server = DrainingServer(create_app(settings, self.engine), settings)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.server.run(sockets=[self.address])
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.errors.append(error)

    def check_end(self) -> None:
        """It ends by itself, and so does its engine."""
        self.thread.join(30)
        assert not self.thread.is_alive() and self.engine.stopped


@pytest.fixture
def begin(model_folder: Path) -> Iterator[Callable[[socket.socket], Starting]]:
    """begin(socket): a server that starts."""
    with ExitStack() as stack:

        def start(address: socket.socket) -> Starting:
            found = Starting(model_folder, stack.enter_context(address))
            stack.callback(found.thread.join, 30)
            stack.callback(setattr, found.server, "should_exit", True)
            stack.callback(found.client.close)
            return found

        yield start


def test_a_server_answers_while_its_engine_starts(begin: Callable[[socket.socket], Starting]) -> None:
    starting = begin(take_address("127.0.0.1", 0))
    client = starting.client
    assert client.get("/health").status_code == 200 and client.get("/ready").status_code == 503
    reply = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_starting")
    assert int(reply.headers["retry-after"]) > 0
    starting.engine.go.set()
    eventually(lambda: client.get("/ready").is_success)


def test_a_server_whose_engine_does_not_start_ends(begin: Callable[[socket.socket], Starting]) -> None:
    starting = begin(take_address("127.0.0.1", 0))
    assert starting.client.get("/ready").status_code == 503
    starting.engine.fails = True
    starting.engine.go.set()
    starting.check_end()
    assert [str(error) for error in starting.errors] == ["a damaged shard"]


def test_a_signal_ends_a_server_whose_engine_starts(begin: Callable[[socket.socket], Starting]) -> None:
    starting = begin(take_address("127.0.0.1", 0))
    assert starting.client.get("/ready").status_code == 503
    starting.server.handle_exit(signal.SIGTERM, None)
    starting.check_end()
    assert not starting.errors
