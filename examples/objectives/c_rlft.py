"""C-RLFT (OpenChat, arXiv 2309.11235): imitation of data of mixed quality, weighed by their rewards.

    loss = - mean_i exp(r_i / beta) / mean_j exp(r_j / beta) log pi(y_i | x, c_i)

Its minimum is pi_c exp(r / beta) / Z, the optimum of E r - beta KL(pi || pi_c), where pi_c wrote the data of class c:
no reference is kept. The class is in the prompt (of offline rows: "system"), and who samples later writes there the
class that is wanted. The means are those of the optimiser step, so that gradients are of the size of imitation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from shared.chat import Chat
from shared.config import Config
from shared.types import Group, TrainSequence
from trainer.objectives.inputs import LossInputs, LossTerm, unbounded
from trainer.objectives.objective import Objective
from trainer.objectives.registry import publish


class CRlft(Objective):
    """Weighed imitation."""

    compares_rewards = False
    reads_plain_rewards = True
    least_completions = 1
    gradient_follows_advantages = True

    beta: float = Field(0.43, gt=0)
    """a row counts exp(reward / beta): at 0.43 a reward higher by 1 counts ten times as much"""

    @property
    def learns_from(self) -> Literal["rows", "log-probs", ""]:
        """Any completions: they are imitated."""
        return "rows"

    def sequences(
        self, groups: Sequence[Group], config: Config, chat: Chat | None, values: Mapping[str, float] | None
    ) -> list[list[TrainSequence | None]]:
        """The sequences of every objective; their advantages are exp(r / beta) over its mean over the minibatch."""
        rows = super().sequences(groups, config, chat, values)
        sequences = [sequence for row in rows for sequence in row if sequence is not None]
        largest = max((sequence.advantages[0] for sequence in sequences), default=0.0)
        counted = [math.exp((sequence.advantages[0] - largest) / self.beta) for sequence in sequences]
        mean = math.fsum(counted) / max(len(counted), 1)
        for sequence, value in zip(sequences, counted, strict=True):
            sequence.advantages = [value / mean] * len(sequence.advantages)
        return rows

    def loss(self, inputs: LossInputs) -> LossTerm:
        """-sum_t weight_t A_t log pi_t."""
        return unbounded(-(inputs.weights * (inputs.advantages * inputs.logprobs)).sum(), inputs)


publish(
    "c_rlft", CRlft, "OpenChat, arXiv 2309.11235", advantage={"kind": "reward"}, loss_aggregation="completions",
    filter_groups_by="off",
)  # fmt: skip
