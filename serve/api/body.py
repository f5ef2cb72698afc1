"""Bodies that are too large, take too long to arrive, or spell what is no character, are refused before all else.

What this does not do: read what bodies ask for. Who calls this: app.py.
"""

from __future__ import annotations

import asyncio
import json
import re

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.api.errors import ApiError, respond

HALF = re.compile(rb"\\u[dD][89a-fA-F]")
"""how JSON begins to spell half of a character"""


def check_characters(body: bytes) -> None:
    """Raises ApiError 400 for JSON with half of a surrogate pair, which no tokenizer and no UTF-8 can hold."""
    if HALF.search(body) is None:
        return
    try:
        json.dumps(json.loads(body), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        message = "the body holds half of a surrogate pair, which is no character"
        raise ApiError(400, message, code="invalid_json") from error
    except (ValueError, RecursionError):
        pass  # it is no JSON, which whoever reads it will say


class BodyLimits:
    """ASGI middleware. The whole body is read first, so that no handler ever waits for a slow client."""

    def __init__(self, app: ASGIApp, *, most_bytes: int, deadline_s: float):
        self.app, self.most_bytes, self.deadline_s = app, most_bytes, deadline_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with its body in memory, or answer 413 or 408."""
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self.app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self.deadline_s):
                body = await self._read(receive)
            check_characters(body)
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
                raise ApiError(413, f"the body has more than {self.most_bytes} bytes", code="body_too_large")
            if not message.get("more_body", False):
                return b"".join(parts)
