"""Parts of a layer with hand-written gradients: they pass over memory less often, and keep less of it, than autograd.

Same formulas, same rounding forward; what costs little to compute again is not kept for the backward pass. Wider
weights are rounded to the input's type for each product, and that copy is not kept either. The product of an adapter is
added to that of its layer before the sum is rounded. On a GPU, what comes between two products is compiled (`fuse`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.launch import launch_folder
from shared.model.lora import LoraLinear

FUSED_ON = {"cuda"}
"""types of devices on which `fuse` compiles"""
VARIANTS = 64
"""how often a function may be compiled: for each width and type, and for parts of a tensor"""
TF32_ADVICE = "TensorFloat32 tensor cores"
"""begins a warning of torch's compiler that recommends to round products of float32, which is not wanted here"""

Function = TypeVar("Function", bound=Callable[..., Any])


def fuse(function: Function) -> Function:
    """Compile a function of tensors at its first call on a GPU, for any number of rows; elsewhere it runs as it is.

    The first argument's dimension 0 counts the rows, as it does of every tensor with more than one dimension. Values
    are rounded between operations as the function does it, not only at the end.
    """

    @functools.cache
    def compiled() -> Callable[..., Any]:
        from torch._dynamo import config  # a second and many megabytes: not before it is needed
        from torch._inductor import config as inductor

        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(kernels_folder()))
        config.recompile_limit = max(config.recompile_limit, VARIANTS)
        warnings.filterwarnings("ignore", TF32_ADVICE)
        inductor.compile_threads = 1  # such small kernels need no pool of processes
        return torch.compile(function, options={"emulate_precision_casts": True})

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        if arguments[0].device.type not in FUSED_ON or len(arguments[0]) < 2:  # 0 and 1 would be compiled apart
            return function(*arguments)
        for argument in arguments:
            if isinstance(argument, Tensor) and argument.dim() > 1:
                torch._dynamo.maybe_mark_dynamic(argument, 0)
        return compiled()(*arguments)

    return call  # type: ignore[return-value]


def kernels_folder() -> Path:
    """Return where compiled kernels are kept. torch's own place is in /tmp, where another user may be first."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "maestrale" / "kernels"
    with contextlib.suppress(OSError):
        folder.mkdir(0o700, parents=True, exist_ok=True)
        if not launch_folder.made_by_others(folder):
            return folder
    return Path(tempfile.mkdtemp(prefix="maestrale-kernels-"))


def inverse_rms(x: Tensor, epsilon: float) -> Tensor:
    """x [..., size] float32 or float64 -> [..., 1] 1 / sqrt(mean(x^2) + epsilon)."""
    squares: Tensor = torch.linalg.vecdot(x, x)
    return squares.div_(x.shape[-1]).add_(epsilon).rsqrt_().unsqueeze_(-1)


def norm_gradients(unit: Tensor, inverse: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """(d x, d weight) of the norm of x = unit / inverse, given that of its result; both in float32 or float64."""
    d_weight = (gradient * unit).flatten(0, -2).sum(0)
    d_unit = gradient * weight
    # the part of d_unit along x changes only the length of x, which the norm takes away again
    along = torch.linalg.vecdot(d_unit, unit).div_(unit.shape[-1]).unsqueeze_(-1)
    return d_unit.addcmul_(unit, along, value=-1).mul_(inverse), d_weight


def full_precision(x: Tensor) -> Tensor:
    """x in float32, or as it is in float64."""
    return x if x.dtype == torch.float64 else x.float()


@fuse
def _norm(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """(the norm of x in its type, inverse_rms of x)."""
    full = full_precision(x)
    inverse = inverse_rms(full, epsilon)
    return (full * inverse).to(x.dtype).mul_(weight), inverse


@fuse
def _norm_backward(x: Tensor, weight: Tensor, inverse: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """(d x, d weight) in their types."""
    d_x, d_weight = norm_gradients(full_precision(x) * inverse, inverse, weight, full_precision(gradient))
    return d_x.to(x.dtype), d_weight.to(weight.dtype)


@fuse
def _norm_backward_again(x: Tensor, weight: Tensor, inverse: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`_norm_backward`, and the norm itself once more."""
    unit = full_precision(x) * inverse
    d_x, d_weight = norm_gradients(unit, inverse, weight, full_precision(gradient))
    normed = unit.mul_(weight) if unit.dtype == x.dtype else unit.to(x.dtype).mul_(weight)
    return d_x.to(x.dtype), d_weight.to(weight.dtype), normed


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        normed, inverse = _norm(x, weight, epsilon)
        ctx.save_for_backward(x, weight, inverse)
        return normed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        return *_norm_backward(x, weight, inverse, gradient), None


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last dimension, in float32 (Zhang and Sennrich 2019).

    x [..., size], weight [size] -> [..., size].
    """
    normed: Tensor = _RMSNorm.apply(x, weight.to(x.dtype), epsilon)
    return normed


def _join(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """[out_i, in] each -> [outs, in] in `dtype`."""
    if weights[0].dtype == dtype:
        return torch.cat(list(weights))
    rows = [len(weight) for weight in weights]
    joined = weights[0].new_empty(sum(rows), weights[0].shape[1], dtype=dtype)
    for block, weight in zip(joined.split(rows), weights, strict=True):
        block.copy_(weight)
    return joined


class Adapter(NamedTuple):
    """The adapter of some columns of a product: scale (x A^T) B^T is added to them (shared/model/lora.py)."""

    columns: slice
    scale: float
    a: Tensor
    """[rank, in]"""
    b: Tensor
    """[columns, rank]"""

    def scaled(self, dtype: torch.dtype) -> Tensor:
        """scale B in `dtype`: scaled before it is rounded, as an engine holds it."""
        return (self.b * self.scale).to(dtype)


def adapters_of(layers: Sequence[nn.Linear]) -> list[Adapter]:
    """The adapters of layers whose results are side by side."""
    adapters, end = list[Adapter](), 0
    for layer in layers:
        columns = slice(end, end := end + layer.out_features)
        if isinstance(layer, LoraLinear):
            adapters.append(Adapter(columns, layer.scale, layer.lora_A.weight, layer.lora_B.weight))
    return adapters


def _from_arguments(
    matrices: Sequence[Tensor], places: Sequence[tuple[slice, float]]
) -> tuple[list[Tensor], list[Adapter]]:
    """(weights, adapters) of the matrices of a product: the weights, then A and B of each adapter. places: columns and
    scale of each."""
    count = len(matrices) - 2 * len(places)
    pairs = zip(places, matrices[count::2], matrices[count + 1 :: 2], strict=True)
    return list(matrices[:count]), [Adapter(*place, a, b) for place, a, b in pairs]


def _as_arguments(adapters: Sequence[Adapter]) -> tuple[tuple[tuple[slice, float], ...], list[Tensor]]:
    """(places, matrices) as `_from_arguments` reads them: autograd follows only tensors that are arguments."""
    matrices = [one for each in adapters for one in (each.a, each.b)]
    return tuple((each.columns, each.scale) for each in adapters), matrices


def _add_adapters(out: Tensor, x: Tensor, adapters: Sequence[Adapter]) -> Tensor | None:
    """Add the adapters' products to out [tokens, outs] in place; returns x A^T of all, [tokens, sum of ranks]."""
    if not adapters:
        return None
    narrow = x.mm(_join([each.a for each in adapters], x.dtype).t())
    for each, reduced in zip(adapters, narrow.split([len(each.a) for each in adapters], 1), strict=True):
        out[:, each.columns].addmm_(reduced, each.scaled(x.dtype).t())
    return narrow


