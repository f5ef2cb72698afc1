"""The policy gradient with importance weights: REINFORCE, RLOO, AIPO, CISPO, DPPO and their relatives.

    loss = - sum_t weight_t c_t A_t log pi_t          c_t the importance weight (importance.py), a constant

Unbiased off-policy as far as the importance weights make it so (Williams 1992). With "token_truncated" it is AIPO
(arXiv 2505.24034) and CISPO (arXiv 2506.13585), with "divergence_masked" DPPO (arXiv 2602.04879).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from shared.config import Config
from trainer.objectives.importance import Importance, Unbounded, bound_contradictions, importance_weights
from trainer.objectives.inputs import LossInputs, LossTerm
from trainer.objectives.objective import Objective
from trainer.objectives.registry import publish


class PolicyGradient(Objective):
    """Settings and loss of the weighted policy gradient."""

    gradient_follows_advantages = True
    advantages_by_token = True

    importance: Importance = Unbounded()
    """weight of a token that another policy sampled"""

    @property
    def unweighted(self) -> str:
        """The setting of the importance weights, where there are none."""
        return "objective.importance" if self.importance.kind == "none" else ""

    @property
    def learns_from(self) -> Literal["rows", "log-probs", ""]:
        """Completions with recorded log-probs, for the importance weights; without weights none."""
        return "" if self.unweighted else "log-probs"

    def loss(self, inputs: LossInputs) -> LossTerm:
        """-sum_t weight_t c_t A_t log pi_t. No gradient flows through c_t."""
        weight, low, high, masked = importance_weights(inputs, self.importance)
        factors = inputs.advantages if weight is None else weight * inputs.advantages
        return LossTerm(-(inputs.weights * (factors * inputs.logprobs)).sum(), low, high, masked)

    def contradictions(self, config: Config) -> Iterator[str]:
        """Yield contradictions of the bounds, and those of every objective."""
        yield from super().contradictions(config)
        yield from bound_contradictions(self.importance, "objective.importance")


class Distill(PolicyGradient):
    """On-policy distillation: the teacher's log-ratios are the advantages."""

    def contradictions(self, config: Config) -> Iterator[str]:
        """Yield that the teacher is missing, else the contradictions of every objective."""
        if self.teacher is None:
            yield (
                'objective.name = "distill" learns from a teacher: set objective.teacher.kind = "local" with a path, '
                'or "served" with url and model'
            )
        else:
            yield from super().contradictions(config)


PLAIN: dict[str, Any] = {"advantage": {"scale": "none"}, "loss_aggregation": "completions"}
"""sums over the tokens of a completion, means over completions, advantages as they are"""
TRUNCATED = {"kind": "token_truncated"}
publish("reinforce", PolicyGradient, "Williams 1992", filter_groups_by="off", **PLAIN)
publish(
    "rloo", PolicyGradient, "arXiv 2402.14740",
    advantage={"kind": "leave_one_out"}, loss_aggregation="completions", filter_groups_by="off",
)  # fmt: skip
publish(
    "aipo", PolicyGradient, "LlamaRL, arXiv 2505.24034", importance=TRUNCATED, filter_groups_by="off", **PLAIN,
)  # fmt: skip
publish(
    "cispo", PolicyGradient, "MiniMax-M1, arXiv 2506.13585",
    importance=TRUNCATED | {"high": 5.0}, advantage={"scale": "group"}, loss_aggregation="batch_tokens",
)  # fmt: skip
publish("dppo", PolicyGradient, "arXiv 2602.04879", importance={"kind": "divergence_masked"})
publish(
    "maxrl", PolicyGradient, "arXiv 2602.02710",
    advantage={"kind": "maxrl"}, filter_groups_by="off", loss_aggregation="completions",
)  # fmt: skip
publish(
    "pass_at_k", PolicyGradient, "arXiv 2503.19595",
    importance=TRUNCATED, advantage={"kind": "pass_at_k"}, loss_aggregation="completions",
)  # fmt: skip
publish(
    "pass_at_k_centred", PolicyGradient, "arXiv 2503.19595",
    importance=TRUNCATED, advantage={"kind": "pass_at_k", "centred": True}, loss_aggregation="completions",
)  # fmt: skip
publish(
    "majority", PolicyGradient, "arXiv 2503.19595",
    importance=TRUNCATED, advantage={"kind": "majority"}, loss_aggregation="completions",
)  # fmt: skip
publish(
    "distill", Distill, "on-policy distillation: arXiv 2306.13649 with the reverse KL",
    importance=TRUNCATED, advantage={"kind": "none"}, loss_aggregation="batch_tokens", filter_groups_by="off",
)  # fmt: skip
