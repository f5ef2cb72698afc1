"""Runs verdicts that need SymPy in worker processes: one request at a time each, killed at a deadline and replaced.

`Pool` belongs to one asyncio loop and never blocks it: cheap verdicts are decided in the caller, the rest waits on
pipes. A worker that misses its deadline (stopped, or deep in a C loop) is killed with its process group and replaced
while others go on; one that dies is replaced and its request retried once in a fresh worker. `compare_blocking`
serves synchronous callers of any thread from a small pool in a background thread.

Workers die with the *thread* that runs the loop (see `worker.die_with_parent`): keep the loop in a thread that lives as
long as the pool.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from pathlib import Path

import msgspec

from shared.errors import ConfigError, RunError
from shared.types import Verdict
from verify.math.plain import decide
from verify.worker import HEADER, Ready, Reply, Request, frame

DEADLINE_S = 5.0
BLOCKING_DEADLINE_S = 2.0
"""for synchronous callers, which block while they wait; a hard sum takes 0.4 s, and the machine may be busy"""
START_DEADLINE_S = 120.0
MAX_REQUESTS = 20_000
MAX_RSS_BYTES = 400 << 20
MAX_START_FAILURES = 3
_CACHED = 16_384
_MAX_FRAME_BYTES = 1 << 16


class _Lost(Exception):
    """The worker closed its pipe, or sent an invalid reply."""


class _Worker:
    """One child process and the two ends of its pipes."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        root = str(Path(__file__).resolve().parents[1])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH") if name in os.environ}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "verify.worker", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=kept | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"},
            start_new_session=True,
        )
        assert self.process.stdin and self.process.stdout
        self.input, self.output = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self.input, False)
        os.set_blocking(self.output, False)
        self.loop, self.buffer, self.served, self.dead = loop, b"", 0, False
        self.ready = False
        self.waiter: asyncio.Future[bytes] | None = None
        loop.add_reader(self.output, self._on_readable)

    def _on_readable(self) -> None:
        try:
            part = os.read(self.output, _MAX_FRAME_BYTES)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        self.buffer += part
        if not part or len(self.buffer) > _MAX_FRAME_BYTES:
            self.dead = True
            self.loop.remove_reader(self.output)
        if self.waiter is not None and not self.waiter.done():
            body = self._pop()
            if body is not None:
                self.waiter.set_result(body)
            elif self.dead:
                self.waiter.set_exception(_Lost())

    def _pop(self) -> bytes | None:
        if len(self.buffer) < HEADER.size:
            return None
        end = HEADER.size + HEADER.unpack_from(self.buffer)[0]
        if len(self.buffer) < end:
            return None
        body, self.buffer = self.buffer[HEADER.size : end], self.buffer[end:]
        return body

    async def _receive(self, deadline_s: float) -> bytes:
        body = self._pop()
        if body is not None:
            return body
        if self.dead:
            raise _Lost
        self.waiter = self.loop.create_future()
        try:
            return await asyncio.wait_for(self.waiter, deadline_s)
        finally:
            self.waiter = None

    async def become_ready(self, deadline_s: float) -> None:
        """Wait for the first frame. Raises _Lost, or TimeoutError."""
        if not self.ready:
            msgspec.msgpack.decode(await self._receive(deadline_s), type=Ready)
            self.ready = True

    async def ask(self, request: Request, deadline_s: float) -> Reply:
        """Send one request and wait for its reply. Raises _Lost, or TimeoutError."""
        data = frame(request)
        try:
            if os.write(self.input, data) != len(data):
                raise _Lost
        except (OSError, BlockingIOError) as error:
            raise _Lost from error
        self.served += 1
        try:
            return msgspec.msgpack.decode(await self._receive(deadline_s), type=Reply)
        except msgspec.DecodeError as error:
            raise _Lost from error

    def kill(self) -> None:
        """SIGKILL the process group and close the pipes; `process` is still to be reaped."""
        self.dead = True
        self.loop.remove_reader(self.output)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                pipe.close()


def worker_count(asked: int) -> int:
    """Return the number of verifier processes for option --workers: 0 is one per core. Raises ConfigError below 0."""
    if asked < 0:
        raise ConfigError(f"--workers = {asked}: must be at least 1 (0 for one per core)")
    return asked or len(os.sched_getaffinity(0))


