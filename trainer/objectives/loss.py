"""The loss of one packed micro-batch, from the objective that the settings choose, and its metrics.

    loss = the policy's part (ratios.py, held.py, jensen.py)     chosen by objective.loss
           + kl sum_t weight_t term_t                            the divergence from a reference (kl.py), and
           - entropy_bonus sum_t weight_t H_t                    the bonus for the entropy of token distributions

The behaviour log-probs are those that the engine reported for the tokens it sampled (the true behaviour policy, also
when weights changed in the middle of the completion). With a teacher each token's advantage gains
teacher_weight sg(log teacher_t - log pi_t): on-policy distillation by the reverse KL, token by token (what a token does
to later ones is left out on purpose).
A new loss is one function, one line in LOSSES, its settings in shared/papers.py, and a test with values worked out by
hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shared.objective import Objective
from trainer.objectives import held, jensen, ratios
from trainer.objectives.inputs import LossInputs, Part
from trainer.objectives.kl import divergence_terms

LOSSES: dict[str, Callable[[LossInputs, Objective], Part]] = {
    "clip": ratios.clip,
    "sequence_clip": ratios.sequence_clip,
    "sequence_token_clip": ratios.sequence_token_clip,
    "weighted": ratios.weighted,
    "agro": held.agro,
    "spo": held.spo,
    "dro": held.dro,
    "jepo": jensen.jepo,
}


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


def supervised_loss(inputs: LossInputs, entropy: Tensor) -> LossOutput:
    """Imitation: - sum_t weight_t log pi_t, the negative log-likelihood of demonstrations. Never regularised."""
    loss = -(inputs.weights * inputs.logprobs).sum()
    return LossOutput(loss, counts(inputs, loss, entropy), {})


def policy_loss(inputs: LossInputs, entropy: Tensor, settings: Objective) -> LossOutput:
    """Loss and metrics of the chosen objective.

    entropy: [loss_tokens] float32 of the policy's token distributions; carries gradients for settings.entropy_bonus.
    settings: resolved. Raises ValueError if something that the objective needs is missing.
    """
    taught = with_teacher(inputs, settings)
    part = LOSSES[settings.loss or ""](taught, settings)
    sampled = without_truth(inputs)
    added, regular = regularisation(sampled, entropy, settings)
    with torch.no_grad():
        log_ratio = sampled.logprobs - sampled.behaviour_logprobs
        if inputs.truth is not None:
            log_ratio = log_ratio[~inputs.truth]
        off_policy, maxima = divergence(log_ratio, log_ratio.exp())
        sums = counts(sampled, part.loss, entropy) | off_policy | regular
        sums |= {"clipped_low": part.low.sum(), "clipped_high": part.high.sum(), "masked": part.masked.sum()}
        if settings.teacher and inputs.teacher is not None:
            sums["teacher_log_ratio"] = (inputs.logprobs - inputs.teacher).sum()
    return LossOutput(part.loss if added is None else part.loss + added, sums, maxima)


def without_truth(inputs: LossInputs) -> LossInputs:
    """Inputs in which true answers, which nothing sampled, have no weight, no divergence and a ratio of 1."""
    if inputs.truth is None:
        return inputs
    truth, reference = inputs.truth, inputs.reference
    return replace(
        inputs,
        logprobs=inputs.logprobs.masked_fill(truth, 0.0),
        behaviour_logprobs=inputs.behaviour_logprobs.masked_fill(truth, 0.0),
        reference=None if reference is None else reference.masked_fill(truth, 0.0),
        weights=inputs.weights.masked_fill(truth, 0.0),
    )


def counts(inputs: LossInputs, loss: Tensor, entropy: Tensor) -> dict[str, Tensor]:
    """The sums that every loss has, over the tokens that were sampled (or demonstrated)."""
    if inputs.truth is not None:
        entropy = entropy[~inputs.truth]
    return {
        "tokens": torch.full_like(loss.detach(), entropy.numel()),
        "loss": loss.detach(),
        "entropy": entropy.detach().sum(),
    }


def with_teacher(inputs: LossInputs, settings: Objective) -> LossInputs:
    """Inputs with the teacher's term added to the advantages: A_t + teacher_weight sg(log teacher_t - log pi_t).

    Raises ValueError if there is a teacher and its log-probs are missing."""
    if not settings.teacher:
        return inputs
    if inputs.teacher is None:
        if not inputs.logprobs.numel():  # an empty micro-batch, with which a rank keeps up with the others
            return inputs
        raise ValueError("objective.teacher needs the log-probs of the teacher")
    lead = inputs.teacher - inputs.logprobs.detach()
    return replace(inputs, advantages=inputs.advantages + (settings.teacher_weight or 0.0) * lead)


def regularisation(inputs: LossInputs, entropy: Tensor, settings: Objective) -> tuple[Tensor | None, dict[str, Tensor]]:
    """What objective.kl and objective.entropy_bonus add to the loss (None if both are 0), and sums for metrics.

    The bonus is the gradient of the entropies where the completions went (not of where they go), without importance
    weights. Raises ValueError if a reference is needed and there is none.
    """
    added: Tensor | None = None
    sums: dict[str, Tensor] = {}
    if settings.refers:
        if inputs.reference is None:
            raise ValueError("objective.kl needs the log-probs of a reference")
        sums["reference_log_ratio"] = (inputs.logprobs.detach() - inputs.reference).sum()
    if settings.kl and inputs.reference is not None:
        terms = divergence_terms(
            settings.kl_gradient or "", inputs.logprobs, inputs.behaviour_logprobs, inputs.reference,
            inputs.completions,
        )  # fmt: skip
        added = settings.kl * (inputs.weights * terms).sum()
    if settings.entropy_bonus:
        bonus = settings.entropy_bonus * (inputs.weights * entropy).sum()
        added = -bonus if added is None else added - bonus
    if added is not None:
        sums["regularisation"] = added.detach()
    return added, sums


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
