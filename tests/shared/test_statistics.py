"""Each formula against values computed by hand, and against all choices one by one where that can be done."""

import itertools
import math
import random
from collections import Counter

import pytest

from shared import statistics
from shared.diversity import ORDERS, distinct, grams, mean_diversity, self_bleu


def test_pass_at_k_is_the_share_of_choices_with_a_right_one():
    """Of every small case all choices, one by one; by hand where binomials are beyond any float."""
    for completions in range(1, 7):
        for right, k in itertools.product(range(completions + 1), range(1, completions + 1)):
            choices = list(itertools.combinations([True] * right + [False] * (completions - right), k))
            share = sum(map(any, choices)) / len(choices)
            assert statistics.pass_at_k(completions, right, k) == pytest.approx(share, abs=1e-15)
    assert (
        statistics.pass_at_k(2000, 1, 1000) == pytest.approx(0.5, abs=1e-15) and statistics.pass_at_k(64, 32, 1) == 0.5
    )
    p, n, k = 0.3, 6, 3  # unbiased: the mean over draws is 1 - (1 - p)^k
    mean = sum(math.comb(n, c) * p**c * (1 - p) ** (n - c) * statistics.pass_at_k(n, c, k) for c in range(n + 1))
    assert mean == pytest.approx(1 - (1 - p) ** k)
    for right, k in ((2, 0), (2, 5), (5, 1), (-1, 1)):
        with pytest.raises(ValueError, match="pass@"):
            statistics.pass_at_k(4, right, k)


@pytest.mark.parametrize(("right", "wrong", "silent", "k", "expected"), [
    (2, [1], 0, 3, 1.0), (1, [1, 1], 0, 3, 1 / 3), (1, [2], 0, 3, 0.0), (1, [1], 2, 4, 0.5), (0, [], 2, 2, 0.0),
    (2, [1, 1], 0, 2, 1 / 6 + 4 / 6 / 2),  # six pairs: one of both right, four of one right (a tie), one of none
    (2, [2], 0, 3, 0.5),  # four triples: two with two right, two with two wrong
    (1, [1], 2, 2, 1 / 6 / 2 + 2 / 6),  # right with wrong; right with silence, twice
])  # fmt: skip
def test_majority_at_k(right, wrong, silent, k, expected):
    assert statistics.majority_at_k(right, wrong, silent, k) == pytest.approx(expected)


def test_majority_at_k_is_the_mean_over_all_choices():
    draw = random.Random(5)
    for _ in range(60):
        wrong = [draw.randint(1, 3) for _ in range(draw.randint(0, 3))]
        right, silent = draw.randint(0, 3), draw.randint(0, 2)
        votes = ["right"] * right + [f"w{i}" for i, many in enumerate(wrong) for _ in range(many)] + [""] * silent
        for k in range(1, len(votes) + 1):
            scores = []
            for chosen in itertools.combinations(votes, k):
                counts = Counter(vote for vote in chosen if vote)
                first = [vote for vote, count in counts.items() if count == max(counts.values())]
                scores.append(1 / len(first) if "right" in first else 0.0)
            assert statistics.majority_at_k(right, wrong, silent, k) == pytest.approx(sum(scores) / len(scores))
    # of many completions it is quick
    assert statistics.majority_at_k(20, [1] * 44, 0, 64) == 1.0 == statistics.majority_at_k(3000, [2999], 0, 5999)
    assert 0.9 < statistics.majority_at_k(20, [1] * 44, 0, 32) < 1.0
    assert statistics.majority_at_k(100, [100, 100], 100, 32) == pytest.approx(1 / 3), "by symmetry"


def test_intervals_of_a_mean():
    mean, half = statistics.mean_and_half_width([1.0, 0.0, 0.5, 0.5])
    assert mean == 0.5 and half == pytest.approx(1.96 * math.sqrt((0.25 + 0.25) / 3 / 4))
    assert statistics.mean_and_half_width([0.25]) == (0.25, 0.0)
    draw = random.Random(1)
    values = [float(draw.random() < 0.3) for _ in range(900)]
    mean, half = statistics.mean_and_half_width(values)
    interval = statistics.cluster_bootstrap(values, seed=3)
    assert interval == pytest.approx((mean - half, mean + half), abs=0.003), "problems are many"
    assert statistics.cluster_bootstrap(values, seed=3) == interval, "one seed, one interval"
    assert statistics.cluster_bootstrap([1.0] * 7) == (1.0, 1.0) and statistics.cluster_bootstrap([0.0]) == (0.0, 0.0)
    assert statistics.cluster_bootstrap([0.0, 1.0]) == (0.0, 1.0)  # a quarter of the resamples is 0, a quarter is 1


@pytest.mark.parametrize(("count", "seed", "low", "high"), [
    (7, 0, 0.10714285714285714, 0.5714285714285714), (7, 1, 0.07142857142857142, 0.6071428571428571),
    (50, 0, 0.34, 0.535), (600, 0, 0.3954166666666667, 0.45625), (600, 1, 0.3954166666666667, 0.45666666666666667),
])  # fmt: skip
def test_intervals_are_those_of_earlier_versions_bit_for_bit(count, seed, low, high):
    """Values of our own resampling, written down before scipy took its place: published intervals stay."""
    dice = random.Random(count)
    assert statistics.cluster_bootstrap([dice.choice([0, 0.25, 0.5, 1]) for _ in range(count)], seed) == (low, high)


