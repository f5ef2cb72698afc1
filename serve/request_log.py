"""Request ids and the access log: the response, its errors and the log name the id, and each request is one line.

    POST /v1/chat/completions 200 532 ms 31+120 tokens req_8d5e...

The log never contains text of prompts or responses, or keys. HEAD is answered as GET, without the body.
"""

from __future__ import annotations

import logging
import re
import time
from contextvars import ContextVar
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared.http_limits import REQUEST_ID, new_id

GIVEN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+=-]{0,127}")
"""form of the ids that clients may choose"""
MOST_PATH = 200
log = logging.getLogger("serve")
access = logging.getLogger("serve.access")


@dataclass
class LogEntry:
    """The log entry of one request: its id and its token counts."""

    id: str
    prompt_tokens: int = 0
    sampled_tokens: int = 0


current: ContextVar[LogEntry | None] = ContextVar("entry", default=None)
"""entry of the request that is being handled"""


def current_id() -> str:
    """Return the id of the request that is being handled, "" outside of any."""
    entry = current.get()
    return entry.id if entry is not None else ""


class RequestLogMiddleware:
    """ASGI middleware, the outermost one, that gives requests their ids and logs them."""

    def __init__(self, app: ASGIApp, *, lines: bool):
        """lines: whether to log one line per request."""
        self.app, self.lines = app, lines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on under its id, and log it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID, "")
        entry = LogEntry(given if GIVEN.fullmatch(given) else new_id())
        current.set(entry)
        scope.setdefault("state", {})["entry"] = entry
        start, status = time.perf_counter(), 0

        async def name(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = entry.id
            await send(message)

        try:  # the server leaves the body of a response to HEAD out
            await self.app({**scope, "method": "GET"} if scope["method"] == "HEAD" else scope, receive, name)
        except Exception:
            status = status or 500
            log.error("request %s failed; how follows", entry.id)
            raise
        finally:
            if self.lines:
                path = scope.get("raw_path", b"").decode("ascii", "replace")[:MOST_PATH]
                access.info(
                    "%s %s %d %d ms %d+%d tokens %s", scope["method"], path, status or 499,
                    round(1000 * (time.perf_counter() - start)), entry.prompt_tokens, entry.sampled_tokens, entry.id,
                )  # fmt: skip
