"""KL(pi || ref) in the loss: how the divergence from a frozen reference policy is differentiated, chosen by name.

    loss += kl * sum_t weight_t term_t      l_t = log pi_t - log ref_t,     r_t = exp(log pi_t - log mu_t)

    name         term_t                              its expected gradient where pi = mu; s_t = gradient of log pi_t
    return       sg(r_t sum_{s >= t} l_s) log pi_t   E[sum_t s_t sum_{s >= t} l_s], of the completion's KL: right
    weighted_k3  r_t (exp(-l_t) - 1 + l_t)           E[sum_t s_t l_t]: leaves out what a token does to later ones
    k2           l_t^2 / 2                           the same
    k3           exp(-l_t) - 1 + l_t                 of KL(ref || pi), token by token: the other direction
    k1           l_t                                 0: only noise

Source: arXiv 2506.09477 (its pitfalls 1 and 2); weighted_k3: DeepSeek-V3.2. Tokens come from mu, not pi: "return" and
"weighted_k3" weigh each token's gradient by its own ratio r_t, neither clipped nor truncated, so that both are r_t l_t
s_t in a completion of one token. The product of all ratios of a completion would be unbiased, but varies
exponentially with its length; the policy objectives leave it out too. k1, k2 and k3 are what they are usually: without.
What it does not: the weights, the model (accumulate.py runs the reference). Who calls this: loss.py, accumulate.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Reference:
    """What the reference says about the targets of one packed micro-batch."""

    logprobs: Tensor
    """[loss_tokens] float32 under the reference, at the sampling temperature; no gradients"""
    last: Tensor
    """[loss_tokens] int64 index of the last token of the same completion (`last_tokens`)"""

    def __post_init__(self) -> None:
        if self.logprobs.requires_grad or self.logprobs.dtype != torch.float32:
            raise ValueError(f"reference log-probs are {self.logprobs.dtype}, must be float32 without gradients")
        if self.last.shape != self.logprobs.shape or self.last.dtype != torch.int64:
            raise ValueError(f"last is {self.last.dtype} {tuple(self.last.shape)}, expected int64 "
                             f"{tuple(self.logprobs.shape)}")


def last_tokens(counts: Sequence[int]) -> Tensor:
    """counts [sequences] of completion tokens, as packed -> [their sum] int64 index of each completion's last token."""
    lengths = torch.tensor(counts, dtype=torch.int64)
    return (lengths.cumsum(0) - 1).repeat_interleave(lengths)


def sums_to_the_end(values: Tensor, last: Tensor) -> Tensor:
    """values [loss_tokens] -> sum_{s >= t} values_s within each completion, in the same type, without gradients.

    A difference of two sums over the micro-batch, hence in float64."""
    running = values.detach().double().cumsum(0)
    return (running[last] - running + values.detach()).to(values.dtype)


@dataclass(frozen=True)
class Terms:
    """What a term is made of; each [loss_tokens] float32, the first three carry gradients."""

    logprobs: Tensor
    ratio: Tensor
    """r, to the policy that sampled"""
    log_ratio: Tensor
    """l, to the reference"""
    last: Tensor
    """int64"""


def through_return(terms: Terms) -> Tensor:
    """sg(r_t sum_{s >= t} l_s) log pi_t: minus the log-ratios as rewards, and the plain policy gradient of them.

    Only its gradient means something, not its value."""
    return terms.ratio.detach() * sums_to_the_end(terms.log_ratio, terms.last) * terms.logprobs


def weighted_k3(terms: Terms) -> Tensor:
    """r_t (exp(-l_t) - 1 + l_t), both factors differentiated: the gradient is r_t l_t s_t."""
    return terms.ratio * k3(terms)


def k1(terms: Terms) -> Tensor:
    """l_t."""
    return terms.log_ratio


def k2(terms: Terms) -> Tensor:
    """l_t^2 / 2."""
    return terms.log_ratio.square() / 2


def k3(terms: Terms) -> Tensor:
    """exp(-l_t) - 1 + l_t (Schulman 2020): never negative."""
    return torch.expm1(-terms.log_ratio) + terms.log_ratio


GRADIENTS: dict[str, Callable[[Terms], Tensor]] = {
    "return": through_return,
    "weighted_k3": weighted_k3,
    "k1": k1,
    "k2": k2,
    "k3": k3,
}


def divergence_terms(name: str, logprobs: Tensor, ratio: Tensor, reference: Reference) -> tuple[Tensor, Tensor]:
    """(term_t to be weighted and added to the loss, l_t for the metrics without gradients), each [loss_tokens].

    name: config.Objective.kl_gradient. logprobs and ratio [loss_tokens] float32, both with gradients.
    """
    terms = Terms(logprobs, ratio, logprobs - reference.logprobs, reference.last)
    return GRADIENTS[name](terms), terms.log_ratio.detach()
