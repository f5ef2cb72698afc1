"""How unlike several responses to the same prompt are: distinct n-grams and self-BLEU.

Reinforcement learning lowers both, which accuracy does not show (Kirk et al. 2024, arXiv 2310.06452).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

WORD = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]|[^\W\u3040-\u30ff\u3400-\u9fff]+|[^\w\s]")
"""a word, a Han or kana character, or a sign"""
ORDERS = (1, 2, 3, 4)
"""n-grams of BLEU"""
NO_MATCH = 0.1
"""matches that BLEU counts for an order without any (Chen and Cherry 2014, method 1)"""

Gram = tuple[str, ...]


def grams(words: Sequence[str], n: int) -> list[Gram]:
    """The runs of n words."""
    return list(zip(*(words[start:] for start in range(n)), strict=False))


def distinct(texts: Sequence[str], n: int = 2) -> float:
    """Different n-grams of all texts over their number (arXiv 1510.03055), 0 to 1: 0 of none, less of long texts."""
    every = [gram for text in texts for gram in grams(WORD.findall(text.casefold()), n)]
    return len(set(every)) / len(every) if every else 0.0


def self_bleu(texts: Sequence[str]) -> float:
    """Mean BLEU-4 of each text against all others as its references (Zhu et al. 2018, arXiv 1802.01886), 1 where
    all are alike.

    BLEU = exp(min(0, 1 - r / c)) (p_1 p_2 p_3 p_4)^(1/4), p_n the n-grams of the text that a reference has too, each at
    most as often as there, over all; c its length, r the nearest length of a reference. Orders that a short text lacks
    are left out; a text without words has 0. Linear in the texts' lengths. texts: at least two.
    """
    words = [WORD.findall(text.casefold()) for text in texts]
    lengths = [len(one) for one in words]
    logs: list[list[float]] = [[] for _ in words]
    for n in ORDERS:
        counts = [Counter(grams(one, n)) for one in words]
        first: dict[Gram, tuple[int, int]] = {}
        """n-gram -> (most occurrences in a text, which)"""
        second = Counter[Gram]()
        """most occurrences in another text than that"""
        for number, counted in enumerate(counts):
            for gram, count in counted.items():
                most, _ = first.get(gram, (0, -1))
                if count > most:
                    first[gram], count = (count, number), most
                second[gram] = max(second[gram], count)
        for number, counted in enumerate(counts):
            others = {gram: second[gram] if first[gram][1] == number else first[gram][0] for gram in counted}
            if total := counted.total():
                matches = sum(min(count, others[gram]) for gram, count in counted.items())
                logs[number].append(math.log((matches or NO_MATCH) / total))
    total_bleu = 0.0
    for number, (length, own) in enumerate(zip(lengths, logs, strict=True)):
        if own:
            nearest = min(lengths[:number] + lengths[number + 1 :], key=lambda other: (abs(other - length), other))
            total_bleu += math.exp(min(0.0, 1 - nearest / length) + math.fsum(own) / len(own))
    return total_bleu / len(texts)


def mean_diversity(problems: Sequence[Sequence[str]]) -> dict[str, float]:
    """{"distinct", "self_bleu"}: distinct bigrams and self-BLEU of each problem's texts, means over those of several;
    {} without such."""
    several = [texts for texts in problems if len(texts) > 1]
    kinds = {"distinct": distinct, "self_bleu": self_bleu}
    return {name: math.fsum(map(kind, several)) / len(several) for name, kind in kinds.items()} if several else {}
