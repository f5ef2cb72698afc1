"""A-LoL (arXiv 2305.14718): the policy gradient of data that the reference wrote, where they beat its own value.

    gradient = - mean_i max(A_i, 0) clip(w_i, 1 - clip_low, 1 + clip_high) grad log pi(y_i|x)
    A_i = r_i - V(x)        w_i = pi(y_i|x) / ref(y_i|x), a constant        V the value of the reference, E_ref r

A completion is one action: its ratio is the product of its tokens'. The reference was trained to imitate the data
(SFT), so that it stands for who wrote them, and nobody's log-probs are needed. V is a value head that learns the mean
reward together with the policy (the authors train one beforehand on the reference's states).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trainer.objectives.inputs import LossInputs, LossTerm
from trainer.objectives.objective import FIXED, Compared, Need
from trainer.objectives.registry import publish


class ALol(Compared):
    """The policy gradient of positive advantages over the reference."""

    compares_rewards = False
    reads_plain_rewards = True
    least_completions = 1

    clip_low: float = Field(0.9, gt=0, lt=1)
    """the ratio of a completion counts at least 1 - clip_low"""
    clip_high: float = Field(0.9, gt=0)
    """the ratio of a completion counts at most 1 + clip_high"""
    value_learning_rate: float = Field(1e-2, gt=0, json_schema_extra=FIXED)
    """learning rate of the value head"""

    @property
    def needs(self) -> set[Need]:
        """The reference and the value head."""
        return super().needs | {Need.VALUE}

    @property
    def learns_from(self) -> Literal["rows", "log-probs", ""]:
        """Any completions: the reference stands for who wrote them."""
        return "rows"

    def loss(self, inputs: LossInputs) -> LossTerm:
        """-sum_i weight_i max(A_i, 0) clip(w_i) log pi(y_i), and for the head sum_i weight_i (r_i - V)^2 / 2.

        Raises ValueError without the log-probs of a reference or a value head."""
        if inputs.reference is None or inputs.values is None:
            raise ValueError('objective.name = "a_lol" needs the log-probs of a reference and a value head')
        completions = inputs.completions
        ratio = completions.sums(inputs.logprobs.detach() - inputs.reference).exp()
        rewards, weights = inputs.advantages[completions.first], inputs.weights[completions.first]
        leads = (rewards - inputs.values.detach()).clamp(min=0)
        least, most = 1 - self.clip_low, 1 + self.clip_high
        policy = -(weights * leads * ratio.clamp(least, most) * completions.sums(inputs.logprobs)).sum()
        value = (weights * (rewards - inputs.values).square()).sum() / 2
        touched = (ratio < least) & (leads > 0), (ratio > most) & (leads > 0), leads == 0
        return LossTerm(policy + value, *(which[completions.index] for which in touched))


publish(
    "a_lol", ALol, "arXiv 2305.14718",
    advantage={"kind": "reward"}, loss_aggregation="completions", filter_groups_by="off",
)  # fmt: skip