def _adapters_backward(
    gradient: Tensor, narrow: Tensor | None, adapters: Sequence[Adapter], d_x: Tensor
) -> tuple[Tensor | None, list[Tensor]]:
    """(d narrow, d B of each), given the gradient of out and what `_add_adapters` returned; d_x [tokens, in] gains the
    adapters' part in place."""
    if narrow is None:
        return None, []
    d_narrow, d_b, ranks = torch.empty_like(narrow), list[Tensor](), [len(each.a) for each in adapters]
    for each, reduced, d_part in zip(adapters, narrow.split(ranks, 1), d_narrow.split(ranks, 1), strict=True):
        own = gradient[:, each.columns]
        d_part.copy_(own.mm(each.scaled(own.dtype)))
        d_b.append(own.t().mm(reduced).to(each.b.dtype).mul_(each.scale))
    d_x.addmm_(d_narrow, _join([each.a for each in adapters], d_x.dtype))
    return d_narrow, d_b


def _adapter_gradients(
    d_narrow: Tensor | None, x: Tensor, adapters: Sequence[Adapter], d_b: Sequence[Tensor]
) -> list[Tensor]:
    """d A and d B of each adapter, in the order of `_as_arguments`."""
    if d_narrow is None:
        return []
    d_a = d_narrow.t().mm(x).to(adapters[0].a.dtype).split([len(each.a) for each in adapters])
    return [one for pair in zip(d_a, d_b, strict=True) for one in pair]


class _NormedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, epsilon: float, bias: Tensor | None,
        places: Sequence[tuple[slice, float]], *matrices: Tensor,
    ) -> Tensor:  # fmt: skip
        normed, inverse = _norm(x, scale, epsilon)
        weights, adapters = _from_arguments(matrices, places)
        out = F.linear(normed, _join(weights, x.dtype), bias)
        narrow = _add_adapters(out, normed, adapters)
        ctx.save_for_backward(x, scale, inverse, narrow, *matrices)
        ctx.places = places
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, inverse, narrow, *matrices = ctx.saved_tensors
        weights, adapters = _from_arguments(matrices, ctx.places)
        d_normed = gradient.mm(_join(weights, x.dtype))
        d_narrow, d_b = _adapters_backward(gradient, narrow, adapters, d_normed)
        d_bias = gradient.sum(0) if ctx.needs_input_grad[3] else None
        d_weights: Sequence[Tensor | None] = [None] * len(weights)
        trained = any(ctx.needs_input_grad[5 : 5 + len(weights)])
        if not trained and not adapters:
            return *_norm_backward(x, scale, inverse, d_normed), None, d_bias, None, *d_weights
        d_x, d_scale, normed = _norm_backward_again(x, scale, inverse, d_normed)
        if trained:
            d_weights = gradient.t().mm(normed).to(weights[0].dtype).split([len(weight) for weight in weights])
        return d_x, d_scale, None, d_bias, None, *d_weights, *_adapter_gradients(d_narrow, normed, adapters, d_b)


