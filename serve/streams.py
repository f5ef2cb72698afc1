"""Streams responses as server-sent events, and cancels work for clients that disconnect."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from serve.errors import FAULT, ApiError
from serve.metrics import current_id
from serve.server import AdmissionPermit

log = logging.getLogger("serve")
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
Json = dict[str, Any]
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
"""for the OpenAPI description: the media type of a response besides JSON"""
STALLED_S = 120.0
"""Seconds that a client may leave what was sent to it in the buffers of its connection."""
Result = TypeVar("Result")


def sse(value: Json) -> bytes:
    """Encode a server-sent event; its name is its type, if it has one."""
    name = f"event: {value['type']}\n".encode() if "type" in value else b""
    return name + b"data: " + msgspec.json.encode(value) + b"\n\n"


class EventStream(StreamingResponse):
    """A response of server-sent events. However it ends, even before its first byte, the iterator of its events and its
    permit are closed."""

    def __init__(self, events: AsyncGenerator[bytes, None], permit: AdmissionPermit, headers: dict[str, str]):
        no_buffer = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers={**no_buffer, **headers})
        self._events, self._permit = events, permit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events, then close their iterator and the permit; a client that takes nothing for STALLED_S seconds
        has left."""

        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(STALLED_S):
                await send(message)

        try:
            with contextlib.suppress(TimeoutError, ClientDisconnect):
                await super().__call__(scope, receive, send_in_time)
        finally:
            await self._events.aclose()
            self._permit.close()


async def merge(
    feeds: Sequence[AsyncGenerator[list[Json], None]], ping_s: float, *, last: Callable[[], list[Json]],
    failed: Callable[[ApiError], Json] = ApiError.body, done: bytes = DONE,
) -> AsyncGenerator[bytes, None]:  # fmt: skip
    """Yield the events of all feeds as they come, then those of `last` or, if a feed raises, that of `failed`, and then
    `done`. After `ping_s` seconds without an event, a comment is sent."""
    queue: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=64)  # a slow client holds its own request back only

    async def drain(feed: AsyncGenerator[list[Json], None]) -> None:
        async with contextlib.aclosing(feed) as parts:
            async for events in parts:
                if events:
                    await queue.put(b"".join(map(sse, events)))

    async def work() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for feed in feeds:
                    group.create_task(drain(feed))
            await queue.put(b"".join(map(sse, last())) + done)
        except* ApiError as errors:
            first = errors.exceptions[0]
            assert isinstance(first, ApiError)
            await queue.put(sse(failed(first)) + done)
        except* Exception as errors:  # our fault; the client must not wait for more
            log.exception("the streamed response of request %s failed", current_id(), exc_info=errors)
            await queue.put(sse(failed(FAULT)) + done)
        await queue.put(None)

    task = asyncio.create_task(work(), name="stream")
    try:
        while True:
            try:
                async with asyncio.timeout(ping_s):
                    events = [await queue.get()]
            except TimeoutError:
                events = [PING]
            while not queue.empty():  # what has come meanwhile goes out in one piece
                events.append(queue.get_nowait())
            yield b"".join(event for event in events if event is not None)
            if events[-1] is None:
                break
        await task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until_disconnect(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of `work`; cancels it when the client disconnects (a framework would let it go on)."""
    task = asyncio.ensure_future(work)

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    gone = asyncio.ensure_future(watch())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client left", code="client_closed_request")
        return task.result()
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    finally:
        for waiting in (task, gone):
            waiting.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
