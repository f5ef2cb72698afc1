"""The Jensen bound: its values and expected gradients by enumeration of the reasoning, and the whole loss by hand.

Two kinds of reasoning, equally likely; the ground truth has probability .9 after the first and .1 after the second. Its
own probability is .5, so the gradient of its log on the first kind's logit is posterior - prior = .9 - .5 = .4.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.types import CONTEXT, IMITATED, SAMPLED, TrainSequence
from trainer.objectives.inputs import LossInputs, completions_of
from trainer.objectives.jepo import Jepo, bound_advantages, bound_value, normalised, others
from trainer.objectives.loss import policy_loss
from trainer.objectives.registry import read_objective

PRIOR, ANSWER = [0.5, 0.5], [0.9, 0.1]
BOUNDS = ("single_sample", "multi_sample")


@pytest.mark.parametrize("bound", BOUNDS)
def test_a_completion_alone_is_not_trained(bound: str) -> None:
    assert bound_advantages(torch.tensor([-2.0]), bound).tolist() == [0.0], "there is no other to compare with"
    assert bound_value(torch.tensor([-2.0]), bound).item() == -2.0


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("bound", BOUNDS)
def test_reasoning_and_answer_together_are_the_gradient_of_the_bound(bound: str, n: int) -> None:
    """The logits of reasoning and of answers are all trained; of the single-sample bound the reasoning's part is n
    times the bound's (the normalised advantages of the loss know no such factor)."""
    reasoning = torch.tensor(PRIOR).log().requires_grad_()
    answers = torch.tensor([math.log(p / (1 - p)) for p in ANSWER], requires_grad=True)
    value, estimate = torch.zeros(()), torch.zeros(())
    for kinds in itertools.product(range(2), repeat=n):
        chosen = torch.tensor(kinds)
        logs = reasoning.log_softmax(0)[chosen]
        likelihoods = torch.nn.functional.logsigmoid(answers)[chosen]
        chance = logs.sum().exp()
        value = value + chance * bound_value(likelihoods, bound)
        factor = n if bound == "single_sample" else 1
        sampled = (bound_advantages(likelihoods, bound) * logs).sum() / factor + bound_value(likelihoods, bound)
        estimate = estimate + chance.detach() * sampled
    wanted = torch.autograd.grad(value, [reasoning, answers], retain_graph=True)
    for found, exact in zip(torch.autograd.grad(estimate, [reasoning, answers]), wanted, strict=True):
        torch.testing.assert_close(found, exact, atol=1e-6, rtol=0)


def test_advantages_and_gradients_of_answers_by_hand_and_without_overflow() -> None:
    likelihoods = torch.tensor([0.6, 0.2, 0.1]).log()
    # log mean .3 less that of the others: .15, .35, .4
    multi = [math.log(2), math.log(0.3 / 0.35), math.log(0.3 / 0.4)]
    single = [math.log(0.6 / math.sqrt(0.02)), math.log(0.2 / math.sqrt(0.06)), math.log(0.1 / math.sqrt(0.12))]
    for bound, expected in (("multi_sample", multi), ("single_sample", single)):
        assert bound_advantages(likelihoods, bound).tolist() == pytest.approx(expected, abs=1e-6)
        # likelihoods of e^-900 and less have no number; their ratios have
        assert bound_advantages(likelihoods - 900, bound).tolist() == pytest.approx(expected, abs=1e-3)
    assert others(torch.tensor([1.0, 2.0, 3.0])).tolist() == [[2, 3], [1, 3], [1, 2]]
    for bound, share in (("multi_sample", [0.6, 0.2, 0.2]), ("single_sample", [1 / 3] * 3)):
        answers = torch.tensor([0.6, 0.2, 0.2]).log().requires_grad_()
        (gradient,) = torch.autograd.grad(bound_value(answers, bound), answers)
        assert gradient.tolist() == pytest.approx(share, abs=1e-6)


