"""The Jensen bound of JEPO: expected gradients by enumeration of all thoughts, and one loss worked out by hand."""

import itertools
import math

import pytest
import torch

from shared.objective import Objective
from trainer.objectives.inputs import LossInputs, completions_of
from trainer.objectives.jensen import bound_advantages, bound_value
from trainer.objectives.loss import policy_loss

THOUGHTS = torch.tensor([0.5, 0.5])
LIKELIHOODS = torch.tensor([0.9, 0.1])
"""of two thoughts, and of the true answer after each"""


@pytest.mark.parametrize(
    ("bound", "size", "value", "gradient"),
    [
        ("multi_sample", 1, -1.2040, 0.0),  # one alone has no advantage
        ("multi_sample", 2, -0.9486, 0.5493),
        ("multi_sample", 3, -0.8485, 0.5145),
        ("multi_sample", 4, -0.8006, 0.4865),
        ("multi_sample", 6, -0.7578, 0.4541),
        ("single_sample", 2, -1.2040, 2 * 0.5493),
        ("single_sample", 4, -1.2040, 4 * 0.5493),
    ],
)
def test_expected_bound_and_gradient_over_all_thoughts(bound: str, size: int, value: float, gradient: float) -> None:
    """log P(a*) = log .5 is approached from below; the gradient on the first thought's logit approaches that of
    log P(a*), posterior - prior = .4, from that of the mean of logs, .25 log 9 = .5493 for each of the n."""
    logits = THOUGHTS.log().requires_grad_()
    logprobs = logits.log_softmax(0)
    mean, score = 0.0, torch.zeros(())
    for thoughts in itertools.product(range(2), repeat=size):
        chance = THOUGHTS[list(thoughts)].prod()
        likelihoods = LIKELIHOODS[list(thoughts)].log()
        mean += (chance * bound_value(likelihoods, bound)).item()
        score = score + chance * (bound_advantages(likelihoods, bound) * logprobs[list(thoughts)]).sum()
    (found,) = torch.autograd.grad(score, logits, materialize_grads=True)
    assert mean == pytest.approx(value, abs=5e-5) and mean < math.log(0.5)
    assert found.tolist() == pytest.approx([gradient, -gradient], abs=size * 5e-5)


def test_a_group_of_three_by_hand() -> None:
    """Two thoughts of one token with the true answer (.9 and .1) behind them, one completion without a box, and a
    completion of another group, which is trained by its reward.

    Advantages log(.5 / .1) and log(.5 / .9), over their deviation 1.0986 and kept within 1: 1 and -.5350. The penalty
    of 10 less that of the others: 5, 5, -10. The second thought's ratio of 3 counts as 2. Every completion weighs 1/4,
    the answers 1/2 times their weight in the bound, .9 and .1.
    """
    behaviour = torch.full((6,), math.log(0.3))
    ratios = torch.tensor([1.0, 0.9 / 0.3, 3.0, 0.1 / 0.3, 1.0, 1.0])
    logprobs = (behaviour + ratios.log()).requires_grad_()
    truth = torch.tensor([False, True, False, True, False, False])
    inputs = LossInputs(
        logprobs, behaviour, torch.tensor([9.0, 9.0, 9.0, 9.0, 9.0, 0.5]), torch.full((6,), 0.25),
        completions_of([2, 2, 1, 1], [7, 7, 7, 8]), truth=truth, bounded=torch.tensor([True, True, True, False]),
    )  # fmt: skip
    settings = Objective(name="jepo", answer_weight=0.2).resolved()
    found = policy_loss(inputs, torch.zeros(6), settings)
    (gradient,) = torch.autograd.grad(found.loss, logprobs)
    second = math.log(0.5 / 0.9) / ((math.log(5) - math.log(0.5 / 0.9)) / 2)
    assert second == pytest.approx(-0.5350, abs=1e-4)
    assert (-gradient).tolist() == pytest.approx(
        [6 / 4, 0.2 * 0.5 * 0.9, 2 * (5 + second) / 4, 0.2 * 0.5 * 0.1, -10 / 4, 0.5 / 4], abs=1e-5
    )
