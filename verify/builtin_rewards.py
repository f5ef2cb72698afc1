"""Built-in rewards that need only the completion: share of tests passed, cosine of the length, repetition."""

from __future__ import annotations

import math

from pydantic import Field

from shared.diversity import WORD
from verify.plugins import Case, RewardOptions, reward


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
    found = [hash(word) for word in WORD.findall(text)]
    total = len(found) - words + 1
    if total < 2:
        return 0.0
    # a rolling polynomial hash: comparing n-grams themselves would cost n times the memory
    modulus, base, value = (1 << 61) - 1, 1_000_003, 0
    first = pow(base, words - 1, modulus)
    seen: set[int] = set()
    for position, word in enumerate(found):
        if position >= words:
            value -= found[position - words] % modulus * first
        value = (value * base + word) % modulus
        if position >= words - 1:
            seen.add(value)
    return 1 - len(seen) / total


@reward("repetition", lowest=-1.0, options=RepetitionOptions)
def repetition(case: Case, options: RepetitionOptions) -> float:
    """Return minus the share of the runs of `options.words` words that were said before, in (-1, 0]."""
    return -repeated_share(f"{case.reasoning}\n{case.response}", options.words)
