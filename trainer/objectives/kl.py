"""KL(pi || ref) in the loss: how the divergence from a reference policy is differentiated, chosen by name.

    loss += kl * sum_t weight_t term_t      l_t = log pi_t - log ref_t, l = sum_t l_t, r_t = exp(log pi_t - log mu_t)

    name             term_t                               its expected gradient; s_t = gradient of log pi_t
    return           sg(r_t sum_{s >= t} l_s) log pi_t    of the completion's KL where pi = mu
    sequence_k2      sg(prod r) l^2 / 2, once             of the completion's KL, from any mu
    sequence_k3      prod r (exp(-l) - 1 + l), once       the same
    weighted_k3      r_t (exp(-l_t) - 1 + l_t)            E[sum_t s_t l_t]: leaves out what a token does to later ones

Source: arXiv 2506.09477 (its pitfalls 1 and 2); weighted_k3: DeepSeek-V3.2. Tokens come from mu, not pi. "return" and
"weighted_k3" weigh each token's gradient by its own ratio r_t, neither clipped nor truncated: exact for a completion of
one token. The product of all ratios of the sequence forms is exact for any, but varies exponentially with length: for
short completions. In an environment a completion is the whole episode: what the environment says has the same
probability under pi, mu and ref, so that "return", "sequence_k2" and "sequence_k3" have the gradient of the episode's
KL, what a turn does to later ones included. docs/objectives.md shows what is wrong with the terms of many public
trainers, which are not offered here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from shared.lazy_module import LazyModule
from shared.section import Section
from trainer.objectives.inputs import Completions

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch")

KlGradient = Literal["return", "sequence_k2", "sequence_k3", "weighted_k3"]


class FirstPolicy(Section):
    """The policy that reinforcement learning starts with."""

    every: ClassVar[int] = 0
    share: ClassVar[float] = 1.0

    kind: Literal["start"] = "start"
    """the policy that is compared with: the one that reinforcement learning starts with, an earlier iterate, or a
    moving average"""


class Previous(Section):
    """An earlier iterate."""

    share: ClassVar[float] = 1.0

    kind: Literal["previous"] = "previous"
    every: int = Field(1, ge=1)
    """batches after which the reference moves"""


class Average(Section):
    """A moving average."""

    kind: Literal["average"] = "average"
    every: int = Field(1, ge=1)
    share: float = Field(0.01, gt=0, le=1)
    """share of the policy that the moving average takes in each time"""


Reference = Annotated[FirstPolicy | Previous | Average, Field(discriminator="kind")]


class Kl(Section):
    """The KL divergence from a reference, added to the loss."""

    weight: float = Field(ge=0)
    """weight of the divergence; at 0 it is measured and adds nothing"""
    gradient: KlGradient = "return"
    """how the gradient is taken: "return" (summed log-ratios as reward), "sequence_k2" or "sequence_k3" (of whole
    completions: exact, for short ones), "weighted_k3" (token by token, as DeepSeek-V3.2)"""
    reference: Reference = FirstPolicy()
    """the policy that the divergence is measured from"""


@dataclass(frozen=True)
class KlTerms:
    """The quantities that a term is computed from; each [loss_tokens] float32, with gradients."""

    logprobs: Tensor
    ratio: Tensor
    """r, to the policy that sampled"""
    log_ratio: Tensor
    """l, to the reference"""
    completions: Completions

    def at_first_token(self, values: Tensor) -> Tensor:
        """[completions] -> [loss_tokens], the value at a completion's first token and 0 at all others."""
        return torch.zeros_like(self.log_ratio).index_put((self.completions.first,), values)

    def product(self) -> Tensor:
        """[completions] product of a completion's ratios."""
        return self.completions.sums(self.ratio.log()).exp()


def through_return(terms: KlTerms) -> Tensor:
    """sg(r_t sum_{s >= t} l_s) log pi_t: minus the log-ratios as rewards, and the plain policy gradient of them.

    Only its gradient means something, not its value."""
    return terms.ratio.detach() * terms.completions.returns_to_go(terms.log_ratio) * terms.logprobs


def sequence_k2(terms: KlTerms) -> Tensor:
    """sg(prod r) l^2 / 2 of the whole completion."""
    return terms.at_first_token(terms.product().detach() * terms.completions.sums(terms.log_ratio).square() / 2)


def sequence_k3(terms: KlTerms) -> Tensor:
    """prod r (exp(-l) - 1 + l) of the whole completion, both factors differentiated."""
    log_ratio = terms.completions.sums(terms.log_ratio)
    return terms.at_first_token(terms.product() * (torch.expm1(-log_ratio) + log_ratio))


def weighted_k3(terms: KlTerms) -> Tensor:
    """r_t (exp(-l_t) - 1 + l_t), both factors differentiated: the gradient is r_t l_t s_t. The second is Schulman's k3
    (2020), never negative."""
    return terms.ratio * (torch.expm1(-terms.log_ratio) + terms.log_ratio)


GRADIENTS: dict[KlGradient, Callable[[KlTerms], Tensor]] = {
    "return": through_return,
    "sequence_k2": sequence_k2,
    "sequence_k3": sequence_k3,
    "weighted_k3": weighted_k3,
}


def divergence_terms(
    name: KlGradient, logprobs: Tensor, behaviour: Tensor, reference: Tensor, completions: Completions
) -> Tensor:
    """[loss_tokens] term_t, to be weighted and added to the loss.

    name: a value of objective.kl.gradient. All log-probs [loss_tokens] float32, those of the policy with gradients.
    """
    return GRADIENTS[name](KlTerms(logprobs, (logprobs - behaviour).exp(), logprobs - reference, completions))
