"""Rotary position embedding: frequencies with their scalings, cos/sin tables, and the rotation itself.

Sources: RoFormer (Su et al. 2021); linear scaling; Llama 3.1's smoothed scaling; YaRN (Peng et al. 2023, eq. 23 and the
attention factor 0.1 ln(s) + 1). Half-split layout as in Hugging Face checkpoints: channel i pairs with i + head_dim/2.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from shared.errors import ModelError
from shared.model.config import ROPE_TYPES
from shared.model.cpu.fused_layers import fuse


def inverse_frequencies(head_dim: int, rope: dict[str, Any], max_positions: int) -> tuple[Tensor, float]:
    """([head_dim / 2] float32 radians per position, factor on cos and sin) for a config's rope parameters.

    `rope` holds rope_theta, rope_type and the numbers of that type. Raises ModelError for an unknown type.
    """
    kind = rope.get("rope_type", "default")
    base = float(rope["rope_theta"])
    plain = 1.0 / base ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)
    if kind == "default":
        return plain, 1.0
    if kind == "linear":
        return plain / float(rope["factor"]), 1.0
    original = int(rope.get("original_max_position_embeddings") or max_positions)
    if kind == "llama3":
        return _llama3(plain, rope, original), 1.0
    if kind == "yarn":
        return _yarn(plain, rope, original, head_dim, max_positions)
    raise ModelError(f"config.json: rope_type '{kind}' is not supported (supported: {', '.join(ROPE_TYPES)})")


def _llama3(plain: Tensor, rope: dict[str, Any], original: int) -> Tensor:
    """Long waves are slowed by `factor`, short ones kept, those between are interpolated."""
    factor, low, high = (float(rope[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = original * plain / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * plain / factor + smooth * plain


def _yarn(
    plain: Tensor, rope: dict[str, Any], original: int, head_dim: int, max_positions: int
) -> tuple[Tensor, float]:
    factor = float(rope.get("factor") or max_positions / original)
    base = float(rope["rope_theta"])

    def channel_with(turns: float) -> float:
        """Channel that makes so many turns within the original length."""
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = channel_with(float(rope.get("beta_fast") or 32)), channel_with(float(rope.get("beta_slow") or 1))
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - first) / (max(last - first, 0.001))
    slowed = ramp.clamp(0, 1)
    attention_factor = rope.get("attention_factor")
    if attention_factor is None:
        scale, scale_all = rope.get("mscale"), rope.get("mscale_all_dim")
        whole = bool(scale and scale_all)
        attention_factor = _yarn_scale(factor, float(scale) if whole else 1.0)  # type: ignore[arg-type]
        attention_factor /= _yarn_scale(factor, float(scale_all)) if whole else 1.0  # type: ignore[arg-type]
    return plain / factor * slowed + plain * (1 - slowed), float(attention_factor)


def _yarn_scale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def rotation_table(positions: Tensor, frequencies: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """cos and sin, [tokens, 1, head_dim / 2] float32, for `positions` [tokens]."""
    angles = positions[:, None, None].float() * frequencies
    return angles.cos() * factor, angles.sin() * factor


class _Rotate(torch.autograd.Function):
    """A rotation's gradient is the opposite rotation: nothing but the tables is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.heads = heads
        return _turn(x, cos, sin, heads)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(gradient, cos, -sin, ctx.heads), None, None, None


@fuse
def _turn(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    turned = x.contiguous().clone()
    first, second = x[:, :heads].chunk(2, -1)
    out_first, out_second = turned[:, :heads].chunk(2, -1)
    out_first.mul_(cos).addcmul_(second, sin, value=-1)
    out_second.mul_(cos).addcmul_(first, sin)
    return turned


def rotate(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    """x [tokens, all heads, head_dim] with its first `heads` (queries and keys, not values) turned by the angles of
    their positions; cos, sin [tokens, 1, head_dim / 2] in x's type."""
    turned: Tensor = _Rotate.apply(x, cos, sin, heads)
    return turned
