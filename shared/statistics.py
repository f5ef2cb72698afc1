"""Statistics of evaluations: pass@k, maj@k, means over problems, intervals, differences of two runs, Elo ratings.

Completions of one problem are alike, so intervals resample whole problems (clusters), never completions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

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
    counts: dict[int, int] = {}
    for (drawn, ties), count in ways.items():
        counts[ties] = counts.get(ties, 0) + count * math.comb(free, rest - drawn)
    return counts


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

    array = np.asarray(values, np.float64)
    if len(array) == 1:
        return Interval(float(array[0]), float(array[0]))
    drawn = bootstrap(
        (array,), np.mean, n_resamples=resamples, batch=max(1, _AT_ONCE // len(array)), method="percentile",
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


def paired_permutation(first: Sequence[float], second: Sequence[float], seed: int = 0) -> float:
    """Two-sided p-value of the mean difference of pairs: the two values of each pair are exchanged at random.

    first, second: [problems] in the same order. As Kenton et al. 2024 (2407.04622): SciPy's test with 10,000 resamples,
    or all of them where there are fewer. Without a difference in any pair it is 1.
    """
    import numpy as np
    from scipy.stats import permutation_test

    pairs = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if len(pairs[0]) < 2 or bool((pairs[0] == pairs[1]).all()):
        return 1.0

    def difference(x: Any, y: Any, axis: int) -> Any:
        return np.mean(x - y, axis=axis)

    test = permutation_test(
        pairs, difference, permutation_type="samples", vectorized=True, n_resamples=RESAMPLES,
        batch=max(1, _AT_ONCE // len(pairs[0])), rng=np.random.default_rng(seed),
    )  # fmt: skip
    return float(test.pvalue)


ELO_SCALE = 500.0
"""points in which the odds of winning change tenfold, as Kenton et al. 2024"""


def elo(games: Sequence[tuple[str, str, float]]) -> dict[str, float]:
    """Return the ratings of maximum likelihood, with mean 0, by BFGS.

    games: (player, opponent, score of the player in [0, 1]). A player that won or lost every game has no finite rating:
    half a drawn game of each pair that met is counted in addition to the others.
    """
    return {name: float(points[0]) for name, points in zip(*_elo(games, 1, 0), strict=True)}


def elo_intervals(games: Sequence[tuple[str, str, float]], seed: int = 0, resamples: int = 500) -> dict[str, Interval]:
    """Return the middle 95 % of each player's rating over resampled games."""
    import numpy as np

    names, ratings = _elo(games, resamples, seed)
    low, high = np.percentile(ratings, (2.5, 97.5), axis=1)
    return {name: Interval(float(low[n]), float(high[n])) for n, name in enumerate(names)}


def _elo(games: Sequence[tuple[str, str, float]], resamples: int, seed: int) -> tuple[list[str], list[list[float]]]:
    """Return players and [players][resamples] ratings; for resamples = 1 those of the games as they are."""
    import numpy as np
    from scipy.optimize import minimize

    names = sorted({name for game in games for name in game[:2]})
    numbers = {name: number for number, name in enumerate(names)}
    sides = np.asarray([(numbers[player], numbers[opponent]) for player, opponent, _ in games])
    turned = sides[:, 0] > sides[:, 1]
    scores = np.where(turned, 1.0 - np.asarray([game[2] for game in games]), [game[2] for game in games])
    pairs, kinds = np.unique(np.sort(sides, 1), axis=0, return_inverse=True)
    kinds = kinds.reshape(-1)

    def fit(played: Any, won: Any, start: Any) -> Any:
        """Logarithms of the odds from games and scores of each pair, with half a drawn game of each that met."""
        played, won = played + 0.5 * (played > 0), won + 0.25 * (played > 0)

        def loss(odds: Any) -> tuple[float, Any]:
            """Negative log-likelihood and its gradient. odds: natural logarithms."""
            gaps = odds[pairs[:, 0]] - odds[pairs[:, 1]]
            value = np.sum(played * np.logaddexp(0.0, -gaps) + (played - won) * gaps) + 0.5 * np.mean(odds) ** 2
            slope = played / (1.0 + np.exp(-gaps)) - won
            gradient = np.full(len(names), np.mean(odds) / len(names))
            np.add.at(gradient, pairs[:, 0], slope)
            np.add.at(gradient, pairs[:, 1], -slope)
            return float(value), gradient

        ratings = minimize(loss, start, jac=True, method="BFGS").x
        return ratings - ratings.mean()

    count, rng = len(pairs), np.random.default_rng(seed)
    whole = fit(np.bincount(kinds, minlength=count), np.bincount(kinds, scores, count), np.zeros(len(names)))
    fits = [whole] if resamples == 1 else []
    while len(fits) < resamples:
        drawn = rng.integers(0, len(games), len(games))
        won = np.bincount(kinds[drawn], scores[drawn], count)
        fits.append(fit(np.bincount(kinds[drawn], minlength=count), won, whole))
    return names, (np.asarray(fits).T * ELO_SCALE / math.log(10.0)).tolist()
