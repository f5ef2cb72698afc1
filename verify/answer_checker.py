r"""Compares final answers with ground truths: cheap cases in the caller, the rest in processes killed at a deadline.

`math/plain.py` decides nearly all real answers in the caller. What takes algebra (radicals, variables, equations) goes
to `math/algebra.py`, and only ever inside a worker process (`checker_process.py`), because no timer can stop it from
outside. Text of the policy is never evaluated as Python. Verdicts: the ground truth is not understood -> UNVERIFIABLE;
the policy's answer is not understood or beyond the limits -> WRONG, unless the spelling is equal.

`AnswerChecker` belongs to one asyncio loop and never blocks it. A worker that misses its deadline (stopped, or deep in
a C loop) is killed with its process group and replaced while others go on; one that dies is replaced and its request
retried once in a fresh worker. `check_answer` serves synchronous callers of any thread from a background thread.

Workers die with the *thread* that runs the loop: keep the loop in a thread that lives as long as the checker.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import sys
import threading
from collections import OrderedDict
from typing import Any

from shared.child_process import Child, ChildLate, ChildLost
from shared.errors import ConfigError, RunError
from shared.types import Verdict
from verify.checker_process import CheckerProcess, Reply
from verify.math.plain import decide

DEADLINE_S = 5.0
BLOCKING_DEADLINE_S = 2.0
"""for synchronous callers, which block while they wait; a hard sum takes 0.4 s, and the machine may be busy"""
START_DEADLINE_S = 120.0
MAX_REQUESTS = 20_000
MAX_RSS_BYTES = 400 << 20
MAX_START_FAILURES = 3
_CACHED = 16_384


class _Worker:
    """One process, which starts when this is made."""

    def __init__(self) -> None:
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH") if name in os.environ}
        environment = kept | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
        who, then = "a verifier process", "another takes its place"
        self.child = Child(CheckerProcess, who, then, supervise=False, environment=environment)
        self.served = 0
        self.started = self._start()

    def _start(self) -> asyncio.Task[Any]:
        task = asyncio.create_task(self.child.start(deadline_s=START_DEADLINE_S))
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return task

    def restart(self) -> None:
        """Kill the process, and start it again in the background."""
        self.started.cancel()
        self.served, self.started = 0, self._start()

    async def close(self) -> None:
        """Kill the process, and wait until it is gone."""
        self.started.cancel()
        await asyncio.wait([self.started])
        await self.child.end()


def worker_count(asked: int) -> int:
    """Return the number of verifier processes for option --workers: 0 is one per core. Raises ConfigError below 0."""
    if asked < 0:
        raise ConfigError(f"--workers = {asked}: must be at least 1 (0 for one per core)")
    return asked or len(os.sched_getaffinity(0))


class AnswerChecker:
    """Checks answers in `workers` processes; `counts` records what happened to requests and workers."""

    def __init__(
        self, workers: int = 1, deadline_s: float = DEADLINE_S, max_requests: int = MAX_REQUESTS,
        max_rss_bytes: int = MAX_RSS_BYTES,
    ) -> None:  # fmt: skip
        if workers < 1:
            raise ValueError(f"reward.workers = {workers} must be at least 1")
        self.size, self.deadline_s = workers, deadline_s
        self.max_requests, self.max_rss_bytes = max_requests, max_rss_bytes
        self.counts = {"decided": 0, "asked": 0, "timeouts": 0, "crashes": 0, "recycled": 0, "started": 0}
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        self._workers: list[_Worker] = []
        self._known: OrderedDict[tuple[str, str], Verdict] = OrderedDict()
        self._pending: dict[tuple[str, str], asyncio.Future[Verdict]] = {}
        self._start_failures = 0
        self._open = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the living workers."""
        return [worker.child.pid for worker in self._workers if worker.child.alive]

    async def start(self) -> None:
        """Start the workers and return at once; the first slow verdict waits until one is ready."""
        if not self._open:
            self._open = True
            self._workers = [_Worker() for _ in range(self.size)]
            self.counts["started"] += self.size
            for worker in self._workers:
                self._idle.put_nowait(worker)

    async def __aenter__(self) -> AnswerChecker:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _restart(self, worker: _Worker) -> None:
        self.counts["started"] += 1
        worker.restart()

    async def check(self, ground_truth: str, answer: str) -> Verdict:
        """Compare an extracted answer with the ground truth; repeated pairs are answered from a cache.

        Waits for a free worker without limit, then at most `deadline_s` for its reply (twice after a crash).
        Raises RunError when the checker is not started, or when workers cannot start at all.
        """
        verdict = decide(ground_truth, answer)
        if verdict is not None:
            self.counts["decided"] += 1
            return verdict
        if not self._open:
            raise RunError("the answer checker is not started: call start() first")
        pair = (ground_truth, answer)
        if pair in self._known:
            self._known.move_to_end(pair)
            return self._known[pair]
        if pair in self._pending:
            return await asyncio.shield(self._pending[pair])
        task = asyncio.ensure_future(self._ask(_sendable(ground_truth), _sendable(answer)))
        self._pending[pair] = task
        task.add_done_callback(lambda _: self._pending.pop(pair, None))
        verdict = await asyncio.shield(task)
        if verdict.graded or verdict is Verdict.UNVERIFIABLE:
            self._known[pair] = verdict
            if len(self._known) > _CACHED:
                self._known.popitem(last=False)
        return verdict

    async def _ask(self, ground_truth: str, answer: str) -> Verdict:
        self.counts["asked"] += 1
        worker = await self._idle.get()
        try:
            for _ in range(2):
                await self._until_ready(worker)
                worker.served += 1
                reply: Reply | None = None
                try:
                    reply = await worker.child.call(
                        CheckerProcess.compare, ground_truth, answer, deadline_s=self.deadline_s
                    )
                except ChildLate:
                    self.counts["timeouts"] += 1
                    self._restart(worker)
                    return Verdict.TIMEOUT
                except ChildLost:
                    pass  # without a reply it is asked again
                if reply is not None and reply.verdict is not Verdict.CRASH:
                    if worker.served >= self.max_requests or reply.rss_bytes > self.max_rss_bytes:
                        self.counts["recycled"] += 1
                        self._restart(worker)
                    return reply.verdict
                self.counts["crashes"] += 1
                self._restart(worker)
            return Verdict.CRASH
        except asyncio.CancelledError:
            if self._open:
                self._restart(worker)
            raise
        finally:
            self._idle.put_nowait(worker)

    async def _until_ready(self, worker: _Worker) -> None:
        """Wait until the worker takes requests; one that has ended is started again. Raises RunError after repeated
        failures."""
        while True:
            try:
                await asyncio.shield(worker.started)
                self._start_failures = 0
                if worker.child.alive:
                    return
            except (ChildLate, ChildLost, OSError, RunError) as error:
                self._start_failures += 1
                if self._start_failures >= MAX_START_FAILURES:
                    raise RunError(
                        f"verifier processes do not start ({self._start_failures} attempts; the last {error}): run "
                        f"`{sys.executable} -c 'from verify.checker_process import CheckerProcess; "
                        "CheckerProcess().begin()'` to see why"
                    ) from None
            self._restart(worker)

    async def close(self) -> None:
        """End every worker; running requests end as CRASH or are cancelled."""
        self._open = False
        for task in list(self._pending.values()):
            task.cancel()
        await asyncio.gather(*self._pending.values(), return_exceptions=True)
        await asyncio.gather(*(worker.close() for worker in self._workers))
        self._workers, self._idle = [], asyncio.Queue()


