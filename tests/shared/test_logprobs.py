"""Log-probabilities: the definition by hand, and the fused chunked head against it."""

import math

import pytest
import torch

from shared.model import logprobs as head
from shared.model.cpu import processor
from shared.model.logprobs import PLAIN, HeadScale, Tile, chunked_logprobs
from tests.packed import entropy_from_logits, logprobs_from_logits

SCALES = [PLAIN, HeadScale(scale=0.25), HeadScale(scale=0.5, cap=3.0)]
OBJECTIVES = [(1.0, 0.0), (0.0, 1.0), (1.0, 1.0)]
"""weights of the log-probabilities and of the entropies"""


def make_inputs(dtype=torch.float32, tokens=37, size=16, vocab=50):
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(tokens, size, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, size, generator=generator) / 2).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(vocab, (tokens,), generator=generator)


def definition(hidden, weight, targets, temperature, scale=PLAIN):
    """Log-probabilities and entropies by all logits."""
    logits = scale.scale * (hidden @ weight.T)
    logits = scale.cap * (logits / scale.cap).tanh() if scale.cap else logits
    return logprobs_from_logits(logits, targets, temperature), entropy_from_logits(logits, temperature)


def gradients(scored, inputs, of_logprobs=1.0, of_entropy=1.0):
    """Those of a sum in which every token has another weight."""
    logprobs, entropy = scored
    up, down = torch.linspace(-1, 1, len(logprobs)), torch.linspace(2, 0.5, len(logprobs))
    total = of_logprobs * (logprobs * up).sum() + of_entropy * (entropy * down).sum()
    return torch.autograd.grad(total, inputs, retain_graph=True)


def test_the_definition_by_hand():
    logits, log = torch.tensor([[0.0, math.log(3.0)], [math.log(4.0), 0.0]]), math.log
    logprobs = logprobs_from_logits(logits, torch.tensor([1, 1]), 1.0)
    torch.testing.assert_close(logprobs, torch.tensor([log(3 / 4), log(1 / 5)]))
    # temperature 2 takes square roots of the odds: 1 : sqrt(3), 2 : 1
    cooled = logprobs_from_logits(logits, torch.tensor([1, 1]), 2.0)
    torch.testing.assert_close(cooled, torch.tensor([log(3**0.5 / (1 + 3**0.5)), log(1 / 3)]))
    flat_and_odd = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, log(3.0), -1e4, -1e4]])
    expected = torch.tensor([log(4), -(0.25 * log(0.25) + 0.75 * log(0.75))])
    torch.testing.assert_close(entropy_from_logits(flat_and_odd, 1.0), expected)


