"""The inputs of the formulas for one packed micro-batch, and sums over its completions.

completions  [7 8 9] [7 8]          index  0 0 0 1 1          last  2 2 2 4 4          counts  3 2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Completions:
    """Which of the [loss_tokens] belong to which of the [completions], and which completions to one group."""

    index: Tensor
    """[loss_tokens] int64, 0 0 0 1 1 ..."""
    first: Tensor
    """[completions] int64 index of the first token of each"""
    last: Tensor
    """[loss_tokens] int64 index of the last token of the token's completion"""
    group: Tensor
    """[completions] int64 number of the group, 0, 1, ..."""
    groups: int

    @property
    def count(self) -> int:
        """Completions in the micro-batch."""
        return self.first.shape[0]

    def sums(self, values: Tensor) -> Tensor:
        """values [loss_tokens] -> [completions] sums of each, added in float64; carries gradients."""
        total = torch.zeros(self.count, dtype=torch.float64, device=values.device)
        return total.index_add(0, self.index, values.double()).to(values.dtype)

    def means(self, values: Tensor, without: Tensor | None = None) -> Tensor:
        """values [loss_tokens] -> [completions] means of each, those `without` [loss_tokens] bool left out (0 where
        that is all of them); carries gradients."""
        if without is None:
            return self.sums(values) / self.sums(torch.ones_like(values.detach()))
        kept = (~without).to(values.dtype)
        return self.sums(values * kept) / self.sums(kept).clamp(min=1.0)

    def sums_to_the_end(self, values: Tensor) -> Tensor:
        """values [loss_tokens] -> sum_{s >= t} values_s within each completion, in the same type, without gradients.

        A difference of two sums over the micro-batch, hence in float64."""
        running = values.detach().double().cumsum(0)
        return (running[self.last] - running + values.detach()).to(values.dtype)


def completions_of(
    counts: Sequence[int], groups: Sequence[int] | None = None, device: torch.device | str = "cpu"
) -> Completions:
    """Build `Completions`. counts [completions]: tokens of each, as packed; groups [completions]: any numbers, the same
    for one group (without them each is a group of its own)."""
    lengths = torch.tensor(counts, dtype=torch.int64)
    ends = lengths.cumsum(0)
    names = list(range(len(counts)) if groups is None else groups)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return Completions(
        index=torch.arange(len(counts)).repeat_interleave(lengths).to(device, non_blocking=True),
        first=(ends - lengths).to(device, non_blocking=True),
        last=(ends - 1).repeat_interleave(lengths).to(device, non_blocking=True),
        group=torch.tensor([numbers[name] for name in names], dtype=torch.int64).to(device, non_blocking=True),
        groups=len(numbers),
    )


@dataclass(frozen=True)
class LossInputs:
    """Tensors of one packed micro-batch; each is [loss_tokens] float32 unless stated otherwise."""

    logprobs: Tensor
    """under the policy that is trained, at the sampling temperature; carries gradients"""
    behaviour_logprobs: Tensor
    """under the policy that sampled, at the sampling temperature; ignored in imitation"""
    advantages: Tensor
    """of the token's completion; the reward itself for agro, spo and dro"""
    weights: Tensor
    """of the token in the step's loss (advantage.token_weights)"""
    completions: Completions
    proximal: Tensor | None = None
    """log-probs under the policy at the start of the batch; None where that is the policy now"""
    reference: Tensor | None = None
    """log-probs under the reference, without gradients"""
    teacher: Tensor | None = None
    """log-probs under the teacher"""
    values: Tensor | None = None
    """[completions] of the value head at the prompt; carries gradients"""
    truth: Tensor | None = None
    """[loss_tokens] bool: a token of the true answer, put there instead of being sampled (jepo); None for none"""
    bounded: Tensor | None = None
    """[completions] bool: of a group that is trained by the Jensen bound; None for none"""

    def __post_init__(self) -> None:
        shape = self.logprobs.shape
        for name in ("logprobs", "behaviour_logprobs", "advantages", "weights", "proximal", "reference", "teacher"):
            tensor = getattr(self, name)
            if tensor is None and name in ("proximal", "reference", "teacher"):
                continue
            if tensor.shape != shape or tensor.dtype != torch.float32:
                raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected float32 {tuple(shape)}")
            if name != "logprobs" and tensor.requires_grad:
                raise ValueError(f"{name} must be without gradients")
        if self.completions.index.shape != shape:
            raise ValueError(f"completions have {tuple(self.completions.index.shape)} tokens, expected {tuple(shape)}")


@dataclass(frozen=True)
class Part:
    """The policy's part of the loss of one micro-batch, and which tokens a bound touched."""

    loss: Tensor
    """0-dimensional; carries gradients"""
    low: Tensor
    """[loss_tokens] bool: a lower bound changes the token's gradient"""
    high: Tensor
    """[loss_tokens] bool: an upper bound changes it"""
    masked: Tensor
    """[loss_tokens] bool: the token is left out"""


def unbounded(loss: Tensor, inputs: LossInputs) -> Part:
    """The Part of a loss without bounds."""
    none = torch.zeros_like(inputs.weights, dtype=torch.bool)
    return Part(loss, none, none, none)
