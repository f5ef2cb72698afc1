"""Limits of requests before any handler runs: their headers, their sender and their body.

shared/http_limits.py has limited time and size of the headers, since the application does not run before they are
complete. AuthMiddleware checks the Host header, the Origin and the key, before the body is read: for the request
itself, and by the scope of each path (`allow`), never by a prefix of the URL. BodyLimitMiddleware reads the body and
refuses one that is too large, arrives too slowly, or is not JSON. Errors have OpenAI's form in all three.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Collection
from typing import Annotated

from fastapi import Depends, Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.errors import ApiError, respond
from serve.keys import ApiKeys, Client
from serve.keys import Scope as KeyScope
from serve.settings import is_loopback
from shared.json_reader import parse_json

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
        match = HOST.fullmatch(given[0]) if len(given) == 1 else None
        if match is None and given:
            raise ApiError(400, "the Host header is not one name", code="invalid_host", param="host")
        if not self.api_keys.open or not self.hosts:
            return
        peer = scope.get("client")  # uvicorn may have been set to listen to others; settings do not see that
        if peer is not None and not is_loopback(peer[0]):
            raise ApiError(403, "a server without keys answers on its own machine only", code="foreign_client")
        name = match["name"].lower() if match else ""
        if name and name not in self.hosts:
            raise ApiError(
                403, f"this server is not called {name}; one without keys answers to its own name only",
                code="invalid_host", param="host",
            )  # fmt: skip
        origin = headers.get("origin")
        host = given[0] if given else ""
        if origin is not None and origin.partition("://")[2] != host and origin not in self.origins:
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
        fault = f"the body is said to be {kind[:60]}" if kind else "the body has no type"
        raise unsupported(f"{fault}: send Content-Type: application/json", "content-type")
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
        except (TimeoutError, ApiError) as error:
            late = ApiError(408, f"the body did not arrive within {self.deadline_s:g} s", code="body_too_slow")
            refusal = error if isinstance(error, ApiError) else late
            await respond(refusal, {"Connection": "close"})(scope, receive, send)
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
                raise ApiError(
                    413, f"the body has more than {self.most_bytes} bytes: shorten it", code="body_too_large"
                )
            if not message.get("more_body", False):
                return b"".join(parts)
