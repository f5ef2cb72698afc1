"""The boxes of a process: started when first needed, lent to one program at a time, replaced and counted.

A seat has a box for the candidate's program and, once needed, a second one for an examiner (`examiner.py`). What
the host allows is found when the first box starts, and holds from then on: a box that later does not start with it is
tried again, and then is an error. A host that cannot isolate is refused unless `unsafe` says otherwise.
Callers wait in threads, never in an event loop.
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
from verify.code.sandbox.client import Isolation, Lost, Owner, SandboxRefused

MAX_PROGRAMS = 5_000
WAIT_S = 3600.0
TRIES = 2
CLOSED = "the sandbox is closed: make another Seats"


class Seat:
    """The boxes of one program at a time: a candidate's and, once needed, an examiner's."""

    def __init__(self, seats: Seats) -> None:
        self.seats, self.programs = seats, 0
        self.candidate = seats.start_box()
        self._examiner: Owner | None = None

    @property
    def examiner(self) -> Owner:
        """The second box, started when first asked for."""
        if self._examiner is None:
            self._examiner = self.seats.start_box()
        return self._examiner

    def kill(self) -> None:
        """End both boxes."""
        for box in (self.candidate, self._examiner):
            if box is not None:
                box.kill()


class _Threads(ThreadPoolExecutor):
    """A pool of threads that reports its own end as the end of the sandbox."""

    def submit(self, *call: Any, **named: Any) -> Future[Any]:
        """As in its base class. Raises RunError when it is closed."""
        try:
            return super().submit(*call, **named)
        except RuntimeError as error:
            raise RunError(CLOSED) from error


class Seats:
    """Lends `size` seats; `counts` holds the boxes started, lost and recycled, `isolation` what holds in them.

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
        self._free: queue.SimpleQueue[Seat | None] = queue.SimpleQueue()
        self._all: set[Seat] = set()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        for _ in range(self.size):
            self._free.put(None)
        atexit.register(self.close)

    def start_box(self) -> Owner:
        """Start a box with the strongest isolation that works here: the first one finds it. Raises SandboxRefused."""
        if not self._settled:
            with self._settling:
                if not self._settled:
                    return self._start_first()
        box = self._try_to_start(self.namespaces)
        if box.isolation.refused:
            raise SandboxRefused(
                f"a box did not start ({box.isolation.refused}), though others did on this host with "
                f"{'' if self.namespaces else 'no '}namespaces: is it short of memory or processes?"
            )
        return box

    def _start_first(self) -> Owner:
        reasons = []
        for namespaces in (True, False) if self.namespaces else (False,):
            box = self._try_to_start(namespaces)
            if not box.isolation.refused:
                self.namespaces, self.isolation, self._settled = namespaces, box.isolation, True
                return box
            reasons.append(f"with{'' if namespaces else 'out'} namespaces: {box.isolation.refused}")
        raise SandboxRefused(
            f"sandbox refused: this host cannot isolate untrusted programs ({'; '.join(reasons)}). Allow user "
            "namespaces or Landlock, or say unsafe=True where the programs are trusted"
        )

    def _try_to_start(self, namespaces: bool) -> Owner:
        """Return a box, or the killed one that was refused twice: once may have been for want of memory or time."""
        for _ in range(TRIES):
            box = Owner(namespaces, self.landlock, self.unsafe, self.shared_folder)
            if not box.isolation.refused:
                with self._lock:
                    self.counts["started"] += 1
                return box
            box.kill()
        return box

    @contextmanager
    def take(self, wait_s: float = WAIT_S) -> Iterator[Seat]:
        """Lend a seat; one whose box was lost meanwhile is replaced.

        Raises SandboxRefused, DeadlineExceeded, RunError once it is closed, also for callers that were waiting.
        """
        self._check_open()
        try:
            seat = self._free.get(timeout=wait_s)
        except queue.Empty:
            raise DeadlineExceeded("a grader", "code", "a free sandbox", wait_s) from None
        try:
            self._check_open()
            if seat is None:
                seat = Seat(self)
                with self._lock:
                    self._all.add(seat)
                self._check_open()  # closed while it started: `close` may not have seen it
            yield seat
            self._count("programs")
            seat.programs += 1
            if seat.programs >= MAX_PROGRAMS:
                self._count("recycled")
                self._retire(seat)
                seat = None
        except BaseException as error:
            if isinstance(error, Lost):
                self._count("lost")
            if seat is not None:
                self._retire(seat)
                seat = None
            raise
        finally:
            if self._closing.is_set() and seat is not None:
                self._retire(seat)
                seat = None
            self._free.put(seat)

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise RunError(CLOSED)

    def _count(self, name: str) -> None:
        with self._lock:
            self.counts[name] += 1

    def _retire(self, seat: Seat) -> None:
        with self._lock:
            self._all.discard(seat)
        seat.kill()

    def close(self) -> None:
        """End all boxes; programs that run in them are lost."""
        if self.pid != os.getpid():
            return
        self._closing.set()
        atexit.unregister(self.close)
        with self._lock:
            seats, self._all = self._all, set()
        for seat in seats:
            seat.kill()
        self.threads.shutdown(wait=False)  # who still queues finds it closed, and says so
