"""Self-predictive representations in tables: what BYOL-Pi, BYOL-AC and BYOL-VAR learn, as flows and as sampled losses.

Khetarpal et al. 2024 (2406.02035). A representation phi [states, k] predicts its own next value:

    pi     E |P' phi(x) - sg phi(y)|^2          one predictor for all actions
    ac     E |P_a' phi(x) - sg phi(y)|^2        one predictor for each action
    var    ac - pi                              what the action adds

sg: no gradient. With predictors at their optimum, uniform states, a uniform policy and symmetric dynamics the gradient
flow keeps phi'phi = 1 and climbs a potential (the negated Lyapunov function of the paper); where the dynamics share
their eigenvectors it ends on the k largest of a matrix:

            potential                                       matrix                        fits, of a random reward
    pi      tr (phi' T phi)^2                               T^2                           the value
    ac      mean_a tr (phi' T_a phi)^2                      mean_a T_a^2                  the action value
    var     their difference, mean_a tr (phi' (T_a - T) phi)^2   mean_a (T_a - T)^2       the advantage

T is the mean of T_a over actions. All tensors are float64, [...] are any leading dimensions of several problems.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Variant = Literal["pi", "ac", "var"]
VARIANTS: tuple[Variant, ...] = ("pi", "ac", "var")


def random_dynamics(seed: int, problems: int, states: int, actions: int, moves: int = 6) -> Tensor:
    """Return symmetric dynamics [problems, actions, states, states]: mixtures of random permutations and their
    inverses, so that rows and columns sum to 1."""
    rng = torch.Generator().manual_seed(seed)
    shape = (problems, actions, moves)
    places = torch.rand(*shape, states, generator=rng).argsort(-1)
    weights = -torch.rand(shape, generator=rng, dtype=torch.float64).log()  # exponential: uniform on the simplex
    permutations = torch.nn.functional.one_hot(places, states).to(torch.float64)
    mixed = ((weights / weights.sum(-1, keepdim=True))[..., None, None] * permutations).sum(-3)
    return (mixed + mixed.mT) / 2


def random_representation(seed: int, problems: int, states: int, size: int) -> Tensor:
    """Return orthonormal representations [problems, states, size]."""
    rng = torch.Generator().manual_seed(seed)
    return orthonormal(torch.randn(problems, states, size, generator=rng, dtype=torch.float64))


def orthonormal(phi: Tensor) -> Tensor:
    """Return an orthonormal basis [..., states, k] of the columns of phi."""
    basis: Tensor = torch.linalg.qr(phi).Q
    return basis


def dynamics_of(dynamics: Tensor, variant: Variant) -> Tensor:
    """Return what a variant sees of dynamics [..., actions, states, states]: their mean over actions, with one action;
    themselves; their differences from the mean."""
    mean = dynamics.mean(-3, keepdim=True)
    return {"pi": mean, "ac": dynamics, "var": dynamics - mean}[variant]


def predictors(phi: Tensor, dynamics: Tensor) -> Tensor:
    """Return the best predictors [..., actions, k, k]: (phi'phi)^-1 phi' T_a phi, for uniform states."""
    left: Tensor = torch.linalg.solve(phi.mT @ phi, phi.mT).unsqueeze(-3)
    return left @ dynamics @ phi.unsqueeze(-3)


def velocity(phi: Tensor, dynamics: Tensor, variant: Variant) -> Tensor:
    """Return d phi / dt [..., states, k]: mean_a (T_a phi - phi P_a) P_a', of var the difference of ac and pi.

    It is minus half the gradient of the loss, times the number of states. phi'phi does not change along it.
    """
    if variant == "var":
        return velocity(phi, dynamics, "ac") - velocity(phi, dynamics, "pi")
    seen, wide = dynamics_of(dynamics, variant), phi.unsqueeze(-3)
    best = predictors(phi, seen)
    return ((seen @ wide - wide @ best) @ best.mT).mean(-3)


def flow(phi: Tensor, dynamics: Tensor, variant: Variant, steps: int, step: float = 0.2) -> Tensor:
    """Return phi after `steps` Runge-Kutta steps (of fourth order) of length `step`, whose rounding of phi'phi is of
    the order of step^4."""
    for _ in range(steps):
        first = velocity(phi, dynamics, variant)
        second = velocity(phi + step / 2 * first, dynamics, variant)
        third = velocity(phi + step / 2 * second, dynamics, variant)
        fourth = velocity(phi + step * third, dynamics, variant)
        phi = phi + step / 6 * (first + 2 * second + 2 * third + fourth)
    return phi


def settle(phi: Tensor, dynamics: Tensor, variant: Variant, steps: int, step: float = 1.5) -> Tensor:
    """Return phi after long steps along the flow, each followed by orthonormalisation: the same ends, sooner."""
    for _ in range(steps):
        phi = orthonormal(phi + step * velocity(phi, dynamics, variant))
    return phi


def potential(phi: Tensor, dynamics: Tensor, variant: Variant) -> Tensor:
    """Return what the flow of a variant climbs [...], for orthonormal phi: mean_a tr (phi' T_a phi)^2."""
    left = phi.mT.unsqueeze(-3)
    inner = left @ dynamics_of(dynamics, variant) @ left.mT
    return (inner @ inner).diagonal(dim1=-2, dim2=-1).sum(-1).mean(-1)


def limit(dynamics: Tensor, variant: Variant, size: int) -> Tensor:
    """Return the eigenvectors [..., states, size] of the largest eigenvalues of the variant's matrix."""
    seen = dynamics_of(dynamics, variant)
    vectors: Tensor = torch.linalg.eigh((seen @ seen).mean(-3)).eigenvectors
    return vectors[..., -size:]


def overlap(phi: Tensor, other: Tensor) -> Tensor:
    """Return the share of a subspace that lies in another one [...]: |phi' other|^2 / k, for orthonormal phi, other."""
    return (phi.mT @ other).square().sum((-2, -1)) / phi.shape[-1]


def model_error(phi: Tensor, dynamics: Tensor, target: Variant) -> Tensor:
    """Return mean_a |S_a - phi P_a phi'|^2 [...], S the target's view of the dynamics, P_a the best matrices.

    It is also the expected squared error of S_a r over rewards r with unit covariance, predicted as phi P_a (phi' r):
    of the value after one step for pi, of the action value for ac, of the advantage for var.
    """
    seen, basis = dynamics_of(dynamics, target), orthonormal(phi.unsqueeze(-3))
    return (seen - basis @ (basis.mT @ seen @ basis) @ basis.mT).square().sum((-2, -1)).mean(-1)


def fit_error(phi: Tensor, dynamics: Tensor, target: Variant) -> Tensor:
    """Return mean_a |S_a r - phi w_a|^2 [...] with the best weights w_a, in expectation over rewards r: how well linear
    functions of phi fit value, action value or advantage after one step."""
    seen, basis = dynamics_of(dynamics, target), orthonormal(phi.unsqueeze(-3))
    return (seen - basis @ (basis.mT @ seen)).square().sum((-2, -1)).mean(-1)


def sampled_loss(
    phi: Tensor, dynamics: Tensor, states: Tensor, actions: Tensor, next_states: Tensor, variant: Variant,
    weights: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the loss on transitions ([n] numbers of states, actions and next states), for gradients of phi alone.

    phi: [states, k]. Predictors are at their optimum for the dynamics, and constants, as is the predicted phi(y).
    weights: [n], in place of a mean over transitions.
    """
    if variant == "var":
        args = (phi, dynamics, states, actions, next_states)
        return sampled_loss(*args, "ac", weights) - sampled_loss(*args, "pi", weights)
    fixed = phi.detach()
    best = predictors(fixed, dynamics_of(dynamics, variant))
    chosen = best[actions] if variant == "ac" else best.expand(len(actions), -1, -1)
    predicted = (phi[states].unsqueeze(1) @ chosen).squeeze(1)
    errors = (predicted - fixed[next_states]).square().sum(-1)
    return errors.mean() if weights is None else (weights * errors).sum()
