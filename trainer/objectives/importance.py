"""Importance weights for tokens that another policy sampled: c_t from the ratios rho_t = pi / mu, chosen by name.

    name                 c_t (a constant)
    token                rho_t
    token_truncated      clip(rho_t, low, high)                       AIPO, CISPO, TIS
    token_masked         rho_t 1[low <= rho_t <= high]                IcePop (arXiv 2510.18855)
    divergence_masked    min(rho_t, 20) 1[pi_t - mu_t <= high if A > 0, >= -low if A <= 0]    DPPO-TV (arXiv 2602.04879)
    sequence             prod_s rho_s                                 unbiased, varies exponentially with length
    sequence_truncated   min(prod_s rho_s, high)
    sequence_masked      prod_s rho_s 1[prod_s rho_s <= high]
    geometric_masked     rho_t 1[low <= exp(mean_s log rho_s) <= high]

pi is the policy at the start of the batch where the loss clips against it (ratio_reference "old"), else the policy now.
In an environment the products are those of the whole episode, the geometric means those of a turn.
Single tokens are biased (what a token does to later ones stays as mu made it), products are not until they are
truncated. Masked tokens stay in the denominator of the step.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from trainer.objectives.inputs import LossInputs

Importance = Literal[
    "none", "token", "token_truncated", "token_masked", "divergence_masked", "sequence", "sequence_truncated",
    "sequence_masked", "geometric_masked",
]  # fmt: skip
BOUNDS: dict[Any, dict[str, Any]] = {
    "none": {},
    "token": {},
    "token_truncated": {"importance_low": 0.0, "importance_high": 2.0},
    "token_masked": {"importance_low": 0.5, "importance_high": 5.0},
    "divergence_masked": {"importance_low": 0.2, "importance_high": 0.2},
    "sequence": {},
    "sequence_truncated": {"importance_high": 5.0},
    "sequence_masked": {"importance_high": 5.0},
    "geometric_masked": {"importance_low": 0.999, "importance_high": 1.001},
}
"""the bounds that each has, with their defaults"""
LARGEST = 20.0
"""largest weight of "divergence_masked\""""


class Weights(NamedTuple):
    """Importance weights of tokens; each [loss_tokens]."""

    weight: Tensor | None
    """float32 c_t; None for 1"""
    low: Tensor
    """bool: the lower bound changes it"""
    high: Tensor
    """bool: the upper bound changes it"""
    masked: Tensor
    """bool: it is 0"""


@torch.no_grad()
def importance_weights(
    inputs: LossInputs, name: Importance | None, low: float | None, high: float | None, of_old: bool = False
) -> Weights:
    """The weights of a micro-batch. name: None for "none". of_old: of the policy at the start of the batch against the
    one that sampled, instead of the policy now. Raises ValueError for an unknown name."""
    none = torch.zeros_like(inputs.weights, dtype=torch.bool)
    if name in (None, "none"):
        return Weights(None, none, none, none)
    least, most = low or 0.0, high or float("inf")
    now = inputs.old if of_old and inputs.old is not None else inputs.logprobs
    log_ratio = now.detach() - inputs.behaviour
    ratio = log_ratio.exp()
    if name == "token":
        return Weights(ratio, none, none, none)
    if name == "token_truncated":
        return Weights(ratio.clamp(least, most), ratio < least, ratio > most, none)
    if name == "token_masked":
        return mask(ratio, ratio, least, most)
    if name == "divergence_masked":
        change, rising = now.exp() - inputs.behaviour.exp(), inputs.advantages > 0
        below, above = ~rising & (change < -least), rising & (change > most)
        return Weights(ratio.clamp(max=LARGEST) * ~(below | above), below, above, below | above)
    of = inputs.completions
    if name == "geometric_masked":
        return mask(ratio, of.turn_means(log_ratio, inputs.imitated).exp()[of.turn], least, most)
    product = of.sums(log_ratio).exp()[of.index]
    if name == "sequence":
        return Weights(product, none, none, none)
    if name == "sequence_truncated":
        return Weights(product.clamp(max=most), none, product > most, none)
    if name == "sequence_masked":
        return mask(product, product, 0.0, most)
    raise ValueError(f"objective.importance = '{name}' is not known")


def mask(weight: Tensor, measured: Tensor, low: float, high: float) -> Weights:
    """c_t = `weight` where `measured` lies between the bounds, else 0."""
    below, above = measured < low, measured > high
    # not a product: an infinite weight times 0 would be NaN
    return Weights(weight.masked_fill(below | above, 0.0), below, above, below | above)
