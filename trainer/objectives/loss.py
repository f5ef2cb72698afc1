"""The loss of one packed micro-batch, from the objective that the settings choose, and its metrics.

    loss = the policy's part (Objective.loss)                     chosen by objective.name
           + kl.weight sum_t weight_t term_t                            the divergence from a reference (kl.py), and
           - entropy_bonus sum_t weight_t H_t                    the bonus for the entropy of token distributions

The behaviour log-probs are those that the engine reported for the tokens it sampled (the true behaviour policy, also
when weights changed in the middle of the completion). With a teacher each token's advantage gains
teacher.weight sg(log teacher_t - log pi_t): on-policy distillation by the reverse KL, token by token (what a token does
to later ones is left out on purpose).
A new loss is one file (objective.py), and a test with values worked out by hand.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shared.lazy_module import LazyModule
from trainer.objectives.inputs import LossInputs
from trainer.objectives.kl import divergence_terms
from trainer.objectives.objective import Objective

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch")


@dataclass(frozen=True)
class LossOutput:
    """Loss of one micro-batch and its metrics, all 0-dimensional and on the device (no wait for it)."""

    loss: Tensor
    """the part of these tokens in the step's loss; carries gradients"""
    sums: dict[str, Tensor]
    """add over micro-batches and ranks, then divide by "tokens", those of `divergence` by "compared"; only add up
    "loss" (the policy's part of the step's loss) and "regularisation" (what kl and entropy bonus add to that)"""
    maxima: dict[str, Tensor]
    """take the largest; empty where there are no tokens"""


def sft_loss(inputs: LossInputs, entropy: Tensor) -> LossOutput:
    """Imitation: - sum_t weight_t log pi_t, the negative log-likelihood of demonstrations. Never regularised."""
    loss = -(inputs.weights * inputs.logprobs).sum()
    return LossOutput(loss, counts(loss, entropy), {})


def policy_loss(inputs: LossInputs, entropy: Tensor, objective: Objective) -> LossOutput:
    """Loss and metrics of an objective.

    entropy: [loss_tokens] float32 of the policy's token distributions; carries gradients for the entropy bonus. Raises
    ValueError if something that the objective needs is missing.
    """
    term = objective.loss(with_teacher(inputs, objective))
    sampled = inputs.sampled
    added, regular = regularisation(sampled, entropy, objective)
    with torch.no_grad():
        log_ratio, own_entropy = sampled.logprobs - sampled.behaviour, entropy
        if inputs.imitated is not None:
            own_entropy = entropy[~inputs.imitated]
        strange = [others for others in (inputs.imitated, inputs.offline) if others is not None]
        if strange:
            log_ratio = log_ratio[~torch.stack(strange).any(0)]
        off_policy, maxima = divergence(log_ratio, log_ratio.exp())
        sums = counts(term.loss, own_entropy) | off_policy | regular
        sums |= {name: getattr(term, name).sum() for name in ("clipped_low", "clipped_high", "masked")}
        if objective.teacher is not None and inputs.teacher is not None:
            sums["teacher_log_ratio"] = (inputs.logprobs - inputs.teacher).sum()
    return LossOutput(term.loss if added is None else term.loss + added, sums, maxima)


def counts(loss: Tensor, entropy: Tensor) -> dict[str, Tensor]:
    """The sums that every loss has, over the tokens that were sampled (or demonstrated)."""
    return {
        "tokens": torch.full_like(loss.detach(), entropy.numel()),
        "loss": loss.detach(),
        "entropy": entropy.detach().sum(),
    }


def with_teacher(inputs: LossInputs, objective: Objective) -> LossInputs:
    """Inputs with the teacher's term added to the advantages: A_t + teacher.weight sg(log teacher_t - log pi_t).

    Raises ValueError if there is a teacher and its log-probs are missing."""
    if objective.teacher is None:
        return inputs
    if inputs.teacher is None:
        if not inputs.logprobs.numel():  # an empty micro-batch, with which a rank keeps up with the others
            return inputs
        raise ValueError("objective.teacher needs the log-probs of the teacher")
    lead = inputs.teacher - inputs.logprobs.detach()
    return replace(inputs, advantages=inputs.advantages + objective.teacher.weight * lead)


def regularisation(
    inputs: LossInputs, entropy: Tensor, objective: Objective
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """What objective.kl and objective.entropy_bonus add to the loss (None if both are 0), and sums for metrics.

    The bonus is the gradient of the entropies where the completions went (not of where they go), without importance
    weights. Raises ValueError if a reference is needed and there is none.
    """
    added: Tensor | None = None
    sums: dict[str, Tensor] = {}
    if objective.compared_with is not None:
        if inputs.reference is None:
            raise ValueError("objective.kl needs the log-probs of a reference")
        sums["reference_log_ratio"] = (inputs.logprobs.detach() - inputs.reference).sum()
    kl = objective.kl
    if kl is not None and kl.weight and inputs.reference is not None:
        terms = divergence_terms(kl.gradient, inputs.logprobs, inputs.behaviour, inputs.reference, inputs.completions)
        added = kl.weight * (inputs.weights * terms).sum()
    if objective.entropy_bonus:
        bonus = objective.entropy_bonus * (inputs.weights * entropy).sum()
        added = -bonus if added is None else added - bonus
    if added is not None:
        sums["regularisation"] = added.detach()
    return added, sums


def divergence(log_ratio: Tensor, ratio: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """How far the trained policy is from the one that sampled: sums and maxima over [tokens that this run sampled],
    whose number is "compared".

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
    sums["compared"] = torch.full_like(sums["ratio"], log_ratio.numel())
    maxima = {"abs_logprob_difference": difference.max(), "ratio": ratio.max()} if ratio.numel() else {}
    return sums, maxima
