"""Deaths of the engine: one that stands still is killed, completions under way continue in the next process, and a
request that causes deaths is refused.

An engine that moves answers between two steps, ends steps, or takes processor time, as in a long step. Time is counted
in looks, so that a server that was itself stopped, or is late, takes no sound engine for a frozen one.

A request with a seed, or at temperature 0, is sampled again from its beginning: the same tokens come, those returned
before are skipped, and if rounding gives a different token it ends with EngineDied. Any other continues after its
tokens as if they were the prompt, provided that nothing in it depends on them (stop strings, penalties and constraints
do: EngineDied).

A request that was under way at one death is sampled again with the others. One that was under way at two deaths is
guilty if it is the only one; if there are several, they run one at a time from then on, and the one that runs at the
next death is guilty. A guilty request is never sampled again, whichever client sends it; one that completes is
cleared. Requests are identified by their content, not by their client, because clients retry what has failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import weakref
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Iterator
from dataclasses import replace
from multiprocessing.process import BaseProcess

import psutil

from rollout.start import last_words
from serve.engine import CrashingRequest, Delta, EngineDied, SamplingParameters
from shared.launch import deaths

log = logging.getLogger("serve")
DEATHS = 2
"""deaths of the engine during a request from which on it is a suspect; a single one may be an accident"""
MOST_KNOWN = 10_000
"""number of requests that are remembered; the oldest are dropped"""
LOOK_EVERY_S = 1.0
QUIET_S = 20.0
"""an engine that neither answers nor computes for so long stands still"""
STEP_S = 600.0
"""so does one that computes for so long without the end of a step"""
COMPUTED_S = 0.5
"""processor time that shows that an engine computes"""


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
        """current: returns the engine. sample: samples a completion in it; raises EngineDied, after `mark_dead`."""
        self._current, self._sample = current, sample
        self.crashes = CrashTracker()
        self.over = False
        """whether there will be no further engine"""
        self._dead: Callable[[], object | None] = lambda: None  # a weak reference: its sockets are closed with it
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
                lives = engine is not None and self._dead() is not engine  # then there will be no successor
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
        count = 0
        async with contextlib.aclosing(self._sample(prompt_ids, sampling)) as deltas:
            async for delta in deltas:
                if count >= len(known):
                    yield delta
                    continue
                if known[count : count + len(delta.token_ids)] != delta.token_ids:
                    raise Diverged
                count += len(delta.token_ids)

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
        if self._dead() is engine:
            return
        self._dead = weakref.ref(engine)
        if not meant and self.crashes.record_death() is not None:
            log.error("a request was running at %d deaths of the engine: it is not tried again", DEATHS)


def repeatable(sampling: SamplingParameters) -> bool:
    """Whether sampling it again gives the same tokens, apart from rounding."""
    return sampling.seed is not None or sampling.temperature == 0


def plain(sampling: SamplingParameters) -> bool:
    """Whether it does not depend on its earlier tokens, so that it can continue as if they were the prompt."""
    kept = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "logprobs", "adapter")
    return sampling == type(sampling)(**{name: getattr(sampling, name) for name in kept})


class EngineWatch:
    """Kills the processes of an engine that stands still; the rest is as for any other death."""

    def __init__(self) -> None:
        self.moved = False
        """to be set when a step has ended"""
        self.frozen = ""
        """why the processes were killed, "" while they were not"""
        self._loading = 0
        self._silent_s = self._quiet_s = self._computed_s = 0.0
        """without an answer or a step; of these, without computing; processor time when it had last computed"""
        self._task: asyncio.Task[None] | None = None
        self._processes: Collection[BaseProcess] = ()
        self._kills_before = 0

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Context in which the engine may stand still, as at a slow disk."""
        self._loading += 1
        try:
            yield
        finally:
            self._loading -= 1

    def start(self, ask: Callable[[], Awaitable[object]], processes: Collection[BaseProcess]) -> None:
        """Watch these processes. ask: is answered by an engine between two steps."""
        self.frozen, self._silent_s = "", 0.0
        self._processes, self._kills_before = processes, deaths.memory_kills()
        self._task = asyncio.create_task(self._watch(ask, processes), name="engine's moves")

    async def end(self) -> None:
        """Watch no more; log how the processes ended that have."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait([self._task])
        for code in [process.exitcode for process in self._processes]:
            if code is not None and not self.frozen:
                why = deaths.how(code, last_words()) + deaths.advice(code, "server's engine", 0, self._kills_before)
                log.error("the engine's process %s", why)
        self._task = None

    async def _watch(self, ask: Callable[[], Awaitable[object]], processes: Collection[BaseProcess]) -> None:
        answer = asyncio.ensure_future(ask())
        try:
            while not self.frozen:
                await asyncio.sleep(LOOK_EVERY_S)
                self.look(answer.done(), processes)
                if answer.done():
                    await asyncio.gather(answer, return_exceptions=True)  # a dead engine's error is its owner's
                    answer = asyncio.ensure_future(ask())
        finally:
            answer.cancel()
        log.error("the engine %s: its process is killed", self.frozen)
        for process in processes:
            process.kill()

    def look(self, answered: bool, processes: Collection[BaseProcess]) -> None:
        """Set `frozen` if the engine has stood still too long. answered: since the last look."""
        if answered or self.moved or self._loading:
            self._silent_s, self.moved = 0.0, False
            return
        before_s, now_s = self._computed_s, processor_s(processes)
        if self._silent_s == 0 or now_s - before_s >= COMPUTED_S:
            self._quiet_s, self._computed_s = 0.0, now_s
        self._silent_s += LOOK_EVERY_S
        self._quiet_s += LOOK_EVERY_S
        if self._quiet_s >= QUIET_S:
            self.frozen = f"has neither answered nor computed for {self._quiet_s:.0f} s"
        elif self._silent_s >= STEP_S:
            self.frozen = f"has ended no step for {self._silent_s:.0f} s"


def processor_s(processes: Collection[BaseProcess]) -> float:
    """Return the processor time so far of these processes and all below them."""
    total = 0.0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            first = psutil.Process(process.pid)
            total += sum(sum(one.cpu_times()[:4]) for one in [first, *first.children(recursive=True)])
    return total
