"""The sandboxes of a process: started when first needed, lent to one program at a time, replaced and counted.

A lease has a sandbox for the candidate's program and, once needed, a second one for the assertion runner
(`assertion_runner.py`). What the host allows is found when the first sandbox starts, and holds from then on: a sandbox
that later does not start with it is tried again, and then is an error. A host that cannot isolate is refused unless
`unsafe` says otherwise. Callers wait in threads, never in an event loop.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from shared.errors import DeadlineExceeded, RunError
from verify.code.sandbox.client import Isolation, Lost, SandboxHandle, SandboxRefused

MAX_PROGRAMS = 5_000
WAIT_S = 3600.0
TRIES = 2
CLOSED = "the sandbox is closed: make another SandboxPool"


class SandboxLease:
    """The sandboxes of one program at a time: the candidate's and, once needed, the assertion runner's."""

    def __init__(self, pool: SandboxPool) -> None:
        self.pool, self.programs = pool, 0
        self.candidate = pool.start_sandbox()
        self._assertion_sandbox: SandboxHandle | None = None

    @property
    def assertion_sandbox(self) -> SandboxHandle:
        """The second sandbox, started when first asked for."""
        if self._assertion_sandbox is None:
            self._assertion_sandbox = self.pool.start_sandbox()
        return self._assertion_sandbox

    def kill(self) -> None:
        """End both sandboxes."""
        for sandbox in (self.candidate, self._assertion_sandbox):
            if sandbox is not None:
                sandbox.kill()


class _Threads(ThreadPoolExecutor):
    """A pool of threads that reports its own end as the end of the sandbox."""

    def submit(self, *call: Any, **named: Any) -> Future[Any]:
        """As in its base class. Raises RunError when it is closed."""
        try:
            return super().submit(*call, **named)
        except RuntimeError as error:
            raise RunError(CLOSED) from error


class SandboxPool:
    """Lends `size` leases; `counts` holds the sandboxes started, lost and recycled, `isolation` what holds in them.

    `namespaces` and `landlock` False leave these out on a host whose policy forbids them (`landlock` as a number: the
    newest ABI to use); with both out, or where system calls cannot be filtered, only `unsafe` True runs programs.
    """

    def __init__(
        self,
        size: int = 0,
        *,
        namespaces: bool = True,
        landlock: bool | int = True,
        unsafe: bool = False,
        shared_folder: str = "",
    ) -> None:
        self.size = size or max(1, len(os.sched_getaffinity(0)) - 1)
        self.namespaces, self.landlock, self.unsafe, self.shared_folder = namespaces, landlock, unsafe, shared_folder
        self.counts = {"programs": 0, "started": 0, "lost": 0, "recycled": 0}
        self.pid = os.getpid()
        self.compiles = False
        """whether a C++ program was compiled and run here"""
        self._settled = False
        self._settling = threading.Lock()
        self.isolation = Isolation()
        self.threads = _Threads(self.size, thread_name_prefix="grade-program")
        self._free: queue.SimpleQueue[SandboxLease | None] = queue.SimpleQueue()
        self._all: set[SandboxLease] = set()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        for _ in range(self.size):
            self._free.put(None)
        atexit.register(self.close)

    def start_sandbox(self) -> SandboxHandle:
        """Start a sandbox with the strongest isolation that works here: the first one finds it. Raises
        SandboxRefused."""
        if not self._settled:
            with self._settling:
                if not self._settled:
                    return self._start_first()
        sandbox = self._try_to_start(self.namespaces)
        if sandbox.isolation.refused:
            raise SandboxRefused(
                f"a sandbox did not start ({sandbox.isolation.refused}), though others did on this host with "
                f"{'' if self.namespaces else 'no '}namespaces: is it short of memory or processes?"
            )
        return sandbox

    def _start_first(self) -> SandboxHandle:
        reasons = []
        for namespaces in (True, False) if self.namespaces else (False,):
            sandbox = self._try_to_start(namespaces)
            if not sandbox.isolation.refused:
                self.namespaces, self.isolation, self._settled = namespaces, sandbox.isolation, True
                return sandbox
            reasons.append(f"with{'' if namespaces else 'out'} namespaces: {sandbox.isolation.refused}")
        raise SandboxRefused(
            f"sandbox refused: this host cannot isolate untrusted programs ({'; '.join(reasons)}). Allow user "
            "namespaces or Landlock, or say unsafe=True where the programs are trusted"
        )

    def _try_to_start(self, namespaces: bool) -> SandboxHandle:
        """Return a sandbox, or the killed one that was refused twice: once may have been for want of memory or time."""
        for _ in range(TRIES):
            sandbox = SandboxHandle(namespaces, self.landlock, self.unsafe, self.shared_folder)
            if not sandbox.isolation.refused:
                with self._lock:
                    self.counts["started"] += 1
                return sandbox
            sandbox.kill()
        return sandbox

    @contextmanager
    def acquire(self, wait_s: float = WAIT_S) -> Iterator[SandboxLease]:
        """Lend a lease for the length of a block; one whose sandbox was lost meanwhile is replaced.

        Raises SandboxRefused, DeadlineExceeded, RunError once it is closed, also for callers that were waiting.
        """
        self._check_open()
        try:
            lease = self._free.get(timeout=wait_s)
        except queue.Empty:
            raise DeadlineExceeded("a grader", "code", "a free sandbox", wait_s) from None
        try:
            self._check_open()
            if lease is None:
                lease = SandboxLease(self)
                with self._lock:
                    self._all.add(lease)
                self._check_open()  # closed while it started: `close` may not have seen it
            yield lease
            self._count("programs")
            lease.programs += 1
            if lease.programs >= MAX_PROGRAMS:
                self._count("recycled")
                self._retire(lease)
                lease = None
        except BaseException as error:
            if isinstance(error, Lost):
                self._count("lost")
            if lease is not None:
                self._retire(lease)
                lease = None
            raise
        finally:
            if self._closing.is_set() and lease is not None:
                self._retire(lease)
                lease = None
            self._free.put(lease)

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise RunError(CLOSED)

    def _count(self, name: str) -> None:
        with self._lock:
            self.counts[name] += 1

    def _retire(self, lease: SandboxLease) -> None:
        with self._lock:
            self._all.discard(lease)
        lease.kill()

    def close(self) -> None:
        """End all sandboxes; programs that run in them are lost."""
        if self.pid != os.getpid():
            return
        self._closing.set()
        atexit.unregister(self.close)
        with self._lock:
            leases, self._all = self._all, set()
        for lease in leases:
            lease.kill()
        self.threads.shutdown(wait=False)  # who still queues finds it closed, and says so
