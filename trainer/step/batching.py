"""Cuts a batch into minibatches, and their sequences into micro-batches of trainer ranks: planned by the controller.

With n optimiser steps a batch is cut into n minibatches of whole groups, in the order of admission; advantages are
scaled within a minibatch, and all but the first are trained by weights that have moved since the batch was sampled
(Magistral, 2506.10910, section 6.3: n_mini = n_batch / n; several steps a batch made training worse).

Greedy collation (Magistral): longest first, each into the first micro-batch with room. Gradients are sums, so the cut
does not change the step; only speed depends on it. Every rank receives the same number of micro-batches, since FSDP's
collectives block until all ranks run them: empty ones fill up, and micro-batches that run at the same time are of
similar size. The largest run first, so that what does not fit in memory fails in the first seconds of a step.
Completions of one prompt stay together as far as the budget allows, since packing then stores their prompt once.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from shared.types import Group, MicroBatch, TrainSequence
from trainer.step.forward_backward import StepSums
from trainer.step.rank import Stepped

ADDED = ("loss", "regularisation")
"""parts of an optimiser step's loss, not sums over tokens"""


class BatchPlan(msgspec.Struct, frozen=True):
    """The micro-batches of one optimiser step on all trainer ranks, and figures of their sizes."""

    micro_batches: list[list[MicroBatch]]
    """[trainer ranks][micro-batches of a rank]"""
    tokens: int
    """prompt + completion tokens of all sequences"""
    stored_tokens: int
    """the same, with the prompt of sequences that stay together counted once"""
    padding_share: float
    """part of the token budgets left empty, dummies included: 1 - stored_tokens / (ranks * micro-batches * budget)"""
    imbalance: float
    """time lost to waiting ranks, in tokens: sum over rounds of the largest share / (stored_tokens / ranks) - 1"""


class Learned(NamedTuple):
    """Plan, sums and gradient norm of one optimiser step, or of all steps of a batch together."""

    plan: BatchPlan
    sums: StepSums
    stepped: Stepped


