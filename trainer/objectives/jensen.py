"""JEPO: learning from true answers that no verifier checks, by a lower bound of their likelihood (arXiv 2503.19618).

A completion is cut where its answer begins, and the true answer a* put there. Over the n thoughts c_i of a prompt,
with L_i = log pi(a*|x, c_i), the sum over the answer's tokens:

    bound            value                     advantage of thoughts c_i                          gradient of the answer
    single_sample    mean_i L_i                L_i - mean_{j != i} L_j                            mean_i grad L_i
    multi_sample     log mean_i exp(L_i)       log mean_j exp(L_j) - log mean_{j != i} exp(L_j)   softmax(L)_i grad L_i

(equations 4, 7 and 8; the second is the tighter one.) What is trained is their appendix B.2: advantages divided by
their standard deviation over the group and kept within -1 and 1, a penalty for completions that never answer (they have
no L and are in no bound), and the answer's gradient times answer_weight:

    loss = - sum_i weight_i (A_i + penalty_i) sum_t c_t log pi(c_it) - answer_weight sum_i weight_i n_i s_i L_i

Groups that are trained by their rewards instead (bound_for) are "weighted", as in ratios.py.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from shared.objective import Objective
from trainer.objectives.inputs import LossInputs, Part
from trainer.objectives.ratios import weighted


def log_mean_exp(values: Tensor) -> Tensor:
    """[n] -> log((1/n) sum exp(values))."""
    return values.logsumexp(-1) - math.log(values.shape[-1])


def others(values: Tensor) -> Tensor:
    """[n] -> [n, n - 1]: row i holds all values but the i-th."""
    n = values.shape[0]
    return values.expand(n, n)[~torch.eye(n, dtype=torch.bool, device=values.device)].view(n, n - 1)


def bound_advantages(likelihoods: Tensor, bound: str) -> Tensor:
    """[n] log-likelihoods of the true answer after each of a prompt's thoughts -> [n] advantages of the thoughts.

    The sum over i of advantage_i times the score of c_i has the gradient of n times the single-sample and of the
    multi-sample bound as its expectation (leave-one-out takes nothing away); with the gradient of the answer's tokens
    that is the whole. A single one has advantage 0.
    """
    likelihoods = likelihoods.detach()
    if likelihoods.shape[0] < 2:
        return torch.zeros_like(likelihoods)
    if bound == "single_sample":
        return likelihoods - others(likelihoods).mean(-1)
    return log_mean_exp(likelihoods) - log_mean_exp(others(likelihoods))


def bound_value(likelihoods: Tensor, bound: str) -> Tensor:
    """[n] -> the bound of one prompt, 0-dimensional; its gradient is that of the answer's tokens."""
    return likelihoods.mean() if bound == "single_sample" else log_mean_exp(likelihoods)


def normalised(advantages: Tensor) -> Tensor:
    """[n] -> clip(advantage / standard deviation over the n, -1, 1); zeros stay."""
    deviation = advantages.std(correction=0)
    return (advantages / deviation).clamp(-1, 1) if deviation > 0 else torch.zeros_like(advantages)


def jepo(inputs: LossInputs, settings: Objective) -> Part:
    """The loss above, summed over the groups of a micro-batch, which must be whole."""
    if inputs.truth is None or inputs.bounded is None:
        return weighted(inputs, settings)
    of, bound = inputs.completions, settings.bound or ""
    likelihoods = of.sums(inputs.logprobs * inputs.truth)
    answered = of.sums(inputs.truth.to(inputs.weights.dtype)) > 0
    advantages = inputs.advantages[of.first].clone()
    imitated = torch.zeros_like(inputs.weights).sum()
    for group in of.group[inputs.bounded].unique().tolist():
        members = (of.group == group).nonzero().squeeze(-1)
        good = members[answered[members]]
        missing = (~answered[members]).to(advantages.dtype)
        share = others(missing).mean(-1) if len(members) > 1 else torch.zeros_like(missing)
        advantages[members] = -(settings.cue_penalty or 0.0) * (missing - share)
        if len(good):
            advantages[good] += normalised(bound_advantages(likelihoods[good], bound))
            weight = inputs.weights[of.first[good]].sum()
            imitated = imitated + weight * bound_value(likelihoods[good], bound)
    thoughts = replace(
        inputs,
        advantages=advantages[of.index],
        weights=inputs.weights * ~inputs.truth,
        # true answers were not sampled: their log-probs now stand in, so that their ratios are 1
        behaviour_logprobs=torch.where(inputs.truth, inputs.logprobs.detach(), inputs.behaviour_logprobs),
    )
    part = weighted(thoughts, settings)
    return Part(
        part.loss - (settings.answer_weight or 0.0) * imitated,
        *(touched & ~inputs.truth for touched in (part.low, part.high, part.masked)),
    )
