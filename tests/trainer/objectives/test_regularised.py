"""Regularised rewards: where the losses end on data that never change, and values by hand.

The bandit: three arms, r = (1, 0, 0), uniform reference, beta = .5, hence pi* = (.7870, .1065, .1065), V* = .570466.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer.objectives.named import example
from tests.trainer.objectives.tabular import Arms, Problem, gradients
from trainer.objectives.inputs import LossInputs, completions_of
from trainer.objectives.loss import LossOutput, policy_loss
from trainer.objectives.objective import Objective
from trainer.objectives.registry import read_objective

BETA, SOFT_VALUE = 0.5, 0.570466
REWARDS, UNIFORM = [1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3]
BEST = [0.7870, 0.1065, 0.1065]
SKEWED = [0.1, 0.3, 0.6]


def bandit(behaviour: list[float], policy: list[float] | None = None) -> Problem:
    """The policy starts at the reference unless given."""
    arms = Arms(torch.tensor(policy or UNIFORM).log().requires_grad_())
    return Problem(arms, Arms(torch.tensor(behaviour).log()), Arms(torch.tensor(UNIFORM).log()), None,
                   torch.tensor(REWARDS), torch.zeros((), requires_grad=True))  # fmt: skip


def best_of_bandit() -> tuple[Tensor, float]:
    """(log pi* [arms] float64, V*) = (log of ref exp(r / beta) / Z, beta log Z)."""
    tilted = torch.tensor(UNIFORM).double().log() + torch.tensor(REWARDS).double() / BETA
    best, value = tilted.log_softmax(0), BETA * tilted.logsumexp(0).item()
    assert best.exp().tolist() == pytest.approx(BEST, abs=5e-5) and value == pytest.approx(SOFT_VALUE, abs=1e-6)
    return best, value


def expected_loss(problem: Problem, settings: Objective) -> Tensor:
    """The expectation over the policy that sampled. Advantages: r - V* for spo, r for agro and dro, else r - E_mu r,
    which is what leave-one-out has as its expectation in any group."""
    if settings.name == "agro":
        inputs = problem.groups_of(2)
    elif settings.name == "dro":
        inputs = problem.every()
    else:
        mean = (problem.behaviour.whole().detach().exp() * problem.rewards).sum()
        inputs = problem.every(problem.rewards - (SOFT_VALUE if settings.name == "spo" else mean))
    return policy_loss(inputs, torch.zeros_like(inputs.weights), settings).loss


CORRECTED = {"name": "rloo", "kl": {"weight": BETA, "gradient": "sequence_k2"}, "importance": {"kind": "sequence"}}
"""the policy gradient and the divergence, both weighed by the ratios of whole completions"""


@pytest.mark.parametrize("behaviour", [SKEWED, UNIFORM], ids=["skewed", "reference"])
@pytest.mark.parametrize("given", [*({"name": name, "beta": BETA} for name in ("agro", "spo", "dro")), CORRECTED])
def test_all_reach_the_optimum_whatever_policy_sampled(given: dict[str, Any], behaviour: list[float]) -> None:
    """By gradient descent on the expected loss; dro's value is trained beside it, and diverges at rates of 2."""
    problem, settings = bandit(behaviour), read_objective(given)
    assert problem.value is not None
    steps, rate = (200, 1.0) if settings.name == "dro" else (60, 3.0)
    optimiser = torch.optim.SGD([*problem.policy.parameters(), problem.value], lr=rate)
    for _ in range(steps):
        optimiser.zero_grad()
        expected_loss(problem, settings).backward()
        optimiser.step()
    assert problem.policy.whole().exp().tolist() == pytest.approx(best_of_bandit()[0].exp().tolist(), abs=1e-4)
    assert problem.value.item() == (pytest.approx(SOFT_VALUE, abs=1e-4) if settings.name == "dro" else 0)


