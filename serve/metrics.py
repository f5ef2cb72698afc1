"""Request ids, the access log, and metrics for Prometheus: requests, tokens, latencies, the language of the reasoning.

    POST /v1/chat/completions 200 532 ms 31+120 tokens req_8d5e...

The response, its errors and the log name the id. Each request but `PROBES` is one line. The log never contains text of
prompts or responses, or keys. HEAD is answered as GET, without the body. Labels of metrics have few values by
construction: route templates, languages that have phrases, names of keys.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.plan import GenerationPlan, Response
from serve.system_prompts import SYSTEM_PROMPTS
from shared.http_limits import REQUEST_ID, new_id

WAITS_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
GIVEN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+=-]{0,127}")
"""form of the ids that clients may choose"""
MOST_PATH = 200
PROBES = ("/health", "/ready")
"""asked again and again by whoever waits for a server: no lines in the log"""
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


class Metrics:
    """The Prometheus metrics of one server, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry, namespace="maestrale")
        timer = partial(Histogram, registry=self.registry, namespace="maestrale", buckets=WAITS_S)
        self.requests = counter("requests", "HTTP requests that ended", ["route", "status", "key"])
        self.duration = timer("request_seconds", "from the request to the end of its response", ["route"])
        self.first_byte = timer("first_byte_seconds", "from the request to the first byte of its body", ["route"])
        self.tokens = counter("tokens", "prompt: read; reasoning, answer: sampled, over all tries", ["kind"])
        self.responses = counter("responses", "whole responses", ["finish_reason"])
        self.languages = counter(
            "reasoning_language", "responses by what was asked for and what was measured in the reasoning",
            ["requested", "enforcement", "outcome"],
        )  # fmt: skip
        self.tries = counter("reasoning_language_retries", "second tries for the language", ["requested"])

    def add_gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Add a gauge of the server's current state."""
        Gauge(name, text, namespace="maestrale", registry=self.registry).set_function(value)

    def count_response(self, response: Response, plan: GenerationPlan) -> None:
        """Count one response, complete or aborted because its client left."""
        self.responses.labels(response.finish_reason or "aborted").inc()
        self.count_tokens(0, response.thinking_tokens, response.tokens - response.thinking_tokens)
        code = plan.choice.code
        if not code or response.measured is None:
            return
        known = code if code in SYSTEM_PROMPTS else "other"
        outcome = {True: "match", False: "mismatch", None: "undetermined"}[response.measured.match]
        self.languages.labels(known, plan.enforcement, outcome).inc()
        self.tries.labels(known).inc(response.tries - 1)

    def count_tokens(self, prompt: int, reasoning: int, answer: int) -> None:
        """Add tokens to the counters and to the current request's log entry."""
        if (entry := current.get()) is not None:
            entry.prompt_tokens += prompt
            entry.sampled_tokens += reasoning + answer
        for kind, count in (("prompt", prompt), ("reasoning", reasoning), ("answer", answer)):
            self.tokens.labels(kind).inc(count)

    def count_request(self, scope: Scope, status: int, took_s: float, first_s: float) -> None:
        """Count a request that has ended. first_s: seconds until the first byte of its body; 0 if there was none."""
        route, client = getattr(scope.get("route"), "path", "none"), scope["state"].get("client")
        self.requests.labels(route, str(status), client.name if client else "").inc()
        self.duration.labels(route).observe(took_s)
        if first_s:
            self.first_byte.labels(route).observe(first_s)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class RequestMiddleware:
    """ASGI middleware, the outermost one, that gives requests their ids, counts and times them, and logs them."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics, lines: bool):
        """lines: whether to log one line per request but `PROBES`."""
        self.app, self.metrics, self.lines = app, metrics, lines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on under its id, and record its status, its duration and the time to its first byte."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given, method = Headers(scope=scope).get(REQUEST_ID, ""), scope["method"]
        entry = LogEntry(given if GIVEN.fullmatch(given) else new_id())
        current.set(entry)
        scope.setdefault("state", {})["entry"] = entry
        scope = {**scope, "method": "GET" if method == "HEAD" else method}  # the server leaves out the body of HEAD
        start, status, first_s = time.perf_counter(), 0, 0.0

        async def watch(message: Message) -> None:
            nonlocal status, first_s
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = entry.id
            elif not first_s and message.get("body"):
                first_s = time.perf_counter() - start
            await send(message)

        try:
            await self.app(scope, receive, watch)
        except Exception:
            status = status or 500
            log.error("request %s failed; how follows", entry.id)
            raise
        finally:
            took_s = time.perf_counter() - start
            self.metrics.count_request(scope, status or 499, took_s, first_s)
            if self.lines and scope["path"] not in PROBES:
                path = scope.get("raw_path", b"").decode("ascii", "replace")[:MOST_PATH]
                access.info(
                    "%s %s %d %d ms %d+%d tokens %s", method, path, status or 499, round(1000 * took_s),
                    entry.prompt_tokens, entry.sampled_tokens, entry.id,
                )  # fmt: skip
