"""Limits of requests before any handler runs: their headers, their sender and their body.

The protocol limits time and size of the headers, since the application does not run before they are complete.
AuthMiddleware then checks the Host header, the Origin and the key, before the body is read: for the request itself, and
by the scope of each path (`allow`), never by a prefix of the URL. BodyLimitMiddleware reads the body and refuses one
that is too large, arrives too slowly, or is not JSON. Errors have OpenAI's form in all three.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Collection
from http import HTTPStatus
from typing import Annotated, Any

import uvicorn
from fastapi import Depends, Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from serve.errors import ApiError, respond
from serve.keys import ApiKeys, Client
from serve.keys import Scope as KeyScope
from serve.request_log import HEADER, new_id
from serve.settings import is_loopback
from shared.errors import ConfigError
from shared.json_reader import parse_json

KEEP_ALIVE_S = 75
"""seconds that idle connections stay open; longer than clients keep theirs (httpx: 5 s), so that none meets a close"""
HEAD_BYTES = 64 << 10
"""largest size of a request line and its headers, and of other data outside a body: trailers, chunk extensions"""


def uvicorn_config(app: ASGIApp, host: str, port: int, **more: Any) -> uvicorn.Config:
    """Return the settings of uvicorn for this server."""
    return uvicorn.Config(
        app, host, port, http=LimitedHttpProtocol, ws="none", access_log=False, server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S, **more,
    )  # fmt: skip


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

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self._deadline: asyncio.TimerHandle | None = None
        """timer that runs while headers are incomplete"""
        self._head_bytes = self._idle_bytes = 0
        self._cycles: list[RequestResponseCycle] = []
        """requests without a whole response; uvicorn knows the last one alone"""
        self._refusal = ApiError(400, "this is no valid HTTP request", code="invalid_http")

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the deadline of the first request's headers."""
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadline, and tell every request of the connection."""
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
        under_way = [cycle for cycle in self._cycles if not cycle.response_complete and cycle is not self.cycle]
        self._cycles = under_way if self.cycle is None else [*under_way, self.cycle]

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


HOST = re.compile(r"(?P<name>[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(:\d{1,5})?")
LOCAL = ("localhost", "127.0.0.1", "[::1]")


class AuthMiddleware:
    """ASGI middleware that finds the client of each request, and refuses requests that no handler should see."""

    def __init__(self, app: ASGIApp, *, api_keys: ApiKeys, hosts: tuple[str, ...], origins: Collection[str] = ()):
        """origins: other sites whose pages may use a server without keys. hosts: names under which a server without
        keys answers, to this machine only; under any name, a foreign web page could reach it through the browser of a
        local user. () for no restriction."""
        self.app, self.api_keys, self.hosts, self.origins = app, api_keys, hosts, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with its client in `state`, or answer 400, 401 or 403."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            self._check_origin(scope, headers)
            client = self.api_keys.find(headers.get("authorization", ""))
            if client is None and scope["method"] not in ("GET", "HEAD", "OPTIONS"):
                raise no_key()
        except ApiError as error:
            await respond(error, {"Connection": "close"})(scope, receive, send)
            return
        scope.setdefault("state", {})["client"] = client
        await self.app(scope, receive, send)

    def _check_origin(self, scope: Scope, headers: Headers) -> None:
        """Raises ApiError for a malformed Host header and, if there are no keys, also for clients on other machines,
        other host names and pages of other sites."""
        given = headers.getlist("host")
        found = HOST.fullmatch(given[0]) if len(given) == 1 else None
        if found is None and given:
            raise ApiError(400, "the Host header is not one name", code="invalid_host", param="host")
        if not self.api_keys.open or not self.hosts:
            return
        peer = scope.get("client")  # uvicorn may have been told to listen to others; settings do not see that
        if peer is not None and not is_loopback(peer[0]):
            raise ApiError(403, "a server without keys answers on its own machine only", code="foreign_client")
        name = found["name"].lower() if found else ""
        if name and name not in self.hosts:
            raise ApiError(
                403, f"this server is not called {name}; one without keys answers to its own name only",
                code="invalid_host", param="host",
            )  # fmt: skip
        origin = headers.get("origin")
        own = given[0] if given else ""
        if origin is not None and origin.partition("://")[2] != own and origin not in self.origins:
            message = "pages of other sites may not use a server without keys, unless its setting origins names them"
            raise ApiError(403, message, code="foreign_origin")


def no_key() -> ApiError:
    """Return the error for a request without a valid key."""
    return ApiError(401, "give a valid key: Authorization: Bearer KEY", code="invalid_api_key")


def allow(scope: KeyScope) -> Callable[[Request], Awaitable[Client]]:
    """Return a dependency of routes that gives the client if it has the scope, and raises ApiError 401 or 403."""

    async def check(request: Request) -> Client:
        client: Client | None = request.scope["state"]["client"]
        if client is None:
            raise no_key()
        if not client.may(scope):
            raise ApiError(403, f'this key has no scope "{scope}"', code="missing_scope")
        return client

    return check


ChatClient = Annotated[Client, Depends(allow("chat"))]
RawClient = Annotated[Client, Depends(allow("raw"))]
MetricsClient = Annotated[Client, Depends(allow("metrics"))]


HALF = re.compile(rb"\\u[dD][89a-fA-F]")
"""the beginning of the JSON escape of one half of a surrogate pair"""


JSON_TYPE = re.compile(r"application/([\w.-]+\+)?json", re.IGNORECASE)


def check_type(headers: Headers) -> None:
    """Raises ApiError 415 for a body whose headers do not declare it as uncompressed JSON."""
    kind = headers.get("content-type", "").partition(";")[0].strip()
    if JSON_TYPE.fullmatch(kind) is None:
        said = f"the body is said to be {kind[:60]}" if kind else "the body has no type"
        raise unsupported(f"{said}: send Content-Type: application/json", "content-type")
    if headers.get("content-encoding", "identity").lower() != "identity":
        message = "compressed bodies are not read: send it as it is, without Content-Encoding"
        raise unsupported(message, "content-encoding")


def unsupported(message: str, header: str) -> ApiError:
    """Return the error for a body of an unsupported type or encoding."""
    return ApiError(415, message, code="unsupported_media_type", param=header)


def check_characters(body: bytes) -> None:
    """Raises ApiError 400 for an empty body, for invalid UTF-8, and for JSON with half of a surrogate pair, which
    neither tokenizers nor UTF-8 can represent."""
    if not body.strip():
        raise ApiError(400, "the body is empty: send a JSON object", code="empty_body")
    try:
        body.decode()
    except UnicodeDecodeError as error:
        message = f"the body is not valid UTF-8 at byte {error.start}: send JSON in UTF-8"
        raise ApiError(400, message, code="invalid_json") from error
    if HALF.search(body) is None:
        return
    try:
        json.dumps(parse_json(body), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        message = "the body holds half of a surrogate pair, which is no character"
        raise ApiError(400, message, code="invalid_json") from error
    except (ValueError, RecursionError):
        pass  # it is no JSON, which whoever reads it will say


class BodyLimitMiddleware:
    """ASGI middleware that reads the whole body first, so that no handler waits for a slow client."""

    def __init__(self, app: ASGIApp, *, most_bytes: int, deadline_s: float):
        self.app, self.most_bytes, self.deadline_s = app, most_bytes, deadline_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with its body in memory, or answer with the error of its body (400, 408, 413, 415)."""
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self.app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self.deadline_s):
                body = await self._read(receive)
            if scope["method"] == "POST":
                check_characters(body)
                check_type(Headers(scope=scope))
        except TimeoutError:
            error = ApiError(408, f"the body did not arrive within {self.deadline_s:g} s", code="body_too_slow")
            await respond(error, {"Connection": "close"})(scope, receive, send)
            return
        except ApiError as error:
            await respond(error, {"Connection": "close"})(scope, receive, send)
            return
        given = False

        async def replay() -> Message:
            nonlocal given
            if given:
                return await receive()  # the client leaving
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, replay, send)

    async def _read(self, receive: Receive) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ApiError(499, "the client left", code="client_closed_request")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self.most_bytes:
                too_large = f"the body has more than {self.most_bytes} bytes: shorten it"
                raise ApiError(413, too_large, code="body_too_large")
            if not message.get("more_body", False):
                return b"".join(parts)