def _sendable(text: str) -> str:
    """Return the text without lone surrogates, which no encoding can carry."""
    return text.encode("utf-8", "ignore").decode("utf-8")


class _Background:
    """Runs an event loop with a small checker in a daemon thread, for synchronous callers."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self.checker = AnswerChecker(2, BLOCKING_DEADLINE_S)  # two workers: one serves while the other is replaced
        threading.Thread(target=self.loop.run_forever, name="verify-background", daemon=True).start()
        asyncio.run_coroutine_threadsafe(self.checker.start(), self.loop).result()
        atexit.register(self.close)

    def check(self, ground_truth: str, answer: str) -> Verdict:
        return asyncio.run_coroutine_threadsafe(self.checker.check(ground_truth, answer), self.loop).result()

    def close(self) -> None:
        if self.pid == os.getpid():
            with contextlib.suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(self.checker.close(), self.loop).result(5)


_background: _Background | None = None
_background_lock = threading.Lock()


def check_answer(ground_truth: str, answer: str) -> Verdict:
    """As `AnswerChecker.check`, blocking, from any thread. Not for event loops.

    The first call of a process that needs algebra also waits for a worker's start, which the deadline does not count.
    """
    verdict = decide(ground_truth, answer)
    if verdict is not None:
        return verdict
    global _background
    with _background_lock:
        if _background is None or _background.pid != os.getpid():
            _background = _Background()
    return _background.check(ground_truth, answer)
