"""A rollout rank: takes calls from the controller, keeps its engine alive, reports completions as they end.

An engine that dies, or that gives no token and no answer for much longer than it ever took, is replaced in this rank:
the newest weights are still in the trainers' (or this rank's) buffers, and its completions continue from the tokens
they have.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rollout.weights.layout import NO_VERSION
from rollout.weights.proof import Updated
from rollout.weights.receiver import WeightReceiver
from shared import record_file, route_files
from shared.config import Config
from shared.errors import CheckpointError, DeadlineExceeded, DiskError, EngineLost, RunError
from shared.launch import deaths, watchdog
from shared.launch.batch_queue import BatchQueue
from shared.launch.calls import CallReply, CallRequest, call
from shared.launch.messages import EngineEnded, EngineRestarted, Finished, GenerateRequest, Message, failure, parts
from shared.launch.ranks import RankInfo
from shared.record_file import Written
from shared.types import Completion

if TYPE_CHECKING:  # the controller imports this file with the engines' calls, and needs no vLLM
    from rollout.engine import Engine

Result = TypeVar("Result")
ANSWER_S = 10.0
"""how long a silent engine has to answer a ping before it is killed"""
OFTEN = 10
"""an engine may be silent for this many times its longest silence so far"""
TRIAL_S = 0.1
"""seconds between two checks whether the next suspected completion may run"""


class RankLink(Protocol):
    """This rank's connection to the controller (shared/launch/rpc.py: EngineLink)."""

    def calls(self, rank_class: type) -> AsyncIterator[tuple[int, CallRequest[Any]]]:
        """Yield (call id, call) until the last; call id 0 expects no answer."""

    async def send(self, call_id: int, message: Message | CallReply[Any]) -> None:
        """Send the answer to a call, or with id 0 an event."""


