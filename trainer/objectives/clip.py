"""Clipped importance ratios of single tokens: PPO's objective as GRPO, DAPO, Magistral and decoupled PPO have it.

    loss = - sum_t weight_t c_t min(r_t A, clip(r_t, 1 - clip_low, 1 + clip_high) A)

r_t = pi_t / mu_t (ratio_reference "rollout"), or pi_t / old_t ("old") with the importance weight c_t of the policy at
the start of the batch against the one that sampled (importance.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from shared.config import Config
from shared.lazy_module import LazyModule
from shared.section import Section
from trainer.objectives.importance import Importance, Unbounded, bound_contradictions, importance_weights
from trainer.objectives.inputs import LossInputs, LossTerm
from trainer.objectives.objective import Need, Objective
from trainer.objectives.registry import publish

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch")

STEPS = 20
"""steps of no entropy, or of twice the target, that take clip_high from one bound to the other"""


def clipped(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), and where the lower and the upper bound end its gradient.

    PPO (arXiv 1707.06347); clip_high above clip_low: DAPO (arXiv 2503.14476), Magistral (arXiv 2506.10910). With
    dual_clip = c and A < 0 it is at least c A (arXiv 1912.09729). Lower bound: A < 0; upper: A > 0. All [loss_tokens].
    """
    low, high = 1.0 - clip_low, 1.0 + clip_high
    objective = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    below, above = (ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0)
    if dual_clip:
        least = dual_clip * advantages
        objective = torch.where(advantages < 0, torch.maximum(objective, least), objective)
        above = above | (ratio > dual_clip) & (advantages < 0)
    return objective, below, above


class EntropyTarget(Section):
    """An entropy that is kept by moving clip_high after every step."""

    nats: float = Field(gt=0)
    """the entropy of next-token distributions to keep (`entropy` in metrics.jsonl)"""
    clip_high_bounds: tuple[float, float] = (0.2, 0.4)
    """least and greatest clip_high that the target may lead to"""


class FromRollout(Section):
    """The ratio divides by the policy that sampled."""

    importance: ClassVar[Importance] = Unbounded()

    kind: Literal["rollout"] = "rollout"
    """the clipped ratio divides by the policy that sampled, or by the one at the start of the batch"""


class FromOld(Section):
    """The ratio divides by the policy at the start of the batch."""

    kind: Literal["old"] = "old"
    importance: Importance = Unbounded(kind="token")
    """weight of a token: how the policy at the start of the batch weighs against the one that sampled"""


