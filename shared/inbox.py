"""What arrives one by one and is taken all at once: a queue for many small things.

A task that waits for each of a thousand messages a second spends its time on waking up; one that takes what has
gathered meanwhile wakes once.
"""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Inbox(Generic[Item]):
    """Of one event loop, for one taker."""

    def __init__(self) -> None:
        self._items: list[Item] = []
        self._arrived = asyncio.Event()

    def put(self, item: Item) -> None:
        """Add one; never waits."""
        self._items.append(item)
        self._arrived.set()

    async def take(self) -> list[Item]:
        """Wait until there is something; all of it, in order of arrival."""
        await self._arrived.wait()
        self._arrived.clear()
        items, self._items = self._items, []
        return items

    def __len__(self) -> int:
        return len(self._items)
