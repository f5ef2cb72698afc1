"""The divergence from the reference: expected gradients by enumeration, against values worked out by hand."""

import math

import pytest
import torch
from torch import Tensor

from shared.config import Objective
from trainer.kl import GRADIENTS, Reference, divergence_terms, last_tokens, sums_to_the_end
from trainer.loss import LossInputs, token_loss

POLICY, UNIFORM = torch.tensor([0.8, 0.2]), torch.tensor([0.5, 0.5])
FAR = torch.tensor([0.2, 0.8])
FIRST, SECOND = [0.8, 0.2], [[0.9, 0.1], [0.3, 0.7]]


def arm_gradient(name: str, behaviour: Tensor, reference: Tensor = UNIFORM) -> float:
    """Expectation over mu of the gradient on the first logit; a completion is one token, one of two arms."""
    logits = POLICY.log().requires_grad_()
    inputs = LossInputs(logits.log_softmax(0), behaviour.log(), torch.zeros(2), behaviour)
    settings = Objective(kl=1.0, kl_gradient=name)
    against = Reference(reference.log(), last_tokens([1, 1]))
    token_loss("clip_higher", inputs, torch.zeros(2), settings, against).loss.backward()
    assert logits.grad is not None
    return logits.grad[0].item()


@pytest.mark.parametrize(
    ("name", "expected"),
    [("return", 0.221807), ("weighted_k3", 0.221807), ("k2", 0.221807), ("k1", 0.0), ("k3", 0.3)],
)
def test_expected_gradients_on_two_arms(name: str, expected: float) -> None:
    """pi = mu = (.8, .2), ref = (.5, .5): the gradient of KL(pi || ref) is .8 * .2 * log 4; k3 gives pi_1 - ref_1."""
    assert arm_gradient(name, POLICY) == pytest.approx(expected, abs=1e-6)
    assert pytest.approx(0.16 * math.log(4), abs=1e-6) == 0.221807


def test_off_policy_only_the_weighted_gradients_stay_right() -> None:
    """mu = (.2, .8): k2 gives E_mu[l s] = .2 log 1.6 * .2 - .8 log .4 * .8."""
    for name in ("return", "weighted_k3"):
        assert arm_gradient(name, FAR) == pytest.approx(0.221807, abs=1e-6)
    assert arm_gradient("k2", FAR) == pytest.approx(0.04 * math.log(1.6) - 0.64 * math.log(0.4), abs=1e-6)


@pytest.mark.parametrize("name", GRADIENTS.keys() - {"k1"})
def test_at_the_reference_nothing_pulls(name: str) -> None:
    assert arm_gradient(name, POLICY, reference=POLICY) == pytest.approx(0, abs=1e-7)


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

    def gradients(self, name: str) -> list[Tensor]:
        """Expectation over pi = mu of the loss's gradients on the logits of the first and of the second token."""
        first, second = self.first.log_softmax(0), self.second.log_softmax(1)
        logprobs = torch.stack([first[:, None].expand(2, 2), second], -1).flatten()
        weights = torch.tensor([[p * q] * 2 for p, row in zip(FIRST, SECOND, strict=True) for q in row]).flatten()
        inputs = LossInputs(logprobs, logprobs.detach(), torch.zeros(8), weights)
        against = Reference(torch.full((8,), math.log(0.5)), last_tokens([2] * 4))
        found = token_loss("reinforce", inputs, torch.zeros(8), Objective(kl=1.0, kl_gradient=name), against)
        return list(torch.autograd.grad(found.loss, [self.first, self.second]))


def test_only_the_return_is_the_gradient_of_the_divergence_of_completions() -> None:
    chain = Chain()
    exact = torch.autograd.grad(chain.divergence(), [chain.first, chain.second])
    for found, wanted in zip(chain.gradients("return"), exact, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)
    assert exact[0][0].item() == pytest.approx(0.267532, abs=1e-6)


