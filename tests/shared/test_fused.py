"""Hand-written gradients: those of autograd over the plain formulas, and less kept for the backward pass."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shared.fused import gated_down, joined_linear, rms_norm

TOKENS, WIDTH, INNER = 7, 6, 5


def leaves(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def plain_down(joined: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    gate, up = joined.chunk(2, -1)
    return F.linear(F.silu(gate) * up, weight, bias)


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


CASES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "joined": (
        lambda x, a, b: joined_linear(x, [a, b]),
        lambda x, a, b: F.linear(x, torch.cat([a, b])),
        [(TOKENS, WIDTH), (4, WIDTH), (3, WIDTH)],
    ),
    "joined with bias": (
        lambda x, a, b, bias: joined_linear(x, [a, b], bias),
        lambda x, a, b, bias: torch.cat([F.linear(x, a, bias[:4]), F.linear(x, b, bias[4:])], 1),
        [(TOKENS, WIDTH), (4, WIDTH), (3, WIDTH), (7,)],
    ),
    "gated": (gated_down, plain_down, [(TOKENS, 2 * INNER), (WIDTH, INNER)]),
    "gated with bias": (gated_down, plain_down, [(TOKENS, 2 * INNER), (WIDTH, INNER), (WIDTH,)]),
    "norm": (lambda x, w: rms_norm(x, w, 1e-5), plain_norm, [(TOKENS, WIDTH), (WIDTH,)]),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_the_plain_formula(name: str) -> None:
    ours, plain, shapes = CASES[name]
    found, expected = leaves(torch.float64, *shapes), leaves(torch.float64, *shapes)
    pull = torch.randn(ours(*found).shape, dtype=torch.float64)
    (ours(*found) * pull).sum().backward()
    (plain(*expected) * pull).sum().backward()
    torch.testing.assert_close(ours(*found), plain(*expected))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("name", ["joined", "gated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_that_of_autograd_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    ours, plain, shapes = CASES[name]
    found, expected = leaves(dtype, *shapes), leaves(dtype, *shapes)
    one, other = ours(*found), plain(*expected)
    assert torch.equal(one, other)
    pull = torch.randn(one.shape).to(dtype)
    one.backward(pull)
    other.backward(pull)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(found, expected, strict=True))  # type: ignore[arg-type]


def test_swiglu_keeps_neither_the_gated_part_nor_the_product() -> None:
    def kept(call: Callable[..., Tensor]) -> int:
        sizes: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        inputs = leaves(torch.float32, (64, 256), (32, 128))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            result = call(*inputs)
        assert result.requires_grad
        return sum(sizes.values()) // 4

    joined, weight, part = 64 * 256, 32 * 128, 64 * 128
    assert kept(gated_down) == joined + weight
    assert kept(plain_down) == joined + weight + 2 * part