def first_fit_decreasing(lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """Greedy collation: indices of `lengths` by length descending (ties by index), each into the first bin with room.

    A sequence longer than the budget gets a bin of its own. Needs at most 11/9 of the fewest possible bins.
    """
    size = 1 << max(len(lengths) - 1, 0).bit_length()
    most = [budget_tokens] * (2 * size)  # a tree: most[node] is the largest room below it, most[size + bin] that bin's
    bins: list[list[int]] = []
    for index in descending(lengths):
        length, node = lengths[index], 1
        while node < size:
            node = 2 * node + (most[2 * node] < length)
        number = node - size if length <= budget_tokens else len(bins)
        if number == len(bins):
            bins.append([])
        bins[number].append(index)
        node = size + number
        most[node] -= length
        while node > 1:
            node //= 2
            most[node] = max(most[2 * node], most[2 * node + 1])
    return bins


def spread(lengths: Sequence[int], budget_tokens: int, count: int) -> list[list[int]] | None:
    """`count` bins of nearly equal fill: longest first, each into the emptiest bin (ties: the first).

    Returns None where that breaks the budget; a sequence longer than the budget may only be alone.
    """
    bins: list[list[int]] = [[] for _ in range(count)]
    emptiest = [(0, place) for place in range(count)]
    for index in descending(lengths):
        fill, number = heapq.heappop(emptiest)
        if bins[number] and fill + lengths[index] > budget_tokens:
            return None
        bins[number].append(index)
        heapq.heappush(emptiest, (fill + lengths[index], number))
    return bins


class PackingUnit(msgspec.Struct, frozen=True):
    """Sequences of one prompt that stay together."""

    members: list[int]
    tokens: int
    """prompt once + completions"""


def whole_groups(sequences: Sequence[TrainSequence]) -> list[PackingUnit]:
    """One unit for each group, whatever its length."""
    members: dict[int, list[int]] = {}
    for index, sequence in enumerate(sequences):
        members.setdefault(sequence.group, []).append(index)
    units = []
    for indices in members.values():
        prompt = sequences[indices[0]].prompt_tokens
        own = sum(len(sequences[index].token_ids) - prompt for index in indices)
        units.append(PackingUnit(indices, prompt + own))
    return units


def units_of(sequences: Sequence[TrainSequence], limit_tokens: int) -> list[PackingUnit]:
    """Split the sequences of each prompt into units of at most limit_tokens (a longer one is a unit of its own)."""
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    last: list[int] | None = None
    for index, sequence in enumerate(sequences):
        prompt_ids = sequence.token_ids[: sequence.prompt_tokens]
        if prompt_ids != last:  # those of a group come one after the other: their prompt is hashed once
            last, same = prompt_ids, by_prompt.setdefault(tuple(prompt_ids), [])
        same.append(index)
    units: list[PackingUnit] = []
    for prompt, indices in by_prompt.items():
        completions = [len(sequences[index].token_ids) - len(prompt) for index in indices]
        for chosen in first_fit_decreasing(completions, limit_tokens - len(prompt)):
            tokens = len(prompt) + sum(completions[number] for number in chosen)
            units.append(PackingUnit([indices[number] for number in chosen], tokens))
    return units


def largest_unit(sequences: Sequence[TrainSequence], ranks: int, budget_tokens: int) -> int:
    """Limit for `units_of` in tokens: the budget; with several ranks at most a quarter of a rank's share."""
    if ranks == 1:
        return budget_tokens
    return min(budget_tokens, -(-sum(len(sequence.token_ids) for sequence in sequences) // (4 * ranks)))


def descending(lengths: Sequence[int]) -> list[int]:
    """Indices by length, longest first; ties keep their order."""
    return sorted(range(len(lengths)), key=lambda index: -lengths[index])


def plan_batch(sequences: Sequence[TrainSequence], ranks: int, budget_tokens: int, together: bool = False) -> BatchPlan:
    """Cut a step's sequences into micro-batches for `ranks` trainers; the same input gives the same plan.

    Every sequence is in exactly one micro-batch; none holds more than budget_tokens (shared prompts counted once),
    except a single longer sequence. together: groups stay whole, for objectives that compare their completions; a
    longer group is then a micro-batch of its own. Raises ValueError for fewer than one rank or token.
    """
    if ranks < 1 or budget_tokens < 1:
        raise ValueError(f"ranks = {ranks} and budget_tokens = {budget_tokens} must be at least 1")
    limit = largest_unit(sequences, ranks, budget_tokens)
    units = whole_groups(sequences) if together else units_of(sequences, limit)
    lengths = [unit.tokens for unit in units]
    bins = first_fit_decreasing(lengths, budget_tokens)
    rounds = max(1, -(-len(bins) // ranks))
    if ranks > 1:
        bins = spread(lengths, budget_tokens, rounds * ranks) or bins
    fill = [sum(lengths[index] for index in members) for members in bins]
    order = descending(fill)
    shares: list[list[MicroBatch]] = [[] for _ in range(ranks)]
    slowest = 0
    for start in range(0, rounds * ranks, ranks):
        round_bins = order[start : start + ranks]
        slowest += max((fill[number] for number in round_bins), default=0)
        # every second round the other way round, so that no rank always has the larger part
        towards = range(ranks) if (start // ranks) % 2 == 0 else reversed(range(ranks))
        for position, rank in enumerate(towards):
            chosen = bins[round_bins[position]] if position < len(round_bins) else []
            members = sorted(index for number in chosen for index in units[number].members)
            shares[rank].append(MicroBatch([sequences[index] for index in members]))
    stored = sum(lengths)
    return BatchPlan(
        micro_batches=shares,
        tokens=sum(len(sequence.token_ids) for sequence in sequences),
        stored_tokens=stored,
        padding_share=1.0 - stored / (rounds * ranks * max(budget_tokens, max(fill, default=0))),
        imbalance=slowest * ranks / stored - 1.0 if stored else 0.0,
    )


def split(groups: Sequence[Group], count: int) -> list[list[Group]]:
    """`count` minibatches of equal size, in order. groups: a multiple of `count`; raises ValueError otherwise."""
    size, rest = divmod(len(groups), count)
    if rest or not size:
        raise ValueError(f"{len(groups)} groups cannot be cut into {count} equal minibatches")
    return [list(groups[i : i + size]) for i in range(0, len(groups), size)]


def add_up(parts: Sequence[StepSums], seconds: float, averaged: Sequence[str] = ()) -> StepSums:
    """Add up the sums of several ranks or steps, and take the largest maxima. seconds: of all together. averaged: names
    whose mean is taken instead."""
    sums: dict[str, float] = {}
    maxima: dict[str, float] = {}
    for addend in parts:
        for name, value in addend.sums.items():
            sums[name] = sums.get(name, 0.0) + value / (len(parts) if name in averaged else 1)
        for name, value in addend.maxima.items():
            maxima[name] = max(maxima.get(name, value), value)
    return StepSums(sums, maxima, seconds, sum(part.tokens for part in parts), sum(part.flops for part in parts))


def combine(steps: Sequence[Learned]) -> Learned:
    """Combine the steps of a batch: sums over its steps, largest maxima, mean loss and mean gradient norm."""
    if len(steps) == 1:
        return steps[0]
    ranks = zip(*(step.plan.micro_batches for step in steps), strict=True)
    return Learned(
        BatchPlan(
            micro_batches=[[batch for share in shares for batch in share] for shares in ranks],
            tokens=sum(step.plan.tokens for step in steps),
            stored_tokens=sum(step.plan.stored_tokens for step in steps),
            padding_share=statistics.fmean(step.plan.padding_share for step in steps),
            imbalance=statistics.fmean(step.plan.imbalance for step in steps),
        ),
        add_up([step.sums for step in steps], sum(step.sums.seconds for step in steps), averaged=ADDED),
        Stepped(
            grad_norm=statistics.fmean(step.stepped.grad_norm for step in steps),
            seconds=sum(step.stepped.seconds for step in steps),
            gpu_peak_bytes=max(step.stepped.gpu_peak_bytes for step in steps),
        ),
    )
