"""Advantages of a group against gradients of their objectives: all groups are enumerated, nothing is sampled.

A policy over a few arms, pi = softmax(theta), stands for the model: s(a)_j = 1[a = j] - pi_j.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.statistics import exact_majority_at_k
from trainer.objectives.baselines import best_of, each_reward, leave_one_out, majority_of, maxrl, mean_baseline

Arms = tuple[int, ...]
ANSWERS = ("7", "8", "9", None)
"""of four arms; the first is right"""


def expected(
    policy: Sequence[float], size: int, advantages: Callable[[Arms], list[float]]
) -> tuple[list[float], float]:
    """(mean of g = (1/n) sum_i A_i s_i over all groups of `size`, variance of g's first entry)."""
    mean, square = [0.0] * len(policy), 0.0
    for group in itertools.product(range(len(policy)), repeat=size):
        chance = math.prod(policy[arm] for arm in group)
        found = advantages(group)
        total, per_arm = math.fsum(found) / size, [0.0] * len(policy)
        for arm, value in zip(group, found, strict=True):
            per_arm[arm] += value / size
        gradient = [per_arm[j] - total * policy[j] for j in range(len(policy))]
        mean = [old + chance * new for old, new in zip(mean, gradient, strict=True)]
        square += chance * gradient[0] ** 2
    return mean, square - mean[0] ** 2


def rewards_of(group: Arms) -> list[float]:
    """Of two arms: the first is right."""
    return [float(arm == 0) for arm in group]


def majority(group: Sequence[int]) -> float:
    """Share of the right answer (arm 0) among the most frequent of ANSWERS, 0 without votes."""
    counts = Counter(ANSWERS[arm] for arm in group if ANSWERS[arm] is not None)
    first = [answer for answer, count in counts.items() if count == max(counts.values())]
    return 1 / len(first) if ANSWERS[0] in first else 0.0


def majority_advantages(group: Arms, k: int) -> list[float]:
    return majority_of([arm == 0 for arm in group], [ANSWERS[arm] for arm in group], k)


def by_subsets(group: Sequence[float], k: int, value: Callable[[list[float]], float]) -> list[float]:
    """k times the mean over subsets of k that hold i of value(S) - value(S without i), as the definition says."""
    found = []
    for i in range(len(group)):
        others = [[group[j] for j in rest] for rest in itertools.combinations(set(range(len(group))) - {i}, k - 1)]
        found.append(k * math.fsum(value([group[i], *rest]) - value(rest) for rest in others) / len(others))
    return found


def assert_expected(advantages: Callable[[Arms], list[float]], p: float, size: int, gradient: float) -> float:
    """That the mean gradient of two arms is this one; returns its variance."""
    mean, variance = expected((p, 1 - p), size, advantages)
    assert mean == pytest.approx([gradient, -gradient], abs=1e-6)
    return variance


@pytest.mark.parametrize(("p", "size", "centred"), [(0.5, 2, 0.125), (0.5, 4, 0.1875), (0.2, 4, 0.12), (0.2, 8, 0.14)])
def test_the_groups_mean_shrinks_the_gradient_and_the_mean_of_the_others_does_not(
    p: float, size: int, centred: float
) -> None:
    """d E r / d theta = p(1 - p)."""
    assert centred == pytest.approx((1 - 1 / size) * p * (1 - p))
    assert_expected(lambda group: mean_baseline(rewards_of(group)), p, size, centred)
    assert_expected(lambda group: leave_one_out(rewards_of(group)), p, size, p * (1 - p))


def test_formulas_by_hand() -> None:
    rewards = [1.0, 0.0, 0.0, 0.0]
    assert mean_baseline(rewards) == [0.75, -0.25, -0.25, -0.25]
    assert leave_one_out(rewards) == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])
    assert leave_one_out([2.0, 0.5, 0.2]) == pytest.approx([2.0 - 0.35, 0.5 - 1.1, 0.2 - 1.25])
    assert leave_one_out([0.7]) == [0.0]
    assert maxrl(rewards) == [3.0, -1.0, -1.0, -1.0]
    assert maxrl([1.0, 1.0, 0.0, 0.5]) == pytest.approx([0.6, 0.6, -1.0, -0.2])
    assert maxrl([-0.1, 0.0, -0.1, 0.0]) == [0.0] * 4, "not for rewards below 0"
    assert best_of([0.2, 0.9, 0.5, 0.5], 4) == pytest.approx([0.0, 4 * 0.4, 0.0, 0.0])
    assert best_of([0.0, 1.0, 1.0, 0.0], 4) == [0.0] * 4, "two are right: none is missed"
    # the first is chosen with the second (adds 0) or with the wrong one (adds 1): 2 * 1/2
    assert best_of([1.0, 1.0, 0.0], 2) == [1.0, 1.0, 0.0]
    # all three of three: without a right one 1 - 1 tie (1/2), without the wrong one still right
    assert majority_of([True, True, False], ["7", "7.0", "8"], 3) == [1.5, 1.5, 0.0]
    assert majority_of([True, True, False], ["7", None, "8"], 3) == [1.5, 1.5, 0.0], "right, whatever its form"
    # 1 - 1 tie: f = 1/2; without the right vote 0, without the wrong one 1; silence changes nothing
    assert majority_of([True, False, False], ["7", "8", None], 3) == [1.5, -1.5, 0.0]
    assert majority_of([True], ["7"], 1) == [1.0]


