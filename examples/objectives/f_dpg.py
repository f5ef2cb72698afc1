"""f-DPG (arXiv 2302.08215): the policy gradient of a divergence from the regularised optimum, which need not be the KL.

    gradient of beta D_f(pi || pi*) = beta E_pi f'(t) grad log pi       t = pi / pi*, pi* = ref exp((r - V) / beta)

    divergence        D_f(pi || pi*)                                         -f'(t), with u = -log t
    js                (KL(pi || m) + KL(pi* || m)), m = (pi + pi*) / 2       log(1 + e^u) - log 2
    kl                KL(pi || pi*): the policy gradient of agro, spo, dro   u - 1
    total_variation   sum |pi - pi*| / 2                                     sign(u) / 2

u = (r - V - beta log(pi / ref)) / beta is above 0 where pi has less than the optimum. V: the prompt's soft value, as
spo has it. -f'(t) less its mean over the other completions of the group takes the place of the advantage. A forward
KL is left out: its e^u has no bound.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from trainer.objectives.inputs import LossInputs, LossTerm
from trainer.objectives.objective import Need
from trainer.objectives.policy_gradient import PolicyGradient
from trainer.objectives.registry import publish
from trainer.objectives.regularised import Spo


class FDpg(Spo, PolicyGradient):
    """Settings and loss of f-DPG; its importance weights are those of a policy gradient."""

    gradient_follows_advantages = False
    advantages_by_token = False
    least_completions = 2

    divergence: Literal["js", "kl", "total_variation"] = Field("js")
    """the divergence from the optimum that is made small"""

    @property
    def needs(self) -> set[Need]:
        """What spo needs, and whole groups: the others are the baseline."""
        return super().needs | {Need.GROUPS}

    @property
    def learns_from(self) -> Literal["rows", "log-probs", ""]:
        """Completions with recorded log-probs, for the importance weights; without weights none."""
        return "" if self.unweighted else "log-probs"

    def pulls(self, lack: Tensor) -> Tensor:
        """-f'(t) of lack = u = -log t."""
        if self.divergence == "js":
            return torch.nn.functional.softplus(lack) - math.log(2)
        return lack - 1 if self.divergence == "kl" else lack.sign() / 2

    def loss(self, inputs: LossInputs) -> LossTerm:
        """-sum_t weight_t c_t beta (-f'_i - mean of the others') log pi_t; the advantages are r - V(x)."""
        regular, _ = self.regularised_rewards(inputs)
        pulls, completions = self.beta * self.pulls(regular.detach() / self.beta), inputs.completions
        leads = pulls - completions.mean_of_others(pulls)
        return PolicyGradient.loss(self, replace(inputs, advantages=leads[completions.index]))


publish(
    "f_dpg", FDpg, "arXiv 2302.08215", importance={"kind": "token_truncated"}, advantage={"kind": "reward"},
    loss_aggregation="completions", filter_groups_by="off",
)  # fmt: skip
