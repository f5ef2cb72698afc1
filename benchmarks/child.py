"""An object in a process of its own, called by the name of its methods; it can be stopped while another is measured.

    with Child(RawOffline, model_dir) as raw:
        seconds = await raw("run", requests)

Standard library's process pool of one process carries arguments and results; the process ends with this one.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing import get_context
from typing import Any, Self

import psutil

from shared.errors import RunError
from shared.launch.watchdog import die_with_parent

STOP_S = 1.0
END_S = 10.0
"""a process that was told to end has so long"""
_made: list[Any] = []


def _make(make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    die_with_parent()
    _made.append(make(*arguments))


def _ask(method: str, arguments: tuple[Any, ...]) -> Any:
    return getattr(_made[0], method)(*arguments)


def family(pid: int) -> list[psutil.Process]:
    """Return a process and all below it, the youngest first."""
    top = psutil.Process(pid)
    return [*reversed(top.children(recursive=True)), top]


def suspend(pid: int) -> None:
    """SIGSTOP for a process and all below it, and wait until they stand: they take no processor time until `resume`."""
    stopped = family(pid)
    for process in stopped:
        process.suspend()
    end = time.monotonic() + STOP_S
    while any(process.status() != psutil.STATUS_STOPPED for process in stopped) and time.monotonic() < end:
        time.sleep(0.001)


def resume(pid: int) -> None:
    """SIGCONT for a process and all below it."""
    for process in reversed(family(pid)):
        process.resume()


def end(pid: int) -> None:
    """Wait a while for a process of ours to end, then kill it with all below it."""
    try:
        every = family(pid)
    except psutil.NoSuchProcess:
        return
    _, left = psutil.wait_procs(every[-1:], END_S)
    for process in every if left else []:
        with suppress(psutil.NoSuchProcess):
            process.kill()


class Child:
    """`make(*arguments)` in another process; it must have a method `close`."""

    def __init__(self, make: Callable[..., Any], *arguments: Any, deadline_s: float = 60.0):
        """deadline_s: of every call."""
        self.name, self.deadline_s, self.pid = make.__name__, deadline_s, 0
        self.pool = ProcessPoolExecutor(1, get_context("spawn"), _make, (make, arguments))

    async def __call__(self, method: str, *arguments: Any) -> Any:
        """Return what the method returned there. Raises RunError if it raised, or is late."""
        try:
            async with asyncio.timeout(self.deadline_s):
                if not self.pid:
                    self.pid = await asyncio.wrap_future(self.pool.submit(os.getpid))
                return await asyncio.wrap_future(self.pool.submit(_ask, method, arguments))
        except TimeoutError:
            raise RunError(f"{self.name}.{method} did not answer within {self.deadline_s:.0f} s") from None
        except BrokenProcessPool:
            raise RunError(f"the process of {self.name} ended in {method}; its own messages stand above") from None
        except Exception as error:
            raise RunError(f"{self.name}.{method} failed:\n{error.__cause__}") from error

    def suspend(self) -> None:
        """Stop it, and all below it."""
        suspend(self.pid)

    def resume(self) -> None:
        """Let it go on."""
        resume(self.pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the process, stopped or not."""
        try:
            if self.pid:
                self.resume()
                self.pool.submit(_ask, "close", ()).result(END_S)
        except (BrokenProcessPool, TimeoutError, psutil.NoSuchProcess):
            pass  # it has ended by itself, or is killed now
        self.pool.shutdown(wait=False)
        if self.pid:
            end(self.pid)
