"""The loop of a run: four nouns (ledger, engines, scorer, trainers), three loops, one screen.

    admit --prompts--> engines --completions--> collect --groups--> train --weights--> engines
      ^ waits for a free slot      waits for a finished completion    waits for a full batch |
      |                            unblocked by any engine            unblocked by collect   |
      +------------- slots come back when every engine has proved that it holds the new weights

The ledger is the only state (so resume works) and `publish` the only writer of policy versions. Nothing in flight is
dropped or restarted by a weight update. What is not here: assembling and ending a run (launch.py), mathematics
(objectives/), planning (batching.py).
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout.client import EngineClient
from shared.config import Config
from shared.types import Completion, Group, Prompt
from trainer.checkpoint.writer import Checkpointer
from trainer.client import TrainerClient
from trainer.data.data_source import DataSource
from trainer.data.offline import OfflineGroups, offline_count
from trainer.episodes import Episodes
from trainer.evaluation import Evaluator, evaluation_due, was_evaluated
from trainer.health import check_alive
from trainer.ledger import Interrupted, Ledger
from trainer.objectives.objective import Need, train_sequences
from trainer.objectives.registry import needs, objective_of
from trainer.objectives.teachers import Teacher
from trainer.run_log import RunLogger
from trainer.schedule import learning_rate
from trainer.step.batching import BatchPlan, Learned, combine, plan_batch, split
from trainer.step.rank import TrainerRank
from trainer.timing import PhaseTimer
from verify.plugins import Failed
from verify.scorer import RewardScorer

GARBAGE_OBJECTS = 20_000
"""containers that are made before Python looks for cycles among them; its usual 700, those of a few groups, cost a
tenth of a saturated controller's processor time"""


