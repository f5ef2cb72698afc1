"""Gradient descent on expected losses of tabular problems: where an objective ends when its data never change.

    R = r - beta log(pi / ref)     J = E_pi R     pi* = ref exp((r - V*) / beta)     V* = beta log E_ref exp(r / beta)

The losses are those of the trainer (policy_loss), their expectations sums over all completions, or all pairs of them
for agro. Who uses this: test_regularised.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tests.trainer.objectives.tabular import Problem
from trainer.objectives.loss import policy_loss
from trainer.objectives.objective import Objective
from trainer.objectives.registry import read_objective


def methods(beta: float) -> dict[str, Objective]:
    """Name -> objective that maximises J, or means to.

    naive: the policy gradient of the rewards as if pi had sampled (no correction), leave-one-out, minus beta times the
    exact gradient of KL(pi || ref) ("sequence_k2" weighs by the ratios of whole completions).
    corrected: the same with the ratios of whole completions on the rewards too, which is the gradient of J itself.
    """
    held = {name: read_objective({"name": name, "beta": beta}) for name in ("agro", "spo", "dro")}
    kl = {"weight": beta, "gradient": "sequence_k2"}
    naive = read_objective({"name": "rloo", "kl": kl})
    corrected = read_objective({"name": "rloo", "kl": kl, "importance": {"kind": "sequence"}})
    return held | {"naive": naive, "corrected": corrected}


def optimum(reference: Tensor, rewards: Tensor, beta: float) -> tuple[Tensor, float]:
    """(log pi* [completions] float64, V*) from reference [completions] log-probs."""
    tilted = reference.detach().double() + rewards.double() / beta
    return tilted.log_softmax(0), beta * tilted.logsumexp(0).item()


def expected_loss(problem: Problem, settings: Objective, soft_value: float) -> Tensor:
    """The expectation over the policy that sampled. Advantages: r - V for spo, r for agro and dro, else r - E_mu r,
    which is what leave-one-out has as its expectation in any group."""
    if settings.name == "agro":
        inputs = problem.groups_of(2)
    elif settings.name == "dro":
        inputs = problem.every()
    else:
        mean = (problem.behaviour.whole().detach().exp() * problem.rewards).sum()
        inputs = problem.every(problem.rewards - (soft_value if settings.name == "spo" else mean))
    return policy_loss(inputs, torch.zeros_like(inputs.weights), settings).loss


def descend(
    problem: Problem, settings: Objective, steps: int, rate: float, soft_value: float = 0.0, momentum: float = 0.0
) -> Iterator[Tensor]:
    """log pi [completions] float64 at the start and after each of `steps` steps of gradient descent.

    dro's value, problem.value, is trained beside the policy at the same rate."""
    parameters = problem.policy.parameters() + ([problem.value] if settings.name == "dro" and problem.value is not None
                                                else [])  # fmt: skip
    optimiser = torch.optim.SGD(parameters, lr=rate, momentum=momentum)
    yield problem.policy.whole().detach().double()
    for _ in range(steps):
        optimiser.zero_grad()
        expected_loss(problem, settings, soft_value).backward()
        optimiser.step()
        yield problem.policy.whole().detach().double()
