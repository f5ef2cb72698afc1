"""How long an event loop was held: the longest gap between two turns of a task that wakes every 10 ms."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator


class Gaps:
    """Filled when the block ends."""

    longest_s = 0.0


@contextlib.asynccontextmanager
async def watched() -> AsyncIterator[Gaps]:
    """Watch the loop that runs the block."""
    gaps = Gaps()

    async def tick() -> None:
        while True:
            start = time.perf_counter()
            await asyncio.sleep(0.01)
            gaps.longest_s = max(gaps.longest_s, time.perf_counter() - start)

    ticker = asyncio.ensure_future(tick())
    try:
        yield gaps
    finally:
        await asyncio.sleep(0)  # a turn that came late is counted as well
        ticker.cancel()
