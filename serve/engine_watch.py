"""Notices an engine process that stands still: one that is stopped, waits for a lock for ever, or is lost in a step.

An engine that moves answers between two steps, ends steps, or takes processor time, as in a long step. Time is counted
in looks, so that a server that was itself stopped, or is late, takes no sound engine for a frozen one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator
from multiprocessing.process import BaseProcess

import psutil

from shared.launch import deaths

LOOK_EVERY_S = 1.0
QUIET_S = 20.0
"""an engine that neither answers nor computes for so long stands still"""
STEP_S = 600.0
"""so does one that computes for so long without the end of a step"""
COMPUTED_S = 0.5
"""processor time that shows that an engine computes"""
log = logging.getLogger("serve")


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
                why = deaths.how(code) + deaths.advice(code, "server's engine", 0, self._kills_before)
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
