"""The HTTP client of an evaluation: requests to any OpenAI-compatible server, with retries while it is busy.

408, 425, 429, 500, 502, 503, 504, no connection, no response in time   retried, after the time in Retry-After
any other status                                                        `Refused`: a retry would not help
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Any, NamedTuple

import httpx
from pydantic import ValidationError

from evaluation.reply import Reply
from evaluation.settings import KEY_VARIABLE, Settings, read_key
from shared.errors import ConfigError

AGAIN = {408, 425, 429, 500, 502, 503, 504}
CONNECT_S = 10.0
START_S = 30.0
"""deadline of requests for models and version"""
MAX_REPLY_BYTES = 64 << 20
FIRST_WAIT_S, MOST_WAIT_S = 1.0, 120.0


class Refused(Exception):
    """Raised when the server refuses a request, so that a retry would not help."""

    def __init__(self, status: int, message: str, code: str):
        super().__init__(f"status {status}: {message}")
        self.status, self.message, self.code = status, message, code


class Unanswered(Exception):
    """Raised when there was no usable response after all tries."""

    def __init__(self, reason: str, tries: int):
        super().__init__(reason)
        self.tries = tries


class _Failed(Exception):
    """Raised when one try failed; another may help, after `wait_s` seconds if the server said so."""

    def __init__(self, reason: str, wait_s: float | None = None):
        super().__init__(reason)
        self.wait_s = wait_s


class Got(NamedTuple):
    """A response, with the number of tries and the latency."""

    reply: Reply
    tries: int
    latency_s: float
    """seconds of the last try"""


class Client:
    """Client of one server: `async with Client(settings) as client: ...`."""

    def __init__(self, settings: Settings):
        self.url, self.deadline_s, self.tries = settings.url, settings.deadline_s, settings.tries
        self._key = read_key()
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            timeout=httpx.Timeout(self.deadline_s, connect=CONNECT_S, pool=None),
            limits=httpx.Limits(max_connections=settings.concurrency, max_keepalive_connections=settings.concurrency),
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def models(self) -> list[dict[str, Any]]:
        """Return the server's list of models; [] if it has none. Raises ConfigError if the server cannot be reached or
        refuses the key."""
        try:
            response = await self._http.get(f"{self.url}/models", timeout=START_S)
        except httpx.HTTPError as error:
            raise ConfigError(
                f"url = {self.url}: nobody answers ({type(error).__name__}): start the server, or give its address"
            ) from None
        if response.status_code in (401, 403):
            raise ConfigError(
                f"url = {self.url}: status {response.status_code}: set {KEY_VARIABLE} to a key of this server"
            )
        try:
            listed = response.json()["data"]
            return [one for one in listed if isinstance(one["id"], str)]
        except (ValueError, LookupError, TypeError):
            return []

    async def weights(self) -> str:
        """Return the name of the served weights, "" if the server does not report it (ours does, at /version)."""
        try:
            response = await self._http.get(f"{self.url.removesuffix('/v1')}/version", timeout=START_S)
            found = response.json()["weights"]
            return found if isinstance(found, str) else ""
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            return ""

    async def ask(self, body: dict[str, Any]) -> Got:
        """Request one chat completion, with retries. Raises Refused, Unanswered."""
        for number in range(1, self.tries + 1):
            began = time.monotonic()
            try:
                reply = await self._try(body)
                return Got(reply, number, time.monotonic() - began)
            except _Failed as failed:
                if number == self.tries:
                    raise Unanswered(str(failed), number) from None
                backoff = min(FIRST_WAIT_S * 2 ** (number - 1), MOST_WAIT_S) * random.uniform(0.5, 1.0)
                await asyncio.sleep(backoff if failed.wait_s is None else min(failed.wait_s, MOST_WAIT_S))
        raise AssertionError("unreachable")

    async def _try(self, body: dict[str, Any]) -> Reply:
        """Send one request. Raises _Failed, Refused."""
        data = b""
        try:
            async with (
                asyncio.timeout(self.deadline_s),
                self._http.stream("POST", f"{self.url}/chat/completions", json=body) as response,
            ):
                async for part in response.aiter_bytes():
                    data += part
                    if len(data) > MAX_REPLY_BYTES:
                        raise _Failed(f"a response of more than {MAX_REPLY_BYTES} bytes")
        except TimeoutError:
            raise _Failed(f"no response in {self.deadline_s:g} s") from None
        except httpx.HTTPError as error:
            raise _Failed(f"{type(error).__name__}: {error}"[:300]) from None
        if response.status_code in AGAIN:
            raise _Failed(f"status {response.status_code}: {self._explain(data)[0]}", retry_after_s(response))
        if response.status_code != 200:
            raise Refused(response.status_code, *self._explain(data))
        try:
            return Reply.model_validate_json(data)
        except ValidationError as error:
            first = error.errors()[0]
            raise _Failed(f"no chat completion: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None

    def _explain(self, data: bytes) -> tuple[str, str]:
        """Like `explain`, with the key masked: a server may repeat the key that it refuses."""
        message, code = explain(data)
        return (message.replace(self._key, "...") if self._key else message), code


def explain(data: bytes) -> tuple[str, str]:
    """Return message and code of an error response, in OpenAI's form or not; printable, in one line."""
    text, code = data.decode("utf-8", "replace"), ""
    try:
        body = json.loads(data)
        error = body.get("error", body)
        if isinstance(error, dict):
            text, code = str(error.get("message") or error.get("detail") or error), str(error.get("code") or "")
        else:
            text = str(error)
    except (ValueError, AttributeError, RecursionError):
        pass  # not JSON: the text itself
    return " ".join("".join(one if one.isprintable() else " " for one in text[:2000]).split())[:500], code


def retry_after_s(response: httpx.Response) -> float | None:
    """Return the seconds that the header Retry-After asks for, as a number or a date; None without one."""
    value = response.headers.get("Retry-After", "").strip()
    if value.isdecimal():
        return float(value)
    try:
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return None
