"""A server of the Model Context Protocol for tests: `python mcp_server.py [PORT]`, stdio without a port. It prints its
port when it listens (0: a free one)."""

import os
import socket
import sys
import time
from pathlib import Path

import uvicorn
from mcp.server.mcpserver import MCPServer

server = MCPServer("tests")
notes: list[str] = []


@server.tool()
def add(a: int, b: int) -> int:
    """Add two whole numbers."""
    return a + b


@server.tool()
def note(text: str) -> str:
    """Keep a text, and return all that were kept in this process."""
    notes.append(text)
    return ",".join(notes)


@server.tool()
def process() -> str:
    """The process id, and that of the parent."""
    return f"{os.getpid()} {os.getppid()}"


@server.tool()
def variable(name: str) -> str:
    """An environment variable of this process, and the command that started it."""
    return f"{os.environ.get(name)} {Path('/proc/self/cmdline').read_text()}"


@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("nothing works")


@server.tool()
def wait(seconds: float) -> str:
    """Wait."""
    time.sleep(seconds)
    return "waited"


@server.tool()
def leave() -> str:
    """End the server."""
    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        listening = socket.create_server(("127.0.0.1", int(sys.argv[1])))
        print(listening.getsockname()[1], flush=True)
        config = uvicorn.Config(server.streamable_http_app(), log_level="warning")
        uvicorn.Server(config).run(sockets=[listening])
    else:
        server.run("stdio")
