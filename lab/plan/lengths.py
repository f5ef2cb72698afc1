"""Distributions of completion lengths as weighted atoms, from mean and 99th percentile, or as measured.

mean        E[L]
position    E[L^2] / (2 E[L]): mean position of a sampled token in its completion, hence the mean length of the
            completions in a busy engine
longest(n)  E[max of n completions]
tail(y)     E[(L - y)+] / E[L]: share of all tokens behind position y
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from statistics import NormalDist

from shared.errors import ConfigError, DataError
from shared.json_reader import parse_json

LAST_STEPS = 20
"""number of newest steps of a run from which lengths are taken"""
NORMAL = NormalDist()
Z99 = NORMAL.inv_cdf(0.99)
BINS = 400
SMALLEST_TAIL = 1e-9
"""probability of the last bin of a lognormal distribution; edges are evenly spaced in the logarithm of their tail"""


@dataclass(frozen=True)
class Lengths:
    """Completion lengths, tokens, in ascending order, and their probabilities [atoms], which sum to 1."""

    tokens: tuple[float, ...]
    weights: tuple[float, ...]

    @cached_property
    def mean(self) -> float:
        """E[L], tokens."""
        return sum(length * weight for length, weight in zip(self.tokens, self.weights, strict=True))

    @cached_property
    def mean_square(self) -> float:
        """E[L^2], tokens^2."""
        return sum(length * length * weight for length, weight in zip(self.tokens, self.weights, strict=True))

    @cached_property
    def position(self) -> float:
        """E[L^2] / (2 E[L]), tokens."""
        return self.mean_square / (2 * self.mean)

    @cached_property
    def cumulated(self) -> tuple[float, ...]:
        """P(L <= tokens[i]); the last is exactly 1."""
        return (*list(accumulate(self.weights))[:-1], 1.0)

    def longest(self, completions: int) -> float:
        """E[max of n] = sum over atoms of length (F_i^n - F_{i-1}^n), tokens."""
        powers = [below**completions for below in self.cumulated]
        steps = (now - before for now, before in zip(powers, [0.0, *powers], strict=False))
        return sum(length * step for length, step in zip(self.tokens, steps, strict=True))

    def tail(self, position: float) -> float:
        """Return the share of tokens behind `position`; 1 for a position of 0 or less."""
        if position <= 0:
            return 1.0
        behind = zip(self.tokens, self.weights, strict=True)
        return sum(max(length - position, 0.0) * weight for length, weight in behind) / self.mean


def lognormal(mean: float, p99: float, limit: float = math.inf) -> Lengths:
    """Return lognormal lengths with this mean and 99th percentile, cut at `limit` tokens.

    ln L ~ N(m, s^2): ln mean = m + s^2/2 and ln p99 = m + z s with z = 2.326, so s = z - sqrt(z^2 - 2 ln(p99 / mean)).
    Each bin has its conditional mean as length, so that without a cut the mean is exact. Raises ConfigError.
    """
    if mean < 1 or p99 < mean:
        raise ConfigError(f"lengths: --mean {mean:g} must be at least 1, and --p99 {p99:g} at least the mean")
    root = Z99**2 - 2 * math.log(p99 / mean)
    if root < 0:
        most = mean * math.exp(Z99**2 / 2)
        raise ConfigError(f"lengths: no lognormal has --p99 {p99:g} at --mean {mean:g}; at most {most:.0f}")
    spread = Z99 - math.sqrt(root)
    if spread < 1e-9:
        return Lengths((min(mean, limit),), (1.0,))
    tails = [SMALLEST_TAIL ** (i / (BINS - 1)) for i in range(BINS)]  # of the lower edges: 1 down to the smallest
    edges = [-math.inf, *(-NORMAL.inv_cdf(tail) for tail in tails[1:]), math.inf]
    weights = [tail - after for tail, after in zip(tails, [*tails[1:], 0.0], strict=True)]
    below = [NORMAL.cdf(spread - edge) for edge in edges]  # upper tails of N(s, 1): mass of L times its length
    masses = [max(upper - lower, 0.0) for upper, lower in zip(below, below[1:], strict=False)]
    lengths = [min(mean * mass / weight, limit) for mass, weight in zip(masses, weights, strict=True)]
    return Lengths(tuple(lengths), tuple(weights))


def measured(lengths: Sequence[int]) -> Lengths:
    """Return the lengths of sampled completions, equally weighted. Raises ConfigError if there are none."""
    kept = sorted(length for length in lengths if length > 0)
    if not kept:
        raise ConfigError("lengths: no completion with a token to measure")
    return Lengths(tuple(map(float, kept)), (1 / len(kept),) * len(kept))


def of_run(folder: Path) -> tuple[Lengths, int]:
    """Return completion lengths and mean prompt length (tokens, rounded up) of a run's newest rollouts. Raises
    DataError."""
    files = sorted((folder / "rollouts").glob("step_*.jsonl"), key=lambda path: int(path.stem.split("_")[1]))
    if not files:
        raise DataError(f"--run {folder} is no folder of a run: there is no rollouts/step_1.jsonl in it")
    completions: list[int] = []
    prompts: list[int] = []
    for file in files[-LAST_STEPS:]:
        for number, line in enumerate(file.read_bytes().splitlines(), 1):
            try:
                row = parse_json(line)
                if row["prompt"].get("problem", {}).get("environment"):
                    raise DataError(f"{file}, line {number} holds episodes, and a plan knows no waiting between turns")
                completions += [len(completion["token_ids"]) for completion in row["completions"]]
                prompts.append(len(row["prompt"]["token_ids"]))
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(f"{file}, line {number} is no group of completions ({error!r})") from error
    if not prompts:
        raise DataError(f"--run {folder}: its newest rollouts are empty")
    return measured(completions), math.ceil(sum(prompts) / len(prompts))
