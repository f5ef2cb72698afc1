"""Refuses request bodies that are too large, arrive too slowly, or are not JSON, before any handler runs."""

from __future__ import annotations

import asyncio
import json
import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.api.errors import ApiError, respond

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
        json.dumps(json.loads(body), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        message = "the body holds half of a surrogate pair, which is no character"
        raise ApiError(400, message, code="invalid_json") from error
    except (ValueError, RecursionError):
        pass  # it is no JSON, which whoever reads it will say


class BodyLimits:
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