def normed_linear(
    x: Tensor,
    scale: Tensor,
    epsilon: float,
    weights: Sequence[Tensor],
    bias: Tensor | None = None,
    adapters: Sequence[Adapter] = (),
) -> Tensor:
    """rms_norm(x, scale, epsilon) cat(weights)^T + bias as one product, and the adapters' products with it.

    x [tokens, in], scale [in], weights [out_i, in], bias [outs] -> [tokens, outs], outs being the sum of all out_i.
    Only x is kept, and x A^T of adapters: its norm is computed again in the backward pass, which needs most of
    it anyway. The joined weight lives only as long as its product.
    """
    bias = None if bias is None else bias.to(x.dtype)
    places, matrices = _as_arguments(adapters)
    projected: Tensor = _NormedLinear.apply(x, scale.to(x.dtype), epsilon, bias, places, *weights, *matrices)
    return projected


def project(x: Tensor, scale: Tensor, epsilon: float, layers: Sequence[nn.Linear]) -> Tensor:
    """`normed_linear` of several layers: to join their weights costs less than to join results."""
    bias = torch.cat([layer.bias for layer in layers]) if layers[0].bias is not None else None
    return normed_linear(x, scale, epsilon, [layer.weight for layer in layers], bias, adapters_of(layers))


@fuse
def _gated(joined: Tensor) -> Tensor:
    """silu(gate) * up: joined [tokens, 2 inner], gate, then up -> [tokens, inner]."""
    gate, up = joined.chunk(2, -1)
    return F.silu(gate).mul_(up)


@fuse
def _gated_backward(joined: Tensor, d_product: Tensor) -> tuple[Tensor, Tensor]:
    """(d joined, _gated(joined)), given the gradient of the latter, whose memory may be used."""
    gate, up = joined.chunk(2, -1)
    if torch.compiler.is_compiling():
        acted = F.silu(gate)
        d_gate = torch.ops.aten.silu_backward(d_product * up, gate)
        return torch.cat([d_gate, d_product * acted], -1), acted * up
    d_joined = torch.empty_like(joined)
    d_gate, d_up = d_joined.chunk(2, -1)
    acted = F.silu(gate)
    torch.mul(d_product, acted, out=d_up)
    torch.ops.aten.silu_backward.grad_input(d_product.mul_(up), gate, grad_input=d_gate)
    return d_joined, acted.mul_(up)


class _GatedDown(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, joined: Tensor, bias: Tensor | None, places: Sequence[tuple[slice, float]], *matrices: Tensor
    ) -> Tensor:
        (weight,), adapters = _from_arguments(matrices, places)
        product = _gated(joined)
        out = F.linear(product, weight.to(joined.dtype), bias)
        narrow = _add_adapters(out, product, adapters)
        ctx.save_for_backward(joined, narrow, *matrices)
        ctx.places = places
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        joined, narrow, *matrices = ctx.saved_tensors
        (weight,), adapters = _from_arguments(matrices, ctx.places)
        d_product = gradient.mm(weight.to(joined.dtype))
        d_narrow, d_b = _adapters_backward(gradient, narrow, adapters, d_product)
        d_joined, product = _gated_backward(joined, d_product)
        d_weight = gradient.t().mm(product).to(weight.dtype) if ctx.needs_input_grad[3] else None
        d_bias = gradient.sum(0) if ctx.needs_input_grad[1] else None
        return d_joined, d_bias, None, d_weight, *_adapter_gradients(d_narrow, product, adapters, d_b)


def gated_down(joined: Tensor, weight: Tensor, bias: Tensor | None = None, adapters: Sequence[Adapter] = ()) -> Tensor:
    """(silu(gate) * up) weight^T + bias, the second half of SwiGLU (Shazeer 2020), and the adapters' product with it.

    joined [tokens, 2 inner]: gate, then up; weight [out, inner]; bias [out] -> [tokens, out]. Only `joined` is kept,
    and the product times A^T of adapters: silu(gate) and the product are computed again in the backward pass.
    """
    bias = None if bias is None else bias.to(joined.dtype)
    places, matrices = _as_arguments(adapters)
    projected: Tensor = _GatedDown.apply(joined, bias, places, weight, *matrices)
    return projected
