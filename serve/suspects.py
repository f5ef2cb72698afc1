"""Finds the request that makes engines die, from the requests that were under way at each death.

A request that was under way at one death is sampled again beside the others. One that was under way at two deaths is
guilty if it is the only one; if there are several, they run one at a time from then on, and the one that runs at the
next death is guilty. A guilty request is never sampled again, whichever client sends it; one that completes is
cleared. Requests are identified by their content, not by their client, because clients retry what has failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Iterator

DEATHS = 2
"""deaths of the engine during a request from which on it is a suspect; a single one may be an accident"""
MOST_KNOWN = 10_000
"""number of requests that are remembered; the oldest are dropped"""


class Guilty(Exception):
    """Raised for a request that has killed engines and is not sampled again."""

    def __init__(self) -> None:
        super().__init__("this request was running when the engine died twice; it is not tried again")


class Suspects:
    """Tracks the requests of one server: those in the engine, the deaths during each, and those found guilty."""

    def __init__(self) -> None:
        self._deaths: OrderedDict[bytes, int] = OrderedDict()
        """request -> number of engines that died while it was running"""
        self._guilty: OrderedDict[bytes, None] = OrderedDict()
        self._running: Counter[bytes] = Counter()
        """requests in the current engine, with the number of their copies"""
        self._trial = asyncio.Lock()

    def note_death(self) -> bytes | None:
        """Record that an engine died. Returns the request that caused it, or None if that is not clear."""
        for request in +self._running:
            self._deaths[request] = self._deaths.pop(request, 0) + 1
        suspects = [request for request in +self._running if self._deaths[request] >= DEATHS]
        if len(suspects) == 1:
            self._guilty[suspects[0]] = None
        for known in (self._deaths, self._guilty):
            while len(known) > MOST_KNOWN:
                known.popitem(last=False)
        return suspects[0] if len(suspects) == 1 else None

    def check(self, request: bytes) -> None:
        """Raises Guilty if the request has been found guilty."""
        if request in self._guilty:
            raise Guilty

    @contextlib.asynccontextmanager
    async def turn(self, request: bytes) -> AsyncIterator[None]:
        """Context in which the request may run: at once, or one at a time if it is suspected. Raises Guilty."""
        async with self._trial if self._deaths.get(request, 0) >= DEATHS else contextlib.nullcontext():
            self.check(request)
            yield

    @contextlib.contextmanager
    def running(self, request: bytes) -> Iterator[None]:
        """Context during which the request counts as running in the engine."""
        self._running[request] += 1
        try:
            yield
        finally:
            self._running[request] -= 1
            if not self._running[request]:
                del self._running[request]

    def clear(self, request: bytes) -> None:
        """Record that the request completed: the deaths counted for it are forgotten."""
        self._deaths.pop(request, None)


def digest_of(*parts: object) -> bytes:
    """Return a digest that identifies a request by its content."""
    return hashlib.blake2b(repr(parts).encode("utf-8", "backslashreplace"), digest_size=16).digest()
