"""Splits a batch of groups into the minibatches of one or several optimiser steps, and combines their numbers.

With n steps a batch is cut into n minibatches of whole groups, in the order of their admission; advantages are scaled
within a minibatch, and all but the first are trained by weights that have moved since the batch was sampled (Magistral,
2506.10910, section 6.3: n_mini = n_batch / n; several steps a batch made training worse).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from shared.messages import Stepped
from shared.types import Group
from trainer.batching import Plan
from trainer.trainers import StepSums

ADDED = ("loss", "regularisation")
"""parts of an optimiser step's loss, not sums over tokens"""


class Learned(NamedTuple):
    """Plan, sums and gradient norm of one optimiser step, or of all steps of a batch together."""

    plan: Plan
    sums: StepSums
    stepped: Stepped


def split(groups: Sequence[Group], count: int) -> list[list[Group]]:
    """`count` minibatches of equal size, in order. groups: a multiple of `count`; raises ValueError otherwise."""
    size, rest = divmod(len(groups), count)
    if rest or not size:
        raise ValueError(f"{len(groups)} groups cannot be cut into {count} equal minibatches")
    return [list(groups[i : i + size]) for i in range(0, len(groups), size)]


def combine(steps: Sequence[Learned]) -> Learned:
    """Combine the steps of a batch: sums over its steps, largest maxima, mean loss and mean gradient norm."""
    if len(steps) == 1:
        return steps[0]
    sums: dict[str, float] = {}
    maxima: dict[str, float] = {}
    for step in steps:
        for name, value in step.sums.sums.items():
            sums[name] = sums.get(name, 0.0) + value / (len(steps) if name in ADDED else 1)
        for name, value in step.sums.maxima.items():
            maxima[name] = max(maxima.get(name, value), value)
    ranks = zip(*(step.plan.micro_batches for step in steps), strict=True)
    return Learned(
        Plan(
            micro_batches=[[batch for share in shares for batch in share] for shares in ranks],
            tokens=sum(step.plan.tokens for step in steps),
            stored_tokens=sum(step.plan.stored_tokens for step in steps),
            padding_share=statistics.fmean(step.plan.padding_share for step in steps),
            imbalance=statistics.fmean(step.plan.imbalance for step in steps),
        ),
        StepSums(sums, maxima, sum(s.sums.seconds for s in steps), sum(s.sums.tokens for s in steps)),
        Stepped(
            grad_norm=statistics.fmean(step.stepped.grad_norm for step in steps),
            seconds=sum(step.stepped.seconds for step in steps),
        ),
    )
