"""Objectives on small problems whose every probability is known: expected gradients by enumeration against analytic
ones, and where descent on them ends."""

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer.objectives.named import example
from tests.trainer.objectives.tabular import Problem, Table, draw, optimum
from trainer.objectives.inputs import LossInputs, completions_of
from trainer.objectives.kl import GRADIENTS
from trainer.objectives.loss import policy_loss
from trainer.objectives.registry import read_objective

SEEDS = range(0, 60, 20)
CORRECTIONS = ("token", "token_truncated", "token_masked", "sequence", "sequence_truncated", "sequence_masked",
               "geometric_masked")  # fmt: skip
RATIO_LOSSES: list[dict[str, Any]] = [
    {"name": "magistral"}, {"name": "grpo"}, {"name": "dapo", "dual_clip": 3.0}, {"name": "gspo"},
    {"name": "gspo_token"}, {"name": "decoupled_ppo"}, {"name": "tis"}, {"name": "icepop"}, {"name": "dppo"},
    {"name": "aipo"}, {"name": "cispo"}, {"name": "reinforce"},
    *({"name": "reinforce", "importance": {"kind": kind}} for kind in CORRECTIONS),
]  # fmt: skip
BETA, WHOLE = 0.5, {"kind": "sequence"}


def make(seed: int, on_policy: bool = False, proximal: bool = False) -> Problem:
    rewards = torch.randn(7, generator=torch.Generator().manual_seed(1000 + seed))
    behaviour, old = draw(seed + (not on_policy)), draw(seed + 3) if proximal else None
    return Problem(draw(seed), behaviour, draw(seed + 2), rewards, old, torch.tensor(0.3, requires_grad=True))


def loss_of(inputs: LossInputs, **chosen: Any) -> Tensor:
    return policy_loss(inputs, torch.zeros_like(inputs.weights), read_objective(chosen)).loss


def close(gradient: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-5)


def name_of(chosen: dict[str, Any]) -> str:
    return "-".join(map(str, chosen.values()))


@pytest.mark.parametrize("chosen", RATIO_LOSSES, ids=name_of)
@pytest.mark.parametrize("seed", SEEDS)
def test_on_policy_all_are_the_policy_gradient(chosen, seed):
    """mu = pi: under the same weights (a sum over tokens) each has the gradient of the expected reward, exactly; ratios
    of whole completions give it from any policy."""
    problem = make(seed, on_policy=chosen.get("importance") != WHOLE)
    loss = loss_of(problem.every(), **chosen)
    close(-problem.gradients(loss), problem.gradients(problem.expect(problem.rewards)))


def gspo(p: Tensor, m: Tensor, x: Tensor, a: Tensor) -> Tensor:
    s, weight = (p - x).mean().exp(), (x - m).exp().clamp(max=2)
    return weight * torch.where(((a > 0) & (s > 1.28)) | ((a < 0) & (s < 0.8)), 0.0, s * a)


def gspo_from_rollout(p: Tensor, m: Tensor, _: Tensor, a: Tensor) -> Tensor:
    return gspo(p, m, m, a)


def masked(weight: Tensor, measured: Tensor, low: float, high: float) -> Tensor:
    return torch.where((measured < low) | (measured > high), 0.0, weight)


def clip(p: Tensor, m: Tensor, a: Tensor) -> Tensor:
    r = (p - m).exp()
    return torch.where(((a > 0) & (r > 1.28)) | ((a < 0) & (r < 0.8)), 0.0, r * a)


