"""Every objective on random small problems: expected gradients by enumeration against analytic ones."""

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer.objectives.named import example
from tests.trainer.objectives.tabular import COMPLETIONS, Problem, draw_policy, draw_rewards, gradients
from trainer.objectives.inputs import LossInputs, completions_of
from trainer.objectives.loss import policy_loss
from trainer.objectives.registry import read_objective

SEEDS = range(0, 60, 10)
RATIO_LOSSES: list[dict[str, Any]] = [
    {"name": "magistral"}, {"name": "grpo"}, {"name": "dapo", "dual_clip": 3.0}, {"name": "gspo"},
    {"name": "gspo_token"}, {"name": "decoupled_ppo"}, {"name": "tis"}, {"name": "icepop"}, {"name": "dppo"},
    {"name": "aipo"}, {"name": "cispo"}, {"name": "reinforce"},
    *({"name": "reinforce", "importance": {"kind": correction}} for correction in (
        "token", "token_truncated", "token_masked", "sequence", "sequence_truncated", "sequence_masked",
        "geometric_masked")),
]  # fmt: skip


def make(seed: int, on_policy: bool = False, proximal: bool = False) -> Problem:
    policy = draw_policy(seed, train=True)
    behaviour = draw_policy(seed) if on_policy else draw_policy(seed + 1)
    return Problem(
        policy, behaviour, draw_policy(seed + 2), draw_policy(seed + 3) if proximal else None, draw_rewards(seed)
    )


def loss_of(inputs: LossInputs, **chosen: Any) -> Tensor:
    full = read_objective(chosen)
    return policy_loss(inputs, torch.zeros_like(inputs.weights), full).loss


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)


def expected_reward(problem: Problem) -> Tensor:
    return (problem.policy.whole().exp() * problem.rewards).sum()


@pytest.mark.parametrize("chosen", RATIO_LOSSES, ids=lambda chosen: "-".join(map(str, chosen.values())))
@pytest.mark.parametrize("seed", SEEDS)
def test_on_policy_all_are_the_policy_gradient(chosen: dict[str, Any], seed: int) -> None:
    """mu = pi: under the same weights (a sum over tokens) each has the gradient of the expected reward, exactly."""
    problem = make(seed, on_policy=True)
    close(-gradients(loss_of(problem.every(), **chosen), problem), gradients(expected_reward(problem), problem))


@pytest.mark.parametrize("seed", SEEDS)
def test_whole_completions_make_the_policy_gradient_unbiased_from_any_policy(seed: int) -> None:
    problem = make(seed)
    found = gradients(loss_of(problem.every(), name="reinforce", importance={"kind": "sequence"}), problem)
    close(-found, gradients(expected_reward(problem), problem))


def analytic(problem: Problem, coefficients: list[Tensor]) -> Tensor:
    """sum_y mu(y) sum_t coefficient_t s_t, through the scores of single tokens."""
    probabilities = problem.behaviour.whole().detach().exp()
    total = torch.zeros(())
    for probability, factor, logprobs in zip(probabilities, coefficients, problem.policy.logprobs(), strict=True):
        total = total + probability * (factor.detach() * logprobs).sum()
    return gradients(total, problem)


def gspo(p: Tensor, m: Tensor, _: Tensor, a: Tensor) -> Tensor:
    s = (p - m).mean().exp()
    outside = ((a > 0) & (s > 1.28)) | ((a < 0) & (s < 0.8))
    return torch.where(outside, 0.0, s * a).expand_as(p)


def masked(weight: Tensor, measured: Tensor, low: float, high: float) -> Tensor:
    return torch.where((measured < low) | (measured > high), 0.0, weight)


def clip(p: Tensor, m: Tensor, _: Tensor, a: Tensor) -> Tensor:
    r = (p - m).exp()
    return torch.where(((a > 0) & (r > 1.28)) | ((a < 0) & (r < 0.8)), 0.0, r * a)