def hand(name: str, groups: list[int], **settings: Any) -> tuple[LossOutput, Tensor]:
    """Completions of 2, 1, 1 and 2 tokens with rewards (1, 0, .5, 2) and weights (.1, .2, .3, .4); beta = .5.

    log pi/ref of the tokens (.3, -.1) (.4) (-.2) (1, 1): of completions .2, .4, -.2, 2; R = (.9, -.2, .6, 1).
    """
    ratio = torch.tensor([0.3, -0.1, 0.4, -0.2, 1.0, 1.0])
    logprobs = torch.full((6,), -2.0, requires_grad=True)
    counts = torch.tensor([2, 1, 1, 2])
    inputs = LossInputs(
        logprobs, torch.full((6,), -3.0), torch.tensor([1.0, 0.0, 0.5, 2.0]).repeat_interleave(counts),
        torch.tensor([0.1, 0.2, 0.3, 0.4]).repeat_interleave(counts), completions_of(counts.tolist(), groups),
        reference=logprobs.detach() - ratio,
    )  # fmt: skip
    found = policy_loss(inputs, torch.zeros(6), read_objective({"name": name, "beta": 0.5, **settings}))
    (gradient,) = torch.autograd.grad(found.loss, logprobs, retain_graph=True)
    return found, gradient


def test_agro_by_hand() -> None:
    """The first, third and second are a group, the last is alone: mean R = 1.3/3, n/(n - 1) = 3/2, 1/(2 beta) = 1."""
    rest = [0.9 - 1.3 / 3, -0.2 - 1.3 / 3, 0.6 - 1.3 / 3]
    found, gradient = hand("agro", [7, 7, 7, 3])
    assert found.loss.item() == pytest.approx(
        1.5 * (0.1 * rest[0] ** 2 + 0.2 * rest[1] ** 2 + 0.3 * rest[2] ** 2), abs=1e-6
    )
    # d/dR_i of sum_j w_j d_j^2 is 2 (w_i d_i - mean_j w_j d_j); dR/dlogpi = -beta on each of its tokens
    pulls = [w * d for w, d in zip((0.1, 0.2, 0.3), rest, strict=True)]
    first, second, third = (-0.5 * 1.5 * 2 * (pull - sum(pulls) / 3) for pull in pulls)
    assert gradient.tolist() == pytest.approx([first, first, second, third, 0, 0], abs=1e-6)


def of_pairs(problem: Problem, name: str, **settings: Any) -> Tensor:
    """The gradient of an example's loss on all pairs of three arms."""
    objective = read_objective({"name": example(name), **settings})
    return gradients(policy_loss(problem.groups_of(2), torch.zeros(18), objective).loss, problem)


def test_f_dpg_by_hand() -> None:
    """R = (.9, -.2, .6, 1) in groups of two, u = R / .5 = (1.8, -.4, 1.2, 2); importance weights left out."""
    js = [0.5 * math.log((1 + math.exp(u)) / 2) for u in (1.8, -0.4, 1.2, 2.0)]
    for divergence, (a, b, c, d) in (
        ("js", js),
        ("kl", [0.4, -0.7, 0.1, 0.5]),
        ("total_variation", [0.25, -0.25, 0.25, 0.25]),
    ):
        _, gradient = hand(example("f_dpg"), [0, 0, 1, 1], divergence=divergence, importance={"kind": "none"})
        leads = [a - b, a - b, b - a, c - d, d - c, d - c]
        expected = [-weight * lead for weight, lead in zip((0.1, 0.1, 0.2, 0.3, 0.4, 0.4), leads, strict=True)]
        assert gradient.tolist() == pytest.approx(expected, abs=1e-6), divergence


