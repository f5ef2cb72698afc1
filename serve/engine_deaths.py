"""Deaths of the engine: completions under way continue in the next process, and a request that causes them is refused.

A request with a seed, or at temperature 0, is sampled again from its beginning: the same tokens come, those returned
before are skipped, and if rounding gives a different token it ends with EngineDied. Any other continues after its
tokens as if they were the prompt, provided that nothing in it depends on them (stop strings, penalties and constraints
do: EngineDied).

A request that was under way at one death is sampled again beside the others. One that was under way at two deaths is
guilty if it is the only one; if there are several, they run one at a time from then on, and the one that runs at the
next death is guilty. A guilty request is never sampled again, whichever client sends it; one that completes is
cleared. Requests are identified by their content, not by their client, because clients retry what has failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace

from serve.engine import CrashingRequest, Delta, EngineDied, SamplingParameters

log = logging.getLogger("serve")
DEATHS = 2
"""deaths of the engine during a request from which on it is a suspect; a single one may be an accident"""
MOST_KNOWN = 10_000
"""number of requests that are remembered; the oldest are dropped"""


class CrashTracker:
    """Tracks the requests of one server: those in the engine, the deaths during each, and those found guilty."""

    def __init__(self) -> None:
        self._deaths: OrderedDict[bytes, int] = OrderedDict()
        """request -> number of engines that died while it was running"""
        self._guilty: OrderedDict[bytes, None] = OrderedDict()
        self._running: Counter[bytes] = Counter()
        """requests in the current engine, with the number of their copies"""
        self._trial = asyncio.Lock()

    def record_death(self) -> bytes | None:
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
        """Raises CrashingRequest if the request has been found guilty."""
        if request in self._guilty:
            raise CrashingRequest

    @contextlib.asynccontextmanager
    async def running(self, request: bytes) -> AsyncIterator[None]:
        """Context in which the request runs in the engine: at once, or one at a time if it is suspected. Raises
        CrashingRequest."""
        async with self._trial if self._deaths.get(request, 0) >= DEATHS else contextlib.nullcontext():
            self.check(request)
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


class Diverged(EngineDied):
    """Raised when rounding in another batch gave a different token, so that the completion cannot be continued."""


class EngineFailover:
    """Carries the completions of one server from each of its successive engine processes to the next."""

    def __init__(
        self,
        current: Callable[[], object | None],
        sample: Callable[[list[int], SamplingParameters], AsyncGenerator[Delta, None]],
    ):
        """current: returns the current engine. sample: samples one completion in
        it; raises EngineDied, after `mark_dead`."""
        self._current, self._sample = current, sample
        self.crashes = CrashTracker()
        self.over = False
        """whether there will be no further engine"""
        self._dead: object | None = None
        self._successor: asyncio.Future[bool] | None = None
        """resolves to True when the next engine is ready, to False if there will be none; None while no task waits"""

    async def generate(self, prompt_ids: list[int], sampling: SamplingParameters) -> AsyncGenerator[Delta, None]:
        """Sample one completion, in several engines if one dies. Raises EngineDied, CrashingRequest."""
        request = digest_of(prompt_ids, replace(sampling, seed=None))
        emitted: list[int] = []
        while True:
            try:
                async with self.crashes.running(request):
                    engine = self._current()
                    async with contextlib.aclosing(self._go_on(prompt_ids, sampling, emitted)) as deltas:
                        async for delta in deltas:
                            emitted += delta.token_ids
                            yield delta
                self.crashes.clear(request)
                return
            except Diverged:
                raise
            except EngineDied:
                self.crashes.check(request)
                lives = engine is not None and self._dead is not engine  # then there will be no successor
                if lives or not (repeatable(sampling) or plain(sampling)):
                    raise
            await self._await_successor(engine)

    async def _go_on(
        self, prompt_ids: list[int], sampling: SamplingParameters, emitted: list[int]
    ) -> AsyncGenerator[Delta, None]:
        """Yield the deltas after the tokens that were returned already. Raises EngineDied."""
        known: list[int] = []
        if repeatable(sampling):
            known = list(emitted)
        else:
            prompt_ids = prompt_ids + emitted
            sampling = replace(sampling, max_tokens=sampling.max_tokens - len(emitted))
        place = 0
        async with contextlib.aclosing(self._sample(prompt_ids, sampling)) as deltas:
            async for delta in deltas:
                if place >= len(known):
                    yield delta
                    continue
                if known[place : place + len(delta.token_ids)] != delta.token_ids:
                    raise Diverged
                place += len(delta.token_ids)

    async def _await_successor(self, engine: object | None) -> None:
        """Wait until there is an engine other than `engine`. Raises EngineDied if there will be none."""
        if self.over:
            raise EngineDied
        if self._current() is not engine and self._current() is not None:
            return
        if self._successor is None:
            self._successor = asyncio.get_running_loop().create_future()
        if not await asyncio.shield(self._successor):
            raise EngineDied

    def release_waiting(self, there: bool) -> None:
        """Wake the requests that wait: the next engine is ready (`there`), or there will be none."""
        waiting, self._successor = self._successor, None
        if waiting is not None:
            waiting.set_result(there)

    def mark_dead(self, engine: object, *, meant: bool = False) -> None:
        """Record once that an engine is dead. Unless that was intended (`meant`), a request may have caused it."""
        if self._dead is engine:
            return
        self._dead = engine
        if not meant and self.crashes.record_death() is not None:
            log.error("a request was running at %d deaths of the engine: it is not tried again", DEATHS)


def repeatable(sampling: SamplingParameters) -> bool:
    """Whether sampling it again gives the same tokens, apart from rounding."""
    return sampling.seed is not None or sampling.temperature == 0


def plain(sampling: SamplingParameters) -> bool:
    """Whether it does not depend on its earlier tokens, so that it can continue as if they were the prompt."""
    kept = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "logprobs", "adapter")
    return sampling == type(sampling)(**{name: getattr(sampling, name) for name in kept})
