"""Log-probabilities: the definition by hand, and the fused chunked head against it."""

import math

import pytest
import torch

from shared.model import logprobs
from shared.model.logprobs import Tile, chunked_logprobs
from tests.packed import entropy_from_logits, logprobs_from_logits

TILES = [Tile(1, 1), Tile(5, 7), Tile(37, 50), Tile(100, 30), None]


def test_definition_by_hand():
    logits = torch.tensor([[0.0, math.log(3.0)], [math.log(4.0), 0.0]])
    logprobs = logprobs_from_logits(logits, torch.tensor([1, 1]), 1.0)
    torch.testing.assert_close(logprobs, torch.tensor([math.log(3 / 4), math.log(1 / 5)]))
    # temperature 2 takes square roots of the odds: 1 : sqrt(3), 2 : 1
    cooled = logprobs_from_logits(logits, torch.tensor([1, 1]), 2.0)
    torch.testing.assert_close(cooled, torch.tensor([math.log(3**0.5 / (1 + 3**0.5)), math.log(1 / 3)]))


def test_entropy_by_hand():
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, math.log(3.0), -1e4, -1e4]])
    expected = torch.tensor([math.log(4), -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))])
    torch.testing.assert_close(entropy_from_logits(logits, 1.0), expected)


def make_inputs(dtype=torch.float32, tokens=37, size=16, vocab=50):
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(tokens, size, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, size, generator=generator) / 2).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(vocab, (tokens,), generator=generator)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_chunked_equals_full(tile, temperature):
    hidden, weight, targets = make_inputs()
    direction = torch.linspace(-1, 1, len(targets))
    logits = hidden @ weight.T
    expected = logprobs_from_logits(logits, targets, temperature)
    logprobs, entropy = chunked_logprobs(hidden, weight, targets, temperature, tile)
    torch.testing.assert_close(logprobs, expected, atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(entropy, entropy_from_logits(logits, temperature), atol=1e-5, rtol=1e-5)
    wanted = torch.autograd.grad((expected * direction).sum(), (hidden, weight))
    gotten = torch.autograd.grad((logprobs * direction).sum(), (hidden, weight))
    for ours, theirs in zip(gotten, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=5e-6, rtol=1e-6)


def test_a_given_gradient_of_the_weight_is_added_to_and_autograd_gets_none():
    hidden, weight, targets = make_inputs()
    chunked_logprobs(hidden, weight, targets, 0.7, Tile(8, 16))[0].sum().backward()
    wanted, d_hidden = weight.grad.clone(), hidden.grad.clone()
    hidden.grad = weight.grad = None
    total = torch.full_like(weight, 0.25)
    for _ in range(2):
        logprobs, _ = chunked_logprobs(hidden, weight, targets, 0.7, Tile(8, 16), total)
        logprobs.sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(total, 0.25 + 2 * wanted)
    assert torch.equal(hidden.grad, 2 * d_hidden)


def test_double_precision_gradient_is_exact():
    hidden, weight, targets = make_inputs(torch.float64, tokens=5, size=4, vocab=7)
    assert torch.autograd.gradcheck(lambda h, w: chunked_logprobs(h, w, targets, 0.7, Tile(2, 3))[0], (hidden, weight))


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_entropy_gradient_equals_that_of_plain_logits(tile, temperature):
    hidden, weight, targets = make_inputs()
    up, down = torch.linspace(-1, 1, len(targets)), torch.linspace(2, 0.5, len(targets))
    logits = hidden @ weight.T
    wanted_entropy = (entropy_from_logits(logits, temperature) * down).sum()
    wanted_both = wanted_entropy + (logprobs_from_logits(logits, targets, temperature) * up).sum()
    logprobs, entropy = chunked_logprobs(hidden, weight, targets, temperature, tile)
    both = (logprobs * up).sum() + (entropy * down).sum()
    for ours, theirs in (((entropy * down).sum(), wanted_entropy), (both, wanted_both)):
        wanted = torch.autograd.grad(theirs, (hidden, weight), retain_graph=True)
        gotten = torch.autograd.grad(ours, (hidden, weight), retain_graph=True)
        for gradient, expected in zip(gotten, wanted, strict=True):
            torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=1e-5)


def test_entropy_gradient_by_hand():
    """p = (.8, .2): dH/dz_1 = -p_1 (log p_1 + H) = -.8 * .2 * log 4; half of it at temperature 2 with logits 2 z."""
    for temperature in (1.0, 2.0):
        hidden = (temperature * torch.tensor([[0.8, 0.2]]).log()).requires_grad_()
        chunked_logprobs(hidden, torch.eye(2), torch.tensor([1]), temperature)[1].sum().backward()
        slope = 0.16 * math.log(4) / temperature
        torch.testing.assert_close(hidden.grad, torch.tensor([[-slope, slope]]))


