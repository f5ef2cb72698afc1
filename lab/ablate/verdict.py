"""Decides whether the runs show what was claimed, by an interval over paired seeds.

For each seed the run of one variant is compared with that of the other, which began from the same weights, drew the
same problems in the same order and sampled with the same seeds. Every relation is one or two inequalities "slack > 0"
(or >= 0); the mean slack over seeds has a 95 % interval (Student's t).

    reproduced        every inequality holds in its whole interval
    not reproduced    an inequality fails in its whole interval
    unclear           the interval extends to both sides, or fewer than two seeds have both runs
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lab.ablate.ablation import MARGIN, Ablation, Claim, window_of
from lab.ablate.figures import Estimate, Runs, estimate

REPRODUCED, NOT_REPRODUCED, UNCLEAR = "reproduced", "not reproduced", "unclear"


@dataclass(frozen=True)
class Decision:
    """The verdict on a claim, with the estimates it rests on."""

    claim: Claim
    part: str
    """part of the held-out problems, e.g. "language/fr"; "" for all"""
    verdict: str
    why: str
    """reason why nothing could be decided; "" if an interval decided"""
    left: Estimate | None = None
    """estimate of `variant`"""
    right: Estimate | None = None
    """estimate of `than`"""
    difference: Estimate | None = None
    """`variant` less `than`, seed by seed"""


def decide_all(ablation: Ablation, runs: Runs) -> list[Decision]:
    """Decide every claim, those with `each` for every part."""
    return [
        decide(ablation, claim, part, runs)
        for claim in ablation.claims
        for part in (runs.parts(claim.each) or [""] if claim.each else [""])
    ]


def decide(ablation: Ablation, claim: Claim, part: str, runs: Runs) -> Decision:
    """Decide one claim, for one part of the held-out problems."""
    if claim.each and not part:
        return Decision(claim, part, UNCLEAR, f"no evaluation tells several {claim.each}s apart")
    metric = f"{claim.metric}/{part}" if part else claim.metric
    over = window_of(metric, claim.over, ablation.over)
    left = runs.values(claim.variant, metric, over)
    right = runs.values(claim.than or claim.variant, metric, claim.than_over or over)
    seeds = sorted(left.keys() & right.keys())
    if not seeds:
        return Decision(claim, part, UNCLEAR, "no seed has both")
    ours, theirs = [left[seed] for seed in seeds], [right[seed] for seed in seeds]
    verdict = judge(claim.relation, claim.margin, {seed: (left[seed], right[seed]) for seed in seeds})
    return Decision(
        claim, part, verdict, "one seed" if len(seeds) == 1 else "", estimate(ours), estimate(theirs),
        estimate([x - y for x, y in zip(ours, theirs, strict=True)]),
    )  # fmt: skip


def judge(relation: str, margin: float | str, pairs: Mapping[int, tuple[float, float]]) -> str:
    """Return the verdict on "x relation y" from seed -> (x, y)."""
    outcomes = []
    for slacks, strict in inequalities(relation, margin, list(pairs.values())):
        found = estimate(slacks)
        if found.low > 0 or (found.low == 0 and not strict):
            outcomes.append(REPRODUCED)
        elif found.high < 0 or (found.high == 0 and strict):
            outcomes.append(NOT_REPRODUCED)
        else:
            outcomes.append(UNCLEAR)
    return next((verdict for verdict in (NOT_REPRODUCED, UNCLEAR) if verdict in outcomes), REPRODUCED)


def inequalities(
    relation: str, margin: float | str, pairs: list[tuple[float, float]]
) -> list[tuple[list[float], bool]]:
    """Return (slack of every seed, whether 0 is too little) of each inequality that a relation consists of.

    With m the margin (a share is taken of |y|, seed by seed): above x - y - m > 0, below y - x - m > 0, not above
    y - x + m >= 0, not below x - y + m >= 0, as: the last two.
    """

    def slack(sign: int, side: int) -> list[float]:
        return [sign * (x - y) + side * margin_of(margin, y) for x, y in pairs]

    at_least, at_most = (slack(1, 1), False), (slack(-1, 1), False)
    return {
        "above": [(slack(1, -1), True)],
        "below": [(slack(-1, -1), True)],
        "not above": [at_most],
        "not below": [at_least],
        "as": [at_least, at_most],
    }[relation]


def margin_of(margin: float | str, value: float) -> float:
    """Return a margin in the metric's unit: a number as it is, "10 %" as a share of |value|."""
    if isinstance(margin, str):
        found = MARGIN.fullmatch(margin)
        assert found is not None, margin
        return float(found["number"]) / 100 * abs(value)
    return margin
