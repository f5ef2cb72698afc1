"""POST /v1/chat/completions, streamed or not, and its control endpoint for "answer now".

A request is admitted, gets its language and its prompt, and then as many responses as it asked for. When a client
disconnects, its completions are aborted at once, in both modes.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from fastapi.responses import Response as HttpResponse

from serve.api.base import Parameters
from serve.api.bounds import IN_CHATS, Names, check_tokens, most_tokens
from serve.api.errors import ApiError
from serve.api.gate import ChatClient
from serve.api.replies import DONE, Reply, logprobs, sse
from serve.api.schemas import ChatRequest
from serve.api.streams import STREAMED, EventStream, apart, merge, together, unless_gone
from serve.engine import EngineDied, Refused
from serve.keys.ring import Client
from serve.response.generation import Plan, Response, generate
from serve.response.language import Choice, Source, choose, read_tag
from serve.response.reasoning import Piece
from serve.response.tools import Call, tell_form
from serve.server import Server
from serve.suspects import Guilty
from shared.errors import ModelError

router = APIRouter()
EFFORTS = {"none": 0.0, "minimal": 0.02, "low": 0.1, "medium": 0.3, "high": 0.6}
"""reasoning_effort -> share of the model's context that thoughts may take; higher efforts have no bound"""
LANGUAGE_HEADER = "x-reasoning-language"
MOST_CALLS = 32


@router.post("/v1/chat/completions", response_model=None, responses=STREAMED)
async def chat_completions(body: ChatRequest, request: Request, client: ChatClient) -> HttpResponse:
    """Sample one or more responses to a conversation."""
    server: Server = request.app.state.server
    server.check_model(body.model)
    seats = server.admit(body.n, client)
    try:
        plan = await apart(body.characters, make_plan, server, body, request, client)
        form = body.reasoning_format or server.settings.reasoning_format if body.include_reasoning else "hidden"
        reply = Reply(server.name, form, server.prompts.tags)
        if body.stream:
            return EventStream(stream(server, body, plan, reply, client), seats, headers(plan))
        responses = await unless_gone(request, together([one(server, plan, index) for index in range(body.n)]))
        seats.close()
        if plan.enforcement == "strict" and any(response.mismatch for response in responses):
            raise mismatch(responses, plan)
        return JSONResponse(reply.whole(responses, plan, len(plan.prompt_ids), body.logprobs), headers=headers(plan))
    except BaseException:
        seats.close()
        raise


class Control(Parameters):
    """The body of POST /v1/chat/completions/control."""

    id: str
    """of a response that is being streamed"""
    action: Literal["reasoning_end"]
    """reasoning_end: the thoughts end now, with a phrase, and the answer follows"""


@router.post("/v1/chat/completions/control")
async def control(body: Control, request: Request, client: ChatClient) -> dict[str, int]:
    """ "Answer now": end the thoughts of a response under way. Returns of how many choices."""
    server: Server = request.app.state.server
    owner, responses = server.live.get(body.id, (None, []))
    if owner is not client:
        raise ApiError(404, f"no response {body.id[:60]} is being streamed", code="not_found", param="id")
    thinking = [response for response in responses if not response.answer and not response.finish_reason]
    for response in thinking:
        response.hurry = True
    return {"ended": len(thinking)}


def headers(plan: Plan) -> dict[str, str]:
    """Return the headers of a response: the language that was requested of the model."""
    return {"X-Reasoning-Language": plan.choice.code} if plan.choice.code else {}


def render(
    server: Server, body: ChatRequest, request: Request, client: Client, names: Names = IN_CHATS
) -> tuple[Choice, list[int]]:
    """Return the language of a response and its [prompt_tokens]. Raises ApiError."""
    settings = server.settings
    try:
        asked = read_tag(request.headers[LANGUAGE_HEADER]) if LANGUAGE_HEADER in request.headers else ""
    except ValueError as error:
        raise ApiError(400, str(error), code="invalid_value", param=LANGUAGE_HEADER) from error
    wishes: list[tuple[str, Source]] = [
        (body.reasoning_language or "", "body"), (asked, "header"), (client.language, "key"),
        (settings.reasoning_language, "default"),
    ]  # fmt: skip
    turns = [message.text for message in body.messages if message.role == "user"]
    choice = choose(wishes, turns, request.headers.get("accept-language", ""), settings.fallback_language)
    try:
        return choice, server.prompts.render(body.messages, choice.code, tell_form(body.offered, body.constraint))
    except ModelError as error:
        raise ApiError(400, f"this conversation does not fit the model's form: {error}", param=names.prompt) from error


