"""One engine in this process, without a launch: the same rank (worker.py), called by the same client (client.py).

The engine samples with the weights of its model folder until `follow` registers tensors of this process; from then on
each `update` copies their present values into the running engine.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
import weakref
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rollout.client import EngineClient, SyncReport
from rollout.start import with_time_to_start
from rollout.weights import WeightSender, make_sender
from rollout.weights.proof import PublishedWeights
from rollout.worker import EngineRank
from shared.config import Config
from shared.errors import DeadlineExceeded, RunError
from shared.launch.batch_queue import BatchQueue
from shared.launch.calls import CallReply, CallRequest, Result, request
from shared.launch.messages import Message, RankFailed, failure
from shared.launch.ranks import count_gpus
from shared.launch.rpc import raise_failure
from shared.route_files import FOLDER
from shared.types import Completion

QUEUE_FACTOR = 2
"""completions under way for every one that the engine decodes, so that the next is queued when one ends"""
Value = TypeVar("Value")


@dataclass(frozen=True)
class LocalRank:
    """What an engine rank reads of its role, where it is the only rank."""

    device: torch.device
    store: dist.Store
    rank: int = 0
    rank_in_role: int = 0


class LocalConnection:
    """Both ends of the connection between a client and one rank of this process; nothing is encoded. The rank takes
    `calls` and sends answers and events (engines), or `serve` carries out its calls (trainers, whose methods block)."""

    def __init__(self, rank_name: str):
        """rank_name: for messages to people."""
        self.rank_name = rank_name
        self.events: BatchQueue[tuple[int, Message]] = BatchQueue()
        self._asked: asyncio.Queue[tuple[int, CallRequest[Any]]] = asyncio.Queue()
        self._answers: dict[int, asyncio.Future[Message | CallReply[Any]]] = {}
        self._serial = itertools.count(1)

    def name(self, rank: int) -> str:
        """The rank's name for people."""
        return self.rank_name

    async def post(self, rank: int, request: CallRequest[Any]) -> None:
        """Call the rank without waiting for its answer, with copies of what the caller goes on with."""
        self._asked.put_nowait((0, replace(request, message=deepcopy(request.message))))

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


