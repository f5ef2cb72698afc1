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
from collections.abc import Coroutine
from typing import Any

from shared.errors import ConfigError, RunError
from shared.launch.deaths import helpers, how
from shared.types import Verdict
from verify.checker_process import Reply, Request
from verify.child_process import frame, kill_group, python_path, read_frame
from verify.math.plain import decide

DEADLINE_S = 5.0
BLOCKING_DEADLINE_S = 2.0
"""for synchronous callers, which block while they wait; a hard sum takes 0.4 s, and the machine may be busy"""
START_DEADLINE_S = 120.0
MAX_REQUESTS = 20_000
MAX_RSS_BYTES = 400 << 20
MAX_START_FAILURES = 3
TAKEN = "another takes its place"
_CACHED = 16_384
_MAX_FRAME_BYTES = 1 << 16


class _Worker:
    """One worker process, which starts when this is made."""

    def __init__(self) -> None:
        self.process: asyncio.subprocess.Process | None = None
        self.served, self.stopped = 0, False
        self.started = asyncio.ensure_future(self._start())
        self.started.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _start(self) -> None:
        """Start the process and wait for its first frame. Raises EOFError, or TimeoutError."""
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH") if name in os.environ}
        async with asyncio.timeout(START_DEADLINE_S):
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "verify.checker_process", str(os.getpid())),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_MAX_FRAME_BYTES,
                env=kept | {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"},
                start_new_session=True,
            )
            await self._receive()

    async def _receive(self) -> Reply:
        """Wait for the next reply. Raises EOFError when the worker closed its pipe, or sent something else."""
        assert self.process and self.process.stdout
        reply: Reply = await read_frame(self.process.stdout, Reply, _MAX_FRAME_BYTES)
        return reply

    async def become_ready(self) -> None:
        """Wait for the start. Raises EOFError when that failed, or the process has ended since; TimeoutError."""
        try:
            await asyncio.shield(self.started)
        except OSError as error:
            raise EOFError from error
        assert self.process and self.process.stdout
        if self.process.returncode is not None or self.process.stdout.at_eof():
            raise EOFError

    @property
    def was_ready(self) -> bool:
        """True once the start has succeeded."""
        return self.started.done() and not self.started.cancelled() and self.started.exception() is None

    async def ask(self, request: Request, deadline_s: float) -> Reply:
        """Send one request and wait for its reply. Raises EOFError, or TimeoutError."""
        assert self.process and self.process.stdin
        self.process.stdin.write(frame(request))
        self.served += 1
        async with asyncio.timeout(deadline_s):
            return await self._receive()

    async def tell_end(self) -> None:
        """Wait for the end of the process; tell it unless it was stopped on purpose, or has not even begun."""
        await asyncio.wait([self.started])
        if self.process is not None:
            code = await self.process.wait()
            if self.was_ready and not self.stopped:
                helpers.add("a verifier process", how(code), TAKEN)

    def kill(self) -> None:
        """SIGKILL the process group."""
        self.started.cancel()
        if self.process is not None and self.process.returncode is None:
            kill_group(self.process.pid)

    async def reap(self) -> None:
        """Wait for a killed process, and close its pipes."""
        await asyncio.wait([self.started])
        if self.process is not None:
            await self.process.communicate()


def worker_count(asked: int) -> int:
    """Return the number of verifier processes for option --workers: 0 is one per core. Raises ConfigError below 0."""
    if asked < 0:
        raise ConfigError(f"--workers = {asked}: must be at least 1 (0 for one per core)")
    return asked or len(os.sched_getaffinity(0))