def test_equal_rewards_give_exactly_zero() -> None:
    equal = [0.7] * 6
    assert math.fsum(equal) / 6 != 0.7, "their mean rounds to another number"
    for formula in (mean_baseline, leave_one_out, maxrl):
        assert formula(equal) == [0.0] * 6
        assert formula([]) == []
    assert all(best_of(equal, k) == [0.0] * 6 for k in range(2, 7))
    assert each_reward([equal, equal], [1.0, 0.5]) == [0.0] * 6
    for k in range(2, 7):
        assert majority_of([True] * 6, ["7"] * 6, k) == [0.0] * 6
        assert majority_of([False] * 6, [None, "a", "a", "b", "c", "c"], k) == [0.0] * 6


@pytest.mark.parametrize("p", [0.05, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_maxrl_is_maximum_likelihood_to_the_order_of_the_group_less_one(p: float, size: int) -> None:
    """d/dp of -sum_{m=1}^{M} (1 - p)^m / m is sum_{m=1}^{M} (1 - p)^(m-1), times dp/dtheta = p(1 - p); M = n - 1."""

    def series(order: int) -> float:
        return p * (1 - p) * sum((1 - p) ** (m - 1) for m in range(1, order + 1))

    assert_expected(lambda group: maxrl(rewards_of(group)), p, size, series(size - 1))
    assert abs(series(size - 1) - series(size)) > 1e-8, "one order more is another gradient"
    # without a baseline, r_i / mean: one order more
    assert_expected(lambda group: [r * size / max(1, group.count(0)) for r in rewards_of(group)], p, size, series(size))


@pytest.mark.parametrize(
    ("p", "k", "gradient", "variance", "plain"),
    [(0.5, 4, 0.125, 0.0469, 0.7344), (0.1, 4, 0.26244, 0.1673, 0.1861), (0.25, 4, 0.31641, 0.1372, 0.3335),
     (0.1, 8, 0.34437, 0.1913, 0.3259)],
)  # fmt: skip
def test_pass_at_k_has_its_gradient_and_more_completions_only_lower_the_variance(
    p: float, k: int, gradient: float, variance: float, plain: float
) -> None:
    """d (1 - (1 - p)^k) / d theta = k p (1 - p)^k. f sum_i s_i, leaving none out, is unbiased too, and noisier."""
    exact = k * p * (1 - p) ** k
    assert exact == pytest.approx(gradient, abs=1e-5)
    spread = assert_expected(lambda group: best_of(rewards_of(group), k), p, k, exact)
    assert spread == pytest.approx(variance, abs=5e-5)
    naive = assert_expected(lambda group: [k * max(rewards_of(group))] * k, p, k, exact)
    assert naive == pytest.approx(plain, abs=5e-5)
    for size in (k + 1, k + 2):
        smaller = assert_expected(lambda group: best_of(rewards_of(group), k), p, size, exact)
        assert smaller < spread - 1e-3
        spread = smaller


@pytest.mark.parametrize(
    ("p", "mean", "four", "eight"),
    [(0.05, 0.931, 1.099, 1.251), (0.1, 2.209, 3.216, 3.646), (0.2, 6.713, 16.334, 3.844), (0.3, 17.872, 24.064, 1.432),
     (0.5, 120.0, 3.881, 0.232)],
)  # fmt: skip
def test_the_best_of_k_tells_more_than_the_mean_where_few_are_right_and_less_where_many_are(
    p: float, mean: float, four: float, eight: float
) -> None:
    """Squared mean over variance of the gradient from one group of 16, as objectives.md has it: worked out with the
    advantages by hand, 1 - (c - 1)/15 and -c/15, or k C(16 - c, k - 1) / C(15, k - 1) for the c right ones only."""
    found = [of_sixteen(p, one) for one in (leave_one_out, lambda row: best_of(row, 4), lambda row: best_of(row, 8))]
    assert [clarity for _, clarity in found] == pytest.approx([mean, four, eight], abs=2e-3)


def of_sixteen(p: float, advantages: Callable[[list[float]], list[float]]) -> tuple[float, float]:
    """(mean, squared mean over variance) of the gradient from one group of 16 of which a share p is right."""
    first = second = 0.0
    for right in range(17):
        chance = math.comb(16, right) * p**right * (1 - p) ** (16 - right)
        found = advantages([1.0] * right + [0.0] * (16 - right))
        gradient = (math.fsum(found[:right]) * (1 - p) - math.fsum(found[right:]) * p) / 16
        first, second = first + chance * gradient, second + chance * gradient**2
    return first, first**2 / (second - first**2)


@pytest.mark.parametrize(("p", "size"), [(0.5, 4), (0.1, 4), (0.25, 3)])
def test_the_centred_best_of_all_by_enumeration(p: float, size: int) -> None:
    """k = n: who is right alone has n - 1, the others -1. So g = (1 - 1/n) instead of 1 - p, where it is not 0:
    the expectation is (n - 1) p (1 - p)^(n - 1), too large by (1 - 1/n) / (1 - p)."""
    assert mean_baseline(best_of([0.0, 1.0, 0.0, 0.0], 4)) == [-1.0, 3.0, -1.0, -1.0]
    exact = (size - 1) * p * (1 - p) ** (size - 1)
    assert_expected(lambda group: mean_baseline(best_of(rewards_of(group), size)), p, size, exact)


@pytest.mark.parametrize(
    ("p", "size", "plain", "clarity"),
    [(0.05, 0.947, 1.099, 1.155), (0.1, 0.958, 3.216, 3.588), (0.3, 1.018, 24.064, 11.945), (0.5, 1.125, 3.881, 2.130)],
)
def test_centring_helps_the_best_of_four_where_few_are_right(
    p: float, size: float, plain: float, clarity: float
) -> None:
    """The mean of the centred gradient over that of the plain one, and what each tells, as objectives.md has it: a
    right one among c has a (1 - c/16) instead of a (1 - p), a = 4 C(16 - c, 3) / C(15, 3)."""
    mean, told = of_sixteen(p, lambda row: best_of(row, 4))
    centred, told_centred = of_sixteen(p, lambda row: mean_baseline(best_of(row, 4)))
    assert [centred / mean, told, told_centred] == pytest.approx([size, plain, clarity], abs=2e-3)
    by_hand = math.fsum(
        math.comb(16, c) * p**c * (1 - p) ** (16 - c)
        * c / 16 * 4 * math.comb(16 - c, 3) / math.comb(15, 3) * (1 - c / 16)
        for c in range(17)
    )  # fmt: skip
    assert centred == pytest.approx(by_hand, abs=1e-9)


@given(st.lists(st.sampled_from([0.5, -1.0, 0.0]) | st.floats(-2, 2), min_size=2, max_size=7))
def test_the_best_is_the_mean_over_all_subsets(rewards: list[float]) -> None:
    for k in range(2, len(rewards) + 1):
        assert best_of(rewards, k) == pytest.approx(by_subsets(rewards, k, max), abs=1e-9)


@pytest.mark.parametrize("size", [3, 4, 5, 6])
def test_the_majority_of_three_has_its_gradient_for_any_number_of_completions(size: int) -> None:
    """E f = p^3 + 3 p^2 (1 - p), d E f / d theta = 6 p^2 (1 - p)^2 = 0.3456 for p = 0.6."""
    assert_expected(lambda group: majority_advantages(group, 3), 0.6, size, 0.3456)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=7))
