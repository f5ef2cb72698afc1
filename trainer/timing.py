"""Times the steps of a run: every wait of the controller's loop has a name, a deadline and a sum of seconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import TypeVar

from shared.errors import DeadlineExceeded
from shared.launch import watchdog
from shared.launch.adaptive_deadline import AdaptiveDeadline

Result = TypeVar("Result")


class IdleSeats:
    """How much of the engines is idle because episodes wait for their environments.

    With `busy` sequences in the engines, `seats` for them and `waiting` episodes, min(seats - busy, waiting) more seats
    would be taken if environments answered at once: those are idle. The share is the integral over time of idle seats
    by that of idle and busy ones: 0 if engines are full whatever waits, 1/2 if they decode half as many as they could.
    """

    def __init__(self) -> None:
        self._busy_s = self._idle_s = 0.0
        self._since, self._busy, self._idle = time.monotonic(), 0, 0

    def note(self, busy: int, seats: int, waiting: int) -> None:
        """Note how it is from now on; to be called at every change."""
        now = time.monotonic()
        self._busy_s += self._busy * (now - self._since)
        self._idle_s += self._idle * (now - self._since)
        self._since, self._busy = now, min(busy, seats)
        self._idle = min(seats - self._busy, waiting)

    def take_share(self) -> float:
        """The share since it was taken last; 0 if nothing was sampled and nothing waited."""
        self.note(self._busy, self._busy + self._idle, self._idle)
        both, idle_s = self._busy_s + self._idle_s, self._idle_s
        self._busy_s = self._idle_s = 0.0
        return idle_s / both if both else 0.0


class PhaseTimer:
    """Names, times and bounds waits: `await clock("a full batch", ledger.take(), deadline_s)`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.step_started = time.monotonic()
        self.started = time.monotonic()
        self.before_s = 0.0
        """training time of earlier launches of this run"""
        self.patience = AdaptiveDeadline()

    async def __call__(self, name: str, wait: Awaitable[Result], deadline_s: float | None = None) -> Result:
        """Await `wait`; raises DeadlineExceeded with the name. Calls to ranks bring their own deadline (pass None).

        deadline_s: upper limit; once a wait of this name has ended, `AdaptiveDeadline` may shorten it.
        """
        watchdog.phase(name)
        begin = time.monotonic()
        try:
            patience_s = None if deadline_s is None else self.patience(name, deadline_s)
            result = await asyncio.wait_for(wait, patience_s)
            self.patience.took(name, time.monotonic() - begin)
            return result
        except TimeoutError as error:
            if deadline_s is None or patience_s is None:
                raise
            raise DeadlineExceeded("controller", name, "the other ranks", patience_s, deadline_s) from error
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - begin

    def nothing(self) -> asyncio.Future[None]:
        """A future that is already done."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.set_result(None)
        return future

    def close_step(self) -> dict[str, float]:
        """Seconds by name since the last call, with "step" for the whole; starts the next step's account."""
        now = time.monotonic()
        account = {**self.seconds, "step": now - self.step_started}
        self.seconds, self.step_started = {}, now
        return account

    @property
    def since_step_s(self) -> float:
        """Seconds since the last step ended."""
        return time.monotonic() - self.step_started

    @property
    def total_s(self) -> float:
        """Training time of this run over all launches."""
        return self.before_s + time.monotonic() - self.started