WIDE, NEAR = {"clip_low": 0.2, "clip_high": 0.28}, {"low": 0.9, "high": 1.1}
FORMULAS: list[tuple[dict[str, Any], Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]]] = [
    ({"name": "decoupled_ppo", "clip_high": 0.28}, lambda p, m, x, a: (x - m).exp() * clip(p, x, x, a)),
    ({"name": "tis"}, lambda p, m, x, a: (x - m).exp().clamp(max=2) * clip(p, x, x, a)),
    ({"name": "icepop", "ratio_reference": {"importance": NEAR}},
     lambda p, m, x, a: masked((x - m).exp(), (x - m).exp(), 0.9, 1.1) * clip(p, x, x, a)),
    ({"name": "gspo", **WIDE}, gspo),
    ({"name": "gspo_token", **WIDE}, gspo),
    ({"name": "aipo", "importance": {"kind": "sequence_masked", "high": 1.1}},
     lambda p, m, x, a: masked((p - m).sum().exp().expand_as(p), (p - m).sum().exp(), 0.0, 1.1) * a),
    ({"name": "aipo", "importance": {"kind": "geometric_masked", **NEAR}},
     lambda p, m, x, a: masked((p - m).exp(), (p - m).mean().exp(), 0.9, 1.1) * a),
]  # fmt: skip
"""[objective] and the coefficient of a token's score, from log pi, mu and old of one completion, and its reward"""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("chosen", "coefficient"), FORMULAS)
def test_expected_gradients_off_policy_against_the_formulas(
    chosen: dict[str, Any], coefficient: Callable[..., Tensor], seed: int
) -> None:
    problem = make(seed, proximal=True)
    pi, mu, old = (policy.logprobs() for policy in (problem.policy, problem.behaviour, problem.old or problem.policy))
    factors = [coefficient(pi[y].detach(), mu[y], old[y], problem.rewards[y]) for y in range(len(COMPLETIONS))]
    close(-gradients(loss_of(problem.every(), **chosen), problem), analytic(problem, factors))


@pytest.mark.parametrize("seed", SEEDS)
def test_regularised_losses_have_the_gradients_of_their_definitions(seed: int) -> None:
    """AGRO: of 1/2 Var_mu(R) / beta by groups of 2 and of 3; SPO and DRO: of 1/2 E_mu (R - V)^2 / beta."""
    problem, beta = make(seed), 0.5
    problem.value = torch.tensor(0.3, requires_grad=True)
    mu = problem.behaviour.whole().detach().exp()
    regular = problem.rewards - beta * (problem.policy.whole() - problem.reference.whole())
    variance = (mu * (regular - (mu * regular).sum()).square()).sum() / 2 / beta
    for size in (2, 3):
        found = gradients(loss_of(problem.groups_of(size), name="agro", beta=beta), problem)
        close(found, gradients(variance, problem))
    squared = (mu * (regular - 0.3).square()).sum() / 2
    close(gradients(loss_of(problem.every(problem.rewards - 0.3), name="spo", beta=beta), problem),
          gradients(squared / beta, problem))  # fmt: skip
    loss = loss_of(problem.every(), name="dro", beta=beta)
    close(gradients(loss, problem), gradients(squared / beta, problem))
    regular = (problem.rewards - beta * (problem.policy.whole() - problem.reference.whole())).detach()
    (slope,) = torch.autograd.grad(loss_of(problem.every(), name="dro", beta=beta), problem.value)
    assert slope.item() == pytest.approx(-(mu * (regular - 0.3)).sum().item(), abs=1e-5)


def cut(inputs: LossInputs, order: list[int]) -> LossInputs:
    """The completions in `order` of a packed micro-batch."""
    of = inputs.completions
    counts = torch.bincount(of.index, minlength=of.count)
    places = torch.tensor([t for c in order for t in range(int(of.first[c]), int(of.first[c] + counts[c]))]).long()

    def column(name: str) -> Tensor | None:
        tensor = getattr(inputs, name)
        if tensor is None:
            return None
        return tensor[torch.tensor(order).long()] if name == "values" else tensor[places]

    names = ("logprobs", "behaviour", "advantages", "weights", "old", "reference", "values", "imitated")
    groups = of.group[torch.tensor(order).long()].tolist()
    completions = completions_of([int(counts[c]) for c in order], groups)
    return LossInputs(completions=completions, **{name: column(name) for name in names})  # type: ignore[arg-type]