def test_the_majority_is_the_mean_over_all_subsets(group: list[int]) -> None:
    for k in range(1, len(group) + 1):
        subsets = by_subsets(group, k, lambda arms: majority([int(arm) for arm in arms]))
        assert majority_advantages(tuple(group), k) == pytest.approx(subsets, abs=1e-9)


def test_large_groups_agree_with_the_definition() -> None:
    """Summed over i, the definition gives sum_i A_i = n k (U_k - U_{k-1}), U_k the mean of f over all choices of k."""
    draw = random.Random(6)
    answers = [str(draw.randrange(40)) for _ in range(64)]
    rewards = [draw.gauss(0, 1) for _ in range(64)]
    right = [answer in ("1", "2", "3") for answer in answers]
    found, best = majority_of(right, answers, 32), best_of(rewards, 32)
    wrong = list(Counter(answer for answer, is_right in zip(answers, right, strict=True) if not is_right).values())
    gain = exact_majority_at_k(sum(right), wrong, 0, 32) - exact_majority_at_k(sum(right), wrong, 0, 31)
    assert abs(gain) > 1e-3
    assert math.fsum(found) == pytest.approx(64 * 32 * float(gain), abs=1e-9)

    def mean_best(k: int) -> float:
        ordered = sorted(rewards)
        return math.fsum(math.comb(i, k - 1) * reward for i, reward in enumerate(ordered)) / math.comb(64, k)

    assert math.fsum(best) == pytest.approx(64 * 32 * (mean_best(32) - mean_best(31)), abs=1e-9)