WIDE, NEAR = {"clip_low": 0.2, "clip_high": 0.28}, {"low": 0.9, "high": 1.1}
FORMULAS: list[tuple[dict[str, Any], Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]]] = [
    ({"name": "decoupled_ppo", "clip_high": 0.28}, lambda p, m, x, a: (x - m).exp() * clip(p, x, a)),
    ({"name": "tis"}, lambda p, m, x, a: (x - m).exp().clamp(max=2) * clip(p, x, a)),
    ({"name": "icepop", "ratio_reference": {"importance": NEAR}},
     lambda p, m, x, a: masked((x - m).exp(), (x - m).exp(), 0.9, 1.1) * clip(p, x, a)),
    ({"name": "gspo_token", **WIDE}, gspo),
    ({"name": "gspo", **WIDE, "ratio_reference": {"kind": "rollout"}}, gspo_from_rollout),
    ({"name": "aipo", "importance": {"kind": "sequence_masked", "high": 1.1}},
     lambda p, m, x, a: masked((p - m).sum().exp().expand_as(p), (p - m).sum().exp(), 0.0, 1.1) * a),
    ({"name": "aipo", "importance": {"kind": "geometric_masked", **NEAR}},
     lambda p, m, x, a: masked((p - m).exp(), (p - m).mean().exp(), 0.9, 1.1) * a),
]  # fmt: skip
"""[objective] and the coefficient of a token's score, from log pi, mu and old of one completion, and its reward"""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("chosen", "coefficient"), FORMULAS)
def test_expected_gradients_off_policy_against_the_formulas(chosen, coefficient, seed):
    """sum_y mu(y) sum_t coefficient_t s_t, through the scores of single tokens."""
    problem = make(seed, proximal=True)
    tables = (table.logprobs() for table in (problem.policy, problem.behaviour, problem.old))
    expected = sum(
        m.sum().exp() * (coefficient(p.detach(), m, x, a) * p).sum()
        for p, m, x, a in zip(*tables, problem.rewards, strict=True)
    )
    close(-problem.gradients(loss_of(problem.every(), **chosen)), problem.gradients(expected))


def f_divergence(name: str, policy: Tensor, best: Tensor) -> Tensor:
    """D_f(pi || pi*) by its definition, from [completions] log-probs."""
    middle = ((policy.exp() + best.exp()) / 2).log()
    if name == "js":
        return (policy.exp() * (policy - middle)).sum() + (best.exp() * (best - middle)).sum()
    return (policy.exp() * (policy - best)).sum() if name == "kl" else (policy.exp() - best.exp()).abs().sum() / 2