class EngineRank:
    """One rollout rank: carries out the controller's calls and replaces an engine that dies or hangs."""

    def __init__(self, link: RankLink, config: Config, role: RankInfo, model_dir: str, own_weights: bool = False):
        """own_weights: the engine may sample with the weights of its model folder, before the first update."""
        from rollout.vllm_config import prepare_environment
        from shared.model.cpu.processor import given_threads

        if config.mode == "sft":  # it evaluates only, while the trainers wait: their cores are free
            prepare_environment(given_threads())
        from rollout.engine import Engine

        self.link, self.config, self.role, self.own_weights = link, config, role, own_weights
        self.engine: Engine = Engine(config, model_dir, rank=role.rank, engine=role.rank_in_role, device=role.device)
        self.engine.outputs.on_finished = self.finished
        self.events: BatchQueue[Completion | EngineEnded | EngineRestarted] = BatchQueue()
        self.lock = asyncio.Lock()
        """one engine operation (generate, update, score, restart) at a time, first come first served"""
        self.ready = asyncio.Event()
        self.awake = asyncio.Event()
        """unset while the engine sleeps: its GPU is the trainers' then, and a dead engine waits for its turn"""
        self.awake.set()
        self.restarts = 0
        self.kills_before = deaths.memory_kills()
        self.stop_id = 0
        self.reason = ""
        """why the engine is to be replaced, where its own end does not say it"""

    def finished(self, request: GenerateRequest) -> None:
        """Report an ended completion to the controller."""
        self.events.put(request.completion)
        if not self.lock.locked():
            self.set_idle_phase()

    def set_idle_phase(self) -> None:
        """Set the phase of this rank between two operations."""
        running = len(self.engine.outputs.running)
        watchdog.phase(f"sampling, {running} completions left" if running else "waiting for the controller")

    async def run(self) -> None:
        """Serve until `stop`. Raises the first error that ends this rank (after reporting it to the controller)."""
        watchdog.phase("starting the engine")
        try:
            await self.engine.start()
        except BaseException:
            await self.engine.stop()  # its process may be there, and have failed at its first prompts
            raise
        self.ready.set()
        self.set_idle_phase()
        helpers = [
            asyncio.create_task(work, name=name)
            for work, name in (
                (self.report(), "events"),
                (self.restart_loop(), "restarts"),
                (self.watch(), "watchdog"),
                (self.try_suspects(), "suspects"),
            )
        ]
        calls = asyncio.create_task(self.take_calls(), name="calls")
        try:
            await asyncio.wait([calls, *helpers], return_when=asyncio.FIRST_COMPLETED)
            for task in (calls, *helpers):
                if task.done() and (error := task.exception()) is not None:
                    await self.link.send(0, failure(error))
                    raise error
        finally:
            for task in (calls, *helpers):
                task.cancel()
            await asyncio.gather(calls, *helpers, return_exceptions=True)
            await self.engine.stop()
        if self.stop_id:
            await self.link.send(self.stop_id, CallReply(None))

    # ---- calls -----------------------------------------------------------------------------------------------------

    async def take_calls(self) -> None:
        """Start each call's work as it comes; returns at `stop`, or raises what a call raised."""
        try:
            async with asyncio.TaskGroup() as group:
                async for call_id, request in self.link.calls(EngineRank):
                    if request.call.last:
                        self.stop_id = call_id
                        return
                    group.create_task(self.answer(call_id, request), name=request.call.method.__name__)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def answer(self, call_id: int, request: CallRequest[Any]) -> None:
        """Do one call and answer it. An error is reported and ends the rank, unless the call survives it."""
        try:
            value = await request.run(self)
        except Exception as error:
            if call_id:
                await self.link.send(call_id, failure(error))
            if isinstance(error, request.call.survives):
                return
            raise
        if call_id:
            await self.link.send(call_id, CallReply(value))

    @call("attach to the weight transfer", deadline="start")
    async def attach(self, transfers: list[dict[str, Any]], stop_ids: list[int] | None = None) -> None:
        """Connect to the trainers' weight transfer. transfers: `Loaded.transfer` of every trainer rank, in order.
        stop_ids: tokens that end a turn, None for those that the model's files name."""
        role = self.role
        self.engine.stop_token_ids = stop_ids or self.engine.stop_token_ids
        workers = self.config.rollout.tensor_parallel
        receiver = await asyncio.to_thread(
            WeightReceiver, transfers, role.rank_in_role, role.store, role.device, workers
        )
        await self.run_exclusive("connecting to the trainers' weights", lambda: self.engine.attach(receiver))

    @call("start of completions", deadline="step")
    async def generate(self, requests: list[GenerateRequest], hold: bool = False) -> None:
        """Sample these; completions come back as they end, in `Finished` events.

        hold: keep the engine paused until all are queued (synchronous mode: the same batches each time).
        """
        if self.engine.version == NO_VERSION and not self.own_weights:
            raise RunError("generate came before the first update: the engine has no weights of the policy yet")
        await self.run_exclusive("taking requests", lambda: self.engine.generate(requests, hold))

    @call("weight update to version {version}", deadline="sync")
    async def update(
        self, version: int, probe: list[list[int]] | None = None, chosen: list[dict[str, list[int]]] | None = None
    ) -> Updated:
        """Take the weights of `version` in flight: pause, apply, label, resume; then show what it computes with.

        probe: [sequences][tokens] that the trainers score too; None when the proof is off. chosen: of each trainer
        rank, matrix -> columns of its rows that are read back where the engine keeps it packed.
        """
        name = f"updating the weights to version {version}"
        updated = await self.run_exclusive(name, lambda: self.engine.update(version))
        if probe is None:
            return updated
        return await self.run_exclusive("reading the weights back", lambda: self.show(probe, chosen or [], updated))

    @call("sleep of the engines", deadline="start")
    async def sleep(self) -> None:
        """Leave the GPU to the trainers. Waits until the engine has started."""
        await self.run_exclusive("leaving the GPU to the trainers", self.engine.sleep)
        self.awake.clear()

    @call("waking of the engines", deadline="start")
    async def wake(self) -> None:
        """Take the GPU again; the next call must be an update."""
        self.awake.set()
        await self.run_exclusive("waking", self.engine.wake)

    @call("snapshot of running completions", deadline="step", survives=(CheckpointError, DiskError))
    async def snapshot(self, folder: str) -> dict[str, Written]:
        """Write all unfinished completions of training, as they are now, into a checkpoint; returns what was written,
        by name. Raises CheckpointError, DiskError."""
        path = Path(folder) / f"engine-{self.role.rank_in_role}.msgpack"
        unfinished = await self.engine.snapshot([one for one in self.engine.unfinished() if one.group >= 0])
        files = [file for completion in unfinished for file in completion.routes]
        routes = await asyncio.to_thread(route_files.save, self.config.run_dir, files, path.parent) if files else {}
        return {path.name: await asyncio.to_thread(record_file.write, path, unfinished), **routes}

    @call("stop of the engines", deadline=30, last=True)
    async def stop(self) -> None:
        """End the engine and free everything: `run` does that, and answers when it is done."""

    async def show(self, probe: list[list[int]], chosen: list[dict[str, list[int]]], updated: Updated) -> Updated:
        """Add to `updated` what the engine computes with, its log-probs of the probe, and the version that the engine
        process itself reports."""
        await self.engine.start_read_back(chosen)
        updated.probe = await self.engine.score(probe)
        updated.held = await self.engine.read_back()
        updated.scored_version = await self.engine.held_version()
        return updated

    async def run_exclusive(self, name: str, work: Callable[[], Awaitable[Result]]) -> Result:
        """Run one engine operation alone, and again on the next engine if this one dies during it. name: the phase."""
        from vllm.v1.engine.exceptions import EngineDeadError

        while True:
            await self.ready.wait()
            async with self.lock:
                if not self.ready.is_set():
                    continue
                watchdog.phase(name)
                try:
                    return await work()
                except EngineDeadError:
                    self.ready.clear()
                    self.engine.ended.set()
                finally:
                    self.set_idle_phase()

    # ---- helpers ---------------------------------------------------------------------------------------------------

    async def report(self) -> None:
        """Send events as they come until cancelled; completions that have gathered travel together, their routes are in
        files before."""
        while True:
            events = await self.events.take()
            if ended := [event for event in events if isinstance(event, Completion)]:
                await self.engine.outputs.routes.put_away(ended)
                for part in parts(ended):
                    await self.link.send(0, Finished(part))
            for event in events:
                if not isinstance(event, Completion):
                    await self.link.send(0, event)

    async def restart_loop(self) -> None:
        """Replace the engine whenever it ended. Raises EngineLost after rollout.max_restarts, or `engine.failure`."""
        from vllm.v1.engine.exceptions import EngineDeadError

        while True:
            await self.engine.ended.wait()
            if self.engine.failure is not None:
                raise self.engine.failure
            self.ready.clear()
            if (receiver := self.engine.receiver) is not None:
                receiver.engine_lost()
            await self.awake.wait()
            start = time.monotonic()
            async with self.lock:
                reason = self.reason or self.how_it_ended()
                self.reason = ""
                self.restarts += 1
                if self.restarts > self.config.rollout.max_restarts:
                    raise EngineLost(
                        f"engine {self.engine.engine} died {self.restarts} times (last: {reason}), more than "
                        f"rollout.max_restarts = {self.config.rollout.max_restarts}"
                    )
                self.events.put(EngineEnded(self.engine.engine, reason))
                watchdog.phase("starting the engine again")
                try:
                    continued = await self.engine.restart()
                except (EngineDeadError, DeadlineExceeded, EngineLost) as failed:
                    self.reason = f"its restart failed: {failed}"
                    self.engine.ended.set()
                    continue
                self.set_idle_phase()
            why = reason + self.engine.trial.report
            self.events.put(EngineRestarted(self.engine.engine, time.monotonic() - start, continued, why))
            self.ready.set()

    async def try_suspects(self) -> None:
        """Let completions that may kill engines run one at a time (trial.py)."""
        while True:
            await asyncio.sleep(TRIAL_S)
            if self.engine.trial.waiting:
                await self.run_exclusive("trying a suspected completion", self.engine.try_next)

    def how_it_ended(self) -> str:
        """e.g. "its process (pid 77) was killed by signal 9 (SIGKILL)", with what to do if memory was the reason."""
        llm = self.engine.llm
        ended = llm.how_it_ended() if llm is not None else ""
        status = -signal.SIGKILL if "SIGKILL" in ended else 1
        return (ended or "its process gave up") + deaths.advice(status, "engine", 0, self.kills_before)

    def patience_s(self) -> float:
        """Seconds that a busy engine may be silent: OFTEN times its longest silence since its first tokens, at least a
        quarter of deadlines.sync_s, at most that; before its first tokens so few that an update may still succeed."""
        limit_s, longest_s = self.config.deadlines.token_s, self.engine.outputs.longest_s
        if longest_s is None:
            return limit_s / 2
        return min(limit_s, max(limit_s / 4, OFTEN * longest_s))

    async def watch(self) -> None:
        """kill -9 an engine that has work, gives no token for `patience_s`, and does not answer either."""
        while True:
            patience_s = self.patience_s()
            await asyncio.sleep(min(patience_s / 4, 5.0))
            if (receiver := self.engine.receiver) is not None and receiver.lively():
                self.engine.outputs.alive()
            busy = bool(self.engine.outputs.running or self.engine.outputs.scoring) or self.lock.locked()
            silent_s = time.monotonic() - self.engine.outputs.active_s
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


async def serve(link: RankLink, config: Config, role: RankInfo, model_dir: str | None = None) -> None:
    """Run one rollout rank until `stop`. model_dir: resolved folder of the model (default: config.model.path).

    Raises EngineLost, NonFinite, SyncMismatch, RunError or an InputError after reporting it to the controller.
    """
    await EngineRank(link, config, role, model_dir or config.model.path).run()
