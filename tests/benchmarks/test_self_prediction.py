"""BYOL-Pi, AC and VAR against theory: subspaces, potentials, orthonormality, views, sampled gradients."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from benchmarks.self_prediction import (
    VARIANTS,
    Variant,
    dynamics_of,
    fit_error,
    flow,
    limit,
    model_error,
    overlap,
    potential,
    predictors,
    random_dynamics,
    random_representation,
    sampled_loss,
    settle,
    velocity,
)


def shared_eigenvectors() -> tuple[Tensor, Tensor]:
    """Two actions with the same eigenvectors [4, 4] and eigenvalues (1, .5, .6, -.1) and (1, .5, -.6, .1): their means
    are (1, .5, 0, 0), mean squares (1, .25, .36, .01), variances (0, 0, .36, .01)."""
    vectors = torch.tensor([[1, 1, 1, 1], [1, 1, -1, -1], [1, -1, 1, -1], [1, -1, -1, 1]], dtype=torch.float64) / 2
    values = torch.tensor([[1, 0.5, 0.6, -0.1], [1, 0.5, -0.6, 0.1]], dtype=torch.float64)
    return vectors.mT, torch.stack([vectors.mT @ value.diag() @ vectors for value in values])


@pytest.mark.parametrize("variant, places", [("pi", [0, 1]), ("ac", [0, 2]), ("var", [2, 3])])
def test_the_three_subspaces(variant: Variant, places: list[int]) -> None:
    vectors, dynamics = shared_eigenvectors()
    start = random_representation(0, 1, 4, 2)[0]
    phi = settle(start, dynamics, variant, 2500)
    assert overlap(phi, vectors[:, places]).item() == pytest.approx(1, abs=1e-9)
    assert overlap(limit(dynamics, variant, 2), vectors[:, places]).item() == pytest.approx(1, abs=1e-12)
    moving = flow(start, dynamics, variant, 100, 0.1)
    assert (moving.mT @ moving - torch.eye(2)).abs().max() < 1e-6


@pytest.mark.parametrize("variant", VARIANTS)
def test_phi_phi_is_constant(variant: Variant) -> None:
    """Exactly along the flow, of any phi; to the fourth order of the step along its integration."""
    dynamics = random_dynamics(12, 20, 10, 4)
    phi = torch.randn(20, 10, 4, generator=torch.Generator().manual_seed(13), dtype=torch.float64)
    change = phi.mT @ velocity(phi, dynamics, variant)
    assert (change + change.mT).abs().max() < 1e-11
    start = random_representation(14, 20, 10, 4)
    drifts = []
    for step in (0.4, 0.2):
        end = flow(start, dynamics, variant, int(4 / step), step)
        drifts.append((end.mT @ end - torch.eye(4)).abs().max())
    assert drifts[1] < drifts[0] / 8 < 1e-3


@pytest.mark.parametrize("variant", VARIANTS)
def test_flows_keep_orthonormality_and_climb_their_potential(variant: Variant) -> None:
    dynamics, phi = random_dynamics(1, 20, 10, 4), random_representation(2, 20, 10, 4)
    assert (dynamics.sum(-1) - 1).abs().max() < 1e-12 and (dynamics - dynamics.mT).abs().max() == 0
    levels = [potential(phi, dynamics, variant)]
    for _ in range(30):
        phi = flow(phi, dynamics, variant, 2, 0.2)
        levels.append(potential(phi, dynamics, variant))
        assert (phi.mT @ phi - torch.eye(4)).abs().max() < 1e-4
    assert (torch.stack(levels).diff(dim=0) > -1e-9).all() and (levels[-1] > levels[0]).all()


@pytest.fixture(scope="module")
def ends() -> tuple[Tensor, dict[Variant, Tensor]]:
    """100 random problems of 10 states and 4 actions, and where each flow of 4 features ends; from some starts a few
    end in a local optimum (docs/results/byol.md), from these none does."""
    dynamics, start = random_dynamics(3, 100, 10, 4), random_representation(4, 100, 10, 4)
    return dynamics, {variant: settle(start, dynamics, variant, 420) for variant in VARIANTS}


@pytest.mark.parametrize("target", VARIANTS)
def test_each_variant_is_best_at_its_own_target(ends: tuple[Tensor, dict[Variant, Tensor]], target: Variant) -> None:
    dynamics, phi = ends
    errors = {variant: model_error(one, dynamics, target) for variant, one in phi.items()}
    fits = {variant: fit_error(one, dynamics, target) for variant, one in phi.items()}
    for other in VARIANTS:
        if other != target:
            print(
                target, other, (errors[target] < errors[other]).sum().item(), (fits[target] < fits[other]).sum().item()
            )
            assert (errors[target] < errors[other]).all()
            assert fits[target].mean() < fits[other].mean()


def test_errors_are_what_random_rewards_say() -> None:
    """With rewards r of unit covariance, drawn: |S r - phi P phi' r|^2 and |S r - phi w|^2 on average."""
    dynamics, phi = random_dynamics(5, 1, 6, 3)[0], random_representation(6, 1, 6, 2)[0]
    rewards = torch.randn(6, 200_000, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    for target in VARIANTS:
        drawn, fitted = [], []
        for one in dynamics_of(dynamics, target):
            wanted = one @ rewards
            drawn.append((wanted - phi @ (phi.mT @ one @ phi) @ (phi.mT @ rewards)).square().sum(0).mean())
            fitted.append((wanted - phi @ (phi.mT @ wanted)).square().sum(0).mean())
        assert torch.stack(drawn).mean().item() == pytest.approx(model_error(phi, dynamics, target).item(), rel=0.02)
        assert torch.stack(fitted).mean().item() == pytest.approx(fit_error(phi, dynamics, target).item(), rel=0.02)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_sampled_loss_has_the_flow_as_its_gradient(variant: Variant) -> None:
    """Over all transitions with their probabilities: -d loss / d phi = 2 / states * d phi / dt; phi need not be
    orthonormal. Without the stop-gradient it is another one."""
    dynamics = random_dynamics(8, 1, 5, 3)[0]
    phi = torch.randn(5, 2, generator=torch.Generator().manual_seed(9), dtype=torch.float64, requires_grad=True)
    every = torch.tensor(list(itertools.product(range(5), range(3), range(5))))
    weights = dynamics[every[:, 1], every[:, 0], every[:, 2]] / 15
    loss = sampled_loss(phi, dynamics, every[:, 0], every[:, 1], every[:, 2], variant, weights)
    gradient = torch.autograd.grad(loss, phi)[0]
    torch.testing.assert_close(-gradient * 5 / 2, velocity(phi.detach(), dynamics, variant))
    moved = -gradient * 5 / 2 + 0.1 * phi.detach()
    assert not torch.allclose(moved, velocity(phi.detach(), dynamics, variant))


def test_predictors_are_least_squares() -> None:
    """P_a is where the gradient of E |P' phi(x) - phi(y)|^2 by P vanishes."""
    dynamics = random_dynamics(10, 1, 5, 2)[0]
    phi = torch.randn(5, 2, generator=torch.Generator().manual_seed(11), dtype=torch.float64)
    for one, best in zip(dynamics, predictors(phi, dynamics), strict=True):
        tried = best.clone().requires_grad_()
        loss = sum(
            one[x, y] * (tried.mT @ phi[x] - phi[y]).square().sum() for x, y in itertools.product(range(5), range(5))
        )
        assert torch.autograd.grad(loss, tried)[0].abs().max() < 1e-12
