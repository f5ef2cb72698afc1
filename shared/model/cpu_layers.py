"""What the decoder does on a CPU only: rows are rounded up, and projections of one input are joined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.model.fused_layers import full_precision, inverse_rms, norm_gradients
from shared.model.packing import PackedBatch

ROWS = 64
"""rows come in multiples of this: each number of rows makes kernels of its own, which stay in memory"""


def round_up(batch: PackedBatch, multiple: int) -> PackedBatch:
    """Pad the batch at the end, so that tokens and targets are multiples of `multiple`: with a segment of its own, and
    with targets at the first position, whose results are to be cut off."""
    tokens, targets = (-count % multiple for count in (batch.tokens, len(batch.targets)))
    if not tokens and not targets:
        return batch
    own = torch.arange(tokens, device=batch.positions.device)
    return PackedBatch(
        token_ids=torch.cat([batch.token_ids, torch.zeros_like(own)]),
        positions=torch.cat([batch.positions, own]),
        lengths=(*batch.lengths, tokens) if tokens else batch.lengths,
        prefixes=(*batch.prefixes, -1) if tokens else batch.prefixes,
        loss_positions=torch.cat([batch.loss_positions, batch.loss_positions.new_zeros(targets)]),
        targets=torch.cat([batch.targets, batch.targets.new_zeros(targets)]),
    )


def _join(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """[out_i, in] each -> [outs, in] in `dtype`."""
    if weights[0].dtype == dtype:
        return torch.cat(list(weights))
    rows = [len(weight) for weight in weights]
    joined = weights[0].new_empty(sum(rows), weights[0].shape[1], dtype=dtype)
    for part, weight in zip(joined.split(rows), weights, strict=True):
        part.copy_(weight)
    return joined


class _NormedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, epsilon: float, bias: Tensor | None, *weights: Tensor) -> Tensor:
        full = full_precision(x)
        inverse = inverse_rms(full, epsilon)
        ctx.save_for_backward(x, scale, inverse, *weights)
        return F.linear((full * inverse).to(x.dtype).mul_(scale), _join(weights, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, inverse, *weights = ctx.saved_tensors
        unit = full_precision(x) * inverse
        d_normed = gradient.mm(_join(weights, x.dtype))
        d_x, d_scale = norm_gradients(unit, inverse, scale, full_precision(d_normed))
        d_bias = gradient.sum(0) if ctx.needs_input_grad[3] else None
        normed = unit.mul_(scale) if unit.dtype == x.dtype else unit.to(x.dtype).mul_(scale)
        d_weights = gradient.t().mm(normed).to(weights[0].dtype).split([len(weight) for weight in weights])
        return d_x.to(x.dtype), d_scale.to(scale.dtype), None, d_bias, *d_weights


def normed_linear(
    x: Tensor, scale: Tensor, epsilon: float, weights: Sequence[Tensor], bias: Tensor | None = None
) -> Tensor:
    """rms_norm(x, scale, epsilon) cat(weights)^T + bias as one product.

    x [tokens, in], scale [in], weights [out_i, in], bias [outs] -> [tokens, outs], outs being the sum of all out_i.
    Only x is kept: its norm is computed again in the backward pass, which needs most of it anyway. The joined weight
    lives only as long as its product.
    """
    bias = None if bias is None else bias.to(x.dtype)
    projected: Tensor = _NormedLinear.apply(x, scale.to(x.dtype), epsilon, bias, *weights)
    return projected


def project(x: Tensor, scale: Tensor, epsilon: float, layers: Sequence[nn.Linear]) -> Tensor:
    """`normed_linear` with the weights and biases of several layers. It pays on the CPU, where small products are slow;
    on a GPU the joined weight would only cost memory."""
    bias = torch.cat([layer.bias for layer in layers]) if layers[0].bias is not None else None
    return normed_linear(x, scale, epsilon, [layer.weight for layer in layers], bias)
