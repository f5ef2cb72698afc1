"""Limits of HTTP servers for time and size of a request's headers, which no application sees before they are complete.

Also the settings of uvicorn with these limits, and the socket that a server listens at.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import socket
import uuid
from http import HTTPStatus
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from shared.errors import ConfigError

KEEP_ALIVE_S = 75
"""seconds that idle connections stay open; longer than clients keep theirs (httpx: 5 s), so that none meets a close"""
HEAD_BYTES = 64 << 10
"""largest size of a request line and its headers, and of other data outside a body: trailers, chunk extensions"""
HEADER_BYTES = 32
"""bytes counted for each header in addition to its text, as in HTTP/2: two letters take some hundred in memory"""
PIPELINED = 64
"""requests of one connection that wait for their responses at most"""
REQUEST_ID = "X-Request-ID"
KINDS = {401: "authentication_error", 408: "timeout_error"}
"""status -> OpenAI's type of an error"""


def new_id() -> str:
    """Return a new id, for a request that brings none."""
    return f"req_{uuid.uuid4().hex}"


def take_address(host: str, port: int) -> socket.socket:
    """Return a socket that listens at the address, of a name with several its IPv4 one: from now on no other program
    can. Connections wait until somebody serves them. Raises ConfigError."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"host = {host}: it is no address ({error.strerror}): give --host 127.0.0.1") from error
    family, *_, address = min(addresses, key=lambda entry: entry[0] != socket.AF_INET)
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # else a restart waits for old connections
    try:
        listening.bind(address)
        listening.listen()  # at once: with SO_REUSEADDR two sockets can be bound to one port until one of them listens
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            words = f"port = {port}: another program listens at {host}:{port}: end it, or give another --port"
        elif error.errno == errno.EACCES:
            words = f"port = {port}: this user may not listen there: give a --port from 1024 on"
        else:
            words = f"host = {host}: this machine cannot listen there ({error.strerror}): give another --host"
        raise ConfigError(words) from error
    return listening


# what any client can cause is not logged: a line per broken request would fill a disk
BROKEN = ("Invalid HTTP request", "Unsupported upgrade request")
logging.getLogger("uvicorn.error").addFilter(lambda record: not str(record.msg).startswith(BROKEN))


class LimitedHttpProtocol(HttpToolsProtocol):
    """One connection, with any number of requests."""

    head_s = 10.0
    """seconds in which the headers of a request must arrive, from the connection or from its first byte"""
    head_bytes = HEAD_BYTES
    refusal_headers = ""
    """further lines of a refusal's head"""

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self._deadline: asyncio.TimerHandle | None = None
        """timer that runs while headers are incomplete"""
        self._head_bytes = self._idle_bytes = 0
        self._cycles: list[RequestResponseCycle] = []
        """requests without a whole response; uvicorn knows the last one alone"""
        self._refusal = (400, "this is no valid HTTP request", "invalid_http")

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the deadline of the first request's headers."""
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadline, and inform every request of the connection."""
        self._end_head()
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse some bytes, at most 256 KiB at a time; refuse too many outside of a body."""
        self._idle_bytes += len(data)
        if self._deadline is None and (self.cycle is None or self.cycle.response_complete):
            self._begin_head()
        super().data_received(data)
        if self._idle_bytes > self.head_bytes and not self.transport.is_closing() and not self.flow.read_paused:
            self._refuse(*self._too_large())

    def on_message_begin(self) -> None:
        """Begin to count the header bytes of a request."""
        self._head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Count a part of the request's URL."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header of the request, or a trailer after its body."""
        self._count(len(name) + len(value) + HEADER_BYTES)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Cancel the deadline: all headers have arrived."""
        self._end_head()
        self._idle_bytes = 0
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        if len(self._cycles) >= PIPELINED:
            self._refusal = 429, f"more than {PIPELINED} requests wait in one connection", "too_many_requests"
            raise ValueError(self._refusal)  # the parser stops, and asks for send_400_response
        super().on_headers_complete()
        if self.cycle is not None and self.cycle not in self._cycles:
            self._cycles.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        """Take a part of the body, which resets the count of bytes outside of one."""
        self._idle_bytes = 0
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        """Refuse data that is not HTTP, or that `_count` has refused."""
        self._refuse(*self._refusal)

    def _begin_head(self) -> None:
        self._idle_bytes = 0
        self._deadline = self.loop.call_later(self.head_s, self._be_late)

    def _end_head(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self.head_bytes:
            self._refusal = self._too_large()
            raise ValueError(self._refusal)  # the parser stops, and asks for send_400_response

    def _be_late(self) -> None:
        self._refuse(408, f"the headers did not arrive within {self.head_s:g} s", "headers_too_slow")

    def _too_large(self) -> tuple[int, str, str]:
        return 431, f"more than {self.head_bytes} bytes of headers", "headers_too_large"

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Send OpenAI's error object, unless a response is under way, and close the connection."""
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            kind = KINDS.get(status, "invalid_request_error")
            body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()
            head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
            head += f"{REQUEST_ID}: {new_id()}\r\n{self.refusal_headers}"
            self.transport.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()


def uvicorn_config(
    app: ASGIApp, host: str, port: int, http: type[LimitedHttpProtocol] = LimitedHttpProtocol, **more: Any
) -> uvicorn.Config:
    """Return the settings of uvicorn for a server with these limits."""
    return uvicorn.Config(
        app, host, port, http=http, ws="none", access_log=False, server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S, **more,
    )  # fmt: skip
