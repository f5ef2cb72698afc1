"""The inputs of the formulas for one packed micro-batch, and sums over its completions.

completions  [7 8 9] [7 8]          index  0 0 0 1 1          last  2 2 2 4 4          counts  3 2

A completion of several turns is one here: sums go over all that was sampled in the episode, since what the environment
says has the same probability under every policy. Means of ratios are those of a turn: its length is the policy's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shared.lazy_module import LazyModule
from shared.types import IMITATED, TrainSequence

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch")


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
    turn: Tensor
    """[loss_tokens] int64 number of the token's turn, 0 0 0 1 1 ...; a completion without an environment is one"""
    turns: int

    @property
    def count(self) -> int:
        """Completions in the micro-batch."""
        return self.first.shape[0]

    def sums(self, values: Tensor) -> Tensor:
        """values [loss_tokens] -> [completions] sums of each, added in float64; carries gradients."""
        total = torch.zeros(self.count, dtype=torch.float64, device=values.device)
        return total.index_add(0, self.index, values.double()).to(values.dtype)

    def mean_of_others(self, values: Tensor) -> Tensor:
        """values [completions] -> [completions] mean over the others of its group, 0 of none."""
        sums, counts = (
            torch.zeros(self.groups, device=values.device).index_add(0, self.group, one)[self.group]
            for one in (values, torch.ones_like(values))
        )
        return (sums - values) / (counts - 1).clamp(min=1)

    def turn_means(self, values: Tensor, without: Tensor | None = None) -> Tensor:
        """values [loss_tokens] -> [turns] means of each, those `without` [loss_tokens] bool left out (0 where that is
        all of them); added in float64, carries gradients."""
        kept = torch.ones_like(values.detach()) if without is None else (~without).to(values.dtype)
        zeros = torch.zeros(self.turns, dtype=torch.float64, device=values.device)
        total = zeros.index_add(0, self.turn, (values if without is None else values * kept).double())
        return total.to(values.dtype) / zeros.index_add(0, self.turn, kept.double()).to(values.dtype).clamp(min=1.0)

    def returns_to_go(self, values: Tensor) -> Tensor:
        """values [loss_tokens] -> sum_{s >= t} values_s within each completion, in the same type, without gradients.

        A difference of two sums over the micro-batch, hence in float64."""
        running = values.detach().double().cumsum(0)
        return (running[self.last] - running + values.detach()).to(values.dtype)


def completions_of(
    counts: Sequence[int],
    groups: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
    turns: Sequence[int] | None = None,
) -> Completions:
    """Build `Completions`. counts [completions]: tokens of each, as packed; groups [completions]: any numbers, the same
    for one group (without them each is a group of its own); turns [turns]: tokens of each, as packed (without them
    each completion is one)."""
    lengths = torch.tensor(counts, dtype=torch.int64)
    ends = lengths.cumsum(0)
    names = list(range(len(counts)) if groups is None else groups)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    of_turns = lengths if turns is None else torch.tensor(turns, dtype=torch.int64)
    return Completions(
        index=torch.arange(len(counts)).repeat_interleave(lengths).to(device, non_blocking=True),
        first=(ends - lengths).to(device, non_blocking=True),
        last=(ends - 1).repeat_interleave(lengths).to(device, non_blocking=True),
        group=torch.tensor([numbers[name] for name in names], dtype=torch.int64).to(device, non_blocking=True),
        groups=len(numbers),
        turn=torch.arange(len(of_turns)).repeat_interleave(of_turns).to(device, non_blocking=True),
        turns=len(of_turns),
    )


