"""Hand-written gradients: those of autograd over the plain formulas, and less kept for the backward pass."""

import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

from shared.model.cpu import fused_layers
from shared.model.cpu.fused_layers import Adapter, gated_down, normed_linear, rms_norm
from shared.model.rope import rotate

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
    "normed": (
        lambda x, w, a, b: normed_linear(x, w, 1e-5, [a, b]),
        lambda x, w, a, b: F.linear(plain_norm(x, w), torch.cat([a, b])),
        [(TOKENS, WIDTH), (WIDTH,), (4, WIDTH), (3, WIDTH)],
    ),
    "normed with bias": (
        lambda x, w, a, b, bias: normed_linear(x, w, 1e-5, [a, b], bias),
        lambda x, w, a, b, bias: F.linear(plain_norm(x, w), torch.cat([a, b]), bias),
        [(TOKENS, WIDTH), (WIDTH,), (4, WIDTH), (3, WIDTH), (7,)],
    ),
    "gated": (gated_down, plain_down, [(TOKENS, 2 * INNER), (WIDTH, INNER)]),
    "gated with bias": (gated_down, plain_down, [(TOKENS, 2 * INNER), (WIDTH, INNER), (WIDTH,)]),
    "normed with adapters": (
        lambda x, w, m, n, a, b, c, d: normed_linear(
            x, w, 1e-5, [m, n], None, [Adapter(slice(0, 4), 2.0, a, b), Adapter(slice(4, 7), 0.5, c, d)]
        ),
        lambda x, w, m, n, a, b, c, d: F.linear(plain_norm(x, w), torch.cat([m + 2 * b @ a, n + 0.5 * d @ c])),
        [(TOKENS, WIDTH), (WIDTH,), (4, WIDTH), (3, WIDTH), (2, WIDTH), (4, 2), (1, WIDTH), (3, 1)],
    ),
    "normed with an adapter of the second": (
        lambda x, w, m, n, a, b: normed_linear(x, w, 1e-5, [m, n], None, [Adapter(slice(4, 7), 2.0, a, b)]),
        lambda x, w, m, n, a, b: F.linear(plain_norm(x, w), torch.cat([m, n + 2 * b @ a])),
        [(TOKENS, WIDTH), (WIDTH,), (4, WIDTH), (3, WIDTH), (2, WIDTH), (3, 2)],
    ),
    "gated with an adapter": (
        lambda joined, weight, bias, a, b: gated_down(joined, weight, bias, [Adapter(slice(0, WIDTH), 2.0, a, b)]),
        lambda joined, weight, bias, a, b: plain_down(joined, weight + 2 * b @ a, bias),
        [(TOKENS, 2 * INNER), (WIDTH, INNER), (WIDTH,), (2, INNER), (WIDTH, 2)],
    ),
    "norm": (lambda x, w: rms_norm(x, w, 1e-5), plain_norm, [(TOKENS, WIDTH), (WIDTH,)]),
}


def pull(calls: list[Callable[..., Tensor]], *inputs: list[Tensor]) -> list[Tensor]:
    """The results of two calls; the same gradient has come back through both."""
    results = [call(*given) for call, given in zip(calls, inputs, strict=True)]
    gradient = torch.randn(results[0].shape).to(results[0].dtype)
    for result in results:
        result.backward(gradient)
    return results


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_the_plain_formula(name):
    ours, plain, shapes = CASES[name]
    inputs, others = leaves(torch.float64, *shapes), leaves(torch.float64, *shapes)
    torch.testing.assert_close(*pull([ours, plain], inputs, others))
    torch.testing.assert_close([one.grad for one in inputs], [other.grad for other in others])


IN_TWO: dict[str, Callable[..., Tensor]] = {
    "normed": lambda x, w, a, b: F.linear(rms_norm(x, w, 1e-5), torch.cat([a, b])), "gated": plain_down,
}  # fmt: skip
"""the parts one after the other, with the gradients of each"""