@pytest.mark.parametrize("k", [-1, 0, 1, 4])
def test_a_k_that_cannot_be_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match=f"objective.advantage.k = {k} "):
        best_of([1.0, 0.0, 0.5], k)
    if k != 1:
        with pytest.raises(ValueError, match=f"objective.advantage.k = {k} "):
            majority_of([True, False, False], ["7", "8", "9"], k)


def test_each_reward_is_scaled_by_itself() -> None:
    correctness, length = [0.9, 0.0, 0.0, 0.0], [0.0, -0.1, 0.0, -0.1]
    # (0.75, -0.25 ...) / 0.4330127 whatever the size of the reward; (1, -1, 1, -1)
    found = each_reward([correctness, length], [1.0, 0.5])
    assert found == pytest.approx([2.2320508, -1.0773503, -0.0773503, -1.0773503], abs=1e-6)
    swapped = each_reward([length, [1000 * value for value in correctness]], [0.5, 1.0])
    assert swapped == pytest.approx(found)

    varied, same = [1.0, 0.0, 1.0], [0.1 + 0.2] * 3
    assert each_reward([varied, same], [0.9, 5.0]) == each_reward([varied], [0.9]), "same for all: adds nothing"
    with pytest.raises(ValueError, match="shorter"):
        each_reward([[1.0, 0.0], [0.0, 1.0]], [1.0])
