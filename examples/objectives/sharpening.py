"""Sharpening (arXiv 2412.01951): the policy is rewarded by what the reference thinks of it, without any verifier.

    gradient = mean_i c_t (l_i - mean of the others' l) grad log pi(y_i|x)        l_i = log ref(y_i|x)

It maximises E_pi log ref; with kl = beta its optimum is ref^(1 + 1/beta) / Z, the reference with its probabilities
sharpened. l is of whole completions, as in the paper, and favours short ones.
"""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field

from trainer.objectives.inputs import LossInputs, LossTerm
from trainer.objectives.objective import Compared, Need
from trainer.objectives.policy_gradient import PolicyGradient
from trainer.objectives.registry import publish


class Sharpening(Compared, PolicyGradient):
    """The policy gradient of the reference's log-probs, added to that of the rewards where an advantage is chosen."""

    rewards_itself = True
    compares_rewards = False
    gradient_follows_advantages = False
    advantages_by_token = False

    self_weight: float = Field(1.0, gt=0)
    """weight of the reference's log-prob of a completion, nats, added to the advantage of its rewards"""

    @property
    def needs(self) -> set[Need]:
        """Whole groups: a completion is compared with the others."""
        return super().needs | {Need.GROUPS}

    def loss(self, inputs: LossInputs) -> LossTerm:
        """-sum_t weight_t c_t (A_i + self_weight (l_i - mean of the others' l)) log pi_t.

        Raises ValueError without the log-probs of a reference."""
        if inputs.reference is None:
            raise ValueError(f'objective.name = "{self.name}" needs the log-probs of a reference')
        completions = inputs.completions
        likelihoods = completions.sums(inputs.reference)
        lead = self.self_weight * (likelihoods - completions.mean_of_others(likelihoods))
        return super().loss(replace(inputs, advantages=inputs.advantages + lead[completions.index]))


publish(
    "sharpening", Sharpening, "arXiv 2412.01951", importance={"kind": "token_truncated"}, advantage={"kind": "none"},
    filter_groups_by="off", loss_aggregation="completions",
)  # fmt: skip
