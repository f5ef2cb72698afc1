"""Remembers what failed in a thread, a future or a task of the tests, where nobody asks for its result."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable
from typing import Any


class Failures:
    """The exceptions of threads, and those of futures and tasks until somebody asks for them."""

    def __init__(self, cut_off: Callable[[str], object]) -> None:
        """`cut_off` takes the name of a coroutine that still runs when the tests leave its event loop."""
        self.cut_off = cut_off
        self.errors: list[BaseException] = []
        self.futures: dict[int, tuple[Any, BaseException | None]] = {}

    def watch(self, source: str) -> None:
        """Listen to all that the tests may use: few use futures or tasks, whose import takes time."""
        threading.excepthook = lambda given: self._add(given.exc_value)
        runner, leave = os.getpid(), os._exit
        os._exit = lambda status: sys.exit(status) if os.getpid() == runner else leave(status)
        if "asyncio" in source:
            import asyncio

            loops, runners = vars(asyncio)["BaseEventLoop"], vars(asyncio)["runners"]
            cancel_all = runners._cancel_all_tasks

            def cancel_tasks(loop: asyncio.AbstractEventLoop) -> None:
                for task in asyncio.all_tasks(loop):
                    self.cut_off(getattr(task.get_coro(), "__name__", ""))
                cancel_all(loop)

            runners._cancel_all_tasks = cancel_tasks
            loops.default_exception_handler = lambda _, context: self._add(context.get("exception"))
        if "asyncio" in source or "futures" in source:
            self._watch_futures()

    def _watch_futures(self) -> None:
        from concurrent.futures import Future

        kind: Any = Future
        plain = kind.set_exception

        def set_exception(future: Any, error: BaseException | None) -> None:
            self.futures[id(future)] = future, error
            plain(future, error)

        def asking(ask: Callable[..., Any]) -> Callable[..., Any]:
            def asked(future: Any, timeout: float | None = None) -> Any:
                try:
                    return ask(future, timeout)
                finally:
                    if future.done():
                        self.futures.pop(id(future), None)

            return asked

        kind.set_exception, kind.result, kind.exception = set_exception, asking(kind.result), asking(kind.exception)

    def _add(self, error: BaseException | None) -> None:
        if error is not None:
            self.errors.append(error)

    def wait(self) -> list[BaseException]:
        """Return what nobody asked for, when all threads have ended."""
        threading._shutdown()  # type: ignore[attr-defined]
        gc.collect()  # a task that nobody asked says so now
        return self.errors + [error for _, error in self.futures.values() if error is not None]
