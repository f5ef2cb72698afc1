"""A server of agents, with the standard library alone: `python server.py FILE [PORT]` calls the function `play` of a
Python file for each episode that the environment "agent" posts, each in a thread, and answers with its reward.

It runs in any environment of Python that has what the agent needs, on any machine that reaches the gateway.
"""

from __future__ import annotations

import json
import runpy
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class AgentServer(ThreadingHTTPServer):
    """Answers POST {"problem", "base_url", "api_key"} with {"reward"}."""

    daemon_threads = True
    request_queue_size = 1024
    """episodes of a step come at once"""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Tell of an error, unless it is that nobody waits any more: episodes are given up when they are cut."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class AgentHandler(BaseHTTPRequestHandler):
    """One episode."""

    def do_POST(self) -> None:
        """Let the agent play. What it raises is the error of this episode."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            reward = float(play(asked["problem"], asked["base_url"], asked["api_key"]))
            status, body = 200, json.dumps({"reward": reward}).encode()
        except Exception as error:  # noqa: BLE001 - whatever an agent raises
            status, body = 500, f"{type(error).__name__}: {error}"[:1000].encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Say nothing."""


if __name__ == "__main__":
    play = runpy.run_path(sys.argv[1])["play"]
    port = int(sys.argv[2]) if len(sys.argv) > 2 else 8900
    with AgentServer(("127.0.0.1", port), AgentHandler) as server:
        print(f"agents of {sys.argv[1]} at http://127.0.0.1:{server.server_port}", flush=True)
        server.serve_forever()
