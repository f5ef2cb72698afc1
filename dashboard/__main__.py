"""See runs in a browser: `python -m dashboard runs/`."""

from __future__ import annotations

import argparse
import contextlib
import secrets
import socket
import sys
from pathlib import Path

import uvicorn

from dashboard.app import create_app
from shared.clean_text import clean_logs
from shared.command_line import CommandParser
from shared.errors import ConfigError, run_command
from shared.http_limits import take_address, uvicorn_config
from shared.user_file import missing
from verify.code.sandbox.syscalls import die_with_parent

HOST, PORT = "127.0.0.1", 8400
TRIED = 20
"""ports that are tried when nobody named one"""
ELSEWHERE = """It prints a link, and answers who has opened that, on this machine only. From another one:
    ssh -L 8400:127.0.0.1:8400 MACHINE      and then the printed link in your browser"""


def main(arguments: list[str]) -> int:
    """Serve until a signal; returns the exit code."""
    parser = CommandParser("python -m dashboard", description=__doc__, epilog=ELSEWHERE,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("folder", nargs="?", default="runs", type=Path, help="a folder of runs, or one run (runs)")
    parser.add_argument("--port", type=int, help=f"0 for any that is free (default: from {PORT} on the first free one)")
    parser.add_argument(
        "--with-parent", type=int, help="process id of the program that started this one: end when it does"
    )
    given = parser.parse_args(arguments)
    if given.with_parent:
        die_with_parent(given.with_parent)
    if not given.folder.is_dir():
        print(f"error: {given.folder}: {missing(given.folder, 'folder', '*/')}", file=sys.stderr)
        return 2
    bound = take_port([given.port] if given.port is not None else list(range(PORT, PORT + TRIED)))
    if bound is None:
        print(f"error: port {given.port or PORT} is taken: give --port=0 for any that is free", file=sys.stderr)
        return 2
    clean_logs()
    token = secrets.token_urlsafe(24)
    print(f"http://{HOST}:{bound.getsockname()[1]}/?token={token}", flush=True)
    app = create_app(given.folder.resolve(), token)
    config = uvicorn_config(app, HOST, bound.getsockname()[1], log_level="warning", timeout_graceful_shutdown=1)
    uvicorn.Server(config).run(sockets=[bound])
    return 0


def take_port(ports: list[int]) -> socket.socket | None:
    """A socket of the first port that is free; None if none is."""
    for port in ports:
        with contextlib.suppress(ConfigError):
            return take_address(HOST, port)
    return None


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1:])))
