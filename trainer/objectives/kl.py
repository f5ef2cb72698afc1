"""KL(pi || ref) in the loss: how the divergence from a reference policy is differentiated, chosen by name.

    loss += kl * sum_t weight_t term_t      l_t = log pi_t - log ref_t, l = sum_t l_t, r_t = exp(log pi_t - log mu_t)

    name             term_t                               its expected gradient; s_t = gradient of log pi_t
    return           sg(r_t sum_{s >= t} l_s) log pi_t    of the completion's KL where pi = mu
    sequence_k2      sg(prod r) l^2 / 2, once             of the completion's KL, from any mu
    sequence_k3      prod r (exp(-l) - 1 + l), once       the same
    weighted_k3      r_t (exp(-l_t) - 1 + l_t)            E[sum_t s_t l_t]: leaves out what a token does to later ones
    wrong_token_k2   l_t^2 / 2                            the same, and only where pi = mu
    wrong_k3         exp(-l_t) - 1 + l_t                  of KL(ref || pi), token by token: the other direction
    wrong_k1         l_t                                  0: only noise

Source: arXiv 2506.09477 (its pitfalls 1 and 2); weighted_k3: DeepSeek-V3.2. Tokens come from mu, not pi. "return" and
"weighted_k3" weigh each token's gradient by its own ratio r_t, neither clipped nor truncated: exact for a completion of
one token. The product of all ratios of the sequence forms is exact for any, but varies exponentially with length: for
short completions. In an environment a completion is the whole episode: what the environment says has the same
probability under pi, mu and ref, so that "return", "sequence_k2" and "sequence_k3" have the gradient of the episode's
KL, what a turn does to later ones included. The wrong ones exist to be compared with: many public trainers have them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trainer.objectives.inputs import Completions

KlGradient = Literal[
    "return", "sequence_k2", "sequence_k3", "weighted_k3", "wrong_k1", "wrong_k3", "wrong_token_k2"
]  # fmt: skip


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
    """r_t (exp(-l_t) - 1 + l_t), both factors differentiated: the gradient is r_t l_t s_t."""
    return terms.ratio * k3(terms)


def k1(terms: KlTerms) -> Tensor:
    """l_t."""
    return terms.log_ratio


def k2(terms: KlTerms) -> Tensor:
    """l_t^2 / 2."""
    return terms.log_ratio.square() / 2


def k3(terms: KlTerms) -> Tensor:
    """exp(-l_t) - 1 + l_t (Schulman 2020): never negative."""
    return torch.expm1(-terms.log_ratio) + terms.log_ratio


GRADIENTS: dict[str, Callable[[KlTerms], Tensor]] = {
    "return": through_return,
    "sequence_k2": sequence_k2,
    "sequence_k3": sequence_k3,
    "weighted_k3": weighted_k3,
    "wrong_token_k2": k2,
    "wrong_k3": k3,
    "wrong_k1": k1,
}


def divergence_terms(
    name: str, logprobs: Tensor, behaviour: Tensor, reference: Tensor, completions: Completions
) -> Tensor:
    """[loss_tokens] term_t, to be weighted and added to the loss.

    name: a value of objective.kl_gradient. All log-probs [loss_tokens] float32, those of the policy with gradients.
    """
    return GRADIENTS[name](KlTerms(logprobs, (logprobs - behaviour).exp(), logprobs - reference, completions))