def test_advantages_become_at_most_one_and_those_of_equal_help_nothing() -> None:
    """(1, 0, -1): deviation sqrt(2/3), 1.2247 is cut to 1. (.5, .5, .5, -1.5): sqrt(.75). About their mean: (3, 1)
    have deviation 1. Equal ones exactly 0: a rounding error over a deviation of rounding errors would be 1."""
    assert normalised(torch.tensor([1.0, 0.0, -1.0])).tolist() == [1.0, 0.0, -1.0]
    assert normalised(torch.tensor([0.5, 0.5, 0.5, -1.5])).tolist() == pytest.approx([0.57735] * 3 + [-1], abs=1e-5)
    assert normalised(torch.tensor([3.0, 1.0, 3.0, 1.0]) / 4).tolist() == [1.0] * 4
    for n, value, bound in itertools.product(range(1, 20), (0.0, -0.1, -1.3, -203.7), BOUNDS):
        assert normalised(bound_advantages(torch.full((n,), value), bound)).tolist() == [0.0] * n


# ---- the whole loss --------------------------------------------------------------------------------------------

TOKENS = [
    # (log pi, log mu, weight, of the ground truth) of each token of a completion
    [(0.5, 0.4, 0.1, False), (0.25, 0.1, 0.1, False), (0.75, 1.0, 0.1, True), (0.8, 1.0, 0.1, True)],
    [(0.3, 0.6, 0.2, False), (0.2, 1.0, 0.2, True)],
    [(0.9, 0.9, 0.1, False), (0.5, 0.25, 0.1, False)],
    [(0.6, 0.5, 0.3, False)],
    [(0.4, 0.1, 0.2, False), (0.7, 0.7, 0.2, False)],
]
"""probabilities pi and mu, weights; groups (0, 0, 0), trained by the bound, and (1, 1), trained by rewards"""
CORRECTIONS = [[1.25, 2.0], [0.5], [1.0, 2.0], [1.2], [2.0, 1.0]]
"""min(pi / mu, 2) of the sampled tokens"""
REWARDS = [7.0, 7.0, 7.0, 0.5, -0.5]
"""advantages as they come; those of the bounded group are not looked at"""


def kind_of(token: tuple[float, float, float, bool]) -> int:
    """Whether a token of TOKENS is of the ground truth."""
    return IMITATED if token[3] else SAMPLED


def jepo(
    logprobs: Tensor | None = None, chosen: tuple[int, ...] = (0, 1, 2, 3, 4), **settings: Any
) -> tuple[Tensor, list[list[float]], Any]:
    """(loss, its gradient by completion and token, the output) of the chosen completions of TOKENS."""
    rows = [TOKENS[number] for number in chosen]
    flat = [token for row in rows for token in row]
    counts = [len(row) for row in rows]
    if logprobs is None:
        logprobs = torch.tensor([token[0] for token in flat]).log()
    logprobs = logprobs.detach().requires_grad_()
    name = settings.pop("name", "jepo")
    objective = read_objective({"name": name, **settings})
    sequences = [
        TrainSequence([0, *[1] * len(row)], bytes([CONTEXT, *map(kind_of, row)]), 0.0, [REWARDS[number]])
        for number, row in zip(chosen, rows, strict=True)
    ]
    if isinstance(objective, Jepo):
        objective.penalise([one for number, one in zip(chosen, sequences, strict=True) if number < 3])
    inputs = LossInputs(
        logprobs, torch.tensor([token[1] for token in flat]).log(),
        torch.tensor([one.advantages[0] for one in sequences]).repeat_interleave(torch.tensor(counts)),
        torch.tensor([token[2] for token in flat]), completions_of(counts, [int(number > 2) for number in chosen]),
        imitated=torch.tensor([token[3] for token in flat]),
        reference=torch.full((len(flat),), math.log(0.5)) if settings.get("kl") else None,
    )  # fmt: skip
    found = policy_loss(inputs, torch.ones(len(flat)), objective)
    (gradient,) = torch.autograd.grad(found.loss, logprobs)
    return found.loss, [part.tolist() for part in torch.split(gradient, counts)], found


