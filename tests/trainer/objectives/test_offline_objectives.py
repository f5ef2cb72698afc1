"""KTO, A-LoL and C-RLFT: values and gradients by hand, and by enumeration where they lead on data that never change."""

from __future__ import annotations

import math

import pytest
import torch

from shared.config import Config
from shared.types import Completion, Group, Problem, Prompt, Reward, Verdict
from tests.trainer.objectives.named import example
from tests.trainer.objectives.tabular import Arms, draw_policy, draw_rewards, gradients
from tests.trainer.objectives.tabular import Problem as Tabular
from trainer.objectives.inputs import LossInputs, completions_of
from trainer.objectives.loss import policy_loss
from trainer.objectives.registry import read_objective

SEEDS = range(3)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def hand(
    rewards: list[float], ratios: list[float], groups: list[int], values: torch.Tensor | None = None
) -> LossInputs:
    """Completions of two tokens, each with half of log pi / ref; weights .1, .2, ..."""
    logprobs = torch.full((2 * len(rewards),), -2.0, requires_grad=True)
    halves = torch.tensor(ratios).repeat_interleave(2) / 2
    weights = torch.arange(1, len(rewards) + 1).repeat_interleave(2) / 10
    return LossInputs(
        logprobs, torch.zeros_like(halves), torch.tensor(rewards).repeat_interleave(2), weights,
        completions_of([2] * len(rewards), groups), reference=logprobs.detach() - halves, values=values,
    )  # fmt: skip