WHOLE_GROUPS = [
    {"name": "agro"},
    {"name": example("kto"), "desirable_above": 0.0},
    {"name": "jepo"},
    {"name": "jepo", "bound": "single_sample"},
]


@pytest.mark.parametrize(
    "chosen",
    [*RATIO_LOSSES, {"name": "spo"}, {"name": "dro"}, *({"name": example(name)} for name in ("a_lol", "c_rlft")),
     *WHOLE_GROUPS,
     *({"name": "magistral", "kl": {"weight": 0.3, "gradient": gradient}}
       for gradient in ("return", "sequence_k2", "sequence_k3"))],
    ids=lambda chosen: "-".join(map(str, chosen.values())),
)  # fmt: skip
@pytest.mark.parametrize("seed", SEEDS)
def test_order_and_cut_into_micro_batches_change_nothing(chosen: dict[str, Any], seed: int) -> None:
    """12 completions in 3 groups, shuffled and cut anywhere, where whole groups are needed between groups; an empty
    micro-batch at the end."""
    problem = make(seed, proximal=True)
    problem.value = torch.tensor(0.3)
    rng = random.Random(seed)
    picks = rng.choices(range(len(COMPLETIONS)), k=12)
    groups = [number // 4 for number in range(12)]
    weights = torch.tensor([rng.random() / 10 for _ in range(3)]).repeat_interleave(4)
    inputs = problem.inputs(picks, weights, groups)
    if chosen["name"] == "jepo":
        inputs = with_ground_truth(inputs)
    whole = loss_of(inputs, **chosen)
    wanted = gradients(whole, problem)
    if chosen in WHOLE_GROUPS:
        parts = [[g * 4 + place for place in rng.sample(range(4), 4)] for g in rng.sample(range(3), 3)]
    else:
        shuffled, place = rng.sample(range(12), 12), rng.randint(1, 11)
        parts = [shuffled[:place], shuffled[place:]]
    found, total = torch.zeros_like(wanted), 0.0
    for part in [*parts, []]:
        inputs = problem.inputs(picks, weights, groups)
        inputs = with_ground_truth(inputs) if chosen["name"] == "jepo" else inputs
        loss = loss_of(cut(inputs, part), **chosen)
        found, total = found + gradients(loss, problem), total + loss.item()
    assert total == pytest.approx(whole.item(), abs=1e-5)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


def with_ground_truth(inputs: LossInputs) -> LossInputs:
    """Second tokens are ground truths, completions of one token never answer, the last group is trained by rewards."""
    of = inputs.completions
    ground_truth = torch.ones_like(inputs.weights, dtype=torch.bool).index_put((of.first,), torch.tensor(False))
    bounded = of.group < of.groups - 1
    return LossInputs(**{**vars(inputs), "imitated": ground_truth & bounded[of.index]})


def test_two_tokens_from_a_uniform_policy() -> None:
    """pi1 = (.7, .3), pi2 = (.6, .4) / (.2, .8), mu uniform, R = [[1, 0], [0, .5]]: the gradient on the first logit."""
    first = torch.tensor([0.7, 0.3]).log().requires_grad_()
    second = torch.tensor([[0.6, 0.4], [0.2, 0.8]]).log()
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.5])
    expected = {
        "none": -0.0125, "token": 0.0525, "sequence": 0.0420, "sequence_truncated": 0.0285,
    }  # fmt: skip
    for importance, wanted in expected.items():
        logprobs = torch.cat([torch.stack([first.log_softmax(0)[a], second[a, b]]) for a, b in
                              itertools.product(range(2), repeat=2)])  # fmt: skip
        inputs = LossInputs(
            logprobs, torch.full((8,), math.log(0.5)), rewards.repeat_interleave(2), torch.full((8,), 0.25),
            completions_of([2] * 4),
        )  # fmt: skip
        bounds = {"high": 1.5} if importance == "sequence_truncated" else {}
        loss = loss_of(inputs, name="reinforce", importance={"kind": importance, **bounds})
        (gradient,) = torch.autograd.grad(loss, first)
        assert -gradient[0].item() == pytest.approx(wanted, abs=1e-6), importance
