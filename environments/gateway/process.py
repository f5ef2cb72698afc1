"""The gateway's process: receives the requests of agents, and answers each when the run has sampled its turn.

It runs as a `Child` (shared/child_process.py) of the process whose environments need it.

    POST /v1/chat/completions     OpenAI's chat, one request at a time
    POST /inference/v1/generate   token ids in and out, as vLLM 0.32 has it
    POST /v1/reward               {"reward": 1.0, "solved": true}: the episode is over

The key of a request says to which episode it belongs. Nothing is sampled here: a request waits until the other side
gives its turn or closes its episode. Weight updates and new engines are out of its sight.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from environments.gateway.connections import NO_KEY, Connections, protocol_of, read_key
from environments.gateway.messages import (
    ChatAsked,
    ClientLeft,
    FromGateway,
    RewardReported,
    StrangersRefused,
    TokensAsked,
    TurnGiven,
)
from environments.gateway.wire import (
    GatewayRefusal,
    Json,
    chat_events,
    chat_object,
    read_chat,
    read_object,
    read_tokens,
    tokens_object,
)
from shared.errors import ConfigError
from shared.http_limits import uvicorn_config
from shared.launch.calls import call
from shared.served import Served

BODY_BYTES = 8 << 20
"""largest body of a request"""
BODY_S = 30.0
"""seconds in which it must arrive"""
TOLD_S = 1.0
"""seconds between two counts of refused strangers"""
BACKLOG = 1024
"""connections that are accepted at a time"""
ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 408: "timeout_error"}


class Gateway(Served):
    """The episodes under way, and the request of each that waits for its turn."""

    events = FromGateway

    @call("listen", deadline=60.0)
    def begin(self, address: str) -> str:
        """Listen at an address, on a free port; returns the URL without a path. Raises ConfigError."""
        self.address, self.numbers = address, itertools.count()
        self.connections = Connections(self.is_open)
        self.waiting: dict[str, tuple[int, asyncio.Future[TurnGiven]] | None] = {}
        """key of an episode -> number of its request, and what it waits for"""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            self.listening = socket.create_server((address, 0), family=family, backlog=BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"environment.options.agent.address = {address!r}: nothing can listen there ({error.strerror or error})"
            ) from error
        host = f"[{address}]" if ":" in address else address
        return f"http://{host}:{self.listening.getsockname()[1]}"

    async def run(self) -> None:
        """Serve, and say now and then what strangers were refused."""
        config = uvicorn_config(
            create_app(self), self.address, 0, http=protocol_of(self.connections), log_level="warning", backlog=BACKLOG
        )
        telling = asyncio.create_task(self.tell_refused())
        await uvicorn.Server(config).serve([self.listening])
        telling.cancel()
        os._exit(0)  # a signal has ended it

    @call("open an episode", deadline=60.0)
    async def open(self, key: str) -> None:
        """An episode begins: requests with this key are its own."""
        self.waiting[key] = None

    @call("close an episode", deadline=60.0)
    async def close(self, key: str, reason: str) -> None:
        """An episode is over: its request that waits is refused, and its key is known no more."""
        self.connections.forget(key)
        if (asked := self.waiting.pop(key, None)) is not None and not asked[1].done():
            asked[1].set_exception(GatewayRefusal(reason, 409))

    @call("give a turn", deadline=60.0)
    async def give(self, turn: TurnGiven) -> None:
        """Answer the request of a turn, unless it waits no more."""
        waits = self.waiting.get(turn.key)
        if waits is not None and waits[0] == turn.number and not waits[1].done():
            waits[1].set_result(turn)

    def is_open(self, key: str) -> bool:
        """Whether this is the key of an episode under way."""
        return key in self.waiting

    def key(self, request: Request) -> str:
        """The key of a request. Raises GatewayRefusal 401 for one of no episode."""
        if not self.is_open(key := read_key(request.headers.get("authorization", ""))):
            raise GatewayRefusal(NO_KEY, 401)  # it was closed since
        return key

    async def ask(self, request: Request, key: str, make: Callable[[int], FromGateway]) -> TurnGiven:
        """The turn that the request asks for. make: the message that asks for it, from its number. Raises
        GatewayRefusal when the episode ends before, or has a request already."""
        if key not in self.waiting:
            raise GatewayRefusal("the episode is over", 409)
        if self.waiting[key] is not None:
            raise GatewayRefusal("another request of this episode waits: an episode is one sequence of turns, so ask "
                                 "one after the other")  # fmt: skip
        future: asyncio.Future[TurnGiven] = asyncio.get_running_loop().create_future()
        self.waiting[key] = number, _ = next(self.numbers), future
        self.say(make(number))
        gone: asyncio.Future[None] = asyncio.ensure_future(_until_gone(request))
        try:
            waits: list[asyncio.Future[Any]] = [future, gone]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if not future.done():
                self.say(ClientLeft(key))
                raise GatewayRefusal("the client left", 499)
            return future.result()
        finally:
            gone.cancel()
            if key in self.waiting:
                self.waiting[key] = None

    async def tell_refused(self) -> None:
        """Tell the other side now and then what strangers were refused."""
        while True:
            await asyncio.sleep(TOLD_S)
            if count := self.connections.refused:
                self.connections.refused = 0
                self.say(StrangersRefused(count))


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def read_body(request: Request) -> Json:
    """The JSON object of a request. Raises GatewayRefusal for one that is too large, too slow, or none. One that is too
    large is read on for a while and dropped: a client that is cut off while it sends would not read the answer."""
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream():
                size += len(chunk)
                if size > 8 * BODY_BYTES:
                    break
                body += chunk if size <= BODY_BYTES else b""
    except TimeoutError as error:
        raise GatewayRefusal(f"the body did not arrive within {BODY_S:g} s", 408) from error
    if size > BODY_BYTES:
        raise GatewayRefusal(f"the body has more than {BODY_BYTES} bytes", 413)
    return read_object(bytes(body))


def refuse(error: GatewayRefusal) -> JSONResponse:
    """The response to a request that is refused: OpenAI's error object. Its clients shall not ask again. The connection
    is closed, so that who has no key keeps none open."""
    kind = ERROR_TYPES.get(error.status, "invalid_request_error")
    content = {"error": {"message": str(error), "type": kind, "param": error.param, "code": None}}
    return JSONResponse(content, error.status, {"X-Should-Retry": "false", "Connection": "close"})


def create_app(gateway: Gateway) -> FastAPI:
    """The HTTP application."""
    app = FastAPI(title="Maestrale gateway", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)

    @app.exception_handler(GatewayRefusal)
    async def refused(request: Request, error: GatewayRefusal) -> JSONResponse:
        return refuse(error)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> JSONResponse:
        return refuse(
            GatewayRefusal(f"{request.method} {request.scope['path'][:200]}: {error.detail}", error.status_code)
        )

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        key = gateway.key(request)
        asked = read_chat(await read_body(request))
        turn = await gateway.ask(
            request, key, lambda number: ChatAsked(key, number, asked.messages, asked.tools, asked.most_calls)
        )
        head = {"id": f"chatcmpl-{turn.number}", "created": int(time.time()), "model": asked.model}
        if asked.stream:
            headers = {"Cache-Control": "no-store"}
            return Response(chat_events(head, turn), media_type="text/event-stream", headers=headers)
        return JSONResponse(chat_object(head, turn))

    @app.post("/inference/v1/generate")
    async def generate(request: Request) -> Response:
        key = gateway.key(request)
        asked = read_tokens(await read_body(request))
        turn = await gateway.ask(request, key, lambda number: TokensAsked(key, number, asked.token_ids))
        head = {"request_id": asked.request_id or f"generate-{turn.number}", "created": int(time.time())}
        return JSONResponse(tokens_object({**head, "model": asked.model}, len(asked.token_ids), turn))

    @app.post("/v1/reward")
    async def reward(request: Request) -> Response:
        key = gateway.key(request)
        body = await read_body(request)
        reward, solved = body.get("reward"), body.get("solved")
        if isinstance(reward, bool) or not isinstance(reward, (int, float)) or abs(reward) > 1e9:
            raise GatewayRefusal(f"reward: a number is needed, not {reward!r:.60}", param="reward")
        if not isinstance(solved, (bool, type(None))):
            raise GatewayRefusal(f"solved: true or false is needed, not {solved!r:.60}", param="solved")
        await gateway.ask(request, key, lambda number: RewardReported(key, number, float(reward), solved))
        return JSONResponse({"reward": float(reward)})

    return app
