"""The divergence from the reference: expected gradients by enumeration, against values worked out by hand."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trainer.objectives.inputs import Completions, LossInputs, completions_of
from trainer.objectives.kl import GRADIENTS, KlTerms
from trainer.objectives.loss import policy_loss
from trainer.objectives.registry import read_objective

POLICY, UNIFORM = torch.tensor([0.8, 0.2]), torch.tensor([0.5, 0.5])
FAR = torch.tensor([0.2, 0.8])
FIRST, SECOND = [0.8, 0.2], [[0.9, 0.1], [0.3, 0.7]]
WRONG: dict[str, Callable[[KlTerms], Tensor]] = {
    "wrong_k1": lambda terms: terms.log_ratio,
    "wrong_token_k2": lambda terms: terms.log_ratio.square() / 2,
    "wrong_k3": lambda terms: torch.expm1(-terms.log_ratio) + terms.log_ratio,
}
"""terms of many public trainers, which are no settings here: docs/objectives.md says what is wrong with them"""
EVERY: dict[str, Callable[[KlTerms], Tensor]] = {**GRADIENTS, **WRONG}


def terms_of(name: str, logprobs: Tensor, behaviour: Tensor, reference: Tensor, completions: Completions) -> Tensor:
    """[loss_tokens] the term of each token."""
    return EVERY[name](KlTerms(logprobs, (logprobs - behaviour).exp(), logprobs - reference, completions))


def divergence_loss(name: str, inputs: LossInputs) -> Tensor:
    """The loss of the divergence alone, by the settings where they have the name."""
    if name in GRADIENTS:
        settings = read_objective({"name": "reinforce", "kl": {"weight": 1.0, "gradient": name}})
        return policy_loss(inputs, torch.zeros_like(inputs.weights), settings).loss
    assert inputs.reference is not None
    terms = terms_of(name, inputs.logprobs, inputs.behaviour, inputs.reference, inputs.completions)
    return (inputs.weights * terms).sum()


def arm_gradient(name: str, behaviour: Tensor, reference: Tensor = UNIFORM) -> float:
    """Expectation over mu of the gradient on the first logit; a completion is one token, one of two arms."""
    logits = POLICY.log().requires_grad_()
    inputs = LossInputs(
        logits.log_softmax(0), behaviour.log(), torch.zeros(2), behaviour, completions_of([1, 1]), None, reference.log()
    )
    divergence_loss(name, inputs).backward()
    assert logits.grad is not None
    return logits.grad[0].item()


@pytest.mark.parametrize(
    ("name", "expected"),
    [*((name, 0.221807) for name in (*GRADIENTS, "wrong_token_k2")), ("wrong_k1", 0.0), ("wrong_k3", 0.3)],
)
def test_expected_gradients_on_two_arms(name: str, expected: float) -> None:
    """pi = mu = (.8, .2), ref = (.5, .5): the gradient of KL(pi || ref) is .8 * .2 * log 4; k3 gives pi_1 - ref_1."""
    assert arm_gradient(name, POLICY) == pytest.approx(expected, abs=1e-6)
    assert pytest.approx(0.16 * math.log(4), abs=1e-6) == 0.221807


def test_off_policy_only_the_weighted_gradients_stay_right() -> None:
    """mu = (.2, .8): k2 gives E_mu[l s] = .2 log 1.6 * .2 - .8 log .4 * .8."""
    for name in ("return", "sequence_k2", "sequence_k3", "weighted_k3"):
        assert arm_gradient(name, FAR) == pytest.approx(0.221807, abs=1e-6)
    assert arm_gradient("wrong_token_k2", FAR) == pytest.approx(0.04 * math.log(1.6) - 0.64 * math.log(0.4), abs=1e-6)


class Chain:
    """Two tokens, the second depending on the first; the reference is uniform. All four completions, packed."""

    def __init__(self) -> None:
        self.first = torch.tensor(FIRST).log().requires_grad_()
        self.second = torch.tensor(SECOND).log().requires_grad_()

    def divergence(self) -> Tensor:
        """KL(pi || ref) over completions, exactly."""
        first, second = self.first.log_softmax(0), self.second.log_softmax(1)
        joint = (first[:, None] + second).exp()
        return (joint * (first[:, None] + second + 2 * math.log(2))).sum()

    def gradients(self, name: str, behaviour: tuple[Tensor, Tensor] | None = None) -> list[Tensor]:
        """Expectation over mu (pi unless given) of the loss's gradients on the logits of both tokens."""
        first, second = self.first.log_softmax(0), self.second.log_softmax(1)
        sampled_first, sampled_second = behaviour or (first.detach(), second.detach())
        logprobs = torch.stack([first[:, None].expand(2, 2), second], -1).flatten()
        sampled = torch.stack([sampled_first[:, None].expand(2, 2), sampled_second], -1)
        weights = sampled.sum(-1).exp()[..., None].expand(2, 2, 2).flatten()
        reference = torch.full((8,), math.log(0.5))
        inputs = LossInputs(
            logprobs, sampled.flatten(), torch.zeros(8), weights, completions_of([2] * 4), None, reference
        )
        return list(torch.autograd.grad(divergence_loss(name, inputs), [self.first, self.second]))


