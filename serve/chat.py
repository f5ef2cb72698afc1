"""POST /v1/chat/completions, streamed and not.

A request is admitted, gets its language and its prompt, and then as many responses as it asked for. A client that
leaves frees its tokens at once, in both modes.
What this does not do: sampling (generation.py), shapes of responses (replies.py). Who calls this: app.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.responses import Response as HttpResponse
from starlette.types import Receive, Scope, Send

from serve.engine import EngineDied, Sampling, TooLong
from serve.errors import FAULT, ApiError
from serve.generation import Plan, Response, generate
from serve.language import Source, choose, read_tag
from serve.reasoning import Piece
from serve.replies import DONE, PING, Reply, sse
from serve.schemas import ChatRequest
from serve.server import Seats, Server
from shared.errors import ModelError

router = APIRouter()
log = logging.getLogger("serve")
Result = TypeVar("Result")
EFFORTS = {"none": 0.0, "minimal": 0.02, "low": 0.1, "medium": 0.3, "high": 0.6}
"""reasoning_effort -> share of the model's context that thoughts may take; higher ones have no bound"""
LANGUAGE_HEADER = "x-reasoning-language"
LARGE = 20_000
"""characters of a conversation, from which on it is made into tokens beside the event loop"""
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
"""for the OpenAPI description: what else than JSON comes back"""


@router.post("/v1/chat/completions", response_model=None, responses=STREAMED)
async def chat_completions(body: ChatRequest, request: Request) -> HttpResponse:
    """One conversation in, one or more responses out."""
    server: Server = request.app.state.server
    server.check_model(body.model)
    seats = server.admit(body.n)
    try:
        # many words take long to become tokens: the responses under way must not wait for them
        large = sum(len(message.text) for message in body.messages) > LARGE
        plan = await asyncio.to_thread(make_plan, server, body, request) if large else make_plan(server, body, request)
        reply = Reply(server.name, body.reasoning_format or server.settings.reasoning_format, server.prompts.tags)
        if body.stream:
            return EventStream(stream(server, body, plan, reply), seats, headers(plan))
        responses = await unless_gone(request, gather(server, body, plan))
        seats.close()
        if plan.enforcement == "strict" and any(response.mismatch for response in responses):
            raise mismatch(responses, plan)
        return JSONResponse(reply.whole(responses, plan, len(plan.prompt_ids), body.logprobs), headers=headers(plan))
    except BaseException:
        seats.close()
        raise


class EventStream(StreamingResponse):
    """Server-sent events. However the response ends, even before its first byte, they are ended and the seats free."""

    def __init__(self, events: AsyncGenerator[bytes, None], seats: Seats, headers: dict[str, str]):
        no_buffer = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers={**no_buffer, **headers})
        self._events, self._seats = events, seats

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()
            self._seats.close()


def headers(plan: Plan) -> dict[str, str]:
    """Of a response: which language was asked of the model."""
    return {"X-Reasoning-Language": plan.choice.code} if plan.choice.code else {}


def make_plan(server: Server, body: ChatRequest, request: Request) -> Plan:
    """Language, prompt and sampling of a request. Raises ApiError."""
    settings = server.settings
    try:
        asked = read_tag(request.headers[LANGUAGE_HEADER]) if LANGUAGE_HEADER in request.headers else ""
    except ValueError as error:
        raise ApiError(400, str(error), code="invalid_value", param=LANGUAGE_HEADER) from error
    wishes: list[tuple[str, Source]] = [
        (body.reasoning_language or "", "body"), (asked, "header"), (settings.reasoning_language, "default"),
    ]  # fmt: skip
    turns = [message.text for message in body.messages if message.role == "user"]
    choice = choose(wishes, turns, request.headers.get("accept-language", ""), settings.fallback_language)
    try:
        prompt_ids = server.prompts.render(body.messages, choice.code)
    except ModelError as error:
        raise ApiError(400, f"this conversation does not fit the model's form: {error}", param="messages") from error
    room = server.max_tokens - len(prompt_ids)
    if room < 1:
        raise ApiError(
            400, f"the conversation has {len(prompt_ids)} tokens, the model's context {server.max_tokens}: shorten it",
            code="context_length_exceeded", param="messages",
        )  # fmt: skip
    sampling = Sampling(
        max_tokens=min(body.most_tokens or room, room),
        temperature=settings.temperature if body.temperature is None else body.temperature,
        top_p=settings.top_p if body.top_p is None else body.top_p,
        top_k=max(body.top_k or 0, 0),
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        seed=body.seed,
        stop=body.stops,
        logprobs=body.top_logprobs if body.logprobs else None,
    )
    enforcement = body.reasoning_language_enforcement or settings.reasoning_language_enforcement
    return Plan(prompt_ids, sampling, choice, enforcement, thinking_budget(body, server.max_tokens))


