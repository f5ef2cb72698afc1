"""The connection between a client and one rank of the same process, in the place of sockets (rpc.py)."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from shared.errors import DeadlineExceeded
from shared.launch.batch_queue import BatchQueue
from shared.launch.calls import CallReply, CallRequest, Result
from shared.launch.messages import Message, RankFailed
from shared.launch.rpc import failure, raise_failure


class LocalConnection:
    """Both ends of the connection; nothing is encoded. The rank takes `calls` and sends answers and events (engines),
    or has its calls carried out by `serve` (trainers, whose methods block)."""

    def __init__(self, rank_name: str):
        """rank_name: for messages to people."""
        self.rank_name = rank_name
        self.events: BatchQueue[tuple[int, Message]] = BatchQueue()
        self._asked: asyncio.Queue[tuple[int, CallRequest[Any]]] = asyncio.Queue()
        self._answers: dict[int, asyncio.Future[Message | CallReply[Any]]] = {}
        self._serial = itertools.count(1)

    # ---- the client --------------------------------------------------------------------------------------------------

    def name(self, rank: int) -> str:
        """The rank's name for people."""
        return self.rank_name

    async def post(self, rank: int, request: CallRequest[Any]) -> None:
        """Call the rank without waiting for its answer."""
        self._asked.put_nowait((0, request))

    async def call_all(
        self, requests: Mapping[int, CallRequest[Result]], deadline_s: float, excused: Callable[[], set[int]] = set
    ) -> list[Result]:
        """Call the rank and wait for its answer. Raises what the call raises, and DeadlineExceeded, which is not raised
        while the rank is excused."""
        [request] = requests.values()
        number = next(self._serial)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self._asked.put_nowait((number, request))
        while not (await asyncio.wait({answer}, timeout=deadline_s))[0]:
            if not excused():
                raise DeadlineExceeded("this process", request.phase, self.rank_name, deadline_s)
        reply = answer.result()
        if isinstance(reply, RankFailed):
            raise_failure(self.rank_name, reply)
        assert isinstance(reply, CallReply)
        return [reply.value]

    # ---- the rank ----------------------------------------------------------------------------------------------------

    async def calls(self, rank_class: type) -> AsyncIterator[tuple[int, CallRequest[Any]]]:
        """Yield (call id, call) of each call until the last."""
        while True:
            call_id, request = await self._asked.get()
            yield call_id, request
            if request.call.last:
                return

    async def send(self, call_id: int, message: Message | CallReply[Any]) -> None:
        """Answer a call, or with id 0 send an event."""
        if call_id == 0:
            assert isinstance(message, Message)
            self.events.put((0, message))
        elif (answer := self._answers.pop(call_id)) and not answer.done():
            answer.set_result(message)

    async def serve(self, rank: object) -> None:
        """Carry out the calls in a thread, one after the other, until the last; an error is an answer, too."""
        loop, thread = asyncio.get_running_loop(), ThreadPoolExecutor(1, self.rank_name)
        try:
            async for call_id, request in self.calls(type(rank)):
                try:
                    reply: Message | CallReply[Any] = CallReply(await loop.run_in_executor(thread, request.run, rank))
                except Exception as error:  # noqa: BLE001 - raised where the answer is waited for
                    reply = failure(error)
                if call_id:
                    await self.send(call_id, reply)
        finally:
            thread.shutdown(wait=False, cancel_futures=True)
