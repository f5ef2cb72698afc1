"""A rollout worker without a launch: its connection to the controller is a queue in the same process."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rollout.worker import Worker
from shared.messages import Done, Generate, Message, ToEngine


@dataclass(frozen=True)
class Place:
    """The attributes of a rank that its worker reads."""

    device: torch.device
    store: dist.Store
    rank: int = 0
    rank_in_role: int = 0


class Line:
    """Connects a worker to a controller in the same process."""

    def __init__(self, on_event: Callable[[Message], None]):
        self.on_event = on_event
        self._asked: asyncio.Queue[tuple[int, ToEngine]] = asyncio.Queue()
        self._answers: dict[int, asyncio.Future[Message]] = {}
        self._serial = itertools.count(1)

    def ask(self, message: ToEngine) -> asyncio.Future[Message]:
        """Hand a call to the worker. Returns a future of its answer."""
        number = next(self._serial)
        self._answers[number] = asyncio.get_running_loop().create_future()
        self._asked.put_nowait((number, message))
        return self._answers[number]

    async def calls(self) -> AsyncIterator[tuple[int, ToEngine]]:
        """Yield (call id, message) of each call until cancelled."""
        while True:
            yield await self._asked.get()

    async def reply(self, call_id: int, message: Message) -> None:
        """Answer a call."""
        answer = self._answers.pop(call_id)
        if not answer.done():
            answer.set_result(message)

    async def event(self, message: Message) -> None:
        """Pass an event to `on_event`."""
        self.on_event(message)


class FolderWorker(Worker):
    """A worker whose engine may sample with the weights of its model folder."""

    async def handle(self, message: ToEngine) -> Message:
        """Carry out one call and return its reply."""
        if isinstance(message, Generate):
            await self.operate("taking requests", lambda: self.engine.generate(message.requests, message.hold))
            return Done()
        return await super().handle(message)