def make_plan(server: Server, body: ChatRequest, request: Request, client: Client, names: Names = IN_CHATS) -> Plan:
    """Return the language, prompt and sampling of a request. names: of its fields. Raises ApiError."""
    settings, constraint = server.settings, body.constraint
    server.check_size(body.characters, names.prompt)
    check_tokens(server, body)
    choice, prompt_ids = render(server, body, request, client, names)
    asked = [(names.most, body.max_tokens), (names.newer, body.max_completion_tokens)]
    most = most_tokens(server, body, asked, prompt_ids, names.prompt)
    ranked = body.top_logprobs if body.logprobs else None
    sampling = replace(body.sampling(settings.temperature, settings.top_p, most, ranked), constraint=constraint)
    enforcement = body.reasoning_language_enforcement or settings.reasoning_language_enforcement
    budget = thinking_budget(body, server.max_tokens)
    if constraint is not None and budget is None:
        budget = most // 2  # what must have a form must also have room
    server.meters.count_tokens(len(prompt_ids), 0, 0)
    tools = frozenset(tool.function.name for tool in body.offered)
    return Plan(prompt_ids, sampling, choice, enforcement, budget, tools, MOST_CALLS if body.parallel_tool_calls else 1)


def thinking_budget(body: ChatRequest, max_tokens: int) -> int | None:
    """Return how many tokens of thought a request allows, by number or by effort (a share of `max_tokens`); None for
    no limit."""
    if body.thinking_token_budget is not None:
        return body.thinking_token_budget
    share = EFFORTS.get(body.reasoning_effort or "")
    return None if share is None else round(share * max_tokens)


async def one(server: Server, plan: Plan, index: int) -> Response:
    """Sample one complete response. Raises ApiError."""
    response = Response()
    async with contextlib.aclosing(pieces(server, plan, index, response)) as found:
        async for _ in found:
            pass
    return response


async def pieces(server: Server, plan: Plan, index: int, response: Response) -> AsyncGenerator[Piece | Call, None]:
    """Yield the pieces of one response. Raises ApiError, also for errors of the engine."""
    try:
        with told_as_errors():
            async with contextlib.aclosing(generate(server.engine, server.prompts, plan.of(index), response)) as found:
                async for piece in found:
                    yield piece
    finally:
        server.meters.count_response(response, plan)


@contextlib.contextmanager
def told_as_errors() -> Iterator[None]:
    """Context manager that turns errors of the engine into ApiError."""
    try:
        yield
    except EngineDied as error:
        message = "the engine died and is started again: try again"
        raise ApiError(503, message, code="engine_restarting", retry_after_s=5) from error
    except Guilty as error:
        raise ApiError(500, str(error), code="engine_killed", retry=False) from error
    except Refused as error:
        raise ApiError(400, str(error).splitlines()[0][:300], code="invalid_value") from error


async def stream(
    server: Server, body: ChatRequest, plan: Plan, reply: Reply, client: Client
) -> AsyncGenerator[bytes, None]:
    """Yield the server-sent events of a request; an error in the middle is an event of its own."""
    responses = [Response() for _ in range(body.n)]

    async def feed(index: int) -> AsyncGenerator[bytes, None]:
        response, told = responses[index], 0

        def ranked() -> dict[str, Any] | None:
            nonlocal told
            new, told = response.logprobs[told:], len(response.logprobs)
            return logprobs(new) if new else None

        yield reply.first(index)
        async with contextlib.aclosing(pieces(server, plan, index, response)) as found:
            async for piece in found:
                if isinstance(piece, Call):
                    yield reply.call(index, len(response.calls) - 1, piece)
                else:
                    yield reply.piece(index, piece, ranked())
        if plan.enforcement == "strict" and response.mismatch:
            raise mismatch([response], plan)
        yield reply.last(index, response, plan, ranked())

    def last() -> bytes:
        wanted = body.stream_options is not None and body.stream_options.include_usage
        return (reply.usage_event(responses, len(plan.prompt_ids)) if wanted else b"") + DONE

    server.live[reply.id] = (client, responses)
    feeds = [feed(index) for index in range(body.n)]
    try:
        events = merge(feeds, server.settings.ping_s, last=last, failed=lambda error: sse(error.body()) + DONE)
        async with contextlib.aclosing(events):
            async for event in events:
                yield event
    finally:
        del server.live[reply.id]


def mismatch(responses: list[Response], plan: Plan) -> ApiError:
    """Return the error of strict enforcement, with the languages that were measured."""
    found = next(response.measured for response in responses if response.mismatch)
    assert found is not None
    parts = (("thoughts", found.thoughts), ("answer", found.answer))
    was = ", ".join(f"{name} {part.share:.0%} {part.language or 'undetermined'}" for name, part in parts)
    return ApiError(422, f"not in {plan.choice.code} in any try: {was}", code="reasoning_language_mismatch")