def by_hand(advantages: list[float], answer_weight: float, bound: float, shares: list[float]) -> tuple[float, Any]:
    """(loss, gradients) from the advantages of the completions, the bound of the first two, and their shares of it."""
    imitated = 0.3 * answer_weight
    """weights .1 and .2 of the completions that answer"""
    loss, rows = -imitated * bound, []
    for number, (tokens, corrections) in enumerate(zip(TOKENS, CORRECTIONS, strict=True)):
        row, reasoning = [], [token for token in tokens if not token[3]]
        for (p, _, weight, _), correction in zip(reasoning, corrections, strict=True):
            loss -= weight * advantages[number] * correction * math.log(p)
            row.append(-weight * advantages[number] * correction)
        rows.append(row + [-imitated * shares[number]] * (len(tokens) - len(reasoning)) if number < 2 else row)
    return loss, rows


FIRST = math.log(2) / (math.log(3) / 2)
SECOND = math.log(0.4 / 0.6) / (math.log(3) / 2)
"""log mean(.6, .2) = log .4, of the others alone log .2 and log .6; deviation of the two log(3)/2"""


@pytest.mark.parametrize(
    ("bound", "advantages", "value", "shares"),
    [
        # .75 * .8 = .6 and .2: log 3 and -log 3, over their deviation 1 and -1
        ("single_sample", [1.0, -1.0], (math.log(0.6) + math.log(0.2)) / 2, [0.5, 0.5]),
        ("multi_sample", [1.0, SECOND], math.log(0.4), [0.75, 0.25]),
    ],
)
@pytest.mark.parametrize(("answer_weight", "penalty"), [(0.01, 10.0), (1.0, 0.5), (0.0, 0.0)])
def test_the_loss_by_hand(
    bound: str, advantages: list[float], value: float, shares: list[float], answer_weight: float, penalty: float
) -> None:
    """The third never answers: it loses the penalty, of which each of the others had expected one half."""
    assert FIRST > 1  # and is cut
    loss, gradient, _ = jepo(bound=bound, answer_weight=answer_weight, missing_answer_penalty=penalty)
    full = [advantage + penalty / 2 for advantage in advantages] + [-penalty, 0.5, -0.5]
    expected, rows = by_hand(full, answer_weight, value, shares)
    assert loss.item() == pytest.approx(expected, abs=1e-5)
    for found, wanted in zip(gradient, rows, strict=True):
        assert found == pytest.approx(wanted, abs=1e-6)


def test_a_group_trained_by_rewards_is_the_weighted_loss() -> None:
    loss, gradient, found = jepo(chosen=(3, 4))
    same, weighted, other = jepo(chosen=(3, 4), name="aipo")
    assert loss.item() == same.item() and gradient == weighted
    assert found.sums["clipped_high"].item() == other.sums["clipped_high"].item() == 1
    # beside a bounded group it adds the same
    assert jepo()[0].item() - jepo(chosen=(0, 1, 2))[0].item() == pytest.approx(same.item(), abs=1e-5)


@pytest.mark.parametrize("bound", BOUNDS)
def test_a_completion_alone_in_its_group_only_imitates_or_is_penalised(bound: str) -> None:
    loss, gradient, _ = jepo(chosen=(0,), bound=bound, answer_weight=0.5)
    assert loss.item() == pytest.approx(-0.5 * 0.1 * math.log(0.6), abs=1e-6)
    assert gradient == [pytest.approx([0, 0, -0.05, -0.05], abs=1e-6)]
    _, gradient, _ = jepo(chosen=(2,), bound=bound, missing_answer_penalty=4.0)
    assert gradient == [pytest.approx([0.1 * 4, 0.1 * 4 * 2], abs=1e-6)]


