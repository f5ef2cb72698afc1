"""A queue for many small items, which arrive one by one and are taken all at once.

A task that takes what has gathered meanwhile wakes once, not for each of a thousand messages a second.
"""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

Item = TypeVar("Item")


class BatchQueue(Generic[Item]):
    """Queue of one event loop with one consumer, which takes all items at once."""

    def __init__(self) -> None:
        self._items: list[Item] = []
        self._arrived = asyncio.Event()

    def put(self, item: Item) -> None:
        """Add an item; never waits."""
        self._items.append(item)
        self._arrived.set()

    async def take(self) -> list[Item]:
        """Wait until there is an item. Returns all items, in order of arrival."""
        await self._arrived.wait()
        self._arrived.clear()
        items, self._items = self._items, []
        return items

    def __len__(self) -> int:
        return len(self._items)