@pytest.mark.parametrize("name", ["return", "sequence_k2", "sequence_k3"])
def test_the_right_ones_are_the_gradient_of_the_divergence_of_completions(name: str) -> None:
    chain = Chain()
    exact = torch.autograd.grad(chain.divergence(), [chain.first, chain.second])
    for found, wanted in zip(chain.gradients(name), exact, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)
    assert exact[0][0].item() == pytest.approx(0.267532, abs=1e-6)


def test_from_another_policy_only_whole_completions_are_exact() -> None:
    chain = Chain()
    exact = torch.autograd.grad(chain.divergence(), [chain.first, chain.second])
    other = (torch.tensor([0.35, 0.65]).log(), torch.tensor([[0.25, 0.75], [0.6, 0.4]]).log())
    for name in ("sequence_k2", "sequence_k3"):
        for found, wanted in zip(chain.gradients(name, other), exact, strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)
    for name in ("return", "weighted_k3", "wrong_token_k2"):
        assert abs(chain.gradients(name, other)[0][0].item() - exact[0][0].item()) > 0.01
    for name in ("wrong_token_k2", "weighted_k3"):  # leave out what a token does to later ones
        assert chain.gradients(name)[0][0].item() == pytest.approx(0.221807, abs=1e-6)


TOKENS = [(0.5, 0.3, 2.0), (0.25, 0.5, 1.0), (0.1, 0.4, 0.5), (0.9, 0.3, 3.0)]
"""pi, ref, r of four tokens: a completion of three and one of one"""


@pytest.mark.parametrize("name", EVERY)
def test_gradient_of_every_token_by_hand(name: str) -> None:
    logs = [math.log(pi / ref) for pi, ref, _ in TOKENS]
    ratios = [r for _, _, r in TOKENS]
    to_the_end = [sum(logs[:3]), sum(logs[1:3]), logs[2], logs[3]]
    whole = [math.prod(ratios[:3]) * sum(logs[:3])] * 3 + [ratios[3] * logs[3]]
    expected = {
        "return": [r * rest for r, rest in zip(ratios, to_the_end, strict=True)],
        "weighted_k3": [r * log for r, log in zip(ratios, logs, strict=True)],
        "sequence_k2": whole,
        "sequence_k3": whole,
        "wrong_k1": [1.0] * 4,
        "wrong_token_k2": logs,
        "wrong_k3": [1 - math.exp(-log) for log in logs],
    }[name]
    logprobs = torch.tensor([math.log(pi) for pi, _, _ in TOKENS], requires_grad=True)
    behaviour = logprobs.detach() - torch.tensor(ratios).log()
    reference = torch.tensor([math.log(ref) for _, ref, _ in TOKENS])
    terms = terms_of(name, logprobs, behaviour, reference, completions_of([3, 1]))
    assert torch.autograd.grad(terms.sum(), logprobs)[0].tolist() == pytest.approx(expected, abs=1e-5)


def test_sums_end_with_the_completion() -> None:
    of = completions_of([2, 1, 3])
    assert of.last.tolist() == [1, 1, 2, 5, 5, 5] and of.first.tolist() == [0, 2, 3] and of.groups == 3
    values = torch.tensor([1.0, 2.0, 5.0, 0.5, 0.25, 0.25])
    assert of.returns_to_go(values).tolist() == [3.0, 2.0, 5.0, 1.0, 0.5, 0.25]
    assert of.sums(values).tolist() == [3.0, 5.0, 1.0]
    assert of.turn_means(values).tolist() == pytest.approx([1.5, 5.0, 1 / 3])
    none = completions_of([])
    assert none.returns_to_go(torch.zeros(0)).shape == none.sums(torch.zeros(0)).shape == (0,) and none.count == 0


def test_sums_are_not_spoilt_by_long_completions_before() -> None:
    """After 50,000 tokens whose sum is 1.5e5, a completion's own sums still have seven digits."""
    long, short = torch.full((50_000,), 3.1), torch.tensor([1e-3, 2e-3, -4e-3])
    of = completions_of([50_000, 3])
    found = of.returns_to_go(torch.cat([long, short]))
    assert found[-3:].tolist() == pytest.approx([-1e-3, -2e-3, -4e-3], rel=1e-6)
    assert of.sums(torch.cat([long, short])).tolist() == pytest.approx([155_000, -1e-3], rel=1e-6)


@pytest.mark.parametrize(
    ("reference", "tokens", "named"),
    [
        (torch.zeros(2, requires_grad=True), 2, "reference must be without gradients"),
        (torch.zeros(2, dtype=torch.bfloat16), 2, "reference is torch.bfloat16"),
        (torch.zeros(3), 2, r"reference is .* \(3,\)"),
        (torch.zeros(2), 3, "completions"),
    ],
)
def test_inputs_with_gradients_of_another_type_or_shape_are_refused(reference: Tensor, tokens: int, named: str) -> None:
    zeros = torch.zeros(2)
    with pytest.raises(ValueError, match=named):
        LossInputs(zeros, zeros, zeros, zeros, completions_of([tokens]), reference=reference)
    if reference.dtype == torch.bfloat16:
        with pytest.raises(ValueError, match="logprobs is torch.bfloat16"):
            LossInputs(reference, reference, reference, reference, completions_of([2]))