@pytest.mark.parametrize("scale", SCALES, ids=str)
@pytest.mark.parametrize("tile", [Tile(1, 10), Tile(8, 1), Tile(37, 50), Tile(100, 30), None])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_chunked_equals_full(tile, temperature, scale):
    hidden, weight, targets = make_inputs()
    expected = definition(hidden, weight, targets, temperature, scale)
    scored = chunked_logprobs(hidden, weight, targets, temperature, tile, scale=scale)
    torch.testing.assert_close(scored[0], expected[0], atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(scored[1], expected[1], atol=1e-5, rtol=1e-5)
    for weights in OBJECTIVES:
        ours, theirs = (gradients(each, (hidden, weight), *weights) for each in (scored, expected))
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("scale", SCALES, ids=str)
def test_double_precision_gradient_is_exact(scale):
    hidden, weight, targets = make_inputs(torch.float64, tokens=5, size=4, vocab=7)
    assert torch.autograd.gradcheck(
        lambda h, w: chunked_logprobs(h, w, targets, 0.7, Tile(2, 3), scale=scale), (hidden, weight)
    )


def test_a_given_gradient_of_the_weight_is_added_to_and_autograd_gets_none():
    hidden, weight, targets = make_inputs()
    chunked_logprobs(hidden, weight, targets, 0.7, Tile(8, 16))[0].sum().backward()
    d_weight, d_hidden = weight.grad.clone(), hidden.grad.clone()
    hidden.grad = weight.grad = None
    total = torch.full_like(weight, 0.25)
    for _ in range(2):
        chunked_logprobs(hidden, weight, targets, 0.7, Tile(8, 16), total)[0].sum().backward()
    assert weight.grad is None and torch.equal(hidden.grad, 2 * d_hidden)
    torch.testing.assert_close(total, 0.25 + 2 * d_weight)


def test_the_entropy_gradient_is_only_computed_when_asked_for(monkeypatch):
    seen, backward = [], head._ChunkedLogprobs.backward

    def spy(ctx, gradient, d_entropy):
        seen.append((gradient is None, d_entropy is None))
        return backward(ctx, gradient, d_entropy)

    monkeypatch.setattr(head._ChunkedLogprobs, "backward", staticmethod(spy))
    for use in (lambda p, h: p.sum() + h.detach().sum(), lambda p, h: h.sum(), lambda p, h: p.sum() + h.sum()):
        use(*chunked_logprobs(*make_inputs(), 1.0)).backward()
    assert seen == [(False, True), (True, False), (False, False)]


def test_bfloat16_inputs_are_scored_and_their_gradients_summed_in_float32(monkeypatch):
    hidden, weight, targets = make_inputs(torch.bfloat16)
    exact = [each.detach().float().requires_grad_() for each in (hidden, weight)]
    scored, expected = chunked_logprobs(hidden, weight, targets, 1.0, Tile(8, 16)), definition(*exact, targets, 1.0)
    assert all(each.dtype == torch.float32 for each in scored)
    torch.testing.assert_close(scored, expected, atol=2e-6, rtol=1e-6)
    for weights in OBJECTIVES[:2]:
        ours, theirs = gradients(scored, (hidden, weight), *weights), gradients(expected, exact, *weights)
        assert {each.dtype for each in ours} == {torch.bfloat16}
        torch.testing.assert_close([each.float() for each in ours], [*theirs], atol=1e-2, rtol=1e-2)
    # over tiles of the vocabulary: rounded once, they are those of one tile, but for the last bit of a few. Products in
    # bfloat16 units (AMX) round their inputs too, large ones only: then they differ in the last bits
    hidden, weight, targets = make_inputs(torch.bfloat16, vocab=512)
    for in_units in (True, False):
        if not in_units:
            monkeypatch.setattr(processor, "multiplies_bfloat16_fast", lambda kind: False)
        whole, tiled = (
            gradients(chunked_logprobs(hidden, weight, targets, 1.0, Tile(64, words)), (hidden,))[0].float()
            for words in (512, 4)
        )
        torch.testing.assert_close(whole, tiled, atol=2e-2 * float(whole.abs().max()), rtol=0)
    assert (whole != tiled).float().mean() < 0.05


def test_far_logits_stay_finite_a_target_that_is_no_word_is_no_number_and_no_targets_are_empty():
    far = torch.tensor([[1e4, 0.0]], requires_grad=True)
    logprobs, entropy = chunked_logprobs(far, torch.eye(2), torch.tensor([1]), 1.0)
    assert logprobs.item() == -1e4 and entropy.item() == 0.0
    (logprobs + entropy).sum().backward()
    assert far.grad.tolist() == [[-1.0, 1.0]]
    hidden, weight, targets = make_inputs()
    for targets[3] in (-1, 50):
        logprobs, entropy = chunked_logprobs(hidden, weight, targets, 1.0)
        assert logprobs.isnan().nonzero().tolist() == [[3]] and entropy.isfinite().all()
    logprobs, entropy = chunked_logprobs(hidden[:0], weight, targets[:0], 1.0)
    assert logprobs.shape == entropy.shape == (0,)
    (logprobs.sum() + entropy.sum()).backward()
    assert not weight.grad.any() and not hidden.grad.any()


def test_a_wider_weight_is_rounded_to_the_type_of_the_hidden_states():
    """As if it had been rounded before; its own gradient is not."""
    hidden, rounded, targets = make_inputs(torch.bfloat16)
    wide = rounded.detach().float().mul(1 + 2e-4).requires_grad_()
    assert not torch.equal(wide, rounded.float())
    scored = [chunked_logprobs(hidden, weight, targets, 0.7, Tile(8, 16)) for weight in (rounded, wide)]
    assert all(map(torch.equal, *scored))
    d_hidden, d_rounded = gradients(scored[0], (hidden, rounded))
    d_same, d_wide = gradients(scored[1], (hidden, wide))
    assert torch.equal(d_hidden, d_same)
    assert d_wide.dtype == torch.float32 and torch.equal(d_wide.bfloat16(), d_rounded)
    assert not torch.equal(d_wide, d_rounded.float())


def test_other_products_keep_their_precision():
    """Only the head's own products may take bfloat16 units: what they computed from are bfloat16 numbers."""
    settings = torch.backends.mkldnn.matmul
    before = settings.fp32_precision
    chunked_logprobs(*make_inputs(torch.bfloat16), 1.0)[0].sum().backward()
    assert settings.fp32_precision == before
    left, right = torch.rand(64, 64), torch.rand(64, 64)
    torch.testing.assert_close(left @ right, (left.double() @ right.double()).float(), atol=1e-5, rtol=1e-6)
