"""The state of a server process: engine, prompts and admission; with the watch that restarts a dead engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path

from serve.api.errors import ApiError
from serve.api.meters import Meters
from serve.engine import Engine
from serve.keys.ring import Client
from serve.response.generation import Response
from serve.response.prompt import Prompts
from serve.settings import Settings
from shared.errors import MaestraleError

LOOK_EVERY_S = 0.25
RESTARTS_IN_A_ROW = 5
log = logging.getLogger("serve")


class Seats:
    """The places that the completions of one request occupy until `close`."""

    def __init__(self, server: Server, client: Client, count: int):
        self._server, self._client, self._count = server, client, count
        server.taken += count
        client.taken += count

    def close(self) -> None:
        """Give the places back; has no effect a second time."""
        self._server.taken -= self._count
        self._client.taken -= self._count
        self._count = 0


class Server:
    """Serves one model: its engine, its prompts, and the requests that are admitted."""

    def __init__(self, settings: Settings, engine: Engine, prompts: Prompts, max_tokens: int):
        self.settings, self.engine, self.prompts, self.max_tokens = settings, engine, prompts, max_tokens
        self.meters = Meters()
        self.name = settings.name or model_name(Path(settings.model))
        self.ready = self.draining = False
        self.failure: MaestraleError | None = None
        """the error with which the engine failed to start, if it did"""
        self.taken = 0
        """number of completions that are admitted and have not ended"""
        self.live: dict[str, tuple[Client, list[Response]]] = {}
        """id -> the client and the choices of a response that is being streamed"""
        self.restarts = self.reloads = 0
        self.meters.watch(self)
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the engine and its watch. Raises ModelError."""
        try:
            await self.engine.start()
        except MaestraleError as error:
            self.failure = error
            raise
        self.ready = True
        self._watch = asyncio.create_task(self._keep_alive(), name="engine watch")

    async def _keep_alive(self) -> None:
        """Restart the engine whenever it dies, until restarts fail too often in a row."""
        failed = 0
        while failed < RESTARTS_IN_A_ROW:
            await asyncio.sleep(LOOK_EVERY_S)
            if await self.engine.is_alive():
                continue
            self.ready = False
            log.error("the engine died; starting it again")
            try:
                await self.engine.restart()
            except Exception:  # whatever it is, it is logged, and the next try may go better
                failed += 1
                log.exception("the engine did not start (%d of %d)", failed, RESTARTS_IN_A_ROW)
                await asyncio.sleep(failed)
                continue
            failed = 0
            self.restarts += 1
            self.ready = True
        log.critical("the engine does not start: this server stays not ready")
        await self.engine.stop()

    def check_model(self, asked: str) -> None:
        """Raises ApiError for any model but the one that is served; "" means this one."""
        if asked not in ("", self.name):
            raise ApiError(
                404,
                f'there is no model "{asked[:100]}" here, only "{self.name}"',
                code="model_not_found",
                param="model",
            )

    def admit(self, count: int, client: Client) -> Seats:
        """Take places for `count` completions. Raises ApiError before any work is done: 400 for more than ever fit, 503
        if none are free, 429 if the client has used up its own."""
        most = self.settings.max_sequences + self.settings.queue
        if count > most:
            message = f"{count} completions in one request, of {most} that fit here"
            raise ApiError(400, message, code="too_many", param="n")
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="draining", retry_after_s=10)
        if not self.ready:
            raise ApiError(503, "the engine is starting: try again", code="engine_starting", retry_after_s=5)
        if self.taken + count > most:
            raise ApiError(
                503, f"{self.taken} completions are running or waiting: try again", code="server_overloaded",
                retry_after_s=2,
            )  # fmt: skip
        client.check(count)
        return Seats(self, client, count)

    def check_size(self, characters: int, param: str) -> None:
        """Raises ApiError for a text that cannot fit the context, before it is tokenised."""
        if characters > self.max_tokens * self.prompts.longest:
            raise ApiError(
                400, f"{characters} characters do not fit the model's context of {self.max_tokens} tokens: shorten it",
                code="context_length_exceeded", param=param,
            )  # fmt: skip

    def room_for(self, prompt_ids: Sequence[int], param: str) -> int:
        """Return how many tokens a completion of this prompt may have. Raises ApiError if there is no room for any."""
        room = self.max_tokens - len(prompt_ids)
        if room < 1:
            raise ApiError(
                400, f"the prompt has {len(prompt_ids)} tokens, the model's context {self.max_tokens}: shorten it",
                code="context_length_exceeded", param=param,
            )  # fmt: skip
        return room

    async def drain(self) -> None:
        """Admit no more requests, and wait for those under way, for at most `drain_s` seconds."""
        self.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.settings.drain_s):
                while self.taken:
                    await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """Stop the watch and the engine."""
        self.ready = False
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await self.engine.stop()


def model_name(folder: Path) -> str:
    """Return the name of a model: the run's name for an export of a run, else the folder's."""
    folder = Path(folder).absolute()
    run = folder.parent if folder.name in ("latest", "best") else folder.parent.parent
    is_export = folder.name in ("latest", "best") or folder.parent.name == "hf"
    return run.name if is_export else folder.name
