"""Which requests were under way when engines died, and which one of them it was.

A request that was under way at one death is sampled again beside the others. One that was under way at two deaths is
guilty where it is the only such one; where there are several, they run one at a time from then on, and the one that
runs at the next death is guilty. A guilty request is never sampled again, whoever sends it; one that comes to its end
is cleared. Requests are known by what they ask for, not by who asks: clients send again what has failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Iterator

DEATHS = 2
"""under which a request may have been under way by accident"""
MOST_KNOWN = 10_000
"""requests that are remembered, the newest ones"""


class Guilty(Exception):
    """The request has ended engines, and is not sampled again."""

    def __init__(self) -> None:
        super().__init__("this request was running when the engine died twice; it is not tried again")


class Suspects:
    """Of one server."""

    def __init__(self) -> None:
        self._deaths: OrderedDict[bytes, int] = OrderedDict()
        """request -> engines that died under it"""
        self._guilty: OrderedDict[bytes, None] = OrderedDict()
        self._running: Counter[bytes] = Counter()
        """in the engine that lives now"""
        self._trial = asyncio.Lock()

    def note_death(self) -> bytes | None:
        """An engine died. Returns the request that has done it, where that is clear."""
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
        """Raises Guilty."""
        if request in self._guilty:
            raise Guilty

    @contextlib.asynccontextmanager
    async def turn(self, request: bytes) -> AsyncIterator[None]:
        """When it may run: at once, or alone among those that are suspected. Raises Guilty."""
        async with self._trial if self._deaths.get(request, 0) >= DEATHS else contextlib.nullcontext():
            self.check(request)
            yield

    @contextlib.contextmanager
    def running(self, request: bytes) -> Iterator[None]:
        """While it is in the engine."""
        self._running[request] += 1
        try:
            yield
        finally:
            self._running[request] -= 1
            if not self._running[request]:
                del self._running[request]

    def clear(self, request: bytes) -> None:
        """It came to its end."""
        self._deaths.pop(request, None)


def digest_of(*parts: object) -> bytes:
    """Names a request by what it asks for."""
    return hashlib.blake2b(repr(parts).encode("utf-8", "backslashreplace"), digest_size=16).digest()
