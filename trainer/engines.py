"""The controller's view of all rollout engines: submit completions, receive finished ones, update weights with proof.

A group stays on one engine (its prompt is prefilled once). In synchronous mode a wave is sent as one held message per
engine, dealt round robin, so the engines form the same batches every time.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

import msgspec

from rollout.weights import proof
from rollout.weights.checksum import add_parts
from shared.config import Config
from shared.inbox import Inbox
from shared.messages import (
    Attach,
    Done,
    EngineEnded,
    EngineRestarted,
    Failed,
    Finished,
    Generate,
    GenerateRequest,
    Message,
    Published,
    Snapshot,
    Snapshotted,
    Stop,
    Update,
    Updated,
)
from shared.progress import Progress
from shared.rpc import Hub, Reply, raise_failure
from shared.sockets import refused
from shared.types import Completion, Group
from trainer.stages import Stages


class SyncReport(msgspec.Struct):
    """Size, times and log-prob differences of one weight update over all engines, for the metrics."""

    version: int
    bytes: int
    write_s: float
    """slowest trainer rank, master weights to staging"""
    update_s: float
    """slowest engine: pause, apply, resume"""
    total_s: float
    """from the start of the write until the last proof"""
    stall_s: float
    stall_steps: float
    logprob_diff_mean: float = 0.0
    logprob_diff_max: float = 0.0


class Engines:
    """All engine ranks: samples completions with them, and updates their weights."""

    def __init__(self, hub: Hub, ranks: range, stages: Stages, progress: Progress):
        self.hub, self.ranks, self.stages, self.progress = hub, ranks, stages, progress
        self.live: dict[int, int] = dict.fromkeys(ranks, 0)
        """completions in flight on each engine"""
        self.restarts = 0
        self.generated_tokens = 0
        self._finished: Inbox[Completion | None] = Inbox()
        self._evaluations: dict[int, asyncio.Future[Completion]] = {}
        self._evaluation_rank: dict[int, int] = {}
        self._checksums: dict[str, int] = {}
        """of the previous version, to distinguish old weights from wrong ones"""
        self.reviving: dict[int, float] = {}
        """engine ranks that start a new engine -> since when"""
        self._routed: dict[tuple[int, int], tuple[int, float]] = {}
        """(group, index) of a completion in flight -> (its engine, when it was sent there)"""

    @property
    def config(self) -> Config:
        """The settings in force."""
        return self.stages.now

    async def attach(self, transfers: list[dict[str, Any]]) -> None:
        """Connect every engine to the trainers' weight transfer."""
        await self._all(Attach(transfers), Done, "attach to the weight transfer", self.config.deadlines.start_s)

    # ---- sampling --------------------------------------------------------------------------------------------

    async def submit(self, groups: Iterable[Group]) -> None:
        """Sample, or continue, every unfinished completion of these groups."""
        hold = self.config.rollout.max_async_level == 0
        batches: dict[int, list[GenerateRequest]] = {}
        now = time.monotonic()
        quietest = [(count, rank) for rank, count in self.live.items()]
        heapq.heapify(quietest)
        for position, group in enumerate(groups):
            rank = self.ranks[position % len(self.ranks)] if hold else quietest[0][1]
            routed = rank, now
            unfinished = [completion for completion in group.completions if completion.finish_reason is None]
            batches.setdefault(rank, []).extend(self._request(group, completion) for completion in unfinished)
            self.live[rank] += len(unfinished)
            for completion in unfinished:
                self._routed[completion.group, completion.index] = routed
            if not hold:
                heapq.heapreplace(quietest, (self.live[rank], rank))
        for rank, requests in batches.items():
            await self.hub.post(rank, Generate(requests, hold=hold))

    def _request(self, group: Group, completion: Completion) -> GenerateRequest:
        rollout = self.config.rollout
        return GenerateRequest(group.prompt.token_ids, completion, rollout.max_completion_tokens, rollout.temperature)

    async def sample_once(self, prompt_ids: list[int], key: int, seed: int, temperature: float) -> Completion:
        """Sample one completion outside of training (evaluation). `key` must be unique among running ones."""
        completion = Completion(group=-1 - key, index=0, seed=seed)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        rank = min(self.ranks, key=lambda r: self.live[r])
        self._evaluations[completion.group] = future
        self._evaluation_rank[completion.group] = rank
        self.live[rank] += 1
        limit = self.config.rollout.max_completion_tokens
        await self.hub.post(rank, Generate([GenerateRequest(prompt_ids, completion, limit, temperature)]))
        return await future

    def seats(self) -> int:
        """Sequences that the engines decode at a time."""
        return len(self.ranks) * self.config.rollout.max_sequences

    def spare(self) -> int:
        """Sequences that the engines could decode beside those in flight."""
        return self.seats() - sum(self.live.values())

    async def dispatch(self) -> None:
        """Dispatch the engines' events until cancelled; raises the failure that an engine reports."""
        while True:
            for rank, event in await self.hub.events.take():
                if isinstance(event, Finished):
                    for completion in event.completions:
                        self._arrived(rank, completion)
                elif isinstance(event, EngineEnded):
                    self.reviving[rank] = time.monotonic()
                    self.progress.warning(f"engine {event.engine} (rank {rank}): {event.reason}; starting another")
                elif isinstance(event, EngineRestarted):
                    self.restarts += 1
                    self.reviving.pop(rank, None)
                    self.progress.warning(
                        f"engine {event.engine} (rank {rank}) was started again in {event.seconds:.1f} s, because "
                        f"{event.reason}; {event.continued} completions continue"
                    )
                elif isinstance(event, Failed):
                    raise_failure(self.hub.name(rank), event)

    def _arrived(self, rank: int, completion: Completion) -> None:
        """Accept a completion that is in flight on this engine; any other is dropped and counted."""
        if completion.group < 0:  # of an evaluation (`sample_once`)
            if self._evaluation_rank.get(completion.group) != rank:
                refused.add(f"a completion of rank {rank} that it was not asked for")
                return
            del self._evaluation_rank[completion.group]
            self._evaluations.pop(completion.group).set_result(completion)
        else:
            key = completion.group, completion.index
            if (routed := self._routed.get(key)) is None or routed[0] != rank:
                refused.add(f"a completion of rank {rank} that it was not asked for")
                return
            del self._routed[key]
            self._finished.put(completion)
        self.live[rank] -= 1
        self.generated_tokens += len(completion.token_ids)

    async def finished(self) -> AsyncIterator[Completion]:
        """Completions of training groups as they end, until `close`."""
        while True:
            for completion in await self._finished.take():
                if completion is None:
                    return
                yield completion

    def close(self) -> None:
        """End `finished`: no more completions are wanted."""
        self._finished.put(None)

    def oldest_wait_s(self) -> float:
        """Seconds that the longest-running training completion has been in flight; 0 if there is none."""
        return time.monotonic() - min(since for _, since in self._routed.values()) if self._routed else 0.0

    async def snapshot(self) -> list[Completion]:
        """Return all unfinished training completions in their current state."""
        replies = await self._all(Snapshot(), Snapshotted, "snapshot of running completions", 60)
        return [completion for reply in replies for completion in reply.completions if completion.group >= 0]

    # ---- weights ---------------------------------------------------------------------------------------------

    async def update(self, published: list[Published], probe: list[list[int]], started: float) -> SyncReport:
        """Bring every engine to the published version while completions are in flight, and prove it.

        published: one per trainer rank. probe: the sequences that the trainers scored. started: time.monotonic() of
        the write's start. Raises SyncMismatch naming the engine and the tensor or token.
        """
        version, proof_on = published[0].version, self.config.sync.verify
        message = Update(version, probe if proof_on else None)
        phase = f"weight update to version {version}"
        replies = await self._all(message, Updated, phase, self.config.deadlines.sync_s)
        stats = [(0.0, 0.0)]
        if proof_on:
            truth = add_parts(part.checksums for part in published)
            for engine, reply in enumerate(replies):
                proof.compare_version(engine, version, reply.version)
                proof.compare_checksums(truth, reply.checksums, engine, self._checksums)
            self._checksums = truth
            stats = [self._probe(published[0], reply, engine) for engine, reply in enumerate(replies)]
        return SyncReport(
            version=version,
            bytes=sum(part.bytes for part in published),
            write_s=max(part.seconds for part in published),
            update_s=max(reply.seconds["total"] for reply in replies),
            total_s=time.monotonic() - started,
            stall_s=max(reply.stall_s for reply in replies),
            stall_steps=max(reply.stall_steps for reply in replies),
            logprob_diff_mean=max(mean for mean, _ in stats),
            logprob_diff_max=max(largest for _, largest in stats),
        )

    def _probe(self, published: Published, reply: Updated, engine: int) -> tuple[float, float]:
        """(mean, largest) difference between the trainers' and an engine's log-probs of the probe."""
        proof.compare_version(engine, published.version, reply.scored_version)
        found = proof.compare_probe(published.probe, reply.probe, engine, self.config.model.dtype)
        return found.mean, found.max

    # ---- end -------------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """End every engine."""
        await self._all(Stop(), Done, "stop of the engines", 30)

    async def _all(self, message: Message, reply_type: type[Reply], phase: str, deadline_s: float) -> list[Reply]:
        messages = dict.fromkeys(self.ranks, message)
        return await self.hub.call_all(messages, reply_type, phase, deadline_s, self._excused)

    def _excused(self) -> set[int]:
        """Ranks that are starting a new engine, which has a deadline of its own."""
        since = time.monotonic() - self.config.deadlines.start_s - self.config.deadlines.token_s
        return {rank for rank, began in self.reviving.items() if began > since}
