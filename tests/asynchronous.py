"""Asynchronous tests: `@asynchronous` before `async def test_...`."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

GUARD_S = 240.0
"""seconds after which an asynchronous test hangs"""
Parameters = ParamSpec("Parameters")


def asynchronous(work: Callable[Parameters, Coroutine[Any, Any, None]]) -> Callable[Parameters, None]:
    """Run a test in an event loop of its own; fixtures and parameters are given as to any other."""

    @functools.wraps(work)
    def test(*arguments: Parameters.args, **named: Parameters.kwargs) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(GUARD_S):
                await work(*arguments, **named)

        asyncio.run(bounded())

    return test
