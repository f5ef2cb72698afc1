"""Parts of a layer with hand-written gradients: they pass over memory less often, and keep less of it, than autograd.

Same formulas, same rounding forward; what costs little to compute again is not kept for the backward pass. Weights may
be of a wider type than the input: they are rounded to its type for each product, and that copy is not kept either.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


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


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        full = full_precision(x)
        inverse = inverse_rms(full, epsilon)
        ctx.save_for_backward(x, weight, inverse)
        normed: Tensor = (full * inverse).to(x.dtype).mul_(weight)
        return normed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        d_x, d_weight = norm_gradients(full_precision(x) * inverse, inverse, weight, full_precision(gradient))
        return d_x.to(x.dtype), d_weight.to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last dimension, in float32 (Zhang and Sennrich 2019).

    x [..., size], weight [size] -> [..., size].
    """
    normed: Tensor = _RMSNorm.apply(x, weight.to(x.dtype), epsilon)
    return normed


class _GatedDown(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, joined: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(joined, weight)
        gate, up = joined.chunk(2, -1)
        return F.linear(F.silu(gate).mul_(up), weight.to(joined.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        joined, weight = ctx.saved_tensors
        gate, up = joined.chunk(2, -1)
        d_joined = torch.empty_like(joined)
        d_gate, d_up = d_joined.chunk(2, -1)
        d_product = gradient.mm(weight.to(joined.dtype))
        gated = F.silu(gate)
        torch.mul(d_product, gated, out=d_up)
        torch.ops.aten.silu_backward.grad_input(d_product.mul_(up), gate, grad_input=d_gate)
        d_weight = gradient.t().mm(gated.mul_(up)).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return d_joined, d_weight, gradient.sum(0) if ctx.needs_input_grad[2] else None


def gated_down(joined: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """(silu(gate) * up) weight^T + bias, the second half of SwiGLU (Shazeer 2020).

    joined [tokens, 2 inner]: gate, then up; weight [out, inner]; bias [out] -> [tokens, out]. Only `joined` is kept:
    silu(gate) and the product are computed again in the backward pass.
    """
    projected: Tensor = _GatedDown.apply(joined, weight, None if bias is None else bias.to(joined.dtype))
    return projected
