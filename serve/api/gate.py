"""Access control: checks the Host header, the Origin and the key of a request before its body is read.

Keys are checked for the request itself and by the scope of each path (`allow`), never by a prefix of the URL.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection
from typing import Annotated

from fastapi import Depends, Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from serve.api.errors import ApiError, respond
from serve.keys.ring import Client, KeyRing
from serve.keys.ring import Scope as KeyScope
from serve.settings import is_loopback

HOST = re.compile(r"(?P<name>[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(:\d{1,5})?")
LOCAL = ("localhost", "127.0.0.1", "[::1]")


class Gate:
    """ASGI middleware that finds the client of each request, and refuses requests that no handler should see."""

    def __init__(self, app: ASGIApp, *, ring: KeyRing, hosts: tuple[str, ...], origins: Collection[str] = ()):
        """origins: other sites whose pages may use a server without keys. hosts: names under which a server without
        keys answers, to this machine only; under any name, a foreign web page could reach it through the browser of a
        local user. () for no restriction."""
        self.app, self.ring, self.hosts, self.origins = app, ring, hosts, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with its client in `state`, or answer 400, 401 or 403."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            self._check_origin(scope, headers)
            client = self.ring.find(headers.get("authorization", ""))
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
        if not self.ring.open or not self.hosts:
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
