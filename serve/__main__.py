"""Serve a trained model over HTTP: `python -m serve --model runs/quickstart/latest`."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from serve.keys import KEY_VARIABLE
from serve.settings import ServerSettings, load
from shared.clean_text import clean, clean_logs
from shared.errors import InputError, print_error, run_command
from shared.http_limits import take_address, uvicorn_config

if TYPE_CHECKING:
    from fastapi import FastAPI

    from serve.server import Server


def main(arguments: list[str]) -> int:
    """Serve until a signal; returns the exit code. SIGINT and SIGTERM drain, a second one ends at once."""
    try:
        settings = load(arguments)
        address = take_address(settings.host, settings.port)
        if settings.model and not settings.follow and not Path(settings.model).is_dir():
            from shared.model import hf

            address.close()  # a download takes minutes, in which nobody shall be kept waiting
            hf.resolve(settings.model, "--model")
            address = take_address(settings.host, settings.port)
        from serve.app import create_app  # late: --help and mistakes need no vLLM

        app = create_app(settings)
    except InputError as error:
        return print_error(error)
    clean_logs()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    announce(app.state.server, settings, address)
    try:
        DrainingServer(app, settings).run(sockets=[address])
    except InputError as error:
        return print_error(error)
    return 0


def announce(server: Server, settings: ServerSettings, listening: socket.socket) -> None:
    """Say where a server starts, and once it is ready how to reach it from this machine, in lines to be copied."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    url = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
    key = "KEY" if settings.keys or os.environ.get(KEY_VARIABLE) else ""
    header = "-H 'Content-Type: application/json'" + f" -H 'Authorization: Bearer {key}'" * bool(key)
    body = '{"messages": [{"role": "user", "content": "What is 2 + 3?"}]}'
    lines = f"chat page: {url}/\ncurl {url}/v1/chat/completions {header} -d '{body}'\n" \
            f'OpenAI(base_url="{url}/v1", api_key="{key or "none"}")'  # fmt: skip
    print(f"starting {clean(server.name)} at {url}", file=sys.stderr)
    server.on_ready = lambda: print(lines, file=sys.stderr)


class DrainingServer(uvicorn.Server):
    """It answers while the engine starts, with 503 where the engine is needed, and ends if the engine does not start.
    The first signal lets responses under way come to their end, the second one does not."""

    def __init__(self, app: FastAPI, settings: ServerSettings):
        super().__init__(uvicorn_config(app, settings.host, settings.port, timeout_graceful_shutdown=5))
        self._server: Server = app.state.server
        self._server.on_failure = lambda: setattr(self, "should_exit", True)
        self._draining: asyncio.Task[None] | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve at sockets that listen, until a signal. Raises what the engine's start failed of."""
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)
        if self._server.failure is not None:
            raise self._server.failure

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came; called between any two instructions."""
        if self._server.draining:
            super().handle_exit(sig, frame)
        else:
            self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        print("stopping: no new requests; those under way are finished first", file=sys.stderr)
        self._draining = asyncio.ensure_future(self._server.drain())
        self._draining.add_done_callback(lambda _: setattr(self, "should_exit", True))


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1:])))
