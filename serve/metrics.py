"""Metrics of the server for Prometheus: requests, tokens, latencies, and above all the language of the reasoning.

Labels have few values by construction: route templates, languages that have phrases, names of keys.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.plan import GenerationPlan, Response
from serve.request_log import current
from serve.system_prompts import SYSTEM_PROMPTS

WAITS_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)


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

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class MetricsMiddleware:
    """ASGI middleware that counts and times requests."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics):
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on and record its status, its duration and the time to its first byte."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status, first_s = time.perf_counter(), 0, 0.0

        async def watch(message: Message) -> None:
            nonlocal status, first_s
            if message["type"] == "http.response.start":
                status = message["status"]
            elif not first_s and message.get("body"):
                first_s = time.perf_counter() - start
            await send(message)

        try:
            await self.app(scope, receive, watch)
        except Exception:
            status = status or 500
            raise
        finally:
            route = getattr(scope.get("route"), "path", "none")
            client = scope.get("state", {}).get("client")
            self.metrics.requests.labels(route, str(status or 499), client.name if client else "").inc()
            self.metrics.duration.labels(route).observe(time.perf_counter() - start)
            if first_s:
                self.metrics.first_byte.labels(route).observe(first_s)