class ClippedRatio(Objective):
    """Settings of a clipped ratio and its loss, here with the ratio of each token by itself."""

    gradient_follows_advantages = True

    clip_low: float = Field(0.2, gt=0)
    """importance ratio is clipped below 1 - clip_low"""
    clip_high: float = Field(0.28, gt=0)
    """importance ratio is clipped above 1 + clip_high"""
    entropy_target: EntropyTarget | None = None
    """the entropy to keep by moving clip_high after every step; without this table clip_high stays as it is"""
    ratio_reference: Annotated[FromRollout | FromOld, Field(discriminator="kind")] = FromRollout()
    """the policy that the clipped ratio divides by"""

    @property
    def needs(self) -> set[Need]:
        """The log-probs at the start of the batch, where ratios divide by them."""
        return super().needs | ({Need.OLD_LOGPROBS} if self.ratio_reference.kind == "old" else set())

    @property
    def unweighted(self) -> str:
        """The setting of the importance weights, where the ratio divides by the start of the batch without them."""
        old, importance = self.ratio_reference.kind == "old", self.ratio_reference.importance
        return "objective.ratio_reference.importance" if old and importance.kind == "none" else ""

    @property
    def learns_from(self) -> Literal["rows", "log-probs", ""]:
        """Completions with log-probs, which a ratio or a weight divides by; else none."""
        return "" if self.unweighted else "log-probs"

    def log_ratios(self, inputs: LossInputs) -> Tensor:
        """[loss_tokens] log r_t, with gradients. A policy that was not kept is the one now."""
        if self.ratio_reference.kind == "rollout":
            return inputs.logprobs - inputs.behaviour
        return inputs.logprobs - (inputs.logprobs.detach() if inputs.old is None else inputs.old)

    def ratios(self, inputs: LossInputs) -> Tensor:
        """[loss_tokens] r_t, with gradients."""
        return self.log_ratios(inputs).exp()

    def clip(self, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The clipped objective of each token, and where the lower and the upper bound end its gradient."""
        return clipped(ratio, advantages, self.clip_low, self.clip_high)

    def after_step(self, entropy: float) -> dict[str, Any]:
        """clip_high moved towards the entropy's target, by hand in Magistral (arXiv 2506.10910, sections 2.1 and 5.1):
        clip_high + (most - least) / STEPS times (target - entropy) / target, the last kept within 1, within bounds."""
        if self.entropy_target is None:
            return {}
        least, most = self.entropy_target.clip_high_bounds
        lack = min(1.0, max(-1.0, 1 - entropy / self.entropy_target.nats))
        return {"clip_high": min(most, max(least, self.clip_high + (most - least) / STEPS * lack))}

    def loss(self, inputs: LossInputs) -> LossTerm:
        """The clipped objective of each token, weighed by its importance weight where there is one."""
        objective, low, high = self.clip(self.ratios(inputs), inputs.advantages)
        weights = importance_weights(inputs, self.ratio_reference.importance, self.ratio_reference.kind == "old")
        weighed = objective if weights.weight is None else weights.weight * objective
        return LossTerm(-(inputs.weights * weighed).sum(), low | weights.low, high | weights.high, weights.masked)

    def contradictions(self, config: Config) -> Iterator[str]:
        """Yield contradictions of the bounds, and those of every objective."""
        yield from super().contradictions(config)
        yield from bound_contradictions(self.ratio_reference.importance, "objective.ratio_reference.importance")
        bounds = self.entropy_target.clip_high_bounds if self.entropy_target else ()
        if bounds and not 0 < bounds[0] <= self.clip_high <= bounds[1]:
            yield (
                f"objective.entropy_target.clip_high_bounds = {list(bounds)} must be [least, most] above 0 with "
                f"objective.clip_high = {self.clip_high} between them"
            )


class Clip(ClippedRatio):
    """The clipped ratio of single tokens, and a bound for what became likely with a negative advantage."""

    advantages_by_token = True

    dual_clip: float = Field(0.0, ge=0)
    """with a negative advantage the objective is at least dual_clip times it (above 1, mostly 3); 0 for no bound"""

    def clip(self, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The clipped objective with the second bound."""
        return clipped(ratio, advantages, self.clip_low, self.clip_high, self.dual_clip)

    def contradictions(self, config: Config) -> Iterator[str]:
        """Yield that dual_clip is no bound, and the contradictions of every clipped ratio."""
        yield from super().contradictions(config)
        if self.dual_clip and self.dual_clip <= 1:
            yield f"objective.dual_clip = {self.dual_clip} must be above 1, or 0 for no such bound"


publish("magistral", Clip, "Magistral, arXiv 2506.10910")
publish(
    "grpo", Clip, "DeepSeekMath, arXiv 2402.03300",
    clip_high=0.2, advantage={"scale": "group"}, loss_aggregation="sequence", filter_groups_by="off",
)  # fmt: skip
publish(
    "dapo", Clip, "arXiv 2503.14476",
    advantage={"scale": "group"}, loss_aggregation="batch_tokens", filter_groups_by="correctness",
)  # fmt: skip
publish(
    "dr_grpo", Clip, "arXiv 2503.20783",
    clip_high=0.2, advantage={"scale": "none"}, loss_aggregation="constant", filter_groups_by="off",
)  # fmt: skip
publish(
    "gdpo", Clip, "arXiv 2601.05242", clip_high=0.2, advantage={"kind": "each_reward"}, filter_groups_by="off",
)  # fmt: skip
publish(
    "decoupled_ppo", Clip, "arXiv 2110.00641; AReaL, arXiv 2505.24298",
    ratio_reference={"kind": "old"}, clip_high=0.2, filter_groups_by="off",
)  # fmt: skip
publish(
    "tis", Clip, "truncated importance sampling, as in verl and TRL",
    ratio_reference={"kind": "old", "importance": {"kind": "token_truncated"}},
)  # fmt: skip
publish(
    "icepop", Clip, "arXiv 2510.18855", ratio_reference={"kind": "old", "importance": {"kind": "token_masked"}},
)  # fmt: skip