def test_paired_differences_and_exact_permutations():
    draw = random.Random(2)
    first = [draw.random() for _ in range(200)]
    difference = statistics.paired_difference(first, [value + 0.01 for value in first])
    assert difference.mean == pytest.approx(0.01)
    assert difference.interval == pytest.approx((0.01, 0.01)), "how hard the problems are does not widen it"
    with pytest.raises(ValueError):
        statistics.paired_difference([1.0], [1.0, 0.0])
    # five differences of 1: of the 32 exchanges 2 are as far out, p = 1/16
    assert statistics.paired_permutation([1.0] * 5, [0.0] * 5) == pytest.approx(2 / 32)
    assert statistics.paired_permutation([0.5, 1.0], [0.5, 1.0]) == 1.0
    assert statistics.paired_permutation([1.0, 0.0] * 50, [0.0, 1.0] * 50) > 0.9


def test_ratings_are_those_of_maximum_likelihood():
    """Of two players it is greatest where the expected score is the mean score, 1 / (1 + 10^(-100 / 500)) = 0.6131 with
    a hundred points more: 500 log10(.6131 / .3869) = 100."""
    points = statistics.elo([("a", "b", 1.0)] * 6131 + [("b", "a", 1.0)] * 3869)
    assert points["a"] - points["b"] == pytest.approx(100, abs=0.1) and points["a"] == -points["b"]
    circle = statistics.elo([("a", "b", 1.0), ("b", "c", 1.0), ("c", "a", 1.0)])
    assert all(abs(points) < 1e-3 for points in circle.values())
    chain = statistics.elo([(*pair, score) for pair in ("ab", "bc") for score in [1.0] * 3000 + [0.0] * 1000])
    step = 500 * math.log10(3)
    assert [chain[name] for name in "abc"] == pytest.approx([step, 0, -step], abs=0.2)
    points = statistics.elo([("a", "b", 1.0)] * 10)  # one that always wins has a finite rating
    assert points["a"] - points["b"] == pytest.approx(500 * math.log10(10.25 / 0.25), abs=0.1)


def test_intervals_hold_the_rating_and_narrow_with_games():
    """The standard error of 500 log10(p / (1 - p)) is 500 / ln 10 / sqrt(n p (1 - p)), a half for each player."""
    games = [("a", "b", 1.0)] * 240 + [("a", "b", 0.0)] * 160
    low, high = statistics.elo_intervals(games)["a"]
    assert low < statistics.elo(games)["a"] < high
    assert (high - low) / 2 == pytest.approx(1.96 * 250 / math.log(10) / math.sqrt(400 * 0.24), rel=0.15)
    assert statistics.elo_intervals(games) == statistics.elo_intervals(games)


def test_distinct_by_hand():
    """a b a b has bigrams ab ba ab; with "b a": ab ba ab ba, two different of four. Case and blanks play no part."""
    assert distinct(["a b A  b", "b a"]) == 2 / 4 and distinct(["a b a b", "b a"], 1) == 2 / 6
    assert distinct(["a b", "c d"]) == 1.0 and distinct(["a", ""]) == 0.0
    assert distinct(["海水咸"], 1) == 1.0, "a Han character is a word"


def test_self_bleu_by_hand():
    """Shared of five: 3 words, 2 bigrams, 1 trigram, none of four (0.1 instead). The short one: all of its two orders,
    brevity exp(1 - 4/2)."""
    assert self_bleu(["a b c d", "a b c d", "A b c d"]) == pytest.approx(1.0)
    assert self_bleu(["a b c d e", "a b c x y"]) == pytest.approx((3 / 5 * 2 / 4 * 1 / 3 * 0.1 / 2) ** 0.25)
    short, long = math.exp(1 - 4 / 2), (2 / 4 * 1 / 3 * 0.1 / 2 * 0.1 / 1) ** 0.25
    assert self_bleu(["a b", "a b c d"]) == pytest.approx((short + long) / 2)
    assert self_bleu(["", "a b c d"]) == pytest.approx((0.0 + (0.1 / 4 * 0.1 / 3 * 0.1 / 2 * 0.1) ** 0.25) / 2)
    # a word counts at most as often as one reference has it: a a a against a a and a: two words of three, one bigram of
    # two, no trigram. a a: all. a: all, brevity exp(-1)
    first = (2 / 3 * 1 / 2 * 0.1 / 1) ** (1 / 3)
    assert self_bleu(["a a a", "a a", "a"]) == pytest.approx((first + 1 + math.exp(1 - 2 / 1)) / 3)
    means = mean_diversity([["a b", "a b"], ["a b", "c d"], ["alone here"]])  # over problems with several texts
    assert means["distinct"] == (1 / 2 + 1) / 2
    assert means["self_bleu"] == pytest.approx((1 + math.sqrt(0.1 / 2 * 0.1 / 1)) / 2)
    assert mean_diversity([["one"], []]) == {}


def test_the_short_way_to_self_bleu_is_the_definition():
    draw = random.Random(5)
    texts = [[draw.choice("abc") for _ in range(draw.randint(4, 9))] for _ in range(6)]

    def bleu(text: list[str], others: list[list[str]]) -> float:
        logs = []
        for n in ORDERS:
            counted = Counter(grams(text, n))
            known = [Counter(grams(other, n)) for other in others]
            matches = sum(min(count, max(one[gram] for one in known)) for gram, count in counted.items())
            logs.append(math.log((matches or 0.1) / counted.total()))
        nearest = min(map(len, others), key=lambda size: (abs(size - len(text)), size))
        return math.exp(min(0.0, 1 - nearest / len(text)) + sum(logs) / 4)

    exact = sum(bleu(text, texts[:i] + texts[i + 1 :]) for i, text in enumerate(texts)) / 6
    assert self_bleu([" ".join(text) for text in texts]) == pytest.approx(exact)
