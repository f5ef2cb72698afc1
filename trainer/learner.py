"""One step of learning on the trainers: the groups of a batch become micro-batches, gradients and new weights."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shared.config import Config
from shared.types import Completion, Group, Prompt
from trainer.client import TrainerClient
from trainer.data.data_source import DataSource
from trainer.data.offline import OfflineGroups, offline_count
from trainer.health import check_alive
from trainer.ledger import Ledger
from trainer.objectives.objective import Need, train_sequences
from trainer.objectives.registry import needs, objective_of
from trainer.objectives.teachers import Teacher
from trainer.schedule import learning_rate
from trainer.step.batching import BatchPlan, Learned, combine, plan_batch, split
from trainer.step.rank import TrainerRank
from trainer.timing import PhaseTimer


@dataclass
class Learner:
    """The trainers, and what the objective needs in addition to the groups that this run sampled."""

    trainers: TrainerClient
    ledger: Ledger
    source: DataSource
    clock: PhaseTimer
    teacher: Teacher | None = None
    """asked over HTTP"""
    offline: OfflineGroups | None = None
    """groups of data.offline, settled"""
    values: dict[str, float] | None = None
    """problem id -> soft value, for spo"""
    sent_objective: dict[str, Any] | None = None
    """[objective] that the trainers have; None while they have that of the settings file"""

    @property
    def config(self) -> Config:
        """The settings in force."""
        return self.ledger.stages.now

    async def learn(self, groups: list[Group], sync: asyncio.Future[None], offline: Sequence[Group] = ()) -> Learned:
        """Take one optimiser step on each minibatch of a batch (by default the batch is one), each with its part of the
        offline groups, once `sync` has read the weights. Raises RunError where the weights are ruined afterwards."""
        config, trainers, clock, steps = self.config, self.trainers, self.clock, []
        rate = learning_rate(self.ledger.version, config.steps, config.optimiser)
        await self.send_objective()
        minibatches = split(groups, config.optimiser.minibatches)
        if offline:
            shares = split(offline, config.optimiser.minibatches)
            minibatches = [sampled + others for sampled, others in zip(minibatches, shares, strict=True)]
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
        learned = combine(steps)
        oldest = max(self.ledger.staleness(group) for group in groups)
        check_alive(learned, config, self.source.vocabulary, self.ledger.version + 1, oldest)
        return learned

    async def send_objective(self) -> None:
        """Send the trainers the objective in force, if a stage or a step changed it."""
        objective = self.config.objective
        if objective != (self.ledger.stages.config.objective if self.sent_objective is None else self.sent_objective):
            await self.clock("objective of the trainers", self.trainers.call(TrainerRank.set_objective, objective))
            self.sent_objective = objective

    def plan(self, minibatch: list[Group]) -> BatchPlan:
        """What each trainer rank does for one optimiser step on these groups."""
        config, chat = self.config, self.source.prompt_format.chat
        sequences = train_sequences(minibatch, objective_of(config), config, chat, self.values)
        ranks, budget = config.shares, config.optimiser.micro_batch_tokens
        return plan_batch(sequences, ranks, budget, together=Need.GROUPS in needs(config))

    async def move_reference(self) -> None:
        """After a batch: bring a reference that moves up to the policy, or a share of the way."""
        reference, trained = objective_of(self.config).compared_with, self.ledger.version + 1
        if reference is not None and reference.every and trained % reference.every == 0:
            moved = self.trainers.call(TrainerRank.move_reference, reference.share)
            await self.clock("move of the reference", moved)

    def offline_groups(self) -> list[Group]:
        """The groups that are trained with the next batch and were not sampled by this run."""
        if self.offline is None:
            return []
        return self.offline.batch(self.ledger.version, offline_count(self.config), self.config.seed)

    async def ask_teacher(self, prompt: Prompt, completion: Completion) -> None:
        """Give a completion the log-probs of the teacher that is asked over HTTP, where the objective has one."""
        if self.teacher is not None:
            completion.teacher = await self.teacher.score(prompt.token_ids, completion.token_ids)
