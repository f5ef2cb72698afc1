"""Losses of importance ratios and of weighted log-probs: clip and its relatives, GSPO, the policy gradient.

    loss = - sum_t weight_t c_t objective_t

    name                   objective_t                                          ratio
    clip                   min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)     r_t of the token
    sequence_clip          the same                                             exp(mean_t log r_t) of its completion
    sequence_token_clip    the same                                             sg(that) pi_t / sg(pi_t)
    weighted               A log pi_t                                           none

r_t = pi_t / mu_t (denominator "behaviour") or pi_t / prox_t ("proximal"); c_t is the correction (corrections.py), 1
unless set.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shared.objective import Objective
from trainer.objectives.corrections import correct
from trainer.objectives.inputs import LossInputs, Part


def log_ratios(inputs: LossInputs, settings: Objective) -> Tensor:
    """[loss_tokens] log r_t, with gradients. The policy at the start of the batch is the one now if it was not kept."""
    if settings.denominator == "behaviour":
        return inputs.logprobs - inputs.behaviour_logprobs
    return inputs.logprobs - (inputs.logprobs.detach() if inputs.proximal is None else inputs.proximal)


def clipped(ratio: Tensor, advantages: Tensor, settings: Objective) -> tuple[Tensor, Tensor, Tensor]:
    """min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), and where the lower and the upper bound end its gradient.

    PPO (arXiv 1707.06347); clip_high above clip_low: DAPO (arXiv 2503.14476), Magistral (arXiv 2506.10910). With
    dual_clip = c and A < 0 it is at least c A (arXiv 1912.09729). The lower bound acts on A < 0, the upper on A > 0.
    """
    low, high = 1.0 - (settings.clip_low or 0.0), 1.0 + (settings.clip_high or 0.0)
    objective = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    below, above = (ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0)
    if settings.dual_clip:
        least = settings.dual_clip * advantages
        objective = torch.where(advantages < 0, torch.maximum(objective, least), objective)
        above = above | (ratio > settings.dual_clip) & (advantages < 0)
    return objective, below, above


def finish(inputs: LossInputs, settings: Objective, objective: Tensor, low: Tensor, high: Tensor) -> Part:
    """The loss of a clipped objective [loss_tokens], each token weighed by the correction where there is one."""
    weight, below, above, masked = correct(inputs, settings)
    weighed = objective if weight is None else weight * objective
    return Part(-(inputs.weights * weighed).sum(), low | below, high | above, masked)


def clip(inputs: LossInputs, settings: Objective) -> Part:
    """The ratio of each token by itself: GRPO (arXiv 2402.03300), DAPO, Magistral, decoupled PPO (arXiv 2110.00641)."""
    objective, low, high = clipped(log_ratios(inputs, settings).exp(), inputs.advantages, settings)
    return finish(inputs, settings, objective, low, high)


def sequence_clip(inputs: LossInputs, settings: Objective) -> Part:
    """The geometric mean of a completion's ratios for each of its tokens: GSPO (arXiv 2507.18071, equation 7)."""
    of = inputs.completions
    ratio = of.means(log_ratios(inputs, settings)).exp()[of.index]
    return finish(inputs, settings, *clipped(ratio, inputs.advantages, settings))


def sequence_token_clip(inputs: LossInputs, settings: Objective) -> Part:
    """The value of `sequence_clip`, with each token's own gradient: GSPO-token (arXiv 2507.18071, equation 14)."""
    of = inputs.completions
    ratio = of.means(log_ratios(inputs, settings)).detach().exp()[of.index]
    ratio = ratio * (inputs.logprobs - inputs.logprobs.detach()).exp()
    return finish(inputs, settings, *clipped(ratio, inputs.advantages, settings))


def weighted(inputs: LossInputs, settings: Objective) -> Part:
    """A log pi: the policy gradient (Williams 1992), unbiased off-policy as far as the correction makes it so.

    With correction "token_truncated" AIPO (arXiv 2505.24034) and CISPO (arXiv 2506.13585), with "divergence_masked"
    DPPO (arXiv 2602.04879). The correction is a constant: no gradient flows through it."""
    weight, low, high, masked = correct(inputs, settings)
    factors = inputs.advantages if weight is None else weight * inputs.advantages
    return Part(-(inputs.weights * (factors * inputs.logprobs)).sum(), low, high, masked)
