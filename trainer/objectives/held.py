"""Losses whose reward is regularised by a reference: regressions that need no importance weights.

    R(x, y) = r(x, y) - beta log(pi(y|x) / ref(y|x)) is the same for all y exactly when pi is the optimum
    pi* = ref exp((r - V*) / beta),     V*(x) = beta log E_ref[exp(r / beta)]

    name    loss of a prompt                            what stands for V*
    agro    1/2 Var_y R, by its n samples               the mean of R over the group (arXiv 2503.19612)
    spo     1/2 E (R - V)^2                             V from samples of the reference (arXiv 2503.05453)
    dro     1/2 E (R - V(x))^2, also minimised in V     a value head (arXiv 2405.19107)

All have pi* as their optimum whatever policies sampled, as long as everything is sampled (SPO without its V has another
optimum). The policy's gradient is that of the loss over beta, as in DRO
(equation 8): of the size of a policy gradient. log pi / ref is of whole completions, so that nothing of the gradient of
their KL is left out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shared.objective import Objective
from trainer.objectives.inputs import LossInputs, Part, unbounded


def regularised_rewards(inputs: LossInputs, settings: Objective) -> tuple[Tensor, Tensor]:
    """(R_i with gradients, weight in the step's loss), each [completions]; the advantages are the rewards."""
    if inputs.reference is None or settings.beta is None:
        raise ValueError(f'objective.loss = "{settings.loss}" needs the log-probs of a reference and a beta')
    of = inputs.completions
    log_ratio = of.sums(inputs.logprobs - inputs.reference)
    return inputs.advantages[of.first] - settings.beta * log_ratio, inputs.weights[of.first]


def agro(inputs: LossInputs, settings: Objective) -> Part:
    """sum_i weight_i n/(n - 1) 1/2 (R_i - mean_j R_j)^2 / beta over each group of n.

    Its expected gradient is that of 1/2 Var R / beta: the other samples take the place of the mean. A completion alone
    in its group adds nothing.
    """
    of = inputs.completions
    rewards, weights = regularised_rewards(inputs, settings)
    counts = torch.zeros(of.groups, device=rewards.device).index_add(0, of.group, torch.ones_like(weights))
    means = torch.zeros(of.groups, device=rewards.device).index_add(0, of.group, rewards) / counts
    unbiased = counts / (counts - 1).clamp(min=1)
    residual = rewards - means[of.group]
    return unbounded((weights * unbiased[of.group] * residual.square()).sum() / (2 * (settings.beta or 1)), inputs)


def spo(inputs: LossInputs, settings: Objective) -> Part:
    """sum_i weight_i 1/2 (r_i - V(x_i) - beta log pi/ref)^2 / beta; the advantages are r - V(x)."""
    residual, weights = regularised_rewards(inputs, settings)
    return unbounded((weights * residual.square()).sum() / (2 * (settings.beta or 1)), inputs)


def dro(inputs: LossInputs, settings: Objective) -> Part:
    """The loss of `spo` with the head's V(x); the head's gradient is that of 1/2 (r - V(x) - beta log pi/ref)^2."""
    if inputs.values is None:
        raise ValueError('objective.loss = "dro" needs a value head')
    rewards, weights = regularised_rewards(inputs, settings)
    policy = (rewards - inputs.values.detach()).square() / (2 * (settings.beta or 1))
    value = (rewards.detach() - inputs.values).square() / 2
    return unbounded((weights * (policy + value)).sum(), inputs)
