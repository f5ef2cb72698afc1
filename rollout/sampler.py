"""Samples from one vLLM engine of this process: takes requests, returns completions, updates weights in place.

It is a rollout rank without a launch: the same worker (worker.py) that a launch runs keeps the engine alive. The engine
samples with the weights of its model folder until `follow` registers tensors of this process; from then on each
`update` copies their present values into the running engine.
"""

from __future__ import annotations

import os

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch reads it once, when it is imported

import asyncio
import signal
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from rollout.line import FolderWorker, Line, Place
from rollout.weights import Sender, make_sender
from rollout.weights.proof import compare_checksums
from shared.config import Config
from shared.errors import RunError
from shared.messages import (
    Attach,
    EngineRestarted,
    Failed,
    Finished,
    Generate,
    GenerateRequest,
    Message,
    Stop,
    ToEngine,
    Update,
    Updated,
)
from shared.types import Completion

QUEUE_FACTOR = 2
"""requests under way for every one that the engine decodes, so that the next is queued when one ends"""


class Sampler:
    """Runs one engine, hands it requests and weights, and returns its completions. Use as
    `async with Sampler(config, folder) as sampler: completions = await sampler.complete(requests)`."""

    def __init__(self, config: Config, model_dir: str, warn: Callable[[str], None] = lambda text: None):
        """config: model, rollout, sync, deadlines and seed are used. warn: called after the engine was replaced."""
        self.config, self.warn = config, warn
        on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
        self.tokens = 0
        """completion tokens of finished requests"""
        self.sender: Sender | None = None
        self.version = -1
        """version of the weights that were sent last; -1 for those of the model folder"""
        self._store = dist.HashStore()
        self._line = Line(self._take)
        self._worker = FolderWorker(self._line, config, Place(self.device, self._store), model_dir)
        self._work: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[Completion]] = {}
        """id() of a completion -> future of its end; the worker returns the same object"""
        self._room = asyncio.Condition()

    async def __aenter__(self) -> Sampler:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Start the engine process: blocks the event loop for some seconds. Raises ModelError, ConfigError."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C is this process's to handle
        try:
            self._work = asyncio.ensure_future(self._worker.run())
            await self._first(asyncio.ensure_future(self._worker.ready.wait()))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._work.add_done_callback(self._fail)

    async def close(self) -> None:
        """End the engine process and free the buffers. Safe to call whatever happened before."""
        if self._work is not None:
            if not self._work.done():
                self._line.ask(Stop())
            await asyncio.wait([self._work])
        if self.sender is not None:
            self.sender.close()
            self.sender = None

    # ---- sampling --------------------------------------------------------------------------------------------

    async def complete(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """Return the finished completions [requests] in the order of the requests, which are queued together.

        Waits while twice as many as the engine decodes at once are under way. Prompts must fit model.max_tokens.
        Raises what ended the engine for good: EngineLost, NonFinite, ConfigError.
        """
        async with self._room:
            await self._room.wait_for(lambda: len(self._waiting) < QUEUE_FACTOR * self.config.rollout.max_sequences)
            self._raise_if_over()
            ends = [self._expect(request.completion) for request in requests]
            self._line.ask(Generate(list(requests)))
        try:
            return list(await asyncio.gather(*ends))
        finally:
            for request in requests:
                self._waiting.pop(id(request.completion), None)
            async with self._room:
                self._room.notify_all()

    def _expect(self, completion: Completion) -> asyncio.Future[Completion]:
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting[id(completion)] = future
        return future

    def _take(self, message: Message) -> None:
        """Handle an event of the worker."""
        if isinstance(message, Finished):
            for completion in message.completions:
                self.tokens += len(completion.token_ids)
                future = self._waiting.pop(id(completion), None)
                if future is not None and not future.done():
                    future.set_result(completion)
        elif isinstance(message, EngineRestarted):
            self.warn(
                f"the engine died ({message.reason}) and was started again in {message.seconds:.1f} s; "
                f"{message.continued} completions continue"
            )

    # ---- weights ---------------------------------------------------------------------------------------------

    async def follow(self, named_parameters: list[tuple[str, torch.Tensor]]) -> None:
        """Register the tensors (all of the model, Hugging Face names, float32) that `update` copies into the engine.

        They must stay the same objects, changed in place: in host memory for an engine on the CPU, on its GPU
        otherwise (CUDA IPC). Raises RunError if the engine cannot open the buffers.
        """
        transport = "cuda_ipc" if self.device.type == "cuda" else "shm"
        self.sender = make_sender(
            transport, named_parameters, getattr(torch, self.config.model.dtype),
            rank=0, world=1, store=self._store, engines=1,
        )  # fmt: skip
        await self._ask(Attach([self.sender.describe()]))

    async def update(self) -> Updated:
        """Copy the present values into the engine, and check them by checksums if sync.verify is set.

        Completions under way continue with them on their KV cache. Raises SyncMismatch, RunError.
        """
        if self.sender is None:
            raise RunError("the sampler was asked for new weights before it follows any")
        self.version += 1
        await asyncio.to_thread(self.sender.write, self.version)
        updated = await self._ask(Update(self.version))
        assert isinstance(updated, Updated)
        if self.config.sync.verify:
            compare_checksums(await asyncio.to_thread(self.sender.checksums), updated.checksums, 0)
        return updated

    # ---- ends ------------------------------------------------------------------------------------------------

    async def _ask(self, message: ToEngine) -> Message:
        answer = self._line.ask(message)
        await self._first(answer)
        if isinstance(answer.result(), Failed):  # the worker ends with what it reported
            await self._first(asyncio.get_running_loop().create_future())
        return answer.result()

    async def _first(self, awaited: asyncio.Future[Any]) -> None:
        """Wait for `awaited`; raise what ended the worker if that comes before."""
        self._raise_if_over()
        assert self._work is not None
        await asyncio.wait({awaited, self._work}, return_when=asyncio.FIRST_COMPLETED)
        if not awaited.done():
            awaited.cancel()
            self._raise_if_over()

    def _raise_if_over(self) -> None:
        if self._work is None:
            raise RunError("the sampler was not started")
        if self._work.done():
            self._work.result()
            raise RunError("the sampler was closed")

    def _fail(self, work: asyncio.Task[None]) -> None:
        """Pass the error that ended the worker, or a RunError, to every completion that is awaited."""
        error = None if work.cancelled() else work.exception()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error or RunError("the sampler was closed"))
        self._waiting.clear()
