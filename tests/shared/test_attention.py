"""Packed attention: sequences do not see each other, and every backend computes the same."""

import pytest
import torch

from shared.model.attention import attend, plan_attention
from shared.model.decoder import Decoder, DecoderConfig, initialise
from tests.packed import pack_from

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


def random_input(lengths, heads=4, key_heads=2, head_dim=8, dtype=torch.float32):
    shape = (sum(lengths), heads + 2 * key_heads, head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=dtype).requires_grad_()


def plan(lengths, prefixes=None, heads=4, key_heads=2, dtype=torch.float32, backend="auto"):
    prefixes = [-1] * len(lengths) if prefixes is None else prefixes
    return plan_attention(lengths, prefixes, heads, key_heads, torch.device("cpu"), dtype, backend)


def assert_same(joined, actual, expected):
    """Equal values, and equal gradients for a random direction."""
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    ours, theirs = (torch.autograd.grad((out * direction).sum(), joined)[0] for out in (actual, expected))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_forward_and_backward_equal_plain_attention(backend, key_heads):
    joined = random_input(LENGTHS, key_heads=key_heads)
    expected = reference(*joined.split([4, key_heads, key_heads], 1), LENGTHS)
    assert_same(joined, attend(joined, plan(LENGTHS, key_heads=key_heads, backend=backend)), expected)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_continued_segments_read_their_prefix(backend, monkeypatch):
    monkeypatch.setattr("shared.model.cpu.cpu_decoder.BLOCK_SCORES", 100)
    lengths, prefixes = (3, 2, 1, 4, 2), (-1, 0, 0, -1, 0)
    joined = random_input(lengths)
    prefix, pairs = joined[:3], [(3, 5), (5, 6), (10, 12)]
    parts = [joined[:3], joined[6:10]] + [torch.cat([prefix, joined[start:stop]]) for start, stop in pairs]
    plain = reference(*torch.cat(parts).split([4, 2, 2], 1), [len(part) for part in parts])
    alone, other, first, second, third = plain.split([len(part) for part in parts])
    expected = torch.cat([alone, first[3:], second[3:], other, third[3:]])
    assert_same(joined, attend(joined, plan(lengths, prefixes, backend=backend)), expected)


def test_short_and_long_rows_mix(monkeypatch):
    monkeypatch.setattr("shared.model.cpu.cpu_decoder.LONGEST_BMM_TOKENS", 8)
    monkeypatch.setattr("shared.model.cpu.cpu_decoder.BLOCK_SCORES", 500)
    joined = random_input(LENGTHS)
    mixed = plan(LENGTHS)
    assert {block.backend for block in mixed.blocks} == {"bmm", "sdpa"}
    assert_same(joined, attend(joined, mixed), reference(*joined.split([4, 2, 2], 1), LENGTHS))


def test_no_mask_is_kept_that_nothing_reads():
    """torch's attention knows causality itself; with a prefix it needs a mask, the same for all heads."""
    whole, continued = plan((600, 3), backend="sdpa"), plan((600, 3), (-1, 0), backend="sdpa")
    assert {block.mask for block in whole.blocks} == {None}
    assert [None if block.mask is None else tuple(block.mask.shape) for block in continued.blocks] == [None, (3, 603)]


def test_double_precision_gradient_is_exact():
    joined = random_input((3, 5, 1, 2), head_dim=4, dtype=torch.float64)
    exact = plan((3, 5, 1, 2), (-1, -1, 0, 0), dtype=torch.float64, backend="bmm")
    assert torch.autograd.gradcheck(lambda tensor: attend(tensor, exact), joined)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_a_sequence_does_not_see_its_neighbours(backend):
    decoder = tiny_decoder(backend)
    first, second = [3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5]
    with torch.no_grad():
        packed = decoder(pack_from([first, second], [1, 1]), output="logits")[len(first) :]
        alone = decoder(pack_from([second], [1]), output="logits")
        permuted = decoder(pack_from([first[::-1], second], [1, 1]), output="logits")[len(first) :]
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)
    assert torch.equal(packed, permuted)


def tiny_decoder(backend, device="cpu", dtype=torch.float32):
    config = DecoderConfig("llama", 11, 16, 24, 2, 4, 2, 16, 1e-5, 64, tied=True, initializer_range=0.5)
    decoder = Decoder(config, attention=backend)
    initialise(decoder, 0)
    return decoder.to(device, dtype)


def test_unknown_or_impossible_backend_is_refused():
    with pytest.raises(ValueError, match="'fast' is unknown: one of auto, bmm"):
        plan([1], backend="fast")
    with pytest.raises(ValueError, match="needs CUDA"):
        plan([1], backend="varlen")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_varlen_equals_float32_on_the_gpu():
    sequences = [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5], [1], [3, 1, 4, 2, 2]]
    batch = pack_from(sequences, [3, 1, 1, 3], "cuda")
    assert max(batch.prefixes) >= 0
    exact = tiny_decoder("auto", "cuda")(batch)[0]
    rough = tiny_decoder("varlen", "cuda", torch.bfloat16)(batch)[0]
    assert (exact - rough).abs().mean() < 0.1
    rough.sum().backward()
