"""The controller's calls of all trainer ranks at once: shares of a batch, sums of what came back."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from rollout.weights.proof import PublishedWeights
from shared.config import Config
from shared.errors import NonFinite
from shared.launch.calls import Connection, RankClient, request
from shared.record_file import Written
from shared.types import MicroBatch
from trainer.step.batching import add_up
from trainer.step.forward_backward import StepSums
from trainer.step.rank import Stepped, TrainerRank


class TrainerClient(RankClient):
    """Calls all trainer ranks together: `call` with the same arguments, the other methods combine the answers."""

    def __init__(self, hub: Connection, ranks: range, config: Config):
        super().__init__(hub, ranks, config.deadlines)
        self.config = config
        self.version = 0
        """policy version that was last published"""
        self.sharers = config.sharers
        """neighbours that have the same share of a batch, and the same sums of it"""

    async def compute_old_logprobs(self, plan: list[list[MicroBatch]]) -> None:
        """Write into every sequence of the plan its log-probs under the policy as it is (column "old")."""
        temperature = self.config.rollout.temperature
        requests = [request(TrainerRank.compute_old_logprobs, share, temperature) for share in plan]
        rows = await self.call_each([each for each in requests for _ in range(self.sharers)])
        for share, logprobs in zip(plan, rows[:: self.sharers], strict=True):
            sequences = [sequence for batch in share for sequence in batch.sequences]
            for sequence, column in zip(sequences, logprobs, strict=True):
                sequence.columns["old"] = column

    async def forward_backward(self, plan: list[list[MicroBatch]], sft: bool = False) -> StepSums:
        """Run forward and backward on every rank. plan: [shares][micro-batches]."""
        temperature = 1.0 if sft else self.config.rollout.temperature
        requests = [request(TrainerRank.forward_backward, share, temperature, sft) for share in plan]
        sums = await self.call_each([each for each in requests for _ in range(self.sharers)])
        total = add_up(sums[:: self.sharers], seconds=max(part.seconds for part in sums))
        if (loss_sum := total.sums.get("loss", 0.0)) != loss_sum:
            raise NonFinite(f"the loss of the step after version {self.version} is {loss_sum}")
        return total

    async def step(self, learning_rate: float) -> Stepped:
        """Take one optimiser step on every rank; returns the slowest rank's answer, with the largest peak of memory."""
        replies = await self.call(TrainerRank.step, learning_rate)
        slowest = max(replies, key=lambda stepped: stepped.seconds)
        return replace(slowest, gpu_peak_bytes=max(stepped.gpu_peak_bytes for stepped in replies))

    async def publish(self, version: int, probe: list[list[int]]) -> list[PublishedWeights]:
        """Write the weights for the engines; returns one report a rank."""
        self.version, proof = version, self.config.sync.verify
        return await self.call(TrainerRank.publish, version, probe if proof else [], proof)

    async def save(self, folder: Path, version: int) -> list[dict[str, int]]:
        """Begin to write all shards of a version; returns the checksums of each rank's weights."""
        return await self.call(TrainerRank.save, str(folder), version)

    async def saved(self) -> dict[str, Written] | None:
        """What all ranks have written since `save`, by name; None while a file is not done, or ranks do other work."""
        if self.under_way:
            return None
        saved = [files for files in await self.call(TrainerRank.saved) if files is not None]
        return None if len(saved) < len(self.ranks) else {name: each for files in saved for name, each in files.items()}
