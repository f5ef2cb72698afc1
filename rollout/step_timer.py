"""Measures how long decode steps take, and when tokens arrive again after a weight update."""

from __future__ import annotations

import asyncio
import statistics
from collections import deque

REMEMBERED_STEPS = 200


class StepTimer:
    """Records the times of engine steps that produced tokens."""

    def __init__(self) -> None:
        self.last_s: float | None = None
        self.intervals_s: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._next: asyncio.Future[float] | None = None

    def step(self, time_s: float) -> None:
        """Record that a step produced tokens at `time_s`."""
        if self.last_s is not None:
            self.intervals_s.append(time_s - self.last_s)
        self.last_s = time_s
        if self._next is not None and not self._next.done():
            self._next.set_result(time_s)

    def stop(self) -> None:
        """Record that no request runs: the time until the next step is not a decode interval."""
        self.last_s = None

    def median_s(self) -> float:
        """Median decode interval of the last 200 steps, seconds; 0 without any."""
        return statistics.median(self.intervals_s) if self.intervals_s else 0.0

    def next_step(self) -> asyncio.Future[float]:
        """Return a future of the time of the next step."""
        self._next = asyncio.get_running_loop().create_future()
        return self._next