def test_where_none_or_one_of_a_group_answers() -> None:
    """None: all lost the same, no gradient at all. One: it gains what the other lost, and its answer is imitated."""
    repeated = jepo(chosen=(2, 2), missing_answer_penalty=10.0)
    assert repeated[0].item() == 0 and repeated[1] == [[0.0, 0.0]] * 2
    _, (good, bad), _ = jepo(chosen=(1, 2), missing_answer_penalty=10.0, answer_weight=0.5)
    assert good == pytest.approx([-0.2 * 10 * 0.5, -0.5 * 0.2], abs=1e-6)
    assert bad == pytest.approx([0.1 * 10 * 1, 0.1 * 10 * 2], abs=1e-6)


def test_ground_truth_answers_are_neither_clipped_nor_off_policy() -> None:
    """Metrics of ratios and of truncation are about what was sampled: of its 8 tokens two have a ratio above 2."""
    _, _, found = jepo()
    ratios = [1.25, 2.5, 0.5, 1.0, 2.0, 1.2, 4.0, 1.0]
    assert sum(map(len, CORRECTIONS)) == len(ratios)
    assert found.sums["ratio"].item() == pytest.approx(sum(ratios), abs=1e-5)
    assert found.sums["tokens"].item() == found.sums["entropy"].item() == 8, "an entropy of 1 each"
    assert found.sums["clipped_high"].item() == 2 and found.sums["clipped_low"].item() == 0
    assert found.maxima["ratio"].item() == pytest.approx(4.0)
    # of the first completion the geometric mean of the two sampled ratios is (1.25 * 2.5)^(1/2) = 1.77; with the two of
    # the ground truth, which are 1, it would be 1.33 and kept. Others: .5, (1 * 2)^(1/2), 1.2, 2
    _, _, found = jepo(importance={"kind": "geometric_masked", "low": 0.1, "high": 1.5})
    assert found.sums["masked"].item() == 4 and found.sums["clipped_high"].item() == 4


def test_an_entropy_bonus_is_of_the_reasoning_alone() -> None:
    """Entropies are 1: weights .1 .1 of the first completion, whose answer has none."""
    _, _, plain = jepo(chosen=(0,))
    _, _, found = jepo(chosen=(0,), entropy_bonus=0.5)
    assert (found.loss - plain.loss).item() == pytest.approx(-0.5 * 0.2, abs=1e-6)


KINDS = ("return", "sequence_k2", "sequence_k3", "weighted_k3")


@pytest.mark.parametrize("kind", KINDS)
def test_the_divergence_is_of_the_reasoning_alone(kind: str) -> None:
    """Ground truths were not sampled: they add nothing to the divergence, its gradient or the sums for metrics."""
    still: dict[str, Any] = {"answer_weight": 0.0, "missing_answer_penalty": 0.0}
    _, plain, _ = jepo(chosen=(0,), answer_weight=0.0, missing_answer_penalty=0.0)
    _, with_divergence, found = jepo(chosen=(0,), kl={"weight": 2.0, "gradient": kind}, **still)
    logs = [math.log(0.5 / 0.5), math.log(0.25 / 0.5)]
    ratios = [1.25, 2.5]
    whole = math.prod(ratios) * sum(logs)
    wanted = {
        "return": [ratios[0] * sum(logs), ratios[1] * logs[1]], "sequence_k2": [whole] * 2, "sequence_k3": [whole] * 2,
        "weighted_k3": [ratio * log for ratio, log in zip(ratios, logs, strict=True)],
    }[kind]  # fmt: skip
    assert plain == [[0.0] * 4]
    assert with_divergence == [pytest.approx([2.0 * 0.1 * one for one in wanted] + [0, 0], abs=1e-6)]
    assert found.sums["reference_log_ratio"].item() == pytest.approx(sum(logs), abs=1e-6)
