"""The token objectives: pure functions from log-probabilities and advantages to a loss, chosen by name.

    loss = - sum_t weight_t objective_t         r_t = exp(logprob_t - behaviour_logprob_t), the importance ratio
           + kl sum_t weight_t term_t           the divergence from a reference policy (kl.py), and
           - entropy_bonus sum_t weight_t H_t   the bonus for the entropy of token distributions: both off by default

The denominator of the ratio is the log-prob that the engine reported for the token it sampled (the true behaviour
policy, also when weights changed in the middle of the completion). All tensors are [loss_tokens] float32 of one
packed micro-batch. A new loss is one function here, one line in OBJECTIVES, one name in config.Objective.loss, one
test with values worked out by hand. What this does not: weights and advantages (advantage.py), the model. Who calls
this: worker.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.config import Objective
from shared.errors import ConfigError
from trainer.kl import Reference, divergence_terms


@dataclass(frozen=True)
class LossInputs:
    """What every objective sees; each [loss_tokens] float32."""

    logprobs: Tensor
    """under the policy that is trained, at the sampling temperature; carries gradients"""
    behaviour_logprobs: Tensor
    """under the policy that sampled, at the sampling temperature; ignored by "supervised\""""
    advantages: Tensor
    """of the token's completion"""
    weights: Tensor
    """of the token in the step's loss (advantage.token_weights)"""

    def __post_init__(self) -> None:
        shape = self.logprobs.shape
        for name in ("logprobs", "behaviour_logprobs", "advantages", "weights"):
            tensor = getattr(self, name)
            if tensor.shape != shape or tensor.dtype != torch.float32:
                raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected float32 {tuple(shape)}")


@dataclass(frozen=True)
class LossOutput:
    """Loss of one micro-batch and its metrics, all 0-dimensional and on the device (no wait for it)."""

    loss: Tensor
    """the part of these tokens in the step's loss; carries gradients"""
    sums: dict[str, Tensor]
    """add over micro-batches and ranks, then divide by "tokens"; only add up "loss" (the policy's part of the step's
    loss) and "regularisation" (what kl and entropy bonus add to that)"""
    maxima: dict[str, Tensor]
    """take the largest; empty where there are no tokens"""


def clip_higher(inputs: LossInputs, ratio: Tensor, settings: Objective) -> Tensor:
    """min(r A, clip(r, 1 - clip_low, 1 + clip_high) A): Magistral (arXiv 2506.10910), DAPO
    (arXiv 2503.14476)."""
    clipped = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    return torch.minimum(ratio * inputs.advantages, clipped * inputs.advantages)


def grpo(inputs: LossInputs, ratio: Tensor, settings: Objective) -> Tensor:
    """min(r A, clip(r, 1 - clip_low, 1 + clip_low) A): the symmetric clip of GRPO (arXiv 2402.03300)."""
    clipped = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_low)
    return torch.minimum(ratio * inputs.advantages, clipped * inputs.advantages)


def truncated_importance(inputs: LossInputs, ratio: Tensor, settings: Objective) -> Tensor:
    """sg(min(r, truncate)) A log pi: AIPO of LlamaRL (arXiv 2505.24034).

    The weight is a constant: no gradient flows through it."""
    return ratio.detach().clamp(max=settings.truncate) * inputs.advantages * inputs.logprobs


def reinforce(inputs: LossInputs, ratio: Tensor, settings: Objective) -> Tensor:
    """A log pi: the plain policy gradient, unbiased only on-policy (Williams 1992)."""
    return inputs.advantages * inputs.logprobs


def supervised(inputs: LossInputs, ratio: Tensor, settings: Objective) -> Tensor:
    """log pi: negative log-likelihood of demonstrations."""
    return inputs.logprobs


TokenObjective = Callable[[LossInputs, Tensor, Objective], Tensor]

OBJECTIVES: dict[str, TokenObjective] = {
    "clip_higher": clip_higher,
    "grpo": grpo,
    "truncated_importance": truncated_importance,
    "reinforce": reinforce,
    "supervised": supervised,
}


def bounds(name: str, settings: Objective) -> tuple[float, float]:
    """Ratios between which the objective named passes the full gradient."""
    if name == "clip_higher":
        return 1.0 - settings.clip_low, 1.0 + settings.clip_high
    if name == "grpo":
        return 1.0 - settings.clip_low, 1.0 + settings.clip_low
    if name == "truncated_importance":
        return 0.0, settings.truncate
    return 0.0, float("inf")