@dataclass(frozen=True)
class LossInputs:
    """Tensors of one packed micro-batch; each is [loss_tokens] float32 unless stated otherwise."""

    logprobs: Tensor
    """under the policy that is trained, at the sampling temperature; carries gradients"""
    behaviour: Tensor
    """log-probs under the policy that sampled, at the sampling temperature; 0 for what was not sampled"""
    advantages: Tensor
    """advantage of the token's segment; the reward itself for agro, spo and dro"""
    weights: Tensor
    """weight of the token in the step's loss (advantage.token_weights)"""
    completions: Completions
    old: Tensor | None = None
    """log-probs under the policy at the start of the batch; None where that is the policy now"""
    reference: Tensor | None = None
    """log-probs under the reference, without gradients"""
    teacher: Tensor | None = None
    """log-probs under the teacher"""
    values: Tensor | None = None
    """[completions] of the value head at the prompt; carries gradients"""
    imitated: Tensor | None = None
    """[loss_tokens] bool: the token was put there to be imitated, nothing sampled it; None where all were sampled"""
    offline: Tensor | None = None
    """[loss_tokens] bool: this run did not sample the token (its behaviour may be unknown, then 0); None for no such"""

    def __post_init__(self) -> None:
        shape = self.logprobs.shape
        for name in ("logprobs", "behaviour", "advantages", "weights", "old", "reference", "teacher"):
            tensor = getattr(self, name)
            if tensor is None and name in ("old", "reference", "teacher"):
                continue
            if tensor.shape != shape or tensor.dtype != torch.float32:
                raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected float32 {tuple(shape)}")
            if name != "logprobs" and tensor.requires_grad:
                raise ValueError(f"{name} must be without gradients")
        if self.completions.index.shape != shape:
            raise ValueError(f"completions have {tuple(self.completions.index.shape)} tokens, expected {tuple(shape)}")

    @property
    def sampled(self) -> LossInputs:
        """The inputs in which tokens that nothing sampled have no weight, no divergence and a ratio of 1."""
        if self.imitated is None:
            return self
        given = self.imitated
        return replace(
            self,
            logprobs=self.logprobs.masked_fill(given, 0.0),
            behaviour=self.behaviour.masked_fill(given, 0.0),
            reference=None if self.reference is None else self.reference.masked_fill(given, 0.0),
            weights=self.weights.masked_fill(given, 0.0),
        )


def loss_inputs(
    sequences: Sequence[TrainSequence], logprobs: Tensor, reference: Tensor | None = None,
    teacher: Tensor | None = None, values: Callable[[Tensor], Tensor] | None = None,
) -> LossInputs:  # fmt: skip
    """The inputs of packed sequences. logprobs, reference, teacher: [loss_tokens] as packed; a teacher that was asked
    over HTTP has its column instead. values: [completions] indices of first loss tokens -> the head's values there."""
    device = logprobs.device

    def on_device(values: Iterable[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(list(values), dtype=dtype).to(device, non_blocking=True)

    def column(name: str) -> Tensor | None:
        if not any(name in sequence.columns for sequence in sequences):
            return None
        return on_device(value for one in sequences for value in one.columns.get(name) or [0.0] * one.loss_tokens)

    kinds = b"".join(sequence.mask for sequence in sequences).replace(b"\0", b"")
    counts = [sequence.loss_tokens for sequence in sequences]
    per_sequence = torch.tensor(counts, dtype=torch.int64)
    weights = torch.tensor([sequence.weight for sequence in sequences], dtype=torch.float32)
    turns = [count for sequence in sequences for count in sequence.segments]
    completions = completions_of(counts, [sequence.group for sequence in sequences], device, turns)
    behaviour, asked = column("behaviour"), column("teacher")
    return LossInputs(
        logprobs=logprobs,
        behaviour=torch.zeros_like(logprobs.detach()) if behaviour is None else behaviour,
        advantages=token_advantages(sequences).to(device, non_blocking=True),
        weights=weights.repeat_interleave(per_sequence).to(device, non_blocking=True),
        completions=completions,
        old=column("old"),
        reference=reference,
        teacher=asked if teacher is None else teacher,
        values=None if values is None else values(completions.first),
        imitated=on_device((kind == IMITATED for kind in kinds), torch.bool) if IMITATED in kinds else None,
        offline=on_device((sequence.offline for sequence in sequences), torch.bool).repeat_interleave(
            per_sequence.to(device)
        )
        if any(sequence.offline for sequence in sequences)
        else None,
    )


def token_advantages(sequences: Sequence[TrainSequence]) -> Tensor:
    """[loss tokens of all] float32 advantage of each token's segment; 0 where a sequence has none (it is imitated)."""
    segments = [sequence.segments for sequence in sequences]
    values = [v for one, own in zip(sequences, segments, strict=True) for v in one.advantages or [0.0] * len(own)]
    counts = torch.tensor([count for own in segments for count in own], dtype=torch.int64)
    return torch.tensor(values, dtype=torch.float32).repeat_interleave(counts)


@dataclass(frozen=True)
class LossTerm:
    """The policy's part of the loss of one micro-batch, and which tokens a bound touched."""

    loss: Tensor
    """0-dimensional; carries gradients"""
    clipped_low: Tensor
    """[loss_tokens] bool: a lower bound changes the token's gradient"""
    clipped_high: Tensor
    """[loss_tokens] bool: an upper bound changes it"""
    masked: Tensor
    """[loss_tokens] bool: the token is left out"""


def unbounded(loss: Tensor, inputs: LossInputs) -> LossTerm:
    """The term of a loss without bounds."""
    none = torch.zeros_like(inputs.weights, dtype=torch.bool)
    return LossTerm(loss, none, none, none)
