"""Client connections: uvicorn's protocol, with limits on the time and the size of request headers.

The application does not run before the headers of a request are complete, so only the protocol can end a connection
that never completes them or never stops sending them. Errors have OpenAI's form here too.
"""

from __future__ import annotations

import asyncio
import json
import logging
from http import HTTPStatus
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serve.api.errors import ApiError
from serve.api.journal import HEADER, new_id

KEEP_ALIVE_S = 75
"""seconds that idle connections stay open; longer than clients keep theirs (httpx: 5 s), so that none meets a close"""
HEAD_BYTES = 64 << 10
"""largest size of a request line and its headers, and of other data outside a body: trailers, chunk extensions"""


def configure(app: ASGIApp, host: str, port: int, **more: Any) -> uvicorn.Config:
    """Return the settings of uvicorn for this server."""
    return uvicorn.Config(
        app, host, port, http=Connection, ws="none", access_log=False, server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S, **more,
    )  # fmt: skip


class Quiet(logging.Filter):
    """Drops log messages that any client can cause: a line per broken request would fill a disk."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is logged."""
        return not str(record.msg).startswith(("Invalid HTTP request", "Unsupported upgrade request"))


logging.getLogger("uvicorn.error").addFilter(Quiet())


class Connection(HttpToolsProtocol):
    """One connection, with any number of requests."""

    head_s = 10.0
    """seconds in which the headers of a request must arrive, from the connection or from its first byte"""

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self._deadline: asyncio.TimerHandle | None = None
        """timer that runs while headers are incomplete"""
        self._head_bytes = self._idle_bytes = 0
        self._refusal = ApiError(400, "this is no valid HTTP request", code="invalid_http")

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the deadline of the first request's headers."""
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadline."""
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse some bytes, at most 256 KiB at a time; refuse too many outside of a body."""
        self._idle_bytes += len(data)
        if self._deadline is None and (self.cycle is None or self.cycle.response_complete):
            self._begin_head()
        super().data_received(data)
        if self._idle_bytes > HEAD_BYTES and not self.transport.is_closing() and not self.flow.read_paused:
            self._refuse(ApiError(431, f"more than {HEAD_BYTES} bytes of headers", code="headers_too_large"))

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
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Cancel the deadline: all headers have arrived."""
        self._end_head()
        self._idle_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a part of the body, which resets the count of bytes outside of one."""
        self._idle_bytes = 0
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        """Refuse data that is not HTTP, or that `_count` has refused."""
        self._refuse(self._refusal)

    def _begin_head(self) -> None:
        self._idle_bytes = 0
        self._deadline = self.loop.call_later(self.head_s, self._be_late)

    def _end_head(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > HEAD_BYTES:
            self._refusal = ApiError(431, f"more than {HEAD_BYTES} bytes of headers", code="headers_too_large")
            raise ValueError(self._refusal.message)  # the parser stops, and asks for send_400_response

    def _be_late(self) -> None:
        self._refuse(ApiError(408, f"the headers did not arrive within {self.head_s:g} s", code="headers_too_slow"))

    def _refuse(self, error: ApiError) -> None:
        """Send the error, unless a response is under way, and close the connection."""
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            body = json.dumps(error.body()).encode()
            head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\nContent-Type: application/json\r\n"
            head += f"{HEADER}: {new_id()}\r\n"
            self.transport.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()
