"""Padding and imbalance of greedy packing against arrival order, and its time.

2,048 completions with lognormal lengths (the longest of Magistral's are five times the shortest; here the longest are
cut at the budget), budget 32,768 tokens. Arrival order: each sequence into the open micro-batch, and a new one is
opened where it has no room (next fit); over several ranks they are dealt in turn. First fit in arrival order is shown
too. Magistral (2506.10910, section 3) saved 19 % of padding, its baseline is not told. `Work of the slowest rank` is
modelled: the time of a micro-batch is taken as proportional to its tokens, and ranks wait for each other after each.
The times are of `plan_batch` itself, beside sorting the same lengths.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from benchmarks.figures import Figure, benchmark
from shared.types import TrainSequence
from trainer.step.batching import descending, plan_batch

BUDGET, SEQUENCES = 32_768, 2_048
MU, SIGMA = 8.0, 1.0
"""of the logarithm of the length in tokens: median 2,981, mean 4,915 before the cut"""
RANKS = (1, 2, 4, 8)
SIZES = (1_000, 2_000, 4_000, 8_000)
ARRIVAL, FIRST_FIT = "arrival order (next fit)", "first fit in arrival order"
SAVED = "padding taken away from arrival order, 1 rank (Magistral: 19 %)"


def draw_lengths(count: int, seed: int) -> list[int]:
    """Draw [count] lengths in tokens, lognormal, cut at the budget."""
    return [int(value) for value in np.random.default_rng(seed).lognormal(MU, SIGMA, count).clip(1, BUDGET)]


def make_sequences(lengths: Sequence[int]) -> list[TrainSequence]:
    """Return sequences that share no prompt; the first token stands for it."""
    return [
        TrainSequence([number, *[0] * (length - 1)], bytes([0, *[1] * (length - 1)]), 0.0, [0.0], group=number)
        for number, length in enumerate(lengths)
    ]


def next_fit(lengths: Sequence[int], budget: int) -> list[int]:
    """Return [bins] fill: a sequence that has no room in the open bin closes it."""
    fills: list[int] = []
    for length in lengths:
        if fills and fills[-1] + length <= budget:
            fills[-1] += length
        else:
            fills.append(length)
    return fills


def first_fit(lengths: Sequence[int], budget: int) -> list[int]:
    """Return [bins] fill: each into the first bin with room."""
    fills: list[int] = []
    for length in lengths:
        place = next((number for number, fill in enumerate(fills) if fill + length <= budget), None)
        if place is None:
            fills.append(length)
        else:
            fills[place] += length
    return fills


def padding(fills: Sequence[int], ranks: int, budget: int) -> float:
    """Return the empty share of the budgets: 1 - tokens / (ranks * rounds * budget), rounds = ceil(bins / ranks)."""
    rounds = -(-len(fills) // ranks)
    return 1.0 - sum(fills) / (ranks * rounds * budget)


def imbalance(fills: Sequence[int], ranks: int) -> float:
    """Time lost to waiting ranks: sum over rounds of the largest fill / (tokens / ranks) - 1; bins in turn."""
    slowest = sum(max(fills[start : start + ranks]) for start in range(0, len(fills), ranks))
    return slowest * ranks / sum(fills) - 1.0


def timed(work: Callable[[], object], repeats: int) -> list[float]:
    """Return [repeats] seconds of calls; called once before, unmeasured."""
    work()
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return found


def quality(seed: int) -> dict[str, float]:
    """Return the figures of one draw of lengths."""
    lengths = draw_lengths(SEQUENCES, seed)
    sequences = make_sequences(lengths)
    arrival = next_fit(lengths, BUDGET)
    found = {
        f"padding, {ARRIVAL}": padding(arrival, 1, BUDGET),
        f"padding, {FIRST_FIT}": padding(first_fit(lengths, BUDGET), 1, BUDGET),
    }
    for ranks in RANKS:
        plan, lost = plan_batch(sequences, ranks, BUDGET), imbalance(arrival, ranks)
        found[f"padding, ours, {ranks} rank{'s' if ranks > 1 else ''}"] = plan.padding_share
        if ranks > 1:
            found[f"time lost to waiting ranks, {ARRIVAL}, {ranks} ranks"] = lost
            found[f"time lost to waiting ranks, ours, {ranks} ranks"] = plan.imbalance
            found[f"work of the slowest rank, ours, {ranks} ranks"] = (1 + plan.imbalance) / (1 + lost)
        else:
            found[SAVED] = found[f"padding, {ARRIVAL}"] - plan.padding_share
            found["micro-batches, ours"] = len(plan.micro_batches[0]) / len(arrival)
    return found


def times(sizes: Sequence[int], repeats: int) -> Iterator[Figure]:
    """Yield the time of plan_batch beside a sort of the same lengths, and how it grows with the number of sequences."""
    medians = []
    for size in sizes:
        lengths = draw_lengths(size, seed=0)
        sequences = make_sequences(lengths)
        seconds = timed(lambda: plan_batch(sequences, 8, BUDGET), repeats)  # noqa: B023 - called at once
        sorting = statistics.median(timed(lambda: descending(lengths), repeats))  # noqa: B023
        medians.append(statistics.median(seconds) / size)
        name = f"plan_batch, {size:,} sequences, 8 ranks"
        yield Figure(f"{name}, of each 1,000", [1e6 * s / size for s in seconds], "ms")
        yield Figure(name, [s / sorting for s in seconds], "", "a sort of the lengths", better="lower")
    name = f"plan_batch, time of each sequence with {sizes[-1] // sizes[0]} times as many sequences"
    yield Figure(name, [medians[-1] / medians[0]], "", f"that with {sizes[0]:,}")


@benchmark()
def packing(quick: bool) -> Iterator[Figure]:
    """Measure padding, imbalance, and the time of plan_batch."""
    draws = [quality(seed) for seed in range(3 if quick else 9)]
    for name in draws[0]:
        ratio = name.startswith(("micro-batches", "work of"))
        better = "higher" if name == SAVED else "lower" if ratio or name == "padding, ours, 1 rank" else ""
        values = [draw[name] for draw in draws]
        yield Figure(name, values, "" if ratio else "%", f"that in {ARRIVAL}" if ratio else "", better)
    yield from times(SIZES[:2] if quick else SIZES, 3 if quick else 7)
