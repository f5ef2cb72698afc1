"""A real HTTP server in a thread of the test, over a scripted engine."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from serve.app import create_app
from serve.server import Server
from serve.settings import ServerSettings
from shared.chat import Chat
from shared.http_limits import uvicorn_config
from tests.serve.fake_engine import Script, ScriptedEngine
from tests.shared.test_chat import make_folder


class Served:
    """A running server: its address, its engine, its insides."""

    def __init__(self, url: str, engine: ScriptedEngine, app: FastAPI):
        self.url, self.engine, self.app = url, engine, app
        self.server: Server = app.state.server
        self.client = httpx.Client(base_url=url, timeout=60)

    def ask(self, text: str = "How many apples are there in the basket?", **body: Any) -> httpx.Response:
        """One question."""
        return self.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": text}], **body})

    def events(self, text: str = "How many apples are there in the basket?", **body: Any) -> list[dict[str, Any]]:
        """The events of a streamed answer; the last one must be [DONE]."""
        lines = [line for line in self.ask(text, stream=True, **body).text.splitlines() if line]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1] if not line.startswith(":")]


Serve = Callable[..., Served]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """Tokenizer, template and config of a model without weights."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return Path(make_folder(folder, config={"max_position_embeddings": 4096, "eos_token_id": 1}))


@contextmanager
def servers(model_folder: Path) -> Iterator[Serve]:
    """begin(script, setting=value, ...): a server whose engine says what the script returns."""
    with ExitStack() as stack:

        def begin(script: Script | str, token_s: float = 0.0, logprob: float | None = None, **settings: Any) -> Served:
            say = (lambda *_: script) if isinstance(script, str) else script
            engine = ScriptedEngine(Chat(model_folder), say, token_s, logprob)
            values = {"model": str(model_folder), "port": 0, "reasoning_language": "off", **settings}
            app = create_app(ServerSettings(**values), engine)
            served = Served(stack.enter_context(running(app)), engine, app)
            stack.callback(served.client.close)
            return served

        yield begin


@pytest.fixture
def serve(model_folder):
    """Servers for a test."""
    with servers(model_folder) as begin:
        yield begin


@pytest.fixture(scope="module")
def served(model_folder):
    """A server that says "x", for all cases of a module that leave nothing behind."""
    with servers(model_folder) as begin:
        yield begin("x")


@contextmanager
def running(app: Any) -> Iterator[str]:
    """The address of a server that answers until the block ends."""
    server = uvicorn.Server(uvicorn_config(app, "127.0.0.1", 0, log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)


def eventually(condition: Callable[[], bool], deadline_s: float = 20) -> None:
    """Wait for something that another thread does."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)
