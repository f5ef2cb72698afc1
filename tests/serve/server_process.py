"""A server with a scripted engine in a process of its own: `python -m tests.serve.server_process MODEL TEXT`.

It prints its port.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import uvicorn

from serve.app import create_app
from serve.settings import ServerSettings
from shared.chat import Chat
from shared.http_limits import LimitedHttpProtocol, uvicorn_config
from tests.serve.fake_engine import ScriptedEngine


async def serve(model: Path, text: str) -> None:
    """Until it is killed."""
    LimitedHttpProtocol.head_s = 1.0
    settings = ServerSettings(model=str(model), reasoning_language="off", body_bytes=1 << 20, body_s=1.0)
    app = create_app(settings, ScriptedEngine(Chat(model), lambda *_: text))
    server = uvicorn.Server(uvicorn_config(app, "127.0.0.1", 0, log_level="warning"))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    print(server.servers[0].sockets[0].getsockname()[1], flush=True)
    await task


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), sys.argv[2]))
