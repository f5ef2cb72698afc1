"""The policy gradient with importance weights: REINFORCE, RLOO, AIPO, CISPO, DPPO and their relatives.

    loss = - sum_t weight_t c_t A_t log pi_t          c_t the importance weight (importance.py), a constant

Unbiased off-policy as far as the importance weights make it so (Williams 1992). With "token_truncated" it is AIPO
(arXiv 2505.24034) and CISPO (arXiv 2506.13585), with "divergence_masked" DPPO (arXiv 2602.04879).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from shared.config import Config
from trainer.objectives.clip import bound_contradictions
from trainer.objectives.importance import Importance, importance_weights
from trainer.objectives.inputs import LossInputs, LossTerm
from trainer.objectives.objective import Objective
from trainer.objectives.registry import publish


class PolicyGradient(Objective):
    """Settings and loss of the weighted policy gradient."""

    own = frozenset({"importance"})
    gradient_follows_advantages = True
    advantages_by_token = True

    importance: Importance = "none"
    """weight of a token, as another policy sampled it: its importance ratio, the product or the geometric mean of its
    completion's, truncated (kept within bounds) or masked (0 beyond them)"""
    importance_low: float | None = Field(None, ge=0)
    """lower bound of `importance`"""
    importance_high: float | None = Field(None, gt=0)
    """upper bound of `importance`; of "divergence_masked", as importance_low, a difference of probabilities"""

    @property
    def learns_from(self) -> Literal["rows", "log-probs", ""]:
        """Those with log-probs, which it weighs; without weights none."""
        return "" if self.importance == "none" else "log-probs"

    def loss(self, inputs: LossInputs) -> LossTerm:
        """-sum_t weight_t c_t A_t log pi_t. No gradient flows through c_t."""
        weight, low, high, masked = importance_weights(
            inputs, self.importance, self.importance_low, self.importance_high
        )
        factors = inputs.advantages if weight is None else weight * inputs.advantages
        return LossTerm(-(inputs.weights * (factors * inputs.logprobs)).sum(), low, high, masked)

    def contradictions(self, config: Config) -> Iterator[str]:
        """Yield contradictions of the bounds, and those of every objective."""
        yield from super().contradictions(config)
        yield from bound_contradictions(self.importance, self.importance_low, self.importance_high)


class Distill(PolicyGradient):
    """On-policy distillation: the teacher's log-ratios are the advantages."""

    def contradictions(self, config: Config) -> Iterator[str]:
        """Yield that the teacher is missing, else the contradictions of every objective."""
        if not self.teacher:
            yield 'objective.name = "distill" learns from a teacher: set objective.teacher to a folder or an address'
        else:
            yield from super().contradictions(config)


SUMS = {"scale": "none", "loss_aggregation": "completions"}
"""sums over the tokens of a completion, means over completions"""
publish("reinforce", PolicyGradient, "Williams 1992", filter_groups_by="off", **SUMS)
publish(
    "rloo", PolicyGradient, "arXiv 2402.14740", advantage="leave_one_out", filter_groups_by="off", **SUMS,
)  # fmt: skip
publish(
    "aipo", PolicyGradient, "LlamaRL, arXiv 2505.24034", importance="token_truncated", filter_groups_by="off", **SUMS,
)  # fmt: skip
publish(
    "cispo", PolicyGradient, "MiniMax-M1, arXiv 2506.13585",
    importance="token_truncated", importance_high=5.0, scale="group", loss_aggregation="batch_tokens",
)  # fmt: skip
publish("dppo", PolicyGradient, "arXiv 2602.04879", importance="divergence_masked")
publish(
    "maxrl", PolicyGradient, "arXiv 2602.02710",
    advantage="maxrl", filter_groups_by="off", loss_aggregation="completions",
)  # fmt: skip
publish(
    "pass_at_k", PolicyGradient, "arXiv 2503.19595", importance="token_truncated", advantage="pass_at_k", **SUMS,
)  # fmt: skip
publish(
    "pass_at_k_centred", PolicyGradient, "arXiv 2503.19595", importance="token_truncated", advantage="pass_at_k",
    centred=True, **SUMS,
)  # fmt: skip
publish(
    "majority", PolicyGradient, "arXiv 2503.19595", importance="token_truncated", advantage="majority", **SUMS,
)  # fmt: skip
publish(
    "distill", Distill, "on-policy distillation: arXiv 2306.13649 with the reverse KL",
    importance="token_truncated", advantage="none", loss_aggregation="batch_tokens", filter_groups_by="off",
)  # fmt: skip