@dataclass
class TrainingLoop:
    """The loops of a run, and everything that they work with."""

    ledger: Ledger
    engines: EngineClient
    scorer: RewardScorer
    episodes: Episodes
    trainers: TrainerClient
    source: DataSource
    clock: PhaseTimer
    logger: RunLogger
    checkpointer: Checkpointer
    probe: list[list[int]]
    """[sequences][tokens] scored by both sides after weight updates, the shortest first"""
    vocabulary: int
    """number of tokens in the vocabulary"""
    evaluator: Evaluator | None = None
    """None without validation problems"""
    teacher: Teacher | None = None
    """asked over HTTP"""
    offline: OfflineGroups | None = None
    """of data.offline, settled"""
    values: dict[str, float] | None = None
    """problem id -> soft value, for spo"""
    told: dict[str, Any] | None = None
    """[objective] that the trainers were told; None while they have that of the settings file"""
    loops: asyncio.TaskGroup = field(init=False)

    @property
    def config(self) -> Config:
        """The settings in force."""
        return self.ledger.stages.now

    async def admit(self) -> None:
        """Start groups wherever there is a slot; after a resume first go on with the interrupted ones."""
        await self.engines.submit(list(self.ledger.groups.values()))
        while count := await self.ledger.slot():
            prompts = await self.open_episodes(self.source.draw_many(self.ledger.next_index, count))
            opened = [self.ledger.open(prompt, self.source.seeds(prompt)) for prompt in prompts]
            await self.engines.submit(opened)

    async def open_episodes(self, prompts: list[Prompt]) -> list[Prompt]:
        """The prompts as their environments begin them; those whose environment fails are left out."""
        if not any(prompt.problem.environment for prompt in prompts):
            return prompts
        found = await asyncio.gather(*(self.episodes.open(prompt) for prompt in prompts), return_exceptions=True)
        opened: list[Prompt] = []
        for prompt, one in zip(prompts, found, strict=True):
            if isinstance(one, Failed):
                self.scorer.failed(prompt.problem, one)
            elif isinstance(one, BaseException):
                raise one
            elif len(opened) < self.ledger.wanted():  # a stage may have ended meanwhile
                opened.append(one)
            self.ledger.next_index = prompt.index + 1
        return opened

    async def collect(self) -> None:
        """Score every completion as it ends; the last of a group makes the group ready or filters it."""

        async def score(completion: Completion) -> None:
            group = self.ledger.groups[completion.group]
            if not group.prompt.problem.environment:
                await self.next_turns()
            elif (completion := await self.answer(group, completion)).unfinished:
                return
            reward, text = await self.scorer.score(group.prompt.problem, completion)
            if self.teacher is not None:
                completion.teacher = await self.teacher.score(group.prompt.token_ids, completion.token_ids)
            for settled in await self.scorer.settle(group, completion, reward, text):
                self.ledger.close(*settled)

        async with asyncio.TaskGroup() as scoring:
            for completion in (*self.ledger.unscored(), *self.ledger.waiting()):
                scoring.create_task(score(completion))
            async for completion in self.engines.finished():
                scoring.create_task(score(self.ended(completion)))

    def ended(self, completion: Completion) -> Completion:
        """Take what an engine has ended: a completion, or a turn of an episode."""
        if self.ledger.groups[completion.group].prompt.problem.environment:
            completion = self.episodes.end_turn(completion)
        self.ledger.receive(completion)
        return completion

    async def answer(self, group: Group, completion: Completion) -> Completion:
        """Let the environment answer the turn that ended; unless the episode is over, the engine goes on behind it. In
        synchronous mode the turns of a wave wait for one another, so that batches repeat."""
        ledger, logger = self.ledger, self.logger
        logger.note_waiting(logger.waiting + 1)
        answered = await self.episodes.answer(group.prompt, completion)
        if completion.unfinished:
            ledger.receive(answered)
        else:
            group.completions[completion.index] = answered
        if self.config.rollout.max_async_level and answered.unfinished:
            await self.engines.submit([group])
        if self.config.rollout.max_async_level or not answered.unfinished:
            logger.note_waiting(logger.waiting - 1)
        await self.next_turns()
        return answered

    async def next_turns(self) -> None:
        """In synchronous mode: let the engines go on with all turns of a wave, once no other completion of it is under
        way and no environment works."""
        ledger, engines = self.ledger, self.engines
        under_way = self.config.rollout.max_async_level or engines.training_in_flight() or ledger.waiting()
        if not under_way and ledger.unfinished():
            self.logger.note_waiting(0)
            await engines.submit(list(ledger.groups.values()))

    async def publish(self, version: int) -> None:
        """Bring the trainers' weights into the running engines, prove it, and free the slots that waited for it."""
        started = time.monotonic()
        probe = self.engines.probe_due(self.probe, version)
        published = await self.trainers.publish(version, probe)
        self.logger.last_sync = await self.engines.update(published, probe, started)
        if self.config.rollout.max_async_level == 0:
            await self.evaluate_if_due(version)  # synchronous: before the next wave, so that batches repeat
        self.ledger.release(version)

    async def train(self) -> None:
        """Take a batch, learn from it, publish; the update overlaps the next forward and backward."""
        ledger, clock = self.ledger, self.clock
        sync: asyncio.Future[None] = clock.nothing()
        kept: asyncio.Future[None] = clock.nothing()
        evaluations: list[asyncio.Task[None]] = []
        while not ledger.exhausted:
            while ledger.stage_over:  # twice where a condition ended one behind the last step of the next
                await clock("last weight update of a stage", sync)
                self.logger.stage(ledger.next_stage())
            try:
                groups = await clock("a full batch", ledger.take(), 2 * self.config.deadlines.step_s)
            except Interrupted:
                await self.checkpointer.save(after=kept)
                await self.checkpointer.finish()
                if not all(task.done() for task in evaluations):  # the next launch's engines have later weights
                    self.logger.progress.warning("a validation evaluation under way ends here and is not made up for")
                raise
            staleness = [ledger.staleness(group) for group in groups]
            offline = self.offline_groups()
            learned = await self.learn(groups, sync, offline)
            check_alive(learned, self.config, self.vocabulary, ledger.version + 1, max(staleness))
            filtered = ledger.trained(groups)
            version = ledger.version
            row = self.logger.step(groups, staleness, filtered, learned, version, offline)
            ledger.stages.move(objective_of(self.config).after_step(row["entropy"]))
            if reason := ledger.stages.observe(row, [*groups, *filtered]):
                ledger.end_stage(reason)
            await clock("rollouts of the step before", kept, self.config.deadlines.step_s)
            kept = self.loops.create_task(self.logger.keep(groups, version), name="rollouts to disk")
            await clock("checkpoint", self.checkpointer.save_if_due(after=kept))
            sync = self.loops.create_task(self.publish(version), name="publish")
            if self.config.rollout.max_async_level == 0:
                await clock("weight update", sync)
            elif evaluated_meanwhile(self.config, version):
                task = self.loops.create_task(self.evaluate_behind(sync, version), name="evaluate")
                evaluations = [*(one for one in evaluations if not one.done()), task]
        await clock("last weight update", sync)
        self.engines.close()

    def offline_groups(self) -> list[Group]:
        """The groups that are trained with the next batch and were not sampled by this run."""
        if self.offline is None:
            return []
        return self.offline.batch(self.ledger.version, offline_count(self.config), self.config.seed)

    async def learn(self, groups: list[Group], sync: asyncio.Future[None], offline: Sequence[Group] = ()) -> Learned:
        """One optimiser step on each minibatch of a batch (by default the batch is one), each with its part of the
        offline groups, once `sync` has read the weights."""
        config, trainers, clock, steps = self.config, self.trainers, self.clock, []
        rate = learning_rate(self.ledger.version, config.steps, config.optimiser)
        await self.tell_objective()
        minibatches = split(groups, config.optimiser.minibatches)
        if offline:
            parts = split(offline, config.optimiser.minibatches)
            minibatches = [own + others for own, others in zip(minibatches, parts, strict=True)]
        # in a thread: splicing answers into thousands of long completions takes seconds, and heartbeats go on
        works = [await clock("plan of the step", asyncio.to_thread(self.plan, minibatch)) for minibatch in minibatches]
        if len(works) > 1 and Need.OLD_LOGPROBS in needs(self.config):
            for work in works:
                await clock("log-probs of the batch", trainers.compute_old_logprobs(work.micro_batches))
        for work in works:
            sums = await clock("forward and backward", trainers.forward_backward(work.micro_batches))
            await clock("previous weight update", sync)  # until here the copy may read the weights
            steps.append(Learned(work, sums, await clock("optimiser step", trainers.step(rate))))
        await self.move_reference()
        return combine(steps)

    async def tell_objective(self) -> None:
        """Let the trainers have the objective in force, if a stage or a step changed it."""
        objective = self.config.objective
        if objective != (self.ledger.stages.config.objective if self.told is None else self.told):
            await self.clock("objective of the trainers", self.trainers.call(TrainerRank.set_objective, objective))
            self.told = objective

    def plan(self, minibatch: list[Group]) -> BatchPlan:
        """What each trainer rank does for one optimiser step on these groups."""
        config = self.config
        sequences = train_sequences(
            minibatch, objective_of(config), config, self.source.prompt_format.chat, self.values
        )
        ranks, budget = len(self.trainers.ranks), config.optimiser.micro_batch_tokens
        return plan_batch(sequences, ranks, budget, together=Need.GROUPS in needs(self.config))

    async def move_reference(self) -> None:
        """After a batch: bring a reference that moves up to the policy, or a share of the way."""
        reference, trained = objective_of(self.config).compared_with, self.ledger.version + 1
        if reference is not None and reference.every and trained % reference.every == 0:
            moved = self.trainers.call(TrainerRank.move_reference, reference.share)
            await self.clock("move of the reference", moved)

    async def evaluate(self, version: int, temperature: float, alone: bool = False) -> None:
        """Evaluate a version on the validation problems, unless an earlier launch did; training goes on meanwhile.
        alone: it does not, and a bar shows how far the evaluation is."""
        if self.evaluator is not None and not was_evaluated(self.config, version, temperature):
            bar = self.logger.progress.sampled if alone else None
            found = await self.evaluator.run(temperature, self.config.evaluate.samples, bar)
            self.logger.evaluation(version, found)

    async def evaluate_if_due(self, version: int) -> None:
        """Evaluate at the sampling temperature every evaluate.every versions; the first and last are not asked here."""
        if evaluated_meanwhile(self.config, version):
            await self.evaluate(version, self.config.rollout.temperature)

    async def evaluate_behind(self, sync: asyncio.Future[None], version: int) -> None:
        """Evaluate a version once its update has ended, so that no completion begins with weights before it."""
        await asyncio.wait([sync])  # its error is raised where it is awaited
        await self.evaluate_if_due(version)

    async def run(self) -> None:
        """Run until `steps` are trained. If one loop fails, all stop and its error is raised."""
        gc.collect()
        gc.freeze()  # what libraries made at the start is never garbage; looking at it took a third of the processor
        usual = gc.get_threshold()
        gc.set_threshold(GARBAGE_OBJECTS, *usual[1:])
        try:
            async with asyncio.TaskGroup() as self.loops:
                for loop in (self.admit, self.collect, self.train):
                    self.loops.create_task(loop(), name=loop.__name__)
        finally:
            gc.set_threshold(*usual)
            gc.unfreeze()


def evaluated_meanwhile(config: Config, version: int) -> bool:
    """Whether a version is evaluated while training goes on."""
    return evaluation_due(config, version) and 0 < version < config.last_version
