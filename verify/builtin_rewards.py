"""Built-in rewards that need only completions: of one, the share of tests passed, the cosine of its length, repetition;
of a group, novelty among its completions and Kimi's length reward; and "robust", a combination of rewards.

A reward of the group is called with all its well-formed completions, when the last one has ended.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence

from pydantic import Field

from shared.diversity import WORD
from shared.sections import RewardWeights
from verify.plugins import Case, RewardOptions, group_reward, read_options, register, reward

_SHINGLE_WORD = re.compile(r"\w+|[^\w\s]")


@reward("tests_passed")
def tests_passed(case: Case) -> float:
    """Return the share of a program's passed tests, in [0, 1]; for other answers 1 when right; 0 for open problems.

    Magistral's negative result (2506.10910, section 5.3): a proportional reward did about 2 % worse than all-or-nothing
    on LiveCodeBench. To reproduce it: reward.correctness = 0, reward.extra = { tests_passed = 0.9 }.
    """
    return case.share


class CosineOptions(RewardOptions):
    """The options of `cosine_length`."""

    right: tuple[float, float] = (1.0, 0.5)
    """value of a right answer of no tokens, and just below length_max"""
    wrong: tuple[float, float] = (-1.0, 0.0)
    """value of a wrong answer of no tokens, and just below length_max: a longer attempt is forgiven more"""

    @property
    def least(self) -> float:
        """The least of the four values."""
        return min(*self.right, *self.wrong)


def cosine_length(tokens: int, limit: int, right: bool, options: CosineOptions) -> float:
    """Return the value of a completion of `tokens` tokens, on a half cosine from 0 to `limit` tokens.

    long + (short - long) * (1 + cos(pi * tokens / limit)) / 2, with short and long of `options.right` or
    `options.wrong`; at the limit and above the value of the shortest wrong answer. Source: Demystifying Long
    Chain-of-Thought Reasoning in LLMs (2502.03373), with our scale: its values are 2 to 1 and -10 to 0.
    """
    if tokens >= limit:
        return options.least
    short, long = options.right if right else options.wrong
    return long + (short - long) * (1 + math.cos(math.pi * tokens / limit)) / 2


@reward("cosine_length", lowest=lambda options: options.least, options=CosineOptions)
def cosine(case: Case, options: CosineOptions) -> float:
    """Return the value of the completion's length; 0 for open problems, which are neither right nor wrong."""
    if not case.problem.verified:
        return 0.0
    return cosine_length(case.tokens, case.settings.length_max, case.verdict == "correct", options)


class RepetitionOptions(RewardOptions):
    """The options of `repetition`."""

    words: int = Field(20, ge=1)
    """so many words in a row that were said before count as a repetition; a Han or kana character is a word"""


def repeated_share(text: str, words: int) -> float:
    """Return the share of the n-grams of `words` words that occurred before, in [0, 1); 0 for fewer than two n-grams.

    Every Han or kana character and every sign is a word of its own. Linear in the text. Source: the n-gram penalty of
    2502.03373, over words instead of tokens, so that it is the same for every tokenizer.
    """
    hashes = [hash(word) for word in WORD.findall(text)]
    total = len(hashes) - words + 1
    if total < 2:
        return 0.0
    # a rolling polynomial hash: comparing n-grams themselves would cost n times the memory
    modulus, base, value = (1 << 61) - 1, 1_000_003, 0
    first = pow(base, words - 1, modulus)
    seen: set[int] = set()
    for position, word in enumerate(hashes):
        if position >= words:
            value -= hashes[position - words] % modulus * first
        value = (value * base + word) % modulus
        if position >= words - 1:
            seen.add(value)
    return 1 - len(seen) / total


@reward("repetition", lowest=-1.0, options=RepetitionOptions)
def repetition(case: Case, options: RepetitionOptions) -> float:
    """Return minus the share of the runs of `options.words` words that were said before, in (-1, 0]."""
    return -repeated_share(f"{case.reasoning}\n{case.response}", options.words)


class NoveltyOptions(RewardOptions):
    """The options of `novelty`."""

    words: int = Field(3, ge=1)
    """length of the runs of words that are compared"""


def shingles(text: str, words: int) -> frozenset[tuple[str, ...]]:
    """Return the runs of `words` words of a text, in lower case; a shorter text is one run."""
    tokens = _SHINGLE_WORD.findall(text.casefold())
    return frozenset(tuple(tokens[start : start + words]) for start in range(max(len(tokens) - words + 1, 1)))


@group_reward("novelty", options=NoveltyOptions)
def novelty(cases: Sequence[Case], options: NoveltyOptions) -> list[float]:
    """Return [completions] 1 minus the mean likeness to the other responses, in [0, 1]; 0 for a completion alone.

    The likeness of two responses is the Jaccard index of their runs of words. Source: the novelty rewards of
    Curiosity-driven Red-teaming (2402.19464), section 3.2, within a group and over runs of words.
    """
    responses = [shingles(case.response, options.words) for case in cases]
    others = len(responses) - 1
    if others < 1:
        return [0.0] * len(responses)
    return [
        1 - sum(len(own & other) / len(own | other) for j, other in enumerate(responses) if j != i) / others
        for i, own in enumerate(responses)
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

    members: list[str] = Field([], alias="of")
    """rewards or judges, the ensemble; their own weights may be 0"""
    mean: float = Field(0.5, ge=0, le=1)
    """weight of their mean; the rest is that of the least of them"""


def robust(values: Sequence[float], options: RobustOptions) -> float:
    """Return mean * the mean of the values + (1 - mean) * the least of them.

    Source: Reward-Robust RLHF (2409.15360), section 3, with the ensemble's members as its set of rewards.
    """
    return options.mean * sum(values) / len(values) + (1 - options.mean) * min(values)


def _robust_options(settings: RewardWeights) -> RobustOptions:
    return read_options("robust", RobustOptions, settings)


register(
    "robust",
    lambda settings: functools.partial(robust, options=_robust_options(settings)),
    lowest=lambda _: 0.0,
    options=RobustOptions,
    members=lambda settings: _robust_options(settings).members,
)