def thinking_budget(body: ChatRequest, max_tokens: int) -> int | None:
    """Tokens of thought that a request allows, by number or by word (a share of the model's context); None for all."""
    if body.thinking_token_budget is not None:
        return body.thinking_token_budget
    share = EFFORTS.get(body.reasoning_effort or "")
    return None if share is None else round(share * max_tokens)


async def one(server: Server, plan: Plan, index: int) -> Response:
    """One whole response. Raises ApiError."""
    response = Response()
    async with contextlib.aclosing(pieces(server, plan, index, response)) as stream:
        async for _ in stream:
            pass
    return response


async def gather(server: Server, body: ChatRequest, plan: Plan) -> list[Response]:
    """All responses of a request, at the same time."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(server, plan, index)) for index in range(body.n)]
    return [task.result() for task in tasks]


async def pieces(server: Server, plan: Plan, index: int, response: Response) -> AsyncGenerator[Piece, None]:
    """The pieces of one response; what goes wrong in the engine becomes an ApiError."""
    try:
        async with contextlib.aclosing(generate(server.engine, server.prompts, plan.of(index), response)) as found:
            async for piece in found:
                yield piece
    except EngineDied as error:
        raise ApiError(503, "the engine died and is started again: try again", code="engine_restarting",
                       retry_after_s=5) from error  # fmt: skip
    except TooLong as error:
        raise ApiError(400, str(error), code="context_length_exceeded", param="messages") from error


async def stream(server: Server, body: ChatRequest, plan: Plan, reply: Reply) -> AsyncGenerator[bytes, None]:
    """Server-sent events of a request; an error in the middle is an event of its own."""
    queue: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=64)  # a slow client holds its own request back only
    responses = [Response() for _ in range(body.n)]

    async def feed(index: int) -> None:
        response = responses[index]
        await queue.put(reply.first(index))
        async with contextlib.aclosing(pieces(server, plan, index, response)) as found:
            async for piece in found:
                if event := reply.piece(index, piece):
                    await queue.put(event)
        if plan.enforcement == "strict" and response.mismatch:
            raise mismatch([response], plan)
        await queue.put(reply.last(index, response, plan))

    async def work() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for index in range(body.n):
                    group.create_task(feed(index))
            if body.stream_options is not None and body.stream_options.include_usage:
                await queue.put(reply.usage_event(responses, len(plan.prompt_ids)))
        except* ApiError as errors:
            first = errors.exceptions[0]
            assert isinstance(first, ApiError)
            await queue.put(sse(first.body()))
        except* Exception as errors:  # our fault; the client must not wait for more
            log.exception("a streamed response failed", exc_info=errors)
            await queue.put(sse(FAULT.body()))
        await queue.put(DONE)
        await queue.put(None)

    task = asyncio.create_task(work(), name="stream")
    try:
        while True:
            try:
                async with asyncio.timeout(server.settings.ping_s):
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


def mismatch(responses: list[Response], plan: Plan) -> ApiError:
    """The error of strict enforcement."""
    found = next(response.measured for response in responses if response.mismatch)
    assert found is not None
    parts = (("thoughts", found.thoughts), ("answer", found.answer))
    was = ", ".join(f"{name} {part.share:.0%} {part.language or 'undetermined'}" for name, part in parts)
    return ApiError(422, f"not in {plan.choice.code} in any try: {was}", code="reasoning_language_mismatch")


async def unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`; cancels it when the client leaves (a framework would let it go on)."""
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