class LocalEngine:
    """Runs one engine and samples with it. Use as
    `async with LocalEngine(config, folder) as engine: completions = await engine.sample(prompt_ids, seeds)`."""

    def __init__(
        self, config: Config, model_dir: str, warn: Callable[[str], None] = lambda text: None,
        stop_ids: Collection[int] = (),
    ):  # fmt: skip
        """config: model, rollout, sync, deadlines and seed are used. warn: called when an engine died, and after it was
        replaced. stop_ids: tokens that end a completion; none for those that the model's files name."""
        on_gpu = count_gpus(config.placement.device) > 0
        config = self.config = with_time_to_start(config, Path(model_dir), on_gpu)
        self.device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
        self.sender: WeightSender | None = None
        self.version = -1
        """version of the weights that were sent last; -1 for those of the model folder"""
        self.store = dist.HashStore()
        self._link = LocalConnection("the engine")
        self.client = EngineClient(self._link, range(1), lambda: config, warn)
        self.rank = EngineRank(self._link, config, LocalRank(self.device, self.store), model_dir, own_weights=True)
        self.keep_routes = False
        """whether completions are trained on: the files of their routes live as long as they"""
        self.rank.engine.stop_token_ids = sorted(stop_ids) or self.rank.engine.stop_token_ids
        self._work: asyncio.Task[None] | None = None
        self._room = asyncio.Condition()
        self._under_way = 0
        """completions that are sampled now"""

    async def __aenter__(self) -> LocalEngine:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Start the engine process: blocks the event loop for some seconds. Raises ModelError, ConfigError."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C is this process's to handle
        try:
            self._work = asyncio.ensure_future(self._run())
            await self.guarded(self.rank.ready.wait())
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    async def _run(self) -> None:
        dispatching = asyncio.ensure_future(self.client.dispatch())
        try:
            await self.rank.run()
        finally:
            dispatching.cancel()
            await asyncio.gather(dispatching, return_exceptions=True)

    async def close(self) -> None:
        """End the engine process and free the buffers. Safe to call whatever happened before."""
        if self._work is not None:
            if not self._work.done():
                await self._link.post(0, request(EngineRank.stop))
            await asyncio.wait([self._work])
            if not self._work.cancelled():
                self._work.exception()  # whoever waited for the engine has the error
        if self.sender is not None:
            self.sender.close()
            self.sender = None

    async def sample(self, prompt_ids: list[int], seeds: Sequence[int]) -> list[Completion]:
        """Return a finished completion of the prompt for each seed, [seeds], at rollout.temperature.

        Waits while twice as many as the engine decodes at once are under way. Prompts must fit model.max_tokens.
        Raises what ended the engine for good: EngineLost, NonFinite, ConfigError.
        """
        rollout = self.config.rollout
        async with self._room:
            await self._room.wait_for(lambda: self._under_way < QUEUE_FACTOR * rollout.max_sequences)
            self._under_way += len(seeds)
        try:
            sampling = self.client.sample(prompt_ids, seeds, rollout.temperature, self.keep_routes)
            completions = await self.guarded(sampling)
            for file in (file for completion in completions for file in completion.routes):
                weakref.finalize(file, (self.config.run_dir / FOLDER / file.name).unlink, missing_ok=True)
            return completions
        finally:
            self._under_way -= len(seeds)
            async with self._room:
                self._room.notify_all()

    # ---- weights ---------------------------------------------------------------------------------------------

    async def follow(self, named_parameters: list[tuple[str, torch.Tensor]]) -> None:
        """Register the tensors (all of the model, Hugging Face names, float32) that `update` copies into the engine.

        They must stay the same objects, changed in place: in host memory for an engine on the CPU, on its GPU
        otherwise (CUDA IPC). Raises RunError if the engine cannot open the buffers.
        """
        transport = "cuda_ipc" if self.device.type == "cuda" else "shm"
        self.sender = make_sender(
            transport, named_parameters, getattr(torch, self.config.model.dtype),
            rank=0, world=1, store=self.store, engines=1,
        )  # fmt: skip
        await self.attach([self.sender.describe()])

    async def attach(self, transfers: list[dict[str, Any]]) -> None:
        """Connect the engine to the weights of trainer ranks of this process (`LoadedTrainer.transfer` of each). Raises
        RunError if the engine cannot open the buffers."""
        await self.guarded(self.client.call(EngineRank.attach, transfers))

    async def update(self) -> SyncReport:
        """Copy the present values into the engine, and check them by checksums if sync.verify is set.

        Completions under way continue with them on their KV cache. Raises SyncMismatch, RunError.
        """
        if self.sender is None:
            raise RunError("the engine was asked for new weights before it follows any")
        self.version, started = self.version + 1, time.monotonic()
        size_bytes, seconds = await asyncio.to_thread(self.sender.write, self.version)
        published = PublishedWeights(self.version, size_bytes, seconds)
        if self.config.sync.verify:
            await asyncio.to_thread(published.add_checksums, self.sender)
        return await self.guarded(self.client.update([published], [], started))

    async def guarded(self, work: Coroutine[Any, Any, Value]) -> Value:
        """Await `work`; raise what ended the rank if that comes before."""
        if self._work is None or self._work.done():
            work.close()
        if self._work is None:
            raise RunError("the engine was not started")
        if not self._work.done():
            task = asyncio.ensure_future(work)
            try:
                await asyncio.wait({task, self._work}, return_when=asyncio.FIRST_COMPLETED)
                if task.done() and not (self._work.done() and task.exception() is not None):
                    return task.result()
            finally:
                task.cancel()
        self._work.result()
        raise RunError("the engine was closed")
