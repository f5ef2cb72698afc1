"""Parts of a layer with hand-written gradients: they pass over memory less often, and keep less of it, than autograd.

Same formulas, same rounding forward; what costs little to compute again is not kept for the backward pass.
What it does not: attention. Who calls this: model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        full = x if x.dtype == torch.float64 else x.float()
        inverse = torch.linalg.vecdot(full, full).div_(x.shape[-1]).add_(epsilon).rsqrt_().unsqueeze_(-1)
        ctx.save_for_backward(x, weight, inverse)
        normed: Tensor = (full * inverse).to(x.dtype).mul_(weight)
        return normed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        unit = x.to(inverse.dtype) * inverse
        gradient = gradient.to(unit.dtype)
        d_weight = (gradient * unit).flatten(0, -2).sum(0)
        d_unit = gradient * weight
        # the part of d_unit along x changes only the length of x, which the norm takes away again
        along = torch.linalg.vecdot(d_unit, unit).div_(x.shape[-1]).unsqueeze_(-1)
        d_x = d_unit.addcmul_(unit, along, value=-1).mul_(inverse)
        return d_x.to(x.dtype), d_weight.to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last dimension, in float32 (Zhang and Sennrich 2019).

    x [..., size], weight [size] of the same type -> [..., size].
    """
    normed: Tensor = _RMSNorm.apply(x, weight, epsilon)
    return normed


class _JoinedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        return F.linear(x, torch.cat(weights), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        d_x = gradient.mm(torch.cat(weights)) if ctx.needs_input_grad[0] else None
        d_bias = gradient.sum(0) if ctx.needs_input_grad[1] else None
        return d_x, d_bias, *gradient.t().mm(x).split([len(weight) for weight in weights])


def joined_linear(x: Tensor, weights: Sequence[Tensor], bias: Tensor | None = None) -> Tensor:
    """x cat(weights)^T + bias as one product: x [tokens, in], weights [out_i, in], bias [outs] -> [tokens, outs], outs
    being the sum of all out_i. The joined weight lives only as long as its product."""
    projected: Tensor = _JoinedLinear.apply(x, bias, *weights)
    return projected


class _GatedDown(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, joined: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(joined, weight)
        gate, up = joined.chunk(2, -1)
        return F.linear(F.silu(gate).mul_(up), weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        joined, weight = ctx.saved_tensors
        gate, up = joined.chunk(2, -1)
        d_joined = torch.empty_like(joined)
        d_gate, d_up = d_joined.chunk(2, -1)
        d_product = gradient.mm(weight)
        gated = F.silu(gate)
        torch.mul(d_product, gated, out=d_up)
        torch.ops.aten.silu_backward.grad_input(d_product.mul_(up), gate, grad_input=d_gate)
        d_weight = gradient.t().mm(gated.mul_(up))
        return d_joined, d_weight, gradient.sum(0) if ctx.needs_input_grad[2] else None


def gated_down(joined: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """(silu(gate) * up) weight^T + bias, the second half of SwiGLU (Shazeer 2020).

    joined [tokens, 2 inner]: gate, then up; weight [out, inner]; bias [out] -> [tokens, out]. Only `joined` is kept:
    silu(gate) and the product are computed again in the backward pass.
    """
    projected: Tensor = _GatedDown.apply(joined, weight, bias)
    return projected