class Pool:
    """Grades answers in `workers` processes; `counts` records what happened to requests and workers."""

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
        return [worker.process.pid for worker in self._all]

    async def start(self) -> None:
        """Start the workers and return at once; the first slow verdict waits until one is ready."""
        if not self._open:
            self._open = True
            for _ in range(self.size):
                self._idle.put_nowait(self._spawn())

    async def __aenter__(self) -> Pool:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _spawn(self) -> _Worker:
        worker = _Worker(asyncio.get_running_loop())
        self.counts["started"] += 1
        self._all.add(worker)
        return worker

    def _discard(self, worker: _Worker) -> None:
        """Kill a worker and reap it in the background."""
        self._all.discard(worker)
        worker.kill()
        task = asyncio.get_running_loop().create_task(_reap(worker.process))
        self._reaping.add(task)
        task.add_done_callback(self._reaping.discard)

    def _replace(self, worker: _Worker) -> _Worker:
        self._discard(worker)
        return self._spawn()

    async def grade(self, gold: str, answer: str) -> Verdict:
        """Compare an extracted answer with the true one; repeated pairs are answered from a cache.

        Waits for a free worker without limit, then at most `deadline_s` for its reply (twice after a crash).
        Raises RunError when the pool is not started, or when workers cannot start at all.
        """
        verdict = decide(gold, answer)
        if verdict is not None:
            self.counts["decided"] += 1
            return verdict
        if not self._open:
            raise RunError("the verifier pool is not started: call start() first")
        pair = (gold, answer)
        if pair in self._known:
            self._known.move_to_end(pair)
            return self._known[pair]
        if pair in self._pending:
            return await asyncio.shield(self._pending[pair])
        task = asyncio.ensure_future(self._ask(Request(_sendable(gold), _sendable(answer))))
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
                    worker = self._replace(worker)
                    return Verdict.TIMEOUT
                except _Lost:
                    reply = None
                if reply is not None and reply.verdict is not Verdict.CRASH:
                    if worker.served >= self.max_requests or reply.rss_bytes > self.max_rss_bytes:
                        self.counts["recycled"] += 1
                        worker = self._replace(worker)
                    return reply.verdict
                self.counts["crashes"] += 1
                worker = self._replace(worker)
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
                if worker.dead:
                    raise _Lost
                await worker.become_ready(START_DEADLINE_S)
                self._start_failures = 0
                return worker
            except (_Lost, TimeoutError, msgspec.DecodeError):
                was_ready = worker.ready
                code = worker.process.poll()
                fresh = self._replace(worker)
                worker = fresh
                if not was_ready:
                    self._start_failures += 1
                if self._start_failures >= MAX_START_FAILURES:
                    raise RunError(
                        f"verifier workers do not start ({self._start_failures} attempts, last exit code {code}): "
                        f"run `{sys.executable} -m verify.worker {os.getpid()} </dev/null` to see why"
                    ) from None

    async def close(self) -> None:
        """Kill and reap every worker; running requests end as CRASH or are cancelled."""
        self._open = False
        for task in list(self._pending.values()):
            task.cancel()
        await asyncio.gather(*self._pending.values(), return_exceptions=True)
        for worker in list(self._all):
            self._discard(worker)
        await asyncio.gather(*self._reaping, return_exceptions=True)
        self._idle = asyncio.Queue()


def _sendable(text: str) -> str:
    """Return the text without lone surrogates, which no encoding can carry."""
    return text.encode("utf-8", "ignore").decode("utf-8")


async def _reap(process: subprocess.Popen[bytes]) -> None:
    """Wait for a killed process without blocking the loop."""
    delay = 0.001
    while process.poll() is None:
        await asyncio.sleep(delay)
        delay = min(0.1, 2 * delay)


class _Background:
    """Runs an event loop with a small pool in a daemon thread, for synchronous callers."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self.pool = Pool(workers=2, deadline_s=BLOCKING_DEADLINE_S)  # two: one serves while the other is replaced
        threading.Thread(target=self.loop.run_forever, name="verify-background", daemon=True).start()
        asyncio.run_coroutine_threadsafe(self.pool.start(), self.loop).result()
        atexit.register(self.close)

    def grade(self, gold: str, answer: str) -> Verdict:
        return asyncio.run_coroutine_threadsafe(self.pool.grade(gold, answer), self.loop).result()

    def close(self) -> None:
        if self.pid == os.getpid():
            with contextlib.suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(self.pool.close(), self.loop).result(5)


_background: _Background | None = None
_background_lock = threading.Lock()


def compare_blocking(gold: str, answer: str) -> Verdict:
    """As `Pool.grade`, for callers without an event loop, from any thread."""
    global _background
    with _background_lock:
        if _background is None or _background.pid != os.getpid():
            _background = _Background()
    return _background.grade(gold, answer)
