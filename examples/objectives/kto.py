"""KTO (arXiv 2402.01306): what people gain or lose by a response, felt less the further it is from a reference point.

    loss = mean_i lambda_i (1 - sigma(s_i beta (l_i - z_i))) / beta      l_i = log pi(y_i|x) / ref(y_i|x)

s_i is 1 for a desirable response (its reward is above `desirable_above`), else -1; lambda_i its weight. The reference
point z is KL(pi || ref) of the prompt, without gradients. Here it is the mean l of the group's other completions, where
that is above 0: on-policy without bias before that bound (the authors take completions of other prompts, biased); 0 for
a completion that is alone, as where pi has just begun at ref. The loss is divided by beta, as those of regularised.py.
"""

from __future__ import annotations

import torch
from pydantic import Field

from trainer.objectives.inputs import LossInputs, LossTerm, unbounded
from trainer.objectives.objective import Need
from trainer.objectives.registry import publish
from trainer.objectives.regularised import Regularised


class Kto(Regularised):
    """Gains of desirable responses and losses of the others."""

    desirable_above: float = 0.5
    """a completion with a reward above this is desirable, any other is undesirable"""
    desirable_weight: float = Field(1.0, gt=0)
    """weight of a desirable completion; with many more of one kind the authors raise the weight of the other, until
    weight times number differ by less than 4/3"""
    undesirable_weight: float = Field(1.0, gt=0)
    """weight of an undesirable completion"""

    @property
    def needs(self) -> set[Need]:
        """Whole groups: the reference point of a completion is that of the others."""
        return super().needs | {Need.GROUPS}

    def loss(self, inputs: LossInputs) -> LossTerm:
        """sum_i weight_i lambda_i (1 - sigma(s_i beta (l_i - z_i))) / beta; the advantages are the rewards."""
        ratios, weights = self.log_ratios(inputs)
        completions = inputs.completions
        point = completions.mean_of_others(ratios.detach()).clamp(min=0)
        desirable = inputs.advantages[completions.first] > self.desirable_above
        signs = torch.where(desirable, 1.0, -1.0)
        counted = torch.where(desirable, self.desirable_weight, self.undesirable_weight)
        felt = torch.sigmoid(signs * self.beta * (ratios - point))
        return unbounded((weights * counted * (1 - felt)).sum() / self.beta, inputs)


publish(
    "kto", Kto, "arXiv 2402.01306",
    advantage={"kind": "reward"}, loss_aggregation="completions", filter_groups_by="off",
)  # fmt: skip
