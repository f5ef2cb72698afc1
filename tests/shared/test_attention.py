"""Packed attention: sequences do not see each other, and every backend computes the same."""

import pytest
import torch

from shared.model.attention import attend, plan_attention
from shared.model.decoder import Decoder, DecoderConfig, initialise
from tests.packed import pack_from

CPU_BACKENDS = ["auto", "bmm", "sdpa"]
LENGTHS = (7, 1, 12, 12, 3)


def reference(joined, lengths, key_heads=2):
    """Sequence by sequence, head by head, in plain words."""
    query, key, value = joined.split([4, key_heads, key_heads], 1)
    attended, start, repeat = [], 0, 4 // key_heads
    for length in lengths:
        here = slice(start, start := start + length)
        heads = []
        for head in range(4):
            q, k, v = query[here, head], key[here, head // repeat], value[here, head // repeat]
            scores = q @ k.T / query.shape[2] ** 0.5
            heads.append(scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf).softmax(-1) @ v)
        attended.append(torch.stack(heads, 1))
    return torch.cat(attended)


def random_input(lengths, key_heads=2, head_dim=8, dtype=torch.float32):
    shape = (sum(lengths), 4 + 2 * key_heads, head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=dtype).requires_grad_()


def plan(lengths, prefixes=None, key_heads=2, dtype=torch.float32, backend="auto"):
    prefixes = [-1] * len(lengths) if prefixes is None else prefixes
    return plan_attention(lengths, prefixes, 4, key_heads, torch.device("cpu"), dtype, backend)


def assert_same(joined, actual, expected):
    """Equal values, and equal gradients for a random direction."""
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    ours, theirs = (torch.autograd.grad((out * direction).sum(), joined)[0] for out in (actual, expected))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_forward_and_backward_equal_plain_attention(backend, key_heads):
    joined = random_input(LENGTHS, key_heads)
    actual = attend(joined, plan(LENGTHS, key_heads=key_heads, backend=backend))
    assert_same(joined, actual, reference(joined, LENGTHS, key_heads))


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_continued_segments_read_their_prefix(backend, monkeypatch):
    monkeypatch.setattr("shared.model.cpu.cpu_decoder.BLOCK_SCORES", 100)
    lengths, prefixes = (3, 2, 1, 4, 2), (-1, 0, 0, -1, 0)
    joined = random_input(lengths)
    alone, other = joined[:3], joined[6:10]
    whole = [alone, other, *(torch.cat([alone, joined[begin:end]]) for begin, end in ((3, 5), (5, 6), (10, 12)))]
    plain = reference(torch.cat(whole), [len(each) for each in whole]).split([len(each) for each in whole])
    expected = torch.cat([plain[0], plain[2][3:], plain[3][3:], plain[1], plain[4][3:]])
    assert_same(joined, attend(joined, plan(lengths, prefixes, backend=backend)), expected)


def test_short_and_long_rows_mix(monkeypatch):
    monkeypatch.setattr("shared.model.cpu.cpu_decoder.LONGEST_BMM_TOKENS", 8)
    monkeypatch.setattr("shared.model.cpu.cpu_decoder.BLOCK_SCORES", 500)
    joined, mixed = random_input(LENGTHS), plan(LENGTHS)
    assert {block.backend for block in mixed.blocks} == {"bmm", "sdpa"}
    assert_same(joined, attend(joined, mixed), reference(joined, LENGTHS))


def test_no_mask_is_kept_that_nothing_reads():
    """torch's attention knows causality itself; with a prefix it needs a mask, the same for all heads."""
    whole, continued = plan((600, 3), backend="sdpa"), plan((600, 3), (-1, 0), backend="sdpa")
    assert {block.mask for block in whole.blocks} == {None}
    assert [None if block.mask is None else tuple(block.mask.shape) for block in continued.blocks] == [None, (3, 603)]


def test_double_precision_gradient_is_exact():
    joined = random_input((3, 5, 1, 2), head_dim=4, dtype=torch.float64)
    exact = plan((3, 5, 1, 2), (-1, -1, 0, 0), dtype=torch.float64, backend="bmm")
    assert torch.autograd.gradcheck(lambda tensor: attend(tensor, exact), joined)


def tiny_decoder(backend, device="cpu", dtype=torch.float32):
    config = DecoderConfig("llama", 11, 16, 24, 2, 4, 2, 16, 1e-5, 64, tied=True, initializer_range=0.5)
    decoder = Decoder(config, attention=backend)
    initialise(decoder, 0)
    return decoder.to(device, dtype)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_what_a_neighbour_says_changes_no_bit(backend):
    decoder, first, second = tiny_decoder(backend), [3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5]
    with torch.no_grad():
        packed, permuted = (
            decoder(pack_from([before, second], [1, 1]), output="logits")[len(first) :]
            for before in (first, first[::-1])
        )
    assert torch.equal(packed, permuted)


@pytest.mark.parametrize(("backend", "message"), [("fast", "'fast' is unknown"), ("varlen", "needs CUDA")])
def test_an_unknown_or_impossible_backend_is_refused(backend, message):
    with pytest.raises(ValueError, match=message):
        plan([1], backend=backend)


@pytest.mark.gpu
def test_varlen_equals_float32_on_the_gpu():
    batch = pack_from([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5], [1], [3, 1, 4, 2, 2]], [3, 1, 1, 3], "cuda")
    assert max(batch.prefixes) >= 0
    exact = tiny_decoder("auto", "cuda")(batch)[0]
    rough = tiny_decoder("varlen", "cuda", torch.bfloat16)(batch)[0]
    assert (exact - rough).abs().mean() < 0.1
    rough.sum().backward()
