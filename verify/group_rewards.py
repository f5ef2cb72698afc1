"""Built-in rewards of a group: novelty among its completions, Kimi's length reward; and "robust", of several rewards.

A reward of the group is called with all its well-formed completions, when the last one has ended.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pydantic import Field

from verify.plugins import Case, RewardOptions, group_reward, reward

_WORD = re.compile(r"\w+|[^\w\s]")


class NoveltyOptions(RewardOptions):
    """The options of `novelty`."""

    words: int = Field(3, ge=1)
    """length of the runs of words that are compared"""


def shingles(text: str, words: int) -> frozenset[tuple[str, ...]]:
    """Return the runs of `words` words of a text, in lower case; a shorter text is one run."""
    found = _WORD.findall(text.casefold())
    return frozenset(tuple(found[start : start + words]) for start in range(max(len(found) - words + 1, 1)))


@group_reward("novelty", options=NoveltyOptions)
def novelty(cases: Sequence[Case], options: NoveltyOptions) -> list[float]:
    """Return [completions] 1 minus the mean likeness to the other responses, in [0, 1]; 0 for a completion alone.

    The likeness of two responses is the Jaccard index of their runs of words. Source: the novelty rewards of
    Curiosity-driven Red-teaming (2402.19464), section 3.2, within a group and over runs of words.
    """
    held = [shingles(case.response, options.words) for case in cases]
    if len(held) < 2:
        return [0.0] * len(held)
    return [
        1 - sum(len(own & other) / len(own | other) for j, other in enumerate(held) if j != i) / (len(held) - 1)
        for i, own in enumerate(held)
    ]


@group_reward("group_length", lowest=-0.5)
def group_length(cases: Sequence[Case]) -> list[float]:
    """Return [completions] 1/2 - (tokens - least) / (most - least) for right answers, that or 0, whichever is less, for
    others; 0 for all where all are as long. least and most are over the group.

    Source: Kimi k1.5 (2501.12599), section 2.3.3.
    """
    lengths = [case.tokens for case in cases]
    least, most = min(lengths), max(lengths)
    if least == most:
        return [0.0] * len(cases)
    shares = [0.5 - (tokens - least) / (most - least) for tokens in lengths]
    return [share if case.verdict == "correct" else min(0.0, share) for share, case in zip(shares, cases, strict=True)]


class RobustOptions(RewardOptions):
    """The options of `robust`."""

    of: list[str] = []
    """rewards or judges, the ensemble; their own weights may be 0"""
    mean: float = Field(0.5, ge=0, le=1)
    """weight of their mean; the rest is that of the least of them"""


@reward("robust", options=RobustOptions)
def robust(case: Case, options: RobustOptions) -> float:
    """Never called: `plugins.Extra.made_of` makes the value from those of the rewards that it names."""
    raise AssertionError(options, case)
