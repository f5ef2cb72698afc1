"""The engines' client: samples completions with all engine ranks, and updates their weights with proof.

The ranks may be those of a launch or one in this process (local_engine.py). A group stays on one engine (its prompt is
prefilled once). In synchronous mode a wave is sent as one held message per engine, dealt round robin, so the engines
form the same batches every time.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from rollout.weights.proof import LogprobDifference, PublishedWeights, WeightProof
from rollout.worker import EngineRank
from shared.config import Config
from shared.launch.batch_queue import BatchQueue
from shared.launch.calls import Connection, RankClient, request
from shared.launch.messages import EngineEnded, EngineRestarted, Finished, GenerateRequest, RankFailed
from shared.launch.rpc import raise_failure
from shared.launch.sockets import refused
from shared.record_file import Written
from shared.types import Completion, Group


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
    gpu_peak_bytes: int = 0
    """largest allocated GPU memory so far of an engine"""
    logprob_move_diff: float = 0.0


class EngineClient(RankClient):
    """Calls all engine ranks: samples completions with them, and updates their weights."""

    def __init__(self, hub: Connection, ranks: range, settings: Callable[[], Config], warn: Callable[[str], None]):
        """settings: returns those in force. warn: called with a line when an engine died, and when it was started
        again."""
        super().__init__(hub, ranks, settings().deadlines)
        self.settings, self.warn = settings, warn
        self.live: dict[int, int] = dict.fromkeys(ranks, 0)
        """completions in flight on each engine"""
        self.training_in_flight = 0
        """completions of training that an engine works on, or that `finished` has not yielded yet"""
        self.restarts = 0
        self.generated_tokens = 0
        self._finished: BatchQueue[Completion | None] = BatchQueue()
        self._ended: set[tuple[int, int]] = set()
        """(group, index) of training completions in `_finished`"""
        self._samples: dict[tuple[int, int], asyncio.Future[Completion]] = {}
        """(group, index) of a completion outside of training -> future of its end"""
        self._serial = itertools.count(1)
        self._proof = WeightProof(settings().model.dtype)
        self.restarting: dict[int, float] = {}
        """engine ranks that start a new engine -> since when"""
        self._routed: dict[tuple[int, int], tuple[int, float]] = {}
        """(group, index) of a completion in flight -> (its engine, when it was sent there)"""

    @property
    def config(self) -> Config:
        """The settings in force."""
        return self.settings()

    # ---- sampling --------------------------------------------------------------------------------------------

    async def submit(self, groups: Iterable[Group]) -> None:
        """Sample, or continue, every unfinished completion of these groups that no engine works on and that does not
        wait for its environment. The turns of an episode stay on one engine, whose cache holds what was before."""
        hold = self.config.rollout.max_async_level == 0
        batches: dict[int, list[GenerateRequest]] = {}
        now = time.monotonic()
        quietest = [(count, rank) for rank, count in self.live.items()]
        heapq.heapify(quietest)
        for position, group in enumerate(groups):
            rank = self.ranks[position % len(self.ranks)] if hold else quietest[0][1]
            if group.prompt.problem.environment:
                rank = self.ranks[group.prompt.index % len(self.ranks)]
            routed = rank, now
            unfinished = [completion for completion in group.completions if self._free(completion)]
            if not unfinished:
                continue
            batches.setdefault(rank, []).extend(self._request(group, completion) for completion in unfinished)
            self.live[rank] += len(unfinished)
            self.training_in_flight += len(unfinished)
            for completion in unfinished:
                self._routed[completion.group, completion.index] = routed
            if not hold and rank == quietest[0][1]:
                heapq.heapreplace(quietest, (self.live[rank], rank))
        for rank, requests in batches.items():
            await self.hub.post(rank, request(EngineRank.generate, requests, hold))

    def _free(self, completion: Completion) -> bool:
        """Whether it has no end, neither an engine nor an environment works on it, and no news of it is on the way."""
        key = completion.group, completion.index
        return completion.unfinished and not (key in self._routed or key in self._ended or completion.waiting)

    async def continue_turns(self, group: Group, wave: Iterable[Group]) -> None:
        """Sample the next turns of a group. In synchronous mode the turns of a wave wait for one another, so that
        batches repeat: all go on once nothing of the wave is in flight and no environment has to answer."""
        if self.config.rollout.max_async_level:
            if any(map(self._free, group.completions)):
                await self.submit([group])
        elif not self.training_in_flight:
            groups = list(wave)
            left = [completion for each in groups for completion in each.completions if completion.unfinished]
            if left and not any(completion.waiting for completion in left):
                await self.submit(groups)

    def _request(self, group: Group, completion: Completion) -> GenerateRequest:
        rollout = self.config.rollout
        limit = self._limit(completion) if group.prompt.problem.environment else rollout.max_completion_tokens
        return GenerateRequest(group.prompt.token_ids, completion, limit, rollout.temperature)

    def _limit(self, completion: Completion) -> int:
        """Tokens at which the turn under way is cut: environment.turn_tokens, or what the episode may still sample."""
        most, before = self.config.rollout.max_completion_tokens, sum(one.end - one.start for one in completion.turns)
        return completion.turn_start + min(self.config.environment.turn_tokens or most, most - before)

    async def sample(
        self, prompt_ids: list[int], seeds: Sequence[int], temperature: float, keep_routes: bool = False
    ) -> list[Completion]:
        """Sample outside of the loop: one completion of the prompt for each seed, [seeds]. temperature: 0 is greedy.
        keep_routes: they are trained on all the same."""
        group = -next(self._serial)
        completions, limit = (
            [Completion(group, *one) for one in enumerate(seeds)],
            self.config.rollout.max_completion_tokens,
        )
        quietest = min(self.ranks, key=lambda rank: self.live[rank])
        asked = [GenerateRequest(prompt_ids, one, limit, temperature, keep_routes) for one in completions]
        return await self._sample(asked, quietest)

    def episode(self, seed: int) -> Completion:
        """A completion outside of training that `continue_turn` samples."""
        return Completion(-next(self._serial), 0, seed)

    async def continue_turn(self, prompt_ids: list[int], completion: Completion, temperature: float) -> Completion:
        """Sample the next turn of an episode outside of training; all of them on one engine, as in `submit`."""
        rank = self.ranks[completion.group % len(self.ranks)]
        asked = GenerateRequest(prompt_ids, completion, self._limit(completion), temperature, keep_routes=False)
        return (await self._sample([asked], rank))[0]

    async def _sample(self, requests: list[GenerateRequest], rank: int) -> list[Completion]:
        now, ends = time.monotonic(), []
        for request_ in requests:
            key = request_.completion.group, request_.completion.index
            ends.append(asyncio.get_running_loop().create_future())
            self._routed[key], self._samples[key] = (rank, now), ends[-1]
        self.live[rank] += len(requests)
        await self.hub.post(rank, request(EngineRank.generate, requests))
        return list(await asyncio.gather(*ends))

    def slots(self) -> int:
        """Sequences that the engines decode at a time."""
        return len(self.ranks) * self.config.rollout.max_sequences

    def spare(self) -> int:
        """Sequences that the engines could decode in addition to those in flight."""
        return self.slots() - sum(self.live.values())

    async def dispatch(self) -> None:
        """Dispatch the engines' events until cancelled; raises the failure that an engine reports."""
        while True:
            for rank, event in await self.hub.events.take():
                if isinstance(event, Finished):
                    for completion in event.completions:
                        self._arrived(rank, completion)
                elif isinstance(event, EngineEnded):
                    self.restarting[rank] = time.monotonic()
                    self.warn(f"engine {event.engine} (rank {rank}): {event.reason}; starting another")
                elif isinstance(event, EngineRestarted):
                    self.restarts += 1
                    self.restarting.pop(rank, None)
                    self.warn(
                        f"engine {event.engine} (rank {rank}) was started again in {event.seconds:.1f} s, because "
                        f"{event.reason}; {event.continued} completions continue"
                    )
                elif isinstance(event, RankFailed):
                    raise_failure(self.hub.name(rank), event)

    def _arrived(self, rank: int, completion: Completion) -> None:
        """Accept a completion that is in flight on this engine; any other is dropped and counted."""
        key = completion.group, completion.index
        if (routed := self._routed.get(key)) is None or routed[0] != rank:
            refused.add(f"a completion of rank {rank} that it was not asked for")
            return
        del self._routed[key]
        if (end := self._samples.pop(key, None)) is None:
            self._ended.add(key)
            self._finished.put(completion)
        elif not end.done():
            end.set_result(completion)
        self.live[rank] -= 1
        self.generated_tokens += len(completion.token_ids) - completion.turn_start

    async def finished(self) -> AsyncIterator[Completion]:
        """Completions of training groups as they end, until `close`."""
        while True:
            for completion in await self._finished.take():
                if completion is None:
                    return
                self._ended.discard((completion.group, completion.index))
                self.training_in_flight -= 1
                yield completion

    def close(self) -> None:
        """End `finished`: no more completions are wanted."""
        self._finished.put(None)

    def oldest_wait_s(self) -> float:
        """Seconds that the longest-running training completion has been in flight; 0 if there is none."""
        training = [since for (group, _), (_, since) in self._routed.items() if group >= 0]
        return time.monotonic() - min(training) if training else 0.0

    async def snapshot(self, folder: Path) -> dict[str, Written]:
        """Let every engine write its unfinished training completions, as they are when the call comes, into a
        checkpoint: the tokens do not pass through the controller. Returns what was written, by name."""
        files_by_engine = await self.call(EngineRank.snapshot, str(folder))
        return {name: written for files in files_by_engine for name, written in files.items()}

    # ---- weights ---------------------------------------------------------------------------------------------

    def probe_due(self, probe: list[list[int]], version: int) -> list[list[int]]:
        """Those of the probe's sequences that prove the update to `version`."""
        return self._proof.due(probe, version)

    async def update(self, published: list[PublishedWeights], probe: list[list[int]], started: float) -> SyncReport:
        """Bring every engine to the published version while completions are in flight, and prove it.

        published: one per trainer rank. probe: the sequences that the trainers scored. started: time.monotonic() of
        the write's start. Raises what `WeightProof.check` raises.
        """
        version, proof_on = published[0].version, self.config.sync.verify
        chosen = [part.chosen for part in published] if any(part.columns for part in published) else []
        replies = await self.call(EngineRank.update, version, probe if proof_on else None, chosen)
        differences = [LogprobDifference(0.0, 0.0, 0.0)]
        if proof_on:  # beside the loop, which a thousand engines would hold up
            differences = await asyncio.to_thread(self._proof.check, published, replies, probe)
        return SyncReport(
            version=version,
            bytes=sum(part.bytes for part in published),
            write_s=max(part.seconds for part in published),
            update_s=max(reply.seconds["total"] for reply in replies),
            total_s=time.monotonic() - started,
            stall_s=max(reply.stall_s for reply in replies),
            stall_steps=max(reply.stall_steps for reply in replies),
            logprob_diff_mean=max(difference.mean for difference in differences),
            logprob_diff_max=max(difference.max for difference in differences),
            logprob_move_diff=max(difference.moved for difference in differences),
            gpu_peak_bytes=max(reply.gpu_peak_bytes for reply in replies),
        )

    def name_ranks(self, parts: list[list[dict[str, int]]]) -> None:
        """See `WeightProof.name_ranks`."""
        self._proof.name_ranks(parts)

    def excused(self) -> set[int]:
        """Ranks that are starting a new engine, which has a deadline of its own."""
        since = time.monotonic() - self.deadlines.start_s - self.deadlines.token_s
        return {rank for rank, began in self.restarting.items() if began > since}