def definitions(problem: Problem, on_policy: bool) -> Iterator[tuple[str, LossInputs, dict[str, Any], Tensor]]:
    """(name, inputs, further settings, the loss by its definition), R = r - beta log pi/ref and V = .3."""
    mu, ratio, rewards = (
        problem.behaviour.whole().exp(),
        problem.policy.whole() - problem.reference.whole(),
        problem.rewards,
    )
    regular, beta = rewards - BETA * ratio, {"beta": BETA}
    for size in (2, 3):
        yield "agro", problem.groups_of(size), beta, (mu * (regular - (mu * regular).sum()).square()).sum() / 2 / BETA
    squared = (mu * (regular - 0.3).square()).sum() / 2 / BETA
    yield "spo", problem.every(rewards - 0.3), beta, squared
    yield "dro", problem.every(), beta, squared
    # pairs: the mean of lambda (1 - sigma(+- beta (l_i - z))) / beta, z = max(0, l_j) held
    point, signs = ratio.detach().clamp(min=0), torch.where(rewards > 0, 1.0, -1.0)
    felt = torch.sigmoid(BETA * signs[:, None] * (ratio[:, None] - point[None, :]))
    pairs = (mu[:, None] * mu[None, :] * (1 - felt)).sum() / BETA
    yield example("kto"), problem.groups_of(2), beta | {"desirable_above": 0.0}, pairs
    best, value = optimum(problem.reference.whole(), rewards, BETA)
    for name in ("js", "kl", "total_variation"):
        exact = BETA * f_divergence(name, problem.policy.whole(), best.float())
        given = beta | {"divergence": name, "importance": WHOLE}
        yield example("f_dpg"), problem.groups_of(2, rewards - value), given, exact
    gain = problem.expect(2 * problem.reference.whole() + rewards)
    yield example("sharpening"), problem.groups_of(2), {"importance": WHOLE, "self_weight": 2.0}, -gain
    for name in GRADIENTS:  # right wherever: whole completions; where the policy sampled: all but weighted_k3
        if name.startswith("sequence") or (on_policy and name == "return"):
            kl = {"kl": {"weight": 1.0, "gradient": name}}
            yield "reinforce", problem.every(torch.zeros(7)), kl, problem.expect(ratio)


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_losses_have_the_gradients_of_their_definitions(seed, on_policy):
    """By enumeration of all completions, pairs or triples, sampled by the policy or by another one."""
    problem = make(seed, on_policy)
    for name, inputs, given, exact in definitions(problem, on_policy):
        expected = problem.gradients(exact)
        torch.testing.assert_close(problem.gradients(loss_of(inputs, name=name, **given)), expected, atol=1e-6,
                                   rtol=1e-5, msg=f"{name} {given}")  # fmt: skip
        assert expected.abs().max() > 0.01
    (slope,) = torch.autograd.grad(loss_of(problem.every(), name="dro", beta=BETA), problem.value)
    mu, ratio = problem.behaviour.whole().exp(), (problem.policy.whole() - problem.reference.whole()).detach()
    assert slope.item() == pytest.approx((mu * (0.3 - problem.rewards + BETA * ratio)).sum().item(), abs=1e-5)
    # mu = ref and wide bounds: minus the gradient of E_pi max(r - V, 0)
    problem.behaviour = problem.reference
    loss = loss_of(problem.every(), name=example("a_lol"), clip_low=0.999999, clip_high=1e6)
    gain = problem.gradients(problem.expect((problem.rewards - 0.3).clamp(min=0)))
    torch.testing.assert_close(problem.gradients(loss), -gain, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", GRADIENTS)
def test_divergences_of_one_and_of_two_tokens_by_hand(name):
    """pi = (.8, .2) against a uniform reference, on the first logit: .8 * .2 * log 4, whoever sampled. With a second
    token (.9, .1) or (.3, .7), whose KL is .368064 or .082283: .16 (log 4 + .368064 - .082283); weighted_k3 leaves out
    what a token does to later ones."""
    kl = {"name": "reinforce", "kl": {"weight": 1.0, "gradient": name}}
    for mu in ([0.8, 0.2], [0.2, 0.8]):
        problem = Problem(*(Table(torch.tensor(p).log()) for p in ([0.8, 0.2], mu, [0.5, 0.5])), torch.zeros(2))
        assert problem.gradients(loss_of(problem.every(), **kl))[0].item() == pytest.approx(0.221807, abs=1e-6)
    first, second = torch.tensor([0.8, 0.2]).log(), torch.tensor([[0.9, 0.1], [0.3, 0.7]]).log()
    policy, behaviour = Table(first.clone(), second.clone(), 0), Table(first, second, 0)
    problem = Problem(policy, behaviour, Table(torch.zeros(2), torch.zeros(2, 2), 0), torch.zeros(4))
    expected = 0.221807 if name == "weighted_k3" else 0.267532
    assert problem.gradients(loss_of(problem.every(), **kl))[0].item() == pytest.approx(expected, abs=1e-6)


def test_divergences_that_many_trainers_differentiate_are_wrong():
    """The same two arms, k1, k2 and k3 of each token (docs/objectives.md): k1 is noise without a mean, k2 is right, k3
    gives pi - ref, of KL(ref || pi). From mu = (.2, .8) k2 gives E_mu[l s] = .2 log 1.6 * .2 - .8 log .4 * .8."""
    logits = torch.tensor([0.8, 0.2]).log().requires_grad_()
    log_ratio = logits.log_softmax(0) - math.log(0.5)
    k1, k2, k3 = log_ratio, log_ratio.square() / 2, torch.expm1(-log_ratio) + log_ratio
    far = 0.04 * math.log(1.6) - 0.64 * math.log(0.4)
    for terms, mu, expected in ((k1, 0.8, 0.0), (k2, 0.8, 0.221807), (k3, 0.8, 0.3), (k2, 0.2, far)):
        mean = (torch.tensor([mu, 1 - mu]) * terms).sum()
        (slope,) = torch.autograd.grad(mean, logits, retain_graph=True)
        assert slope[0].item() == pytest.approx(expected, abs=1e-6)


UNIFORM, SKEWED = [1 / 3, 1 / 3, 1 / 3], [0.1, 0.3, 0.6]


def bandit(behaviour: list[float], policy: list[float], reference: list[float], rewards: list[float]) -> Problem:
    tables = (Table(torch.tensor(p).log()) for p in (policy, behaviour, reference))
    return Problem(*tables, torch.tensor(rewards), value=torch.zeros((), requires_grad=True))


def test_sharpening_with_a_divergence_rests_where_the_reference_is_sharpened():
    """beta = 1: ref^2 / Z of (.6, .3, .1) is (36, 9, 1) / 46, where reward and divergence pull equally."""
    for policy, rests in (([36 / 46, 9 / 46, 1 / 46], True), ([0.5, 0.3, 0.2], False)):
        problem = bandit(policy, policy, [0.6, 0.3, 0.1], [0.0] * 3)
        settings = {"name": example("sharpening"), "kl": {"weight": 1.0}, "importance": {"kind": "none"}}
        pull = problem.gradients(loss_of(problem.groups_of(2), **settings)).abs().max()
        assert pull < 1e-6 if rests else pull > 0.05


@pytest.mark.parametrize("behaviour", [SKEWED, UNIFORM], ids=["skewed", "reference"])
@pytest.mark.parametrize(
    ("given", "steps", "rate"),
    [
        ({"name": "agro", "beta": BETA}, 60, 3.0),
        ({"name": "spo", "beta": BETA}, 60, 3.0),
        ({"name": "dro", "beta": BETA}, 200, 1.0),  # its value is trained beside it, and diverges at rates of 2
        # the policy gradient and the divergence, both weighed by the ratios of whole completions
        ({"name": "rloo", "kl": {"weight": BETA, "gradient": "sequence_k2"}, "importance": WHOLE}, 60, 3.0),
        *(({"name": example("f_dpg"), "beta": BETA, "divergence": divergence, "importance": WHOLE}, 80, 8.0)
          for divergence in ("js", "kl")),
    ],
    ids=lambda value: name_of(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_all_reach_the_optimum_whatever_policy_sampled(given, steps, rate, behaviour):
    """Three arms, r = (1, 0, 0), uniform reference, beta = .5: pi* = (.7870, .1065, .1065), V* = .570466. Advantages: r
    for agro and dro, r - V* for spo and f_dpg, else r - E_mu r, the expectation of leave-one-out in any group."""
    problem = bandit(behaviour, UNIFORM, UNIFORM, [1.0, 0.0, 0.0])
    mean = (problem.behaviour.whole().exp() * problem.rewards).sum()
    baseline = {"agro": 0.0, "dro": 0.0, "rloo": mean}.get(given["name"], 0.570466)
    pairs = given["name"] in ("agro", example("f_dpg"))
    optimiser = torch.optim.SGD([*problem.policy.logits, problem.value], lr=rate)
    for _ in range(steps):
        optimiser.zero_grad()
        advantages = problem.rewards - baseline
        loss_of(problem.groups_of(2, advantages) if pairs else problem.every(advantages), **given).backward()
        optimiser.step()
    best, value = optimum(problem.reference.whole(), problem.rewards, BETA)
    assert best.exp().tolist() == pytest.approx([0.7870, 0.1065, 0.1065], abs=5e-5)
    assert value == pytest.approx(0.570466, abs=1e-6)
    within = 1e-3 if given["name"] == example("f_dpg") else 1e-4
    assert problem.policy.whole().exp().tolist() == pytest.approx(best.exp().tolist(), abs=within)
    assert problem.value.item() == (pytest.approx(value, abs=1e-4) if given["name"] == "dro" else 0)


def test_c_rlft_ends_at_the_optimum_regularised_by_who_wrote_the_data():
    """mu exp(r / beta) / Z; no reference plays a part. With r = beta ln (10, 1, 1) and mu = (.1, .3, .6) that is
    (10, 3, 6) / 19."""
    counted = torch.tensor([10.0, 1.0, 1.0])
    problem = bandit(SKEWED, UNIFORM, UNIFORM, (0.8 * counted.log()).tolist())
    for _ in range(60):
        inputs = problem.every(counted / (torch.tensor(SKEWED) * counted).sum())
        pull = problem.gradients(loss_of(inputs, name=example("c_rlft"), beta=0.8))
        problem.policy.logits[0].data -= 3.0 * pull
    assert problem.policy.whole().exp().tolist() == pytest.approx([10 / 19, 3 / 19, 6 / 19], abs=1e-4)


def cut(inputs: LossInputs, order: list[int]) -> LossInputs:
    """The completions in `order` of a packed micro-batch."""
    packed = inputs.completions
    counts = torch.bincount(packed.index, minlength=packed.count)
    places = torch.tensor(
        [t for c in order for t in range(int(packed.first[c]), int(packed.first[c] + counts[c]))]
    ).long()
    columns = {name: column[torch.tensor(order).long() if name == "values" else places]
               for name, column in vars(inputs).items() if isinstance(column, Tensor)}  # fmt: skip
    groups = packed.group[torch.tensor(order).long()].tolist()
    return LossInputs(completions=completions_of([int(counts[c]) for c in order], groups), **columns)


def with_ground_truth(inputs: LossInputs) -> LossInputs:
    """Second tokens are ground truths, completions of one token never answer, the last group is trained by rewards."""
    packed = inputs.completions
    ground_truth = torch.ones_like(inputs.weights, dtype=torch.bool).index_put((packed.first,), torch.tensor(False))
    return LossInputs(**{**vars(inputs), "imitated": ground_truth & (packed.group < packed.groups - 1)[packed.index]})


WHOLE_GROUPS: list[dict[str, Any]] = [
    {"name": "agro"}, {"name": example("kto"), "desirable_above": 0.0}, {"name": "jepo"},
    {"name": "jepo", "bound": "single_sample"},
]  # fmt: skip
DIVERGENCES: list[dict[str, Any]] = [
    {"name": "magistral", "kl": {"weight": 0.3, "gradient": kind}} for kind in ("return", "sequence_k2", "sequence_k3")
]
OTHERS: list[dict[str, Any]] = [{"name": name} for name in ("spo", "dro", example("a_lol"), example("c_rlft"))]


@pytest.mark.parametrize("chosen", [*RATIO_LOSSES, *OTHERS, *WHOLE_GROUPS, *DIVERGENCES], ids=name_of)
@pytest.mark.parametrize("seed", SEEDS)
def test_order_and_cut_into_micro_batches_change_nothing(chosen, seed):
    """12 completions in 3 groups, shuffled and cut anywhere, where whole groups are needed between groups; an empty
    micro-batch at the end."""
    problem, rng = make(seed, proximal=True), random.Random(seed)
    picks = rng.choices(range(7), k=12)
    weights = torch.tensor([rng.random() / 10 for _ in range(3)]).repeat_interleave(4)
    if chosen in WHOLE_GROUPS:
        parts = [[g * 4 + place for place in rng.sample(range(4), 4)] for g in rng.sample(range(3), 3)]
    else:
        shuffled, place = rng.sample(range(12), 12), rng.randint(1, 11)
        parts = [shuffled[:place], shuffled[place:]]
    inputs = problem.inputs(picks, weights, [number // 4 for number in range(12)])
    inputs = with_ground_truth(inputs) if chosen["name"] == "jepo" else inputs
    whole, *losses = (loss_of(each, **chosen) for each in (inputs, *(cut(inputs, part) for part in [*parts, []])))
    assert sum(loss.item() for loss in losses) == pytest.approx(whole.item(), abs=1e-5)
    total = torch.stack([problem.gradients(loss) for loss in losses]).sum(0)
    torch.testing.assert_close(total, problem.gradients(whole), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("importance", "expected"), [
    ({"kind": "none"}, -0.0125), ({"kind": "token"}, 0.0525), ({"kind": "sequence"}, 0.0420),
    ({"kind": "sequence_truncated", "high": 1.5}, 0.0285),
])  # fmt: skip
def test_two_tokens_from_a_uniform_policy(importance, expected):
    """pi1 = (.7, .3), pi2 = (.6, .4) / (.2, .8), mu uniform, R = [[1, 0], [0, .5]]: the gradient on the first logit."""
    uniform = Table(torch.zeros(2), torch.zeros(2, 2), 0)
    policy = Table(torch.tensor([0.7, 0.3]).log(), torch.tensor([[0.6, 0.4], [0.2, 0.8]]).log(), 0)
    problem = Problem(policy, uniform, uniform, torch.tensor([1.0, 0.0, 0.0, 0.5]))
    loss = loss_of(problem.every(), name="reinforce", importance=importance)
    assert -problem.gradients(loss)[0].item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("truncate", "plain", "with_baseline"), [(1, 0.04, 0.064), (2, 0.08, 0.096), (4, 0.16, 0.16), (1e9, 0.16, 0.16)]
)
def test_aipo_expected_gradient_on_two_arms(truncate, plain, with_baseline):
    """pi = (.8, .2), mu = (.2, .8), r = (1, 0): the expectation over mu of the gradient on the first logit."""
    problem = bandit([0.2, 0.8], [0.8, 0.2], [0.5, 0.5], [1.0, 0.0])
    for baseline, expected in ((0.0, plain), (0.2, with_baseline)):
        loss = loss_of(problem.every(problem.rewards - baseline), name="aipo", importance={"high": truncate})
        assert -problem.gradients(loss)[0].item() == pytest.approx(expected, abs=1e-6)