@pytest.mark.parametrize("name", ["k2", "weighted_k3"])
def test_token_level_gradients_leave_out_what_a_token_does_to_later_ones(name: str) -> None:
    assert Chain().gradients(name)[0][0].item() == pytest.approx(0.221807, abs=1e-6)


TOKENS = [(0.5, 0.3, 2.0), (0.25, 0.5, 1.0), (0.1, 0.4, 0.5), (0.9, 0.3, 3.0)]
"""pi, ref, r of four tokens: a completion of three and one of one"""


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradient_of_every_token_by_hand(name: str) -> None:
    logs = [math.log(pi / ref) for pi, ref, _ in TOKENS]
    ratios = [r for _, _, r in TOKENS]
    to_the_end = [sum(logs[:3]), sum(logs[1:3]), logs[2], logs[3]]
    expected = {
        "return": [r * rest for r, rest in zip(ratios, to_the_end, strict=True)],
        "weighted_k3": [r * log for r, log in zip(ratios, logs, strict=True)],
        "k1": [1.0] * 4,
        "k2": logs,
        "k3": [1 - math.exp(-log) for log in logs],
    }[name]
    logprobs = torch.tensor([math.log(pi) for pi, _, _ in TOKENS], requires_grad=True)
    behaviour = logprobs.detach() - torch.tensor(ratios).log()
    reference = Reference(torch.tensor([math.log(ref) for _, ref, _ in TOKENS]), last_tokens([3, 1]))
    terms, log_ratio = divergence_terms(name, logprobs, (logprobs - behaviour).exp(), reference)
    assert torch.autograd.grad(terms.sum(), logprobs)[0].tolist() == pytest.approx(expected, abs=1e-5)
    assert log_ratio.tolist() == pytest.approx(logs, abs=1e-6) and not log_ratio.requires_grad


def test_values_of_the_estimates_by_hand() -> None:
    """At l = log 2 and r = 3: k1 log 2, k2 log(2)^2 / 2, k3 1/2 - 1 + log 2, and three times that."""
    log2 = math.log(2)
    reference = Reference(torch.tensor([-log2]), last_tokens([1]))
    for name, value in {"k1": log2, "k2": log2**2 / 2, "k3": log2 - 0.5, "weighted_k3": 3 * (log2 - 0.5)}.items():
        terms, _ = divergence_terms(name, torch.zeros(1), torch.tensor([3.0]), reference)
        assert terms.item() == pytest.approx(value, abs=1e-6), name


def test_sums_end_with_the_completion() -> None:
    assert last_tokens([2, 1, 3]).tolist() == [1, 1, 2, 5, 5, 5] and last_tokens([]).shape == (0,)
    found = sums_to_the_end(torch.tensor([1.0, 2.0, 5.0, 0.5, 0.25, 0.25]), last_tokens([2, 1, 3]))
    assert found.tolist() == [3.0, 2.0, 5.0, 1.0, 0.5, 0.25]
    assert sums_to_the_end(torch.zeros(0), last_tokens([])).shape == (0,)


def test_sums_are_not_spoilt_by_long_completions_before() -> None:
    """After 50,000 tokens whose sum is 1.5e5, a completion's own sums still have seven digits."""
    long, short = torch.full((50_000,), 3.1), torch.tensor([1e-3, 2e-3, -4e-3])
    found = sums_to_the_end(torch.cat([long, short]), last_tokens([50_000, 3]))
    assert found[-3:].tolist() == pytest.approx([-1e-3, -2e-3, -4e-3], rel=1e-6)


def test_a_reference_with_gradients_or_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="without gradients"):
        Reference(torch.zeros(2, requires_grad=True), last_tokens([2]))
    with pytest.raises(ValueError, match="float32"):
        Reference(torch.zeros(2, dtype=torch.bfloat16), last_tokens([2]))
    with pytest.raises(ValueError, match=r"expected int64 \(2,\)"):
        Reference(torch.zeros(2), last_tokens([3]))