class AnswerChecker:
    """Checks answers in `workers` processes; `counts` records what happened to requests and workers."""

    def __init__(
        self,
        workers: int = 1,
        deadline_s: float = DEADLINE_S,
        max_requests: int = MAX_REQUESTS,
        max_rss_bytes: int = MAX_RSS_BYTES,
    ) -> None:
        if workers < 1:
            raise ValueError(f"reward.workers = {workers} must be at least 1")
        self.size, self.deadline_s = workers, deadline_s
        self.max_requests, self.max_rss_bytes = max_requests, max_rss_bytes
        self.counts = {"decided": 0, "asked": 0, "timeouts": 0, "crashes": 0, "recycled": 0, "started": 0}
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        self._all: set[_Worker] = set()
        self._reaping: set[asyncio.Task[None]] = set()
        self._known: OrderedDict[tuple[str, str], Verdict] = OrderedDict()
        self._pending: dict[tuple[str, str], asyncio.Future[Verdict]] = {}
        self._start_failures = 0
        self._open = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the living workers."""
        return [worker.process.pid for worker in self._all if worker.process is not None]

    async def start(self) -> None:
        """Start the workers and return at once; the first slow verdict waits until one is ready."""
        if not self._open:
            self._open = True
            for _ in range(self.size):
                self._idle.put_nowait(self._spawn())

    async def __aenter__(self) -> AnswerChecker:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _spawn(self) -> _Worker:
        worker = _Worker()
        self.counts["started"] += 1
        self._all.add(worker)
        self._await(worker.tell_end())
        return worker

    def _await(self, work: Coroutine[Any, Any, None]) -> None:
        """Do what `close` waits for, in the background."""
        task = asyncio.get_running_loop().create_task(work)
        self._reaping.add(task)
        task.add_done_callback(self._reaping.discard)

    def _discard(self, worker: _Worker) -> None:
        """Kill a worker and reap it in the background."""
        self._all.discard(worker)
        worker.kill()
        self._await(worker.reap())

    def _replace(self, worker: _Worker, lost: bool = False) -> _Worker:
        """A new worker in place of this one. lost: it has ended by itself."""
        worker.stopped = not lost
        self._discard(worker)
        return self._spawn()

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
        task = asyncio.ensure_future(self._ask(Request(_sendable(ground_truth), _sendable(answer))))
        self._pending[pair] = task
        task.add_done_callback(lambda _: self._pending.pop(pair, None))
        verdict = await asyncio.shield(task)
        if verdict.graded or verdict is Verdict.UNVERIFIABLE:
            self._known[pair] = verdict
            if len(self._known) > _CACHED:
                self._known.popitem(last=False)
        return verdict

    async def _ask(self, request: Request) -> Verdict:
        self.counts["asked"] += 1
        worker = await self._idle.get()
        try:
            for _ in range(2):
                worker = await self._living(worker)
                try:
                    reply = await worker.ask(request, self.deadline_s)
                except TimeoutError:
                    self.counts["timeouts"] += 1
                    helpers.add("a verifier process", f"gave no answer for {self.deadline_s:g} s: killed", TAKEN)
                    worker = self._replace(worker)
                    return Verdict.TIMEOUT
                except EOFError:
                    reply = None
                if reply is not None and reply.verdict is not Verdict.CRASH:
                    if worker.served >= self.max_requests or reply.rss_bytes > self.max_rss_bytes:
                        self.counts["recycled"] += 1
                        worker = self._replace(worker)
                    return reply.verdict
                self.counts["crashes"] += 1
                worker = self._replace(worker, lost=reply is None)
            return Verdict.CRASH
        except asyncio.CancelledError:
            worker = self._replace(worker) if self._open else worker
            raise
        finally:
            self._idle.put_nowait(worker)

    async def _living(self, worker: _Worker) -> _Worker:
        """Return the worker once it is ready, or a replacement that is. Raises RunError after repeated failures."""
        while True:
            try:
                await worker.become_ready()
                self._start_failures = 0
                return worker
            except (EOFError, TimeoutError):
                code = worker.process.returncode if worker.process is not None else None
                self._start_failures += not worker.was_ready
                worker = self._replace(worker, lost=True)
                if self._start_failures >= MAX_START_FAILURES:
                    raise RunError(
                        f"verifier workers do not start ({self._start_failures} attempts, last exit code {code}): "
                        f"run `{sys.executable} -m verify.checker_process {os.getpid()} </dev/null` to see why"
                    ) from None

    async def close(self) -> None:
        """Kill and reap every worker; running requests end as CRASH or are cancelled."""
        self._open = False
        for task in list(self._pending.values()):
            task.cancel()
        await asyncio.gather(*self._pending.values(), return_exceptions=True)
        for worker in list(self._all):
            worker.stopped = True
            self._discard(worker)
        await asyncio.gather(*self._reaping, return_exceptions=True)
        self._idle = asyncio.Queue()


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
