"""Importance weights for tokens that another policy sampled: c_t from the ratios rho_t = pi / mu, chosen by kind.

    kind                 c_t (a constant)
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

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple

from pydantic import Field

from shared.lazy_module import LazyModule
from shared.section import Section
from trainer.objectives.inputs import LossInputs

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch")

LARGEST = 20.0
"""largest weight of "divergence_masked\""""


class Unbounded(Section):
    """No weight, the ratio of each token, or the product over its completion."""

    low: ClassVar[float] = 0.0
    high: ClassVar[float] = math.inf

    kind: Literal["none", "token", "sequence"] = "none"
    """how tokens that another policy sampled are weighed"""


class Bounded(Section):
    """A weight with two bounds."""

    low: float = Field(0.0, ge=0)
    """lower bound; of "divergence_masked" a difference of probabilities"""
    high: float = Field(2.0, gt=0)
    """upper bound; of "divergence_masked" a difference of probabilities"""


class TokenTruncated(Bounded):
    """The ratio of each token, kept within the bounds."""

    kind: Literal["token_truncated"] = "token_truncated"


class TokenMasked(Bounded):
    """The ratio of each token, 0 beyond the bounds."""

    kind: Literal["token_masked"] = "token_masked"
    low: float = Field(0.5, ge=0)
    high: float = Field(5.0, gt=0)


class DivergenceMasked(Bounded):
    """The ratio of each token, 0 where its probability moved further than a bound."""

    kind: Literal["divergence_masked"] = "divergence_masked"
    low: float = Field(0.2, ge=0)
    high: float = Field(0.2, gt=0)


class GeometricMasked(Bounded):
    """The ratio of each token, 0 where the geometric mean of its turn is beyond the bounds."""

    kind: Literal["geometric_masked"] = "geometric_masked"
    low: float = Field(0.999, ge=0)
    high: float = Field(1.001, gt=0)


class SequenceBounded(Section):
    """The product over the completion, truncated at the bound or 0 above it."""

    low: ClassVar[float] = 0.0

    kind: Literal["sequence_truncated", "sequence_masked"]
    high: float = Field(5.0, gt=0)
    """upper bound"""


Importance = Annotated[
    Unbounded | TokenTruncated | TokenMasked | DivergenceMasked | SequenceBounded | GeometricMasked,
    Field(discriminator="kind"),
]


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


def importance_weights(inputs: LossInputs, settings: Importance, from_old: bool = False) -> Weights:
    """The weights of a micro-batch. from_old: weigh the policy at the start of the batch, instead of the policy now,
    against the one that sampled."""
    with torch.no_grad():
        name, least, most = settings.kind, settings.low, settings.high
        none = torch.zeros_like(inputs.weights, dtype=torch.bool)
        if name == "none":
            return Weights(None, none, none, none)
        now = inputs.old if from_old and inputs.old is not None else inputs.logprobs
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
        completions = inputs.completions
        if name == "geometric_masked":
            means = completions.turn_means(log_ratio, inputs.imitated).exp()
            return mask(ratio, means[completions.turn], least, most)
        product = completions.sums(log_ratio).exp()[completions.index]
        if name == "sequence":
            return Weights(product, none, none, none)
        if name == "sequence_truncated":
            return Weights(product.clamp(max=most), none, product > most, none)
        return mask(product, product, 0.0, most)


def mask(weight: Tensor, measured: Tensor, low: float, high: float) -> Weights:
    """c_t = `weight` where `measured` is between the bounds, else 0."""
    below, above = measured < low, measured > high
    # not a product: an infinite weight times 0 would be NaN
    return Weights(weight.masked_fill(below | above, 0.0), below, above, below | above)


def bound_contradictions(settings: Importance, setting: str) -> Iterator[str]:
    """Yield a line where the lower bound is not below the upper one. setting: the dotted name of the table."""
    if settings.kind != "divergence_masked" and settings.low >= settings.high:
        yield f"{setting}.low = {settings.low} must be below {setting}.high = {settings.high}"
