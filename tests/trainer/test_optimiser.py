"""One step of the optimiser and its learning rate, by hand."""

import math

import pytest
import torch
from torch import nn

from shared.errors import NonFinite, RunError
from shared.sections import Optimiser
from trainer.schedule import learning_rate, warm_and_decay
from trainer.step.optimiser import clip, describe_dtypes, make_optimiser, reset, step_count, update


def test_learning_rate_warms_up_to_the_peak_and_decays_to_its_share():
    rates = [warm_and_decay(step, 7, 1.0, 2, 0.2) for step in range(8)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    constant = Optimiser(learning_rate=3e-4, warmup_steps=0, min_lr_ratio=1.0)
    assert {learning_rate(step, 5, constant) for step in range(9)} == {3e-4}
    cosine = Optimiser(learning_rate=1.0, warmup_steps=2, min_lr_ratio=0.2, decay="cosine")
    half = 0.4 * math.sqrt(0.5)  # cos(pi / 4) of half the way from .2 to 1
    rates = [learning_rate(step, 7, cosine) for step in range(8)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.6 + half, 0.6, 0.6 - half, 0.2, 0.2])
    # a run shorter than its warm-up still has rates
    assert [warm_and_decay(step, 2, 1.0, 5, 0.0) for step in range(2)] == pytest.approx([0.2, 0.4])
    assert warm_and_decay(0, 1, 1.0, 0, 0.5) == warm_and_decay(0, 0, 1.0, 0, 0.5) == 1.0


def test_first_step_moves_by_the_learning_rate_and_decays_matrices_only():
    """AdamW's first update is lr * sign(gradient), after weight *= 1 - lr * decay on matrices. A reset forgets it."""
    model = nn.Linear(1, 1)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    optimiser = make_optimiser(model, Optimiser(weight_decay=0.5, epsilon=1e-12))
    model(torch.ones(1, 1)).sum().backward()
    update(model, optimiser, 0.1)
    assert model.weight.item() == pytest.approx(1 * (1 - 0.1 * 0.5) - 0.1)
    assert model.bias.item() == pytest.approx(1 - 0.1)
    assert model.weight.grad is None and step_count(optimiser) == 1
    reset(optimiser)
    assert step_count(optimiser) == 0 and not any(state["exp_avg"].any() for state in optimiser.state.values())


def test_betas_and_epsilon_are_those_of_the_settings():
    """Two updates by hand: Adam's means of 1 and 3, corrected for their start, and epsilon beside the root."""
    first, second, epsilon = 0.5, 0.8, 0.3
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimiser = make_optimiser(model, Optimiser(betas=(first, second), epsilon=epsilon))
    mean = square = weight = 0.0
    for step, gradient in ((1, 1.0), (2, 3.0)):
        model.weight.grad = torch.tensor([[gradient]])
        update(model, optimiser, 0.1)
        mean, square = first * mean + (1 - first) * gradient, second * square + (1 - second) * gradient**2
        weight -= 0.1 * (mean / (1 - first**step)) / (math.sqrt(square / (1 - second**step)) + epsilon)
        assert model.weight.item() == pytest.approx(weight, rel=1e-6)


def test_updates_of_a_ten_thousandth_at_a_tiny_rate_survive_a_hundred_steps():
    """lr 1e-6 on weights of 0.01 moves 1e-4 of them a step; bfloat16 would lose every one."""
    model = nn.Linear(64, 64, bias=False)
    nn.init.constant_(model.weight, 0.01)
    optimiser = make_optimiser(model, Optimiser())
    half = torch.full((), 0.01, dtype=torch.bfloat16)
    for _ in range(100):
        model(torch.ones(1, 64)).sum().backward()
        update(model, optimiser, 1e-6)
        half = half - 1e-6
    assert model.weight[0, 0].item() == pytest.approx(0.01 - 100 * 1e-6, rel=1e-4)
    assert half == torch.tensor(0.01, dtype=torch.bfloat16)
    assert describe_dtypes(model, optimiser) == {"master weights": "float32", "moments": "float32"}


def test_clipping_scales_to_the_norm_and_reports_the_norm_before():
    model = nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    assert clip(model, 10.0, None) == pytest.approx(5.0)
    assert model.weight.grad.tolist() == [[3.0, 4.0]]
    assert clip(model, 4.0, None) == pytest.approx(5.0)
    assert model.weight.grad.tolist() == [pytest.approx([2.4, 3.2])]


def test_the_first_parameter_with_a_bad_gradient_is_named():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    model[0].bias.grad[0] = math.inf
    model[1].weight.grad[0] = math.nan
    with pytest.raises(NonFinite, match=r"norm is nan; .* is 0\.bias \(1 values"):
        clip(model, 1.0, None)


def test_master_weights_of_another_type_and_steps_without_gradients_are_refused():
    with pytest.raises(ValueError, match=r"weight is torch.bfloat16"):
        make_optimiser(nn.Linear(1, 1, dtype=torch.bfloat16), Optimiser())
    model = nn.Linear(1, 1)
    with pytest.raises(RunError, match="weight has no gradient"):
        update(model, make_optimiser(model, Optimiser()), 0.1)
