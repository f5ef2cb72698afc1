"""Who may see runs: whoever has the token of the printed link, since all users of this machine reach 127.0.0.1.

The link is opened once; a cookie has the token from then on. Programs send `Authorization: Bearer TOKEN`.
"""

from __future__ import annotations

import hmac

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from serve.errors import ApiError, respond
from serve.page import HEADERS


class TokenMiddleware:
    """ASGI middleware that answers 401 without the token, whatever is asked for."""

    def __init__(self, app: ASGIApp, *, token: str):
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request with the token; answer the link with the cookie, and send its visitor to the page."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope)
        # cookies are the same for all ports of a host, and several dashboards may be open
        cookie = f"maestrale-{request.headers.get('host', '').rpartition(':')[2]}"
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        app: ASGIApp = self.app
        if scope["path"] == "/" and self._is_token(request.query_params.get("token", "")):
            to_page = RedirectResponse("/", 303, {**HEADERS, "Cache-Control": "no-store"})
            to_page.set_cookie(cookie, self.token, httponly=True, samesite="lax")
            app = to_page
        elif not self._is_token(request.cookies.get(cookie, "")) and not (kind == "Bearer" and self._is_token(key)):
            app = _no_token()
        await app(scope, receive, send)

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.token.encode())


def _no_token() -> Response:
    words = "open the link that this dashboard printed when it started: http://127.0.0.1:PORT/?token=..."
    return respond(ApiError(401, words, code="no_token"), {"Connection": "close"})