def clipped(name: str, inputs: LossInputs, ratio: Tensor, settings: Objective) -> tuple[Tensor, Tensor]:
    """Counts of tokens whose gradient the lower and the upper bound change.

    The clips act on one sign of the advantage each : the lower on A < 0, the upper on A > 0; the
    truncation of the importance weight acts on both.
    """
    low, high = bounds(name, settings)
    below, above = ratio < low, ratio > high
    if name != "truncated_importance":
        below, above = below & (inputs.advantages < 0), above & (inputs.advantages > 0)
    return below.sum(), above.sum()


def regularisation(
    inputs: LossInputs, ratio: Tensor, entropy: Tensor, settings: Objective, reference: Reference | None
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """What objective.kl and objective.entropy_bonus add to the loss (None if both are 0), and its sums for metrics.

    The bonus is the gradient of the entropies where the completions went (not of where they go), without importance
    weights. Raises ValueError if kl is on and there is no reference.
    """
    added: Tensor | None = None
    sums: dict[str, Tensor] = {}
    if settings.kl > 0:
        if reference is None:
            raise ValueError("objective.kl needs the log-probs of a reference")
        terms, log_ratio = divergence_terms(settings.kl_gradient, inputs.logprobs, ratio, reference)
        added = settings.kl * (inputs.weights * terms).sum()
        sums["reference_log_ratio"] = log_ratio.sum()
    if settings.entropy_bonus > 0:
        bonus = settings.entropy_bonus * (inputs.weights * entropy).sum()
        added = -bonus if added is None else added - bonus
    if added is not None:
        sums["regularisation"] = added.detach()
    return added, sums


def token_loss(
    name: str, inputs: LossInputs, entropy: Tensor, settings: Objective, reference: Reference | None = None
) -> LossOutput:
    """Loss and metrics of one micro-batch.

    entropy: [loss_tokens] float32 of the policy's token distributions; carries gradients for settings.entropy_bonus.
    reference: for settings.kl. "supervised" is never regularised.
    Raises ConfigError for an unknown name.
    """
    if name not in OBJECTIVES:
        raise ConfigError(f"objective.loss = '{name}' is not one of {', '.join(OBJECTIVES)}")
    log_ratio = inputs.logprobs - inputs.behaviour_logprobs
    ratio = log_ratio.exp()
    loss = -(inputs.weights * OBJECTIVES[name](inputs, ratio, settings)).sum()
    added: Tensor | None = None
    regular: dict[str, Tensor] = {}
    if name != "supervised":
        added, regular = regularisation(inputs, ratio, entropy, settings, reference)
    with torch.no_grad():
        sums = {
            "tokens": torch.full_like(loss, inputs.logprobs.numel()),
            "loss": loss.detach(),
            "entropy": entropy.sum(),
        }
        maxima: dict[str, Tensor] = {}
        if name != "supervised":
            off_policy, maxima = divergence(log_ratio, ratio)
            low, high = clipped(name, inputs, ratio, settings)
            sums |= off_policy | {"clipped_low": low, "clipped_high": high} | regular
    return LossOutput(loss if added is None else loss + added, sums, maxima)


def divergence(log_ratio: Tensor, ratio: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """How far the trained policy is from the one that sampled: sums and maxima over [loss_tokens].

    logprob_difference sums log mu - log pi (its mean estimates KL(mu || pi)); kl_k3 sums r - 1 - log r, which
    estimates the same with less variance and is never negative (Schulman 2020); ratio and ratio_squared give the
    mean ratio (1 when nothing is wrong) and the effective sample size (sum r)^2 / sum r^2.
    """
    difference = log_ratio.abs()
    sums = {
        "abs_logprob_difference": difference.sum(),
        "logprob_difference": -log_ratio.sum(),
        "kl_k3": (torch.expm1(log_ratio) - log_ratio).sum(),
        "ratio": ratio.sum(),
        "ratio_squared": (ratio * ratio).sum(),
    }
    maxima = {"abs_logprob_difference": difference.max(), "ratio": ratio.max()} if ratio.numel() else {}
    return sums, maxima
