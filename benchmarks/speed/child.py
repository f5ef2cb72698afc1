"""An object in a process of its own, called by the name of its methods; it can be stopped while another is measured.

    with Child(RawOffline, model_dir) as raw:
        seconds = await raw("run", requests)      # in a thread, so that the event loop turns

Arguments and results go through a pipe of multiprocessing. The process ends with this one, whatever happens.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import psutil

from shared.errors import RunError
from shared.watchdog import die_with_parent

STOP_S = 1.0
END_S = 10.0
"""a process that was told to end has so long"""


def be(pipe: Connection, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """The process: answers (method, arguments) with (True, what the method returned) or (False, its traceback)."""
    die_with_parent()
    side = make(*arguments)
    while (asked := pipe.recv()) is not None:
        method, given = asked
        try:
            answer = (True, getattr(side, method)(*given))
        except Exception:  # noqa: BLE001 - raised where it was called
            answer = (False, traceback.format_exc())
        pipe.send(answer)
    side.close()


def family(pid: int) -> list[psutil.Process]:
    """A process and all below it, the youngest first."""
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


def end(process: Any) -> None:
    """Wait a while for a process of multiprocessing to end, then kill it with all below it."""
    process.join(END_S)
    if process.is_alive():
        for one in family(process.pid):
            one.kill()
        process.join()


class Child:
    """`make(*arguments)` in another process; it must have a method `close`."""

    def __init__(self, make: Callable[..., Any], *arguments: Any, deadline_s: float = 60.0):
        """deadline_s: of every call."""
        context = multiprocessing.get_context("spawn")
        self.name, self.deadline_s = make.__name__, deadline_s
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=be, args=(theirs, make, arguments))
        self.process.start()
        theirs.close()

    def _call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        try:
            self.pipe.send((method, arguments))
            if not self.pipe.poll(self.deadline_s):
                raise RunError(f"{self.name}.{method} did not answer within {self.deadline_s:.0f} s")
            done, answer = self.pipe.recv()
        except (EOFError, ConnectionError):
            raise RunError(f"the process of {self.name} ended in {method}; its own messages stand above") from None
        if not done:
            raise RunError(f"{self.name}.{method} failed:\n{answer}")
        return answer

    async def __call__(self, method: str, *arguments: Any) -> Any:
        """What the method returned there. Raises RunError if it raised, or is late."""
        return await asyncio.to_thread(self._call, method, arguments)

    def suspend(self) -> None:
        """Stop it, and all below it."""
        suspend(self.process.pid or 0)

    def resume(self) -> None:
        """Let it go on."""
        resume(self.process.pid or 0)

    def close(self) -> None:
        """End the process."""
        if self.process.is_alive():
            self.resume()
            with suppress(ConnectionError):  # it may end by itself in this moment
                self.pipe.send(None)
        end(self.process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
