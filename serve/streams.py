"""Streams responses as server-sent events, and cancels work for clients that disconnect."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from serve.engine import CrashingRequest, EngineDied, EngineRefused
from serve.errors import FAULT, ApiError
from serve.request_log import current_id
from serve.server import AdmissionPermit

log = logging.getLogger("serve")
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
Json = dict[str, Any]
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
"""for the OpenAPI description: the media type of a response besides JSON"""
STALLED_S = 120.0
"""that a client may leave what was sent to it in the buffers of its connection"""
LARGE = 20_000
"""characters of a request above which `in_thread_if_long` works in a thread"""
Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


def sse(value: Json) -> bytes:
    """Encode a server-sent event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """Return the events that end a stream with an error."""
    return sse(error.body()) + DONE


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
    feeds: Sequence[AsyncGenerator[bytes, None]], ping_s: float, *, last: Callable[[], bytes],
    failed: Callable[[ApiError], bytes] = error_event,
) -> AsyncGenerator[bytes, None]:  # fmt: skip
    """Yield the events of all feeds as they come, then those of `last` or, if a feed raises, those of `failed`. After
    `ping_s` seconds without an event, a comment is sent."""
    queue: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=64)  # a slow client holds its own request back only

    async def drain(feed: AsyncGenerator[bytes, None]) -> None:
        async with contextlib.aclosing(feed) as events:
            async for event in events:
                if event:
                    await queue.put(event)

    async def work() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for feed in feeds:
                    group.create_task(drain(feed))
            await queue.put(last())
        except* ApiError as errors:
            first = errors.exceptions[0]
            assert isinstance(first, ApiError)
            await queue.put(failed(first))
        except* Exception as errors:  # our fault; the client must not wait for more
            log.exception("the streamed response of request %s failed", current_id(), exc_info=errors)
            await queue.put(failed(FAULT))
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


async def in_thread_if_long(
    characters: int, work: Callable[Arguments, Result], *arguments: Arguments.args, **named: Arguments.kwargs
) -> Result:
    """Return the result of `work`. Tokenising many characters takes long, and responses under way must not wait for it:
    in that case the work is done in a thread."""
    if characters > LARGE:
        return await asyncio.to_thread(work, *arguments, **named)
    return work(*arguments, **named)


async def exhaust(iterators: Iterable[AsyncGenerator[Any, None]]) -> None:
    """Run iterators concurrently to their ends, for what they do beside what they yield; one failure cancels the
    others."""

    async def run(iterator: AsyncGenerator[Any, None]) -> None:
        async with contextlib.aclosing(iterator) as found:
            async for _ in found:
                pass

    async with asyncio.TaskGroup() as group:
        for iterator in iterators:
            group.create_task(run(iterator))


@contextlib.contextmanager
def engine_errors() -> Iterator[None]:
    """Context manager that turns errors of the engine into ApiError."""
    try:
        yield
    except EngineDied as error:
        message = "the engine died and is started again: try again"
        raise ApiError(503, message, code="engine_restarting", retry_after_s=5) from error
    except CrashingRequest as error:
        raise ApiError(500, str(error), code="engine_killed", retry=False) from error
    except EngineRefused as error:
        raise ApiError(400, str(error).splitlines()[0][:300], code="invalid_value") from error


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
