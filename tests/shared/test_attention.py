"""Packed attention: sequences do not see each other, and every backend computes the same."""

import pytest
import torch

from shared.attention import attend, plan_attention
from shared.model import Decoder, DecoderConfig, initialise, pack

CPU_BACKENDS = ["auto", "bmm", "sdpa"]
LENGTHS = (7, 1, 12, 12, 3)


def reference(query, key, value, lengths):
    """Sequence by sequence, head by head, in plain words."""
    parts, start, repeat = [], 0, query.shape[1] // key.shape[1]
    for length in lengths:
        part = slice(start, start + length)
        heads = []
        for head in range(query.shape[1]):
            q, k, v = query[part, head], key[part, head // repeat], value[part, head // repeat]
            scores = q @ k.T / query.shape[2] ** 0.5
            scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
            heads.append(scores.softmax(-1) @ v)
        parts.append(torch.stack(heads, 1))
        start += length
    return torch.cat(parts)


def random_inputs(lengths, heads=4, key_heads=2, head_dim=8):
    generator = torch.Generator().manual_seed(1)
    shapes = [(sum(lengths), count, head_dim) for count in (heads, key_heads, key_heads)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_forward_and_backward_equal_plain_attention(backend, key_heads):
    inputs = random_inputs(LENGTHS, key_heads=key_heads)
    expected = reference(*inputs, LENGTHS)
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    expected_gradients = torch.autograd.grad((expected * direction).sum(), inputs)
    plan = plan_attention(LENGTHS, 4, torch.device("cpu"), torch.float32, backend)
    actual = attend(*inputs, plan)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    gradients = torch.autograd.grad((actual * direction).sum(), inputs)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_short_and_long_rows_mix(monkeypatch):
    monkeypatch.setattr("shared.attention.LONGEST_BMM_TOKENS", 8)
    monkeypatch.setattr("shared.attention.CHUNK_SCORES", 500)
    inputs = random_inputs(LENGTHS)
    plan = plan_attention(LENGTHS, 4, torch.device("cpu"), torch.float32)
    assert {rows.backend for rows in plan.rows} == {"bmm", "sdpa"}
    expected, actual = reference(*inputs, LENGTHS), attend(*inputs, plan)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(
        torch.autograd.grad(actual.square().sum(), inputs),
        torch.autograd.grad(expected.square().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_double_precision_gradient_is_exact():
    inputs = [tensor.detach().double().requires_grad_() for tensor in random_inputs((3, 5, 1), head_dim=4)]
    plan = plan_attention((3, 5, 1), 4, torch.device("cpu"), torch.float64, "bmm")
    assert torch.autograd.gradcheck(lambda *tensors: attend(*tensors, plan), inputs)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_a_sequence_does_not_see_its_neighbours(backend):
    decoder = tiny_decoder(backend)
    first, second = [3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5]
    with torch.no_grad():
        packed = decoder(pack([first, second], [1, 1]), output="logits")[len(first) :]
        alone = decoder(pack([second], [1]), output="logits")
        permuted = decoder(pack([first[::-1], second], [1, 1]), output="logits")[len(first) :]
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)
    assert torch.equal(packed, permuted)


def tiny_decoder(backend, device="cpu", dtype=torch.float32):
    config = DecoderConfig("llama", 11, 16, 24, 2, 4, 2, 16, 1e-5, 64, tied=True, initializer_range=0.5)
    decoder = Decoder(config, attention=backend)
    initialise(decoder, 0)
    return decoder.to(device, dtype)


def test_unknown_or_impossible_backend_is_refused():
    with pytest.raises(ValueError, match="'fast' is unknown: one of auto, bmm"):
        plan_attention([1], 1, torch.device("cpu"), torch.float32, "fast")
    with pytest.raises(ValueError, match="needs CUDA"):
        plan_attention([1], 1, torch.device("cpu"), torch.float32, "varlen")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_varlen_equals_float32_on_the_gpu():
    sequences = [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5], [1]]
    batch = pack(sequences, [1, 1, 1], "cuda")
    exact = tiny_decoder("auto", "cuda")(batch)[0]
    rough = tiny_decoder("varlen", "cuda", torch.bfloat16)(batch)[0]
    assert (exact - rough).abs().mean() < 0.1
    rough.sum().backward()
