"""Client of an OpenAI-compatible API: sends requests and returns replies; for chats, sends messages and returns text.
Every request may fail; none is retried here, but for one that asks for a parameter of sampling which the server refuses
by its name: it is left out then, in this request and in later ones (`ApiEndpoint.complete`).

The key comes from an environment variable and goes into the request's header only: into no file, log or error. Replies
are bounded in bytes and in time, and never unpacked: a kilobyte can become gigabytes (`PLAIN`).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import ssl
import sys
import weakref
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx

from shared.errors import ConfigError
from shared.json_reader import parse_json

CONCURRENT = 16
CONNECT_S = 10.0
MAX_REPLY_BYTES = 1 << 20
PLAIN = {"Accept-Encoding": "identity"}
"""header of requests whose replies may not be packed; `packing` says whether a reply is packed all the same"""
AGAIN = {408, 425, 429, 500, 502, 503, 504}
"""statuses after which another try may help"""
LEFT_OUT = ("temperature", "top_p", "seed", "max_tokens", "max_completion_tokens")
"""parameters that a request can do without; `max_tokens` is then sent as `max_completion_tokens`, its newer name"""
MOST_COUNT = 1 << 53
_NAMES = re.compile(rf"(?<![A-Za-z0-9_])(?:{'|'.join(LEFT_OUT)})(?![A-Za-z0-9_])")
_REFUSES = re.compile(
    r"unsupported|unknown|unrecogni[sz]ed|unexpected|extra_forbidden|additional propert|deprecated|only the default|"
    r"(?:\bnot|n't|no longer) (?:currently |yet |be |an? )*(?:support|permit|allow|accept|available|valid|compatible|"
    r"configurable|implemented|enabled|used?\b|set\b|specified)|cannot both|only \S+ is (?:support|allow|accept)",
    re.IGNORECASE,
)
_TOO_MUCH = re.compile(r"too (?:large|long|big|high|many)|exceed|at most|maximum|greater than|less than|or equal", re.I)
"""a value is refused, not the parameter"""
FAILURES = (httpx.HTTPError, ValueError, LookupError, TypeError)
"""errors of a request that gets no usable reply"""


def packing(headers: Mapping[str, str]) -> str:
    """Return how a reply is packed against our wish, in words; "" if it is not."""
    coding = headers.get("content-encoding", "")
    if coding.strip().lower() in ("", "identity"):
        return ""
    return f"its reply has Content-Encoding {coding!r:.60}, which is not unpacked here: let it send replies as they are"


class HttpStatus(ValueError):
    """The endpoint answered with an error status."""

    def __init__(self, response: httpx.Response, body: bytes):
        self.code, self.headers, self.body = response.status_code, response.headers, body
        super().__init__(f"status {self.code}: {body[:200]!r}")


class ErrorReply(ValueError):
    """The endpoint answered with status 200 and an error in place of a completion."""


class ChatReply(NamedTuple):
    """The body of a chat completion, and which parameters of the request were left out."""

    data: bytes
    left_out: tuple[str, ...]


def explain_error(data: bytes, key: str = "") -> tuple[str, str]:
    """Return message and code of an error response, in OpenAI's form or not; printable, in one line. The key is masked:
    a server may repeat one that it refuses."""
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
    text = " ".join("".join(one if one.isprintable() else " " for one in text[:2000]).split())[:500]
    return (text.replace(key, "...") if key else text), code


def refused_parameter(error: HttpStatus, sent: dict[str, Any]) -> str:
    """Return which parameter of LEFT_OUT a refusal names, "" for none, or for one that is refused for its value."""
    text, _ = explain_error(error.body)
    if error.code not in (400, 422) or not _REFUSES.search(text) or _TOO_MUCH.search(text):
        return ""
    try:
        named = json.loads(error.body)["error"]["param"]
    except (ValueError, LookupError, TypeError, RecursionError):
        named = ""
    if named and isinstance(named, str):
        return named if named in LEFT_OUT and named in sent else ""
    names = [name for name in _NAMES.findall(text) if name in sent]
    return "" if not names else names[-1] if re.search(r"\bboth\b", text) else names[0]


def read_count(value: Any) -> int | None:
    """Return a number of tokens, which some servers send as a float or a text; None for anything else."""
    try:
        number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else -1.0
    except (ValueError, OverflowError):
        return None
    return int(number) if 0 <= number <= MOST_COUNT and number.is_integer() else None


def _error_in(data: bytes) -> str:
    """Return the error that a reply has in place of a completion, "" for none."""
    if b'"error"' not in data:
        return ""
    try:
        body = json.loads(data)
        choices = body.get("choices")
        first = choices[0] if choices else body
        failed = first.get("error") or (first.get("finish_reason") == "error" and body.get("error"))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return ""  # whoever reads it says what it lacks
    return explain_error(json.dumps({"error": failed}).encode())[0] if failed else ""


def key_headers(variable: str, setting: str) -> dict[str, str]:
    """The header with the key of an environment variable; none for "". Raises ConfigError, which names the setting."""
    if not variable:
        return {}
    key = os.environ.get(variable, "")
    if not key:
        raise ConfigError(f'{setting} = "{variable}": that environment variable is not set')
    return {"Authorization": f"Bearer {key}"}


def api_address(url: str) -> str:
    """The address of an API up to its version: with /v1 where `url` has no path."""
    url = url.rstrip("/").removesuffix("/chat/completions")
    return url if urlsplit(url).path else f"{url}/v1"


@cache
def _certificates() -> ssl.SSLContext:
    return httpx.create_ssl_context()  # 50 ms, for which the event loop stops: once for all clients


class ApiEndpoint:
    """Sends requests to one API, with a connection pool per event loop: a client must not outlive its loop."""

    def __init__(self, url: str, model: str, headers: dict[str, str], deadline_s: float, concurrent: int = CONCURRENT):
        self.url, self.model, self.deadline_s, self.concurrent = api_address(url), model, deadline_s, concurrent
        self._headers = headers
        self.left_out: set[str] = set()
        """of LEFT_OUT: what this server refuses, or shall not be sent"""
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
            headers = {**PLAIN, **self._headers}
            client = httpx.AsyncClient(headers=headers, timeout=timeout, limits=limits, verify=_certificates())
            self._clients[loop] = (client, asyncio.Semaphore(self.concurrent))
        return self._clients[loop]

    async def request(
        self, method: str, address: str, body: dict[str, Any] | None = None, most_bytes: int = MAX_REPLY_BYTES
    ) -> bytes:
        """Return the reply's body. Raises one of FAILURES: HttpStatus for an error status, ValueError for a packed or
        too long reply, HTTPError for one that is not whole in time."""
        data = bytearray()
        try:
            async with (
                asyncio.timeout(self.deadline_s),
                self._client()[0].stream(method, address, json=body) as response,
            ):
                if packed := packing(response.headers):
                    raise ValueError(packed) if response.status_code == 200 else HttpStatus(response, packed.encode())
                async for chunk in response.aiter_raw():
                    data += chunk
                    if len(data) > most_bytes:
                        raise ValueError(f"a reply of more than {most_bytes} bytes")
                if response.status_code != 200:
                    raise HttpStatus(response, bytes(data))
        except TimeoutError as error:
            raise httpx.ReadTimeout(f"no whole reply in {self.deadline_s:g} s") from error
        return bytes(data)

    async def complete(self, body: dict[str, Any], most_bytes: int = MAX_REPLY_BYTES) -> ChatReply:
        """Ask for a chat completion. Raises one of FAILURES."""
        key = self._headers.get("Authorization", "").removeprefix("Bearer ")
        while True:
            sent = self._allowed(body)
            try:
                data = await self.request("POST", f"{self.url}/chat/completions", sent, most_bytes)
            except HttpStatus as error:
                name = refused_parameter(error, sent)
                if not name:
                    raise
                if name not in self.left_out:
                    self.left_out.add(name)
                    message, _ = explain_error(error.body, key)
                    sys.stderr.write(f"{self.url} refuses {name}, which is left out from now on: {message}\n")
                continue
            if message := _error_in(data):
                raise ErrorReply(
                    f"an error in place of a completion: {message.replace(key, '...') if key else message}"
                )
            return ChatReply(data, tuple(name for name in LEFT_OUT if name in body and name not in sent))

    def _allowed(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return a request without what is left out."""
        sent = {name: value for name, value in body.items() if name not in self.left_out}
        if "max_tokens" in body.keys() - sent.keys() and "max_completion_tokens" not in self.left_out:
            sent.setdefault("max_completion_tokens", body["max_tokens"])
        return sent

    async def close(self) -> None:
        """Close the connections of this loop."""
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client[0].aclose()


class ChatEndpoint(ApiEndpoint):
    """Sends chat messages to one API and model."""

    async def ask(self, messages: list[dict[str, str]], max_tokens: int, temperature: float = 0) -> str:
        """Return the text of one reply. Raises one of FAILURES."""
        request: dict[str, Any] = {
            "model": self.model, "messages": messages, "temperature": temperature, "max_tokens": max_tokens,
        }  # fmt: skip
        content = parse_json((await self.complete(request)).data)["choices"][0]["message"]["content"]
        if not isinstance(content, str):
            raise ValueError("the reply holds no text")
        return content
