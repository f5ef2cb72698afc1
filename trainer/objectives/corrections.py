"""Weights for tokens that another policy sampled: c_t from the ratios rho_t = pi / mu, chosen by name. Constants.

    name                 c_t
    token                rho_t
    token_truncated      clip(rho_t, low, high)                       AIPO, CISPO, TIS
    token_masked         rho_t 1[low <= rho_t <= high]                IcePop (arXiv 2510.18855)
    divergence_masked    min(rho_t, 20) 1[pi_t - mu_t <= high if A > 0, >= -low if A <= 0]    DPPO-TV (arXiv 2602.04879)
    sequence             prod_s rho_s                                 unbiased, varies exponentially with length
    sequence_truncated   min(prod_s rho_s, high)
    sequence_masked      prod_s rho_s 1[prod_s rho_s <= high]
    geometric_masked     rho_t 1[low <= exp(mean_s log rho_s) <= high]

pi is the policy at the start of the batch where the loss clips against it (denominator "proximal"), else the policy
now. Single tokens are biased (what a token does to later ones stays as mu made it), products are not until they are
truncated. Masked tokens stay in the denominator of the step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shared.objective import Objective
from trainer.objectives.inputs import LossInputs

LARGEST = 20.0
"""largest weight of "divergence_masked\""""


@torch.no_grad()
def correct(inputs: LossInputs, settings: Objective) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """[loss_tokens] each: c_t (float32; None for 1), where the lower and the upper bound change it, where it is 0."""
    name, of = settings.correction, inputs.completions
    none = torch.zeros_like(inputs.weights, dtype=torch.bool)
    if name in (None, "none"):
        return None, none, none, none
    low, high = settings.correction_low or 0.0, settings.correction_high or float("inf")
    now = inputs.proximal if settings.denominator == "proximal" and inputs.proximal is not None else inputs.logprobs
    log_ratio = now.detach() - inputs.behaviour_logprobs
    ratio = log_ratio.exp()
    if name == "token":
        return ratio, none, none, none
    if name == "token_truncated":
        return ratio.clamp(low, high), ratio < low, ratio > high, none
    if name == "token_masked":
        return mask(ratio, ratio, low, high)
    if name == "divergence_masked":
        change, rising = now.exp() - inputs.behaviour_logprobs.exp(), inputs.advantages > 0
        below, above = ~rising & (change < -low), rising & (change > high)
        return ratio.clamp(max=LARGEST) * ~(below | above), below, above, below | above
    if name == "geometric_masked":
        return mask(ratio, of.means(log_ratio, inputs.truth).exp()[of.index], low, high)
    product = of.sums(log_ratio).exp()[of.index]
    if name == "sequence":
        return product, none, none, none
    if name == "sequence_truncated":
        return product.clamp(max=high), none, product > high, none
    if name == "sequence_masked":
        return mask(product, product, 0.0, high)
    raise ValueError(f"objective.correction = '{name}' is not known")


def mask(weight: Tensor, measured: Tensor, low: float, high: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """c_t = `weight` where `measured` lies between the bounds, else 0; returns what `correct` returns."""
    below, above = measured < low, measured > high
    # not a product: an infinite weight times 0 would be NaN
    return weight.masked_fill(below | above, 0.0), below, above, below | above