def divergence_of(name: str, policy: Tensor, best: Tensor) -> Tensor:
    """D_f(pi || pi*) by its definition, from [completions] log-probs."""
    middle = ((policy.exp() + best.exp()) / 2).log()
    if name == "js":
        return (policy.exp() * (policy - middle)).sum() + (best.exp() * (best - middle)).sum()
    return (policy.exp() * (policy - best)).sum() if name == "kl" else (policy.exp() - best.exp()).abs().sum() / 2


@pytest.mark.parametrize("divergence", ["js", "kl", "total_variation"])
@pytest.mark.parametrize("behaviour", [[0.2, 0.5, 0.3], SKEWED], ids=["own", "other"])
def test_f_dpg_has_the_gradient_of_its_divergence_by_enumeration(divergence: str, behaviour: list[float]) -> None:
    """All pairs of three arms, own policy and, weighed by ratios of whole completions, another's."""
    problem = bandit(behaviour, [0.2, 0.5, 0.3])
    best, value = best_of_bandit()
    problem.rewards = problem.rewards - value
    found = of_pairs(problem, "f_dpg", beta=BETA, divergence=divergence, importance={"kind": "sequence"})
    exact = gradients(divergence_of(divergence, problem.policy.whole(), best.float()), problem)
    torch.testing.assert_close(found, BETA * exact, atol=1e-6, rtol=1e-5)
    assert exact.abs().max() > 0.05


@pytest.mark.parametrize("divergence", ["js", "kl"])
def test_f_dpg_ends_at_the_optimum(divergence: str) -> None:
    problem, (best, value) = bandit(SKEWED), best_of_bandit()
    problem.rewards = problem.rewards - value
    (logits,) = problem.policy.parameters()
    for _ in range(60):
        pull = of_pairs(problem, "f_dpg", beta=BETA, divergence=divergence, importance={"kind": "sequence"})
        logits.data -= 8.0 * pull
    assert problem.policy.whole().exp().tolist() == pytest.approx(best.exp().tolist(), abs=1e-3)


def unrewarded(behaviour: list[float], policy: list[float]) -> Problem:
    """A bandit whose reference is (.6, .3, .1)."""
    problem = bandit(behaviour, policy)
    problem.reference, problem.rewards = Arms(torch.tensor([0.6, 0.3, 0.1]).log()), torch.zeros(3)
    return problem


@pytest.mark.parametrize("behaviour", [[0.5, 0.3, 0.2], SKEWED], ids=["own", "other"])
def test_sharpening_is_the_policy_gradient_of_the_references_log_probs(behaviour: list[float]) -> None:
    """Minus grad E_pi log ref, by enumeration of all pairs; rewards count where an advantage is chosen."""
    problem = unrewarded(behaviour, [0.5, 0.3, 0.2])
    pull = of_pairs(problem, "sharpening", importance={"kind": "sequence"}, self_weight=2.0)
    said = (problem.policy.whole().exp() * problem.reference.whole()).sum()
    torch.testing.assert_close(pull, -2 * gradients(said, problem), atol=1e-6, rtol=1e-5)
    problem.rewards = torch.tensor(REWARDS)
    beside = of_pairs(problem, "sharpening", importance={"kind": "sequence"}, self_weight=2.0)
    reward = (problem.policy.whole().exp() * problem.rewards).sum()
    torch.testing.assert_close(beside - pull, -gradients(reward, problem), atol=1e-6, rtol=1e-5)


def test_sharpening_with_a_divergence_rests_where_the_reference_is_sharpened() -> None:
    """beta = 1: ref^2 / Z of (.6, .3, .1) is (36, 9, 1) / 46, where reward and divergence pull equally."""
    settings: dict[str, Any] = {"kl": {"weight": 1.0}, "importance": {"kind": "none"}}
    sharp, other = [36 / 46, 9 / 46, 1 / 46], [0.5, 0.3, 0.2]
    assert of_pairs(unrewarded(sharp, sharp), "sharpening", **settings).abs().max() < 1e-6
    assert of_pairs(unrewarded(other, other), "sharpening", **settings).abs().max() > 0.05
