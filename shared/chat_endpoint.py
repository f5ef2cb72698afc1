"""Client of an OpenAI-compatible API: sends requests and returns replies; for chats, sends messages and returns text.
Every request may fail; none is retried here.

The key comes from an environment variable and goes into the request's header only: into no file, log or error.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import weakref
from functools import cache
from typing import Any

import httpx

from shared.errors import ConfigError

CONCURRENT = 16
CONNECT_S = 10.0
MAX_REPLY_BYTES = 1 << 20
AGAIN = {408, 425, 429, 500, 502, 503, 504}
"""statuses after which another try may help"""
FAILURES = (httpx.HTTPError, ValueError, LookupError, TypeError)
"""what a request raises if it gets no usable reply"""


class HttpStatus(ValueError):
    """The endpoint answered with an error status."""

    def __init__(self, response: httpx.Response, body: bytes):
        self.code, self.headers, self.body = response.status_code, response.headers, body
        super().__init__(f"status {self.code}: {body[:200]!r}")


def key_headers(variable: str, setting: str) -> dict[str, str]:
    """The header with the key of an environment variable; none for "". Raises ConfigError, which names the setting."""
    if not variable:
        return {}
    key = os.environ.get(variable, "")
    if not key:
        raise ConfigError(f'{setting} = "{variable}": that environment variable is not set')
    return {"Authorization": f"Bearer {key}"}


@cache
def _certificates() -> ssl.SSLContext:
    return httpx.create_ssl_context()  # 50 ms, in which the event loop stands still: once for all clients


class ApiEndpoint:
    """Sends requests to one API, with a connection pool per event loop: a client must not outlive its loop."""

    def __init__(self, url: str, model: str, headers: dict[str, str], deadline_s: float, concurrent: int = CONCURRENT):
        self.url, self.model, self.deadline_s, self.concurrent = url.rstrip("/"), model, deadline_s, concurrent
        self._headers = headers
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[httpx.AsyncClient, asyncio.Semaphore]]
        self._clients = weakref.WeakKeyDictionary()

    def free(self) -> asyncio.Semaphore:
        """Return the semaphore that bounds the requests under way: `async with endpoint.free(): ...`."""
        return self._client()[1]

    def _client(self) -> tuple[httpx.AsyncClient, asyncio.Semaphore]:
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            timeout = httpx.Timeout(self.deadline_s, connect=min(CONNECT_S, self.deadline_s))
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=self.concurrent)  # `free` bounds them
            client = httpx.AsyncClient(headers=self._headers, timeout=timeout, limits=limits, verify=_certificates())
            self._clients[loop] = (client, asyncio.Semaphore(self.concurrent))
        return self._clients[loop]

    async def request(
        self, method: str, address: str, body: dict[str, Any] | None = None, most_bytes: int = MAX_REPLY_BYTES
    ) -> bytes:
        """Return the reply's body. Raises one of FAILURES: HttpStatus for an error status, ValueError if it is too
        long."""
        data = bytearray()
        async with self._client()[0].stream(method, address, json=body) as response:
            async for part in response.aiter_bytes():
                data += part
                if len(data) > most_bytes:
                    raise ValueError(f"a reply of more than {most_bytes} bytes")
            if response.status_code != 200:
                raise HttpStatus(response, bytes(data))
        return bytes(data)

    async def close(self) -> None:
        """Close the connections of this loop."""
        held = self._clients.pop(asyncio.get_running_loop(), None)
        if held is not None:
            await held[0].aclose()


class ChatEndpoint(ApiEndpoint):
    """Sends chat messages to one API and model."""

    async def ask(self, messages: list[dict[str, str]], max_tokens: int, temperature: float = 0) -> str:
        """Return the text of one reply. Raises one of FAILURES."""
        request: dict[str, Any] = {
            "model": self.model, "messages": messages, "temperature": temperature, "max_tokens": max_tokens,
        }  # fmt: skip
        data = await self.request("POST", f"{self.url}/chat/completions", request)
        content = json.loads(data)["choices"][0]["message"]["content"]
        if not isinstance(content, str):
            raise ValueError("the reply holds no text")
        return content
