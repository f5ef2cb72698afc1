"""Elementwise parts of a layer with hand-written gradients: fewer passes over memory than autograd makes of them.

Same formulas, same rounding forward. What it does not: matrix products. Who calls this: model.
"""

from __future__ import annotations

from typing import Any

import torch
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
