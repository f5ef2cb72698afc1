"""A rollout rank: takes calls from the controller, keeps its engine alive, reports completions as they end.

An engine that dies, or that gives no token and no answer for much longer than it ever took, is replaced in this rank:
the newest weights still lie in the trainers' (or this rank's) buffers, and its completions continue from the tokens
they have.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from vllm.v1.engine.exceptions import EngineDeadError

from rollout.engine import Engine
from rollout.intake import NO_VERSION
from rollout.weights.receiver import Receiver
from shared import deaths, watchdog
from shared.config import Config
from shared.errors import DeadlineExceeded, EngineLost, RunError
from shared.inbox import Inbox
from shared.messages import (
    Attach,
    Done,
    EngineEnded,
    EngineRestarted,
    Finished,
    Generate,
    GenerateRequest,
    Message,
    Snapshot,
    Snapshotted,
    Stop,
    ToEngine,
    Update,
    Updated,
)
from shared.rpc import failure
from shared.types import Completion

Result = TypeVar("Result")
ANSWER_S = 10.0
"""how long a silent engine has to answer a ping before it is killed"""
OFTEN = 10
"""an engine may be silent for this many times its longest silence so far"""
TRIAL_S = 0.1
"""seconds between two checks whether the next suspected completion may run"""


class Link(Protocol):
    """This rank's connection to the controller (shared/rpc.py: AsyncLink)."""

    def calls(self) -> AsyncIterator[tuple[int, ToEngine]]:
        """Yield (call id, message) until Stop; call id 0 expects no reply."""

    async def reply(self, call_id: int, message: Message) -> None:
        """Answer a call."""

    async def event(self, message: Message) -> None:
        """Send an event, which answers no call."""


