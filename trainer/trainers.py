"""The controller's view of all trainer ranks: every method calls each rank and combines their replies."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from shared.config import Config
from shared.errors import NonFinite
from shared.messages import (
    Accumulate,
    Accumulated,
    Done,
    Export,
    Load,
    LoadBeside,
    Loaded,
    Message,
    MoveReference,
    OptimiserStep,
    Publish,
    Published,
    Recall,
    Recalled,
    ResetOptimiser,
    Saved,
    SaveShard,
    Stepped,
    Stop,
    Written,
)
from shared.rpc import Hub, Reply
from shared.types import MicroBatch


class StepSums(msgspec.Struct):
    """Sums and maxima over all trainer ranks of one accumulate call."""

    sums: dict[str, float]
    maxima: dict[str, float]
    seconds: float
    """slowest rank"""
    tokens: int
    """prompt + completion tokens through the model, all ranks"""


class Trainers:
    """All trainer ranks, called together."""

    def __init__(self, hub: Hub, ranks: range, config: Config):
        self.hub, self.ranks, self.config = hub, ranks, config
        self.version = 0
        """policy version that was last published"""

    async def load(self, model_dir: Path, checkpoint: Path | None) -> list[Loaded]:
        """Build model and optimiser on every rank."""
        message = Load(str(model_dir), str(checkpoint) if checkpoint else None)
        return await self._all(message, Loaded, "load of the model", self.config.deadlines.start_s)

    async def load_beside(self, folder: Path, role: Literal["reference", "teacher"]) -> None:
        """Build a frozen model beside the policy on every rank, from a Hugging Face folder."""
        message = LoadBeside(str(folder), role)
        await self._all(message, Done, f"load of the {role} model", self.config.deadlines.start_s)

    async def move_reference(self, share: float) -> None:
        """Move the reference `share` of the way to the policy."""
        await self._all(MoveReference(share), Done, "move of the reference model", self.config.deadlines.step_s)

    async def recall(self, plan: list[list[MicroBatch]]) -> None:
        """Write into every sequence of the plan its log-probs under the policy as it is (column "old")."""
        messages: dict[int, Message] = {
            rank: Recall(share, self.config.rollout.temperature) for rank, share in zip(self.ranks, plan, strict=True)
        }
        replies = await self.hub.call_all(messages, Recalled, "log-probs of the batch", self.config.deadlines.step_s)
        for share, reply in zip(plan, replies, strict=True):
            sequences = [sequence for batch in share for sequence in batch.sequences]
            for sequence, logprobs in zip(sequences, reply.logprobs, strict=True):
                sequence.columns["old"] = logprobs

    async def accumulate(self, plan: list[list[MicroBatch]], sft: bool = False) -> StepSums:
        """Run forward and backward on every rank. plan: [trainer ranks][micro-batches]."""
        temperature = 1.0 if sft else self.config.rollout.temperature
        messages: dict[int, Message] = {
            rank: Accumulate(share, temperature, sft) for rank, share in zip(self.ranks, plan, strict=True)
        }
        deadline_s = self.config.deadlines.step_s
        replies = await self.hub.call_all(messages, Accumulated, "forward and backward", deadline_s)
        sums: dict[str, float] = {}
        maxima: dict[str, float] = {}
        for reply in replies:
            for name, value in reply.sums.items():
                sums[name] = sums.get(name, 0.0) + value
            for name, value in reply.maxima.items():
                maxima[name] = max(maxima.get(name, value), value)
        if (loss_sum := sums.get("loss", 0.0)) != loss_sum:
            raise NonFinite(f"the loss of the step after version {self.version} is {loss_sum}")
        return StepSums(sums, maxima, max(r.seconds for r in replies), sum(r.tokens for r in replies))

    async def step(self, learning_rate: float) -> Stepped:
        """Take one optimiser step on every rank; returns the slowest rank's reply."""
        replies = await self._all(OptimiserStep(learning_rate), Stepped, "optimiser step", self.config.deadlines.step_s)
        return max(replies, key=lambda reply: reply.seconds)

    async def reset_optimiser(self) -> None:
        """Set moments and step count back to zero."""
        await self._all(ResetOptimiser(), Done, "reset of the optimiser", self.config.deadlines.step_s)

    async def publish(self, version: int, probe: list[list[int]]) -> list[Published]:
        """Write the weights for the engines; returns one report a rank."""
        self.version, proof = version, self.config.sync.verify
        message = Publish(version, probe if proof else [], proof)
        return await self._all(message, Published, "weights to staging", self.config.deadlines.sync_s)

    async def save(self, folder: Path, version: int) -> dict[str, Written]:
        """Write all shards of a version; returns what was written, by name."""
        replies = await self._all(SaveShard(str(folder), version), Saved, "checkpoint of the trainers", 1800)
        return {name: written for reply in replies for name, written in reply.files.items()}

    async def export(self, folder: Path) -> None:
        """Write a Hugging Face folder."""
        await self._all(Export(str(folder)), Done, "export", 1800)

    async def stop(self) -> None:
        """End every trainer."""
        await self._all(Stop(), Done, "stop of the trainers", 60)

    async def _all(self, message: Message, reply_type: type[Reply], phase: str, deadline_s: float) -> list[Reply]:
        return await self.hub.call_all(dict.fromkeys(self.ranks, message), reply_type, phase, deadline_s)
