"""Distinct n-grams and self-BLEU: values by hand."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from shared.diversity import ORDERS, distinct, grams, mean_diversity, self_bleu


def test_distinct_by_hand() -> None:
    """a b a b has bigrams ab ba ab; with "b a": ab ba ab ba, two different of four. Case and blanks play no part."""
    assert distinct(["a b A  b", "b a"]) == 2 / 4
    assert distinct(["a b a b", "b a"], 1) == 2 / 6
    assert distinct(["a b", "c d"]) == 1.0 and distinct(["a", ""]) == 0.0
    assert distinct(["海水咸"], 1) == 1.0, "a Han character is a word"


def test_self_bleu_by_hand() -> None:
    """Shared of five: 3 words, 2 bigrams, 1 trigram, none of four (0.1 instead). The short one: all of its two orders,
    brevity exp(1 - 4/2)."""
    assert self_bleu(["a b c d", "a b c d", "A b c d"]) == pytest.approx(1.0)
    assert self_bleu(["a b c d e", "a b c x y"]) == pytest.approx((3 / 5 * 2 / 4 * 1 / 3 * 0.1 / 2) ** 0.25)
    short, long = math.exp(1 - 4 / 2), (2 / 4 * 1 / 3 * 0.1 / 2 * 0.1 / 1) ** 0.25
    assert self_bleu(["a b", "a b c d"]) == pytest.approx((short + long) / 2)
    assert self_bleu(["", "a b c d"]) == pytest.approx((0.0 + (0.1 / 4 * 0.1 / 3 * 0.1 / 2 * 0.1) ** 0.25) / 2)


def test_a_word_counts_at_most_as_often_as_one_reference_has_it() -> None:
    """a a a against a a and a: two words of three, one bigram of two, no trigram. a a: all. a: all, brevity exp(-1)."""
    first = (2 / 3 * 1 / 2 * 0.1 / 1) ** (1 / 3)
    assert self_bleu(["a a a", "a a", "a"]) == pytest.approx((first + 1 + math.exp(1 - 2 / 1)) / 3)


def test_the_short_way_is_the_definition() -> None:
    draw = random.Random(5)
    texts = [[draw.choice("abc") for _ in range(draw.randint(4, 9))] for _ in range(6)]

    def bleu(own: list[str], others: list[list[str]]) -> float:
        logs = []
        for n in ORDERS:
            counted = Counter(grams(own, n))
            known = [Counter(grams(other, n)) for other in others]
            matches = sum(min(count, max(one[gram] for one in known)) for gram, count in counted.items())
            logs.append(math.log((matches or 0.1) / counted.total()))
        nearest = min(map(len, others), key=lambda size: (abs(size - len(own)), size))
        return math.exp(min(0.0, 1 - nearest / len(own)) + sum(logs) / 4)

    exact = sum(bleu(own, texts[:i] + texts[i + 1 :]) for i, own in enumerate(texts)) / 6
    assert self_bleu([" ".join(text) for text in texts]) == pytest.approx(exact)


def test_means_are_over_problems_with_several_texts() -> None:
    found = mean_diversity([["a b", "a b"], ["a b", "c d"], ["alone here"]])
    assert found["distinct"] == (1 / 2 + 1) / 2
    assert found["self_bleu"] == pytest.approx((1 + math.sqrt(0.1 / 2 * 0.1 / 1)) / 2)
    assert mean_diversity([["one"], []]) == {}
