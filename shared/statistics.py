"""Statistics of evaluations: pass@k, maj@k, means over problems, their intervals, the difference of two runs.

Problems are the units that are drawn at random: completions of one problem are alike, so intervals resample whole
problems (clusters), never completions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

RESAMPLES = 10_000
_AT_ONCE = 1 << 22
"""problems drawn in one array"""


class Interval(NamedTuple):
    """The range that holds the middle 95 % of the resamples."""

    low: float
    high: float


def pass_at_k(completions: int, right: int, k: int) -> float:
    """Chance that at least one of k completions is right: 1 - C(n - c, k) / C(n, k), unbiased.

    k is at most n. Source: Chen et al. 2021 (2107.03374), equation 1.
    """
    if not 0 <= right <= completions or not 1 <= k <= completions:
        raise ValueError(f"pass@{k} of {right} right in {completions} completions")
    return 1.0 - math.comb(completions - right, k) / math.comb(completions, k)


def majority_at_k(right: int, wrong: Sequence[int], silent: int, k: int) -> float:
    """Chance that the most frequent answer of k completions is right, as `exact_majority_at_k`."""
    return float(exact_majority_at_k(right, wrong, silent, k))


def exact_majority_at_k(right: int, wrong: Sequence[int], silent: int, k: int) -> Fraction:
    """Chance that the most frequent answer of k completions is right, exactly: the mean over all choices of k of n.

    right: completions with the right answer; wrong: [different wrong answers] completions with each; silent: without an
    answer, they do not vote. With m answers equally frequent, one of them right, a choice counts 1 / m; one without any
    votes counts 0. For k = n this is whether the majority of all is right.
    """
    total = right + sum(wrong) + silent
    if not 1 <= k <= total:
        raise ValueError(f"maj@{k} of {total} completions")
    score = Fraction()
    for votes in range(max(1, k - total + right), min(right, k) + 1):
        rivals = [size for size in wrong if size >= votes]
        rest = _ways(rivals, total - right - sum(rivals), k - votes, votes)
        share = sum(Fraction(count, 1 + ties) for ties, count in rest.items())
        score += math.comb(right, votes) * share
    return score / math.comb(total, k)


def _ways(rivals: Sequence[int], free: int, rest: int, votes: int) -> dict[int, int]:
    """Choices of `rest` completions where no wrong answer has more than `votes`: how many of them have so many answers
    with exactly `votes`.

    rivals: sizes of the wrong answers that can have as many; free: the completions of all others, in any number.
    """
    ways: dict[tuple[int, int], int] = {(0, 0): 1}
    for size in rivals:
        longer: dict[tuple[int, int], int] = {}
        for (drawn, ties), count in ways.items():
            for own in range(min(size, votes, rest - drawn) + 1):
                key = (drawn + own, ties + (own == votes))
                longer[key] = longer.get(key, 0) + count * math.comb(size, own)
        ways = longer
    found: dict[int, int] = {}
    for (drawn, ties), count in ways.items():
        found[ties] = found.get(ties, 0) + count * math.comb(free, rest - drawn)
    return found


def mean_and_half_width(shares: Sequence[float]) -> tuple[float, float]:
    """Mean over problems and half of its 95 % interval: 1.96 s / sqrt(n), s^2 = sum (x - mean)^2 / (n - 1).

    shares: [problems] of right completions. One problem has no spread: its half width is 0.
    """
    count = len(shares)
    mean = math.fsum(shares) / count
    if count < 2:
        return mean, 0.0
    variance = math.fsum((share - mean) ** 2 for share in shares) / (count - 1)
    return mean, 1.96 * math.sqrt(variance / count)


def cluster_bootstrap(values: Sequence[float], seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """The middle 95 % of the means of resampled problems. values: [problems], e.g. the share of right completions.

    The same seed gives the same interval. One problem has no spread: its interval is its value.
    """
    import numpy as np
    from scipy.stats import bootstrap  # late: it takes seconds, and ranks that train need neither

    found = np.asarray(values, np.float64)
    if len(found) == 1:
        return Interval(float(found[0]), float(found[0]))
    drawn = bootstrap(
        (found,), np.mean, n_resamples=resamples, batch=max(1, _AT_ONCE // len(found)), method="percentile",
        random_state=np.random.default_rng(seed),
    )  # fmt: skip
    return Interval(float(drawn.confidence_interval.low), float(drawn.confidence_interval.high))


class PairedDifference(NamedTuple):
    """Mean difference of two runs on the same problems, with its interval."""

    mean: float
    """second minus first"""
    interval: Interval


def paired_difference(first: Sequence[float], second: Sequence[float], seed: int = 0) -> PairedDifference:
    """Mean difference over problems and its interval: problems are resampled with both of their values.

    first, second: [problems] in the same order.
    """
    steps = [after - before for before, after in zip(first, second, strict=True)]
    return PairedDifference(math.fsum(steps) / len(steps), cluster_bootstrap(steps, seed))