@pytest.mark.parametrize("name", IN_TWO)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_that_of_the_parts_bit_for_bit(name, dtype):
    ours, _, shapes = CASES[name]
    inputs, others = leaves(dtype, *shapes), leaves(dtype, *shapes)
    assert torch.equal(*pull([ours, IN_TWO[name]], inputs, others))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(inputs, others, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_wider_weights_are_rounded_to_the_type_of_the_input(name):
    """As if they had been rounded before; their gradients come in the weights' own type."""
    ours, _, shapes = CASES[name]
    x, *rounded = leaves(torch.bfloat16, *shapes)
    wide = [weight.detach().float().mul(1 + 2e-4).requires_grad_() for weight in rounded]  # rounds to the same again
    same = x.detach().clone().requires_grad_()
    assert torch.equal(*pull([ours, ours], [x, *rounded], [same, *wide])) and torch.equal(x.grad, same.grad)
    for a, b in zip(rounded, wide, strict=True):
        assert torch.equal(b.bfloat16(), a) and not torch.equal(b, a.float())
        assert b.grad.dtype == torch.float32 and torch.equal(a.grad.float(), b.grad)


def kept(call: Callable[..., Tensor], *inputs: Tensor) -> int:
    """Numbers that are kept for the backward pass, the inputs among them."""
    sizes: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = call(*inputs)
    assert result.requires_grad
    return sum(sizes.values()) // 4


def test_neither_normed_inputs_nor_gated_parts_nor_rounded_weights_are_kept():
    normed = leaves(torch.float32, (64, 256), (256,), (32, 256), (16, 256))
    gated = leaves(torch.float32, (64, 256), (32, 128))
    x, inverse, rows_of = 64 * 256, 64, 64 * 128
    assert kept(CASES["normed"][0], *normed) == x + 256 + 48 * 256 + inverse
    assert kept(IN_TWO["normed"], *normed) >= 2 * x + 256 + 48 * 256 + inverse
    assert kept(gated_down, *gated) == x + 32 * 128
    assert kept(plain_down, *gated) == x + 32 * 128 + 2 * rows_of
    halves = (each[0].detach().bfloat16().requires_grad_() for each in (normed, gated))
    assert kept(CASES["normed"][0], next(halves), *normed[1:]) == x // 2 + 256 // 2 + 48 * 256 + inverse
    assert kept(gated_down, next(halves), *gated[1:]) == x // 2 + 32 * 128


def test_adapters_keep_what_they_make_narrow_and_frozen_weights_get_no_gradient():
    shapes = (64, 256), (256,), (32, 256), (16, 256), (2, 256), (32, 2), (2, 256), (16, 2)
    x, *frozen = leaves(torch.float32, *shapes)
    scale, first, second = (each.requires_grad_(False) for each in frozen[:3])
    low = [Adapter(slice(0, 32), 2.0, *frozen[3:5]), Adapter(slice(32, 48), 2.0, *frozen[5:])]

    def call(x: Tensor) -> Tensor:
        return normed_linear(x, scale, 1e-5, [first, second], None, low)

    assert kept(call, x) == sum(each.numel() for each in (x, *frozen)) + 64 + 64 * 4
    call(x).sum().backward()
    assert all(each.grad is not None for each in (x, *frozen[3:]))
    joined, weight, a, b = leaves(torch.float32, (64, 256), (32, 128), (2, 128), (32, 2))
    down = kept(lambda *_: gated_down(joined, weight.detach(), None, [Adapter(slice(0, 32), 2.0, a, b)]))
    assert down == sum(each.numel() for each in (joined, weight, a, b)) + 64 * 2


def all_of(given: list[Tensor]) -> list[Tensor]:
    """Results and gradients of the parts of a layer."""
    x, weight, matrix, joined, cos, sin = given
    turned = rotate(rms_norm(x, weight, 1e-5), cos, sin, 2)
    normed = normed_linear(x.flatten(1), weight.repeat(3), 1e-5, [matrix])
    results = [turned, normed, gated_down(joined, torch.eye(5).to(joined))]
    pulled = sum((one.float().sin().sum() for one in results), torch.zeros((), device=x.device))
    return [*results, *torch.autograd.grad(pulled, given[:4])]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("device", [
    pytest.param("cpu", marks=pytest.mark.soak), pytest.param("cuda", marks=pytest.mark.gpu),
])  # fmt: skip
def test_compiled_they_give_what_they_give_as_they_stand(device, monkeypatch, tmp_path):
    """In bfloat16, as far from float64 as these; compiled once for all numbers of rows, and kept at home."""
    if device == "cpu" and not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        pytest.skip("Python's headers, with which torch compiles for CPUs, are not installed")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)  # engines on a CPU set it
    for rows in (5, 9, 12):
        shapes = (rows, 3, 8), (8,), (6, 24), (rows, 10), (rows, 1, 4), (rows, 1, 4)
        given = [one.detach().to(device).requires_grad_() for one in leaves(torch.bfloat16, *shapes)]
        monkeypatch.setattr(fused_layers, "FUSED_ON", {device})
        compiled = all_of(given)
        if rows == 5:
            graphs = counters["stats"]["unique_graphs"]
        monkeypatch.setattr(fused_layers, "FUSED_ON", set())
        eager, exact = all_of(given), all_of([one.detach().double().requires_grad_() for one in given])
        for one, other, truth in zip(compiled, eager, exact, strict=True):
            far, usual = ((each.double() - truth).norm() / truth.norm() for each in (one, other))
            assert far <= 1.5 * usual + 2e-3 < 0.05
    assert counters["stats"]["unique_graphs"] == graphs > 0
    assert any((tmp_path / "maestrale" / "kernels").rglob("*.*"))
