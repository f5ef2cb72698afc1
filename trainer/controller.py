"""The loop of a run: four nouns (ledger, engines, scorer, learner), three loops, one screen.

    admit --prompts--> engines --completions--> collect --groups--> train --weights--> engines
      ^ waits for a free slot      waits for a finished completion    waits for a full batch |
      |                            unblocked by any engine            unblocked by collect   |
      +------------- slots come back when every engine has proved that it holds the new weights

The ledger is the only state (so resume works) and `publish` the only writer of policy versions. Nothing in flight is
dropped or restarted by a weight update. What is not here: assembling and ending a run (launch.py), one step on the
trainers (learner.py), mathematics (objectives/).
"""

from __future__ import annotations

import asyncio
import gc
import time
from dataclasses import dataclass, field

from rollout.client import EngineClient
from shared.config import Config
from shared.errors import SyncMismatch
from shared.types import Completion
from trainer.checkpoint.writer import Checkpointer
from trainer.data.data_source import DataSource
from trainer.episodes import Episodes
from trainer.evaluation import Evaluator, evaluation_due, was_evaluated
from trainer.learner import Learner
from trainer.ledger import Interrupted, Ledger
from trainer.objectives.registry import objective_of
from trainer.run_log import RunLogger
from trainer.step.rank import TrainerRank
from trainer.timing import PhaseTimer
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
    source: DataSource
    learner: Learner
    clock: PhaseTimer
    logger: RunLogger
    checkpointer: Checkpointer
    probe: list[list[int]]
    """[sequences][tokens] scored by both sides after weight updates, the shortest first"""
    evaluator: Evaluator | None = None
    """None without validation problems"""
    loops: asyncio.TaskGroup = field(init=False)

    @property
    def config(self) -> Config:
        """The settings in force."""
        return self.ledger.stages.now

    async def admit(self) -> None:
        """Start groups wherever there is a slot; after a resume first go on with the interrupted ones."""
        ledger = self.ledger
        await self.engines.submit(list(ledger.groups.values()))
        while count := await ledger.slot():
            drawn = self.source.draw_many(ledger.next_index, count)
            prompts = await self.episodes.open_all(drawn)
            ledger.next_index = drawn[-1].index + 1
            prompts = prompts[: ledger.wanted()]  # a stage may have ended while environments began
            await self.engines.submit([ledger.open(prompt, self.source.seeds(prompt)) for prompt in prompts])

    async def collect(self) -> None:
        """Score every completion as it ends; the last of a group makes the group ready or filters it. Where only a turn
        of an episode ended, the environment answers it, and the engine goes on."""
        ledger = self.ledger

        async def score(completion: Completion) -> None:
            group = ledger.groups[completion.group]
            prompt, played = group.prompt, bool(group.prompt.problem.environment)
            if played:
                self.logger.note_waiting()
                completion = await self.episodes.advance(prompt, completion)
                ledger.advance(completion)
            await self.engines.continue_turns(group, ledger.groups.values())
            if played:
                self.logger.note_waiting()
            if completion.unfinished:
                return
            reward, text = await self.scorer.score(prompt.problem, completion)
            await self.learner.ask_teacher(prompt, completion)
            for settled in await self.scorer.settle(group, completion, reward, text):
                ledger.close(*settled)

        async with asyncio.TaskGroup() as scoring:
            for completion in (*ledger.unscored(), *ledger.waiting()):
                scoring.create_task(score(completion))
            async for completion in self.engines.finished():
                if ledger.groups[completion.group].prompt.problem.environment:
                    completion = self.episodes.end_turn(completion)
                ledger.receive(completion)
                scoring.create_task(score(completion))

    async def publish(self, version: int) -> None:
        """Bring the trainers' weights into the running engines, prove it, and free the slots that waited for it."""
        started = time.monotonic()
        probe = self.engines.probe_due(self.probe, version)
        trainers = self.learner.trainers
        published = await trainers.publish(version, probe)
        try:
            self.logger.last_sync = await self.engines.update(published, probe, started)
        except SyncMismatch:
            self.engines.name_ranks(await trainers.call(TrainerRank.checksum_parts))
            raise
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
            while ledger.stage_over:  # twice where a condition ended one after the last step of the next
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
            offline = self.learner.offline_groups()
            learned = await self.learner.learn(groups, sync, offline)
            filtered = ledger.trained(groups)
            version = ledger.version
            row = self.logger.step(groups, staleness, filtered, learned, version, offline)
            ledger.stages.move(objective_of(self.config).after_step(row["entropy"]))
            if reason := ledger.stages.observe(row, [*groups, *filtered]):
                ledger.end_stage(reason)
            await clock("rollouts of the step before", kept, self.config.deadlines.step_s)
            kept = self.loops.create_task(self.logger.keep(groups, version), name="rollouts to disk")
            await self.checkpointer.forget_routes([*groups, *filtered])
            await clock("checkpoint", self.checkpointer.save_if_due(after=kept))
            sync = self.loops.create_task(self.publish(version), name="publish")
            if self.config.rollout.max_async_level == 0:
                await clock("weight update", sync)
            elif evaluated_meanwhile(self.config, version):
                evaluation = self.loops.create_task(self.evaluate_after(sync, version), name="evaluate")
                evaluations = [*(task for task in evaluations if not task.done()), evaluation]
        await clock("last weight update", sync)
        self.engines.close()

    async def evaluate(self, version: int, temperature: float, alone: bool = False) -> None:
        """Evaluate a version, unless an earlier launch did. alone: training waits, and a bar shows how far it is."""
        if self.evaluator is not None and not was_evaluated(self.config, version, temperature):
            bar = self.logger.progress.sampled if alone else None
            result = await self.evaluator.run(temperature, self.config.evaluate.samples, bar)
            self.logger.evaluation(version, result)

    async def evaluate_if_due(self, version: int) -> None:
        """Evaluate at the sampling temperature every evaluate.every versions; the first and last are not asked here."""
        if evaluated_meanwhile(self.config, version):
            await self.evaluate(version, self.config.rollout.temperature)

    async def evaluate_after(self, sync: asyncio.Future[None], version: int) -> None:
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