def test_kto_by_hand() -> None:
    """Log-ratios (.4, -.2, 1) and -1 in two groups. Reference points: mean of the others, at least 0: max(0, .4) = .4,
    .7, .1, and 0 for the one alone. Rewards above .5 are desirable; they count 1, the others 2; beta = .5."""
    inputs = hand([1.0, 0.1, 0.6, 0.5], [0.4, -0.2, 1.0, -1.0], [0, 0, 0, 1])
    settings = read_objective({"name": example("kto"), "beta": 0.5, "undesirable_weight": 2.0})
    loss = policy_loss(inputs, torch.zeros(8), settings).loss
    felt = [sigmoid(0.5 * (0.4 - 0.4)), sigmoid(0.5 * (0.7 + 0.2)), sigmoid(0.5 * (1.0 - 0.1)), sigmoid(0.5 * 1.0)]
    counted = [0.1 * 1, 0.2 * 2, 0.3 * 1, 0.4 * 2]
    expected = sum(c * (1 - f) for c, f in zip(counted, felt, strict=True)) / 0.5
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    (slope,) = torch.autograd.grad(loss, inputs.logprobs)
    signs = [-1, 1, -1, 1]  # down for what is desirable: the loss falls as its probability rises
    pulls = [s * c * f * (1 - f) for s, c, f in zip(signs, counted, felt, strict=True)]
    assert slope.tolist() == pytest.approx([pull for pull in pulls for _ in range(2)], abs=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_kto_has_the_gradient_of_its_definition(seed: int) -> None:
    """Pairs that mu samples: the mean of lambda (1 - sigma(+- beta (l_i - z))) / beta, z = max(0, l_j) held."""
    problem = make(seed)
    settings = read_objective({"name": example("kto"), "beta": 0.5, "desirable_above": 0.0})
    found = gradients(policy_loss(problem.groups_of(2), torch.zeros(0), settings).loss, problem)
    mu, ratio = problem.behaviour.whole().detach().exp(), problem.policy.whole() - problem.reference.whole()
    signs = torch.where(problem.rewards > 0, 1.0, -1.0)
    point = ratio.detach().clamp(min=0)
    felt = torch.sigmoid(0.5 * signs[:, None] * (ratio[:, None] - point[None, :]))
    expected = gradients((mu[:, None] * mu[None, :] * (1 - felt)).sum() / 0.5, problem)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def make(seed: int) -> Tabular:
    """Policies of completions of one or two tokens, all different, and rewards."""
    return Tabular(
        draw_policy(seed, train=True), draw_policy(seed + 100), draw_policy(seed + 200), None, draw_rewards(seed),
        torch.tensor(0.1, requires_grad=True),
    )  # fmt: skip


def test_a_lol_by_hand() -> None:
    """Rewards less values (.5, -.2, .6, .3), of which the second counts for nothing; ratios e^.4, e^-.2, e^1 (cut at
    1.9) and e^-3 (cut at .1)."""
    values = torch.tensor([0.5, 0.3, 0.4, 0.7], requires_grad=True)
    inputs = hand([1.0, 0.1, 1.0, 1.0], [0.4, -0.2, 1.0, -3.0], [0, 1, 2, 3], values)
    output = policy_loss(inputs, torch.zeros(8), read_objective({"name": example("a_lol")}))
    factors = [0.1 * 0.5 * math.exp(0.4), 0.0, 0.3 * 0.6 * 1.9, 0.4 * 0.3 * 0.1]
    errors = [0.5, -0.2, 0.6, 0.3]
    value = sum(w * e * e for w, e in zip((0.1, 0.2, 0.3, 0.4), errors, strict=True)) / 2
    assert output.loss.item() == pytest.approx(4.0 * sum(factors) + value, abs=1e-5)
    slope, head = torch.autograd.grad(output.loss, [inputs.logprobs, values])
    assert slope.tolist() == pytest.approx([-factor for factor in factors for _ in range(2)], abs=1e-6)
    assert head.tolist() == pytest.approx([-0.05, 0.04, -0.18, -0.12], abs=1e-6)
    assert [output.sums[name].item() for name in ("clipped_low", "clipped_high", "masked")] == [2, 2, 2]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_lol_is_the_policy_gradient_of_positive_advantages_where_the_reference_wrote_the_data(seed: int) -> None:
    """mu = ref and wide bounds: minus the gradient of E_pi max(r - V, 0), by enumeration."""
    problem = make(seed)
    problem.behaviour = problem.reference
    settings = read_objective({"name": example("a_lol"), "clip_low": 0.999999, "clip_high": 1e6})
    found = gradients(policy_loss(problem.every(), torch.zeros(0), settings).loss, problem)
    gain = (problem.policy.whole().exp() * (problem.rewards - 0.1).clamp(min=0)).sum()
    torch.testing.assert_close(found, -gradients(gain, problem), atol=1e-6, rtol=1e-4)


def group(index: int, rewards: list[float]) -> Group:
    completions = [Completion(index, i, 0, [7, 8], [-1.0, -1.0], finish_reason="stop") for i in range(len(rewards))]
    graded = [Reward(value, 0.0, value, 0.0, 0.0, Verdict.CORRECT) for value in rewards]
    return Group(Prompt(index, Problem(str(index), "?", "1"), [1, 2]), completions, [*graded])


def test_c_rlft_weighs_by_the_exponential_of_the_reward() -> None:
    """beta = 1 / ln 10: rewards 1, 0, 0, 2 count 10, 1, 1, 100, of which the mean is 28."""
    settings = read_objective({"name": example("c_rlft"), "beta": 1 / math.log(10)})
    rows = settings.sequences([group(0, [1.0, 0.0]), group(1, [0.0, 2.0])], Config(), None, None)
    found = [one.advantages for row in rows for one in row if one is not None]
    assert [value for (value,) in found] == pytest.approx([10 / 28, 1 / 28, 1 / 28, 100 / 28], rel=1e-12)
    huge = read_objective({"name": example("c_rlft"), "beta": 1e-6}).sequences(
        [group(0, [1.0, 0.0])], Config(), None, None
    )
    assert [one.advantages for row in huge for one in row if one] == [[2.0], [0.0]]


def test_c_rlft_ends_at_the_optimum_regularised_by_who_wrote_the_data() -> None:
    """mu exp(r / beta) / Z, by gradient descent on the expected loss of three arms; no reference plays a part. With
    r = beta ln (10, 1, 1) and mu = (.1, .3, .6) that is (10, 3, 6) / 19."""
    beta, mu = 0.8, torch.tensor([0.1, 0.3, 0.6])
    counted = torch.tensor([10.0, 1.0, 1.0])
    arms, uniform = Arms(torch.zeros(3, requires_grad=True)), Arms(torch.zeros(3))
    problem = Tabular(arms, Arms(mu.log()), uniform, None, beta * counted.log())
    settings = read_objective({"name": example("c_rlft"), "beta": beta})
    for _ in range(60):
        inputs = problem.every(counted / (mu * counted).sum())
        loss = policy_loss(inputs, torch.zeros_like(inputs.weights), settings).loss
        arms.logits.data -= 3.0 * gradients(loss, problem)
    assert problem.policy.whole().exp().tolist() == pytest.approx([10 / 19, 3 / 19, 6 / 19], abs=1e-4)