class Place(Protocol):
    """The attributes of shared.ranks.Role that a worker reads."""

    @property
    def rank(self) -> int: ...
    @property
    def rank_in_role(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def store(self) -> dist.Store: ...


class Worker:
    """Runs one rollout rank: carries out the controller's calls and replaces an engine that dies or hangs."""

    def __init__(self, link: Link, config: Config, role: Place, model_dir: str):
        self.link, self.config, self.role = link, config, role
        self.engine = Engine(config, model_dir, rank=role.rank, engine=role.rank_in_role, device=role.device)
        self.engine.intake.on_finished = self.finished
        self.events: Inbox[Completion | EngineEnded | EngineRestarted] = Inbox()
        self.turn = asyncio.Lock()
        """one engine operation (generate, update, score, restart) at a time, first come first served"""
        self.ready = asyncio.Event()
        self.restarts = 0
        self.kills_before = deaths.memory_kills()
        self.stop_id = 0
        self.reason = ""
        """why the engine is to be replaced, where its own end does not say it"""

    def finished(self, request: GenerateRequest) -> None:
        """Report an ended completion to the controller."""
        self.events.put(request.completion)
        if not self.turn.locked():
            self.rest()

    def rest(self) -> None:
        """Set the phase of this rank between two operations."""
        running = len(self.engine.intake.running)
        watchdog.phase(f"sampling, {running} completions left" if running else "waiting for the controller")

    async def run(self) -> None:
        """Serve until Stop. Raises the first error that ends this rank (after reporting it to the controller)."""
        watchdog.phase("starting the engine")
        try:
            await self.engine.start()
        except BaseException:
            await self.engine.stop()  # its process may be there, and have failed at its first prompts
            raise
        self.ready.set()
        self.rest()
        helpers = [
            asyncio.create_task(work, name=name)
            for work, name in (
                (self.report(), "events"),
                (self.revive(), "revive"),
                (self.watch(), "watchdog"),
                (self.try_suspects(), "suspects"),
            )
        ]
        calls = asyncio.create_task(self.take_calls(), name="calls")
        try:
            await asyncio.wait([calls, *helpers], return_when=asyncio.FIRST_COMPLETED)
            for task in (calls, *helpers):
                if task.done() and (error := task.exception()) is not None:
                    await self.link.event(failure(error))
                    raise error
        finally:
            for task in (calls, *helpers):
                task.cancel()
            await asyncio.gather(calls, *helpers, return_exceptions=True)
            await self.engine.stop()
        await self.link.reply(self.stop_id, Done())

    # ---- calls -----------------------------------------------------------------------------------------------------

    async def take_calls(self) -> None:
        """Start each call's work as it comes; returns at Stop, or raises what a call raised."""
        try:
            async with asyncio.TaskGroup() as group:
                async for call_id, message in self.link.calls():
                    if isinstance(message, Stop):
                        self.stop_id = call_id
                        return
                    group.create_task(self.answer(call_id, message), name=type(message).__name__)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def answer(self, call_id: int, message: ToEngine) -> None:
        """Do one call and reply. An error is replied as Failed and ends the rank."""
        try:
            reply = await self.handle(message)
        except Exception as error:
            if call_id:
                await self.link.reply(call_id, failure(error))
            raise
        if call_id:
            await self.link.reply(call_id, reply)

    async def handle(self, message: ToEngine) -> Message:
        """Carry out one call and return its reply."""
        engine = self.engine
        match message:
            case Attach(transfers=transfers):
                receiver = await asyncio.to_thread(
                    Receiver, transfers, self.role.rank_in_role, self.role.store, self.role.device
                )
                await self.operate("connecting to the trainers' weights", lambda: engine.attach(receiver))
            case Generate(requests=requests, hold=hold):
                if engine.version == NO_VERSION:
                    raise RunError("Generate came before the first Update: the engine has no weights of the policy yet")
                await self.operate("taking requests", lambda: engine.generate(requests, hold))
            case Update(version=version, probe=probe):
                name = f"updating the weights to version {version}"
                updated = await self.operate(name, lambda: engine.update(version))
                if probe is None:
                    return updated
                return await self.operate("scoring the probe", lambda: self.score(probe, updated))
            case Snapshot():
                return Snapshotted(engine.snapshot())
            case _:
                raise RunError(f"an engine rank cannot handle {type(message).__name__}")
        return Done()

    async def score(self, probe: list[list[int]], updated: Updated) -> Updated:
        """Add the log-probs of the probe and the version that the engine process itself reports to `updated`."""
        updated.probe = await self.engine.score(probe)
        updated.scored_version = await self.engine.held_version()
        return updated

    async def operate(self, name: str, work: Callable[[], Awaitable[Result]]) -> Result:
        """Run one engine operation alone, and again on the next engine if this one dies during it. name: the phase."""
        while True:
            await self.ready.wait()
            async with self.turn:
                if not self.ready.is_set():
                    continue
                watchdog.phase(name)
                try:
                    return await work()
                except EngineDeadError:
                    self.ready.clear()
                    self.engine.ended.set()
                finally:
                    self.rest()

    # ---- helpers ---------------------------------------------------------------------------------------------------

    async def report(self) -> None:
        """Send events as they come until cancelled; completions that have gathered travel in one message."""
        while True:
            events = await self.events.take()
            if ended := [event for event in events if isinstance(event, Completion)]:
                await self.link.event(Finished(ended))
            for event in events:
                if not isinstance(event, Completion):
                    await self.link.event(event)

    async def revive(self) -> None:
        """Replace the engine whenever it ended. Raises EngineLost after rollout.max_restarts, or `engine.failure`."""
        while True:
            await self.engine.ended.wait()
            if self.engine.failure is not None:
                raise self.engine.failure
            self.ready.clear()
            start = time.monotonic()
            async with self.turn:
                reason = self.reason or self.how_it_ended()
                self.reason = ""
                self.restarts += 1
                if self.restarts > self.config.rollout.max_restarts:
                    raise EngineLost(
                        f"engine {self.engine.engine} died {self.restarts} times (last: {reason}), more than "
                        f"rollout.max_restarts = {self.config.rollout.max_restarts}; its own messages stand above"
                    )
                self.events.put(EngineEnded(self.engine.engine, reason))
                watchdog.phase("starting the engine again")
                try:
                    continued = await self.engine.restart()
                except (EngineDeadError, DeadlineExceeded, EngineLost) as failed:
                    self.reason = f"its restart failed: {failed}"
                    self.engine.ended.set()
                    continue
                self.rest()
            told = reason + self.engine.trial.told
            self.events.put(EngineRestarted(self.engine.engine, time.monotonic() - start, continued, told))
            self.ready.set()

    async def try_suspects(self) -> None:
        """Let completions that may kill engines run one at a time (trial.py)."""
        while True:
            await asyncio.sleep(TRIAL_S)
            if self.engine.trial.waiting:
                await self.operate("trying a suspected completion", self.engine.try_next)

    def how_it_ended(self) -> str:
        """e.g. "its process (pid 77) was killed by signal 9 (SIGKILL)", with what to do if memory was the reason."""
        llm = self.engine.llm
        ended = llm.how_it_ended() if llm is not None else ""
        status = -signal.SIGKILL if "SIGKILL" in ended else 1
        return (ended or "its process gave up") + deaths.advice(status, "engine", 0, self.kills_before)

    def patience_s(self) -> float:
        """Seconds that a busy engine may be silent: OFTEN times its longest silence since its first tokens, at least a
        quarter of deadlines.sync_s, at most that; before its first tokens so few that an update may still succeed."""
        limit_s, longest_s = self.config.deadlines.token_s, self.engine.intake.longest_s
        if longest_s is None:
            return limit_s / 2
        return min(limit_s, max(limit_s / 4, OFTEN * longest_s))

    async def watch(self) -> None:
        """kill -9 an engine that has work, gives no token for `patience_s`, and does not answer either."""
        while True:
            patience_s = self.patience_s()
            await asyncio.sleep(min(patience_s / 4, 5.0))
            busy = bool(self.engine.intake.running or self.engine.intake.scoring) or self.turn.locked()
            silent_s = time.monotonic() - self.engine.intake.active_s
            if not busy or not self.ready.is_set() or silent_s < patience_s or self.engine.ended.is_set():
                continue
            if await self.engine.answers(min(ANSWER_S, patience_s)) or not self.ready.is_set():
                continue
            pids = ", ".join(map(str, self.engine.llm.pids())) if self.engine.llm is not None else "?"
            self.reason = (
                f"no token and no answer for {silent_s:.0f} s in phase '{watchdog.current_phase()}', so its process "
                f"(pid {pids}) was killed; it may take {patience_s:.0f} s (raise deadlines.sync_s for more)"
            )
            if self.engine.llm is not None:
                self.engine.llm.kill()
            self.engine.ended.set()


async def serve(link: Link, config: Config, role: Place, model_dir: str | None = None) -> None:
    """Run one rollout rank until Stop. model_dir: resolved folder of the model (default: config.model.path).

    Raises EngineLost, NonFinite, SyncMismatch, RunError or an InputError after reporting it in a Failed reply or event
    to the controller.
    """
    await Worker(link, config, role, model_dir or config.model.path).run()