def test_entropy_gradient_is_the_finite_difference():
    hidden, weight, targets = make_inputs(torch.float64, tokens=5, size=4, vocab=7)
    assert torch.autograd.gradcheck(lambda h, w: chunked_logprobs(h, w, targets, 0.7, Tile(2, 3)), (hidden, weight))


def test_entropy_gradient_is_only_computed_when_asked_for(monkeypatch):
    seen, backward = [], logprobs._ChunkedLogprobs.backward

    def spy(ctx, gradient, d_entropy):
        seen.append((gradient is None, d_entropy is None))
        return backward(ctx, gradient, d_entropy)

    monkeypatch.setattr(logprobs._ChunkedLogprobs, "backward", staticmethod(spy))
    for use in (lambda p, h: p.sum() + h.detach().sum(), lambda p, h: h.sum(), lambda p, h: p.sum() + h.sum()):
        hidden, weight, targets = make_inputs()
        use(*chunked_logprobs(hidden, weight, targets, 1.0)).backward()
    assert seen == [(False, True), (True, False), (False, False)]


def test_bfloat16_inputs_are_scored_in_float32():
    hidden, weight, targets = make_inputs(torch.bfloat16)
    logprobs, entropy = chunked_logprobs(hidden, weight, targets, 1.0, Tile(8, 16))
    exact_hidden, exact_weight = (t.detach().float().requires_grad_() for t in (hidden, weight))
    expected = logprobs_from_logits(exact_hidden @ exact_weight.T, targets, 1.0)
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs, expected, atol=2e-6, rtol=1e-6)
    expected_entropy = entropy_from_logits(exact_hidden @ exact_weight.T, 1.0)
    for ours, theirs in ((logprobs, expected), (entropy, expected_entropy)):
        gradients = torch.autograd.grad(ours.sum(), (hidden, weight), retain_graph=True)
        exacts = torch.autograd.grad(theirs.sum(), (exact_hidden, exact_weight))
        for gradient, exact in zip(gradients, exacts, strict=True):
            assert gradient.dtype == torch.bfloat16
            torch.testing.assert_close(gradient.float(), exact, atol=1e-2, rtol=1e-2)


def test_far_logits_stay_finite():
    hidden = torch.tensor([[1e4, 0.0]], requires_grad=True)
    weight = torch.eye(2)
    logprobs, entropy = chunked_logprobs(hidden, weight, torch.tensor([1]), 1.0)
    assert logprobs.item() == -1e4 and entropy.item() == 0.0
    (logprobs + entropy).sum().backward()
    assert hidden.grad.tolist() == [[-1.0, 1.0]]


def test_a_target_that_is_no_word_is_no_number():
    hidden, weight, targets = make_inputs()
    for wrong in (-1, 50):
        targets[3] = wrong
        logprobs, entropy = chunked_logprobs(hidden, weight, targets, 1.0)
        assert logprobs.isnan().nonzero().tolist() == [[3]] and entropy.isfinite().all()


def test_no_targets_give_empty_results_and_zero_gradients():
    hidden, weight, _ = make_inputs()
    logprobs, entropy = chunked_logprobs(hidden[:0], weight, torch.empty(0, dtype=torch.int64), 1.0)
    assert logprobs.shape == entropy.shape == (0,)
    (logprobs.sum() + entropy.sum()).backward()
    assert not weight.grad.any() and not hidden.grad.any()


def test_a_wider_weight_is_rounded_to_the_type_of_the_hidden_states():
    """As if it had been rounded before; its own gradient is not."""
    hidden, rounded, targets = make_inputs(torch.bfloat16)
    wide = rounded.detach().float().mul(1 + 2e-4).requires_grad_()
    same = hidden.detach().clone().requires_grad_()
    assert not torch.equal(wide, rounded.float())
    for states, weight in ((hidden, rounded), (same, wide)):
        logprobs, entropy = chunked_logprobs(states, weight, targets, 0.7, Tile(8, 16))
        (logprobs.sum() + 0.1 * entropy.sum()).backward()
    with torch.no_grad():
        for one, other in zip(*(chunked_logprobs(hidden, w, targets, 0.7) for w in (rounded, wide)), strict=True):
            assert torch.equal(one, other)
    assert torch.equal(hidden.grad, same.grad)
    assert wide.grad.dtype == torch.float32 and torch.equal(wide.grad.bfloat16(), rounded.grad)
    assert not torch.equal(wide.grad, rounded.grad.float())


def test_other_products_keep_their_precision():
    """Only the head's own products may take bfloat16 units: what they computed from are bfloat16 numbers."""
    settings = torch.backends.mkldnn.matmul
    before = settings.fp32_precision
    hidden, weight, targets = make_inputs(torch.bfloat16)
    logprobs, _ = chunked_logprobs(hidden, weight, targets, 1.0)
    logprobs.sum().backward()
    assert settings.fp32_precision == before
    left, right = torch.rand(64, 64), torch.rand(64, 64)
    torch.testing.assert_close(left @ right, (left.double() @ right.double()).float(), atol=1e-5, rtol=1e-6)
