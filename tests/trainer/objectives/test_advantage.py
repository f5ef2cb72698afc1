"""Advantages by hand and, of one group, against gradients of their objectives: all groups of a few arms are enumerated,
pi = softmax(theta), s(a)_j = 1[a = j] - pi_j. Then weights of tokens, and the sequences that carry both."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.config import Config
from shared.errors import NonFinite
from shared.sections import RewardWeights
from shared.statistics import exact_majority_at_k
from shared.types import Completion, Group, Problem, Prompt, Reward, Verdict
from tests.tables import read_table
from tests.trainer.objectives.named import example
from trainer.objectives import baselines
from trainer.objectives.advantage import advantages, deviation, diverse, group_advantages, token_weights
from trainer.objectives.baselines import best_of, each_reward, leave_one_out, majority_of, maxrl, mean_baseline
from trainer.objectives.objective import train_sequences
from trainer.objectives.registry import objective_of, read_objective
from trainer.objectives.sequences import Demonstration, sft_sequences

Arms = Sequence[int]
Formula = Callable[[list[float]], list[float]]
ANSWERS = ("7", "8", "9", None)
"""of four arms; the first is right"""


@pytest.mark.parametrize("row", read_table("trainer/objectives/formulas"), ids=lambda row: row["case"])
def test_formulas_by_hand(row):
    assert getattr(baselines, row["formula"])(*row["arguments"]) == pytest.approx(row["expected"], abs=1e-6)


def test_equal_rewards_give_exactly_zero():
    equal = [0.7] * 6
    assert math.fsum(equal) / 6 != 0.7, "their mean rounds to another number"
    for formula in (mean_baseline, leave_one_out, maxrl):
        assert formula(equal) == [0.0] * 6 and formula([]) == []
    assert each_reward([equal, equal], [1.0, 0.5]) == [0.0] * 6
    for k in range(2, 7):
        assert best_of(equal, k) == majority_of([True] * 6, ["7"] * 6, k) == [0.0] * 6
        assert majority_of([False] * 6, [None, "a", "a", "b", "c", "c"], k) == [0.0] * 6


def expected(p: float, size: int, formula: Callable[[Arms], list[float]]) -> tuple[float, float]:
    """Mean and variance, over all groups of `size` of two arms, of the first entry of g = (1/n) sum_i A_i s_i."""
    mean = square = 0.0
    for group in itertools.product(range(2), repeat=size):
        values = formula(group)
        first = math.fsum(value for arm, value in zip(group, values, strict=True) if arm == 0)
        gradient = (first - math.fsum(values) * p) / size
        chance = p ** group.count(0) * (1 - p) ** group.count(1)
        mean, square = mean + chance * gradient, square + chance * gradient**2
    return mean, square - mean**2


def of_rewards(formula: Formula) -> Callable[[Arms], list[float]]:
    """Of two arms the first is right."""
    return lambda group: formula([float(arm == 0) for arm in group])


def of_votes(k: int) -> Callable[[Arms], list[float]]:
    return lambda group: majority_of([arm == 0 for arm in group], [ANSWERS[arm] for arm in group], k)


def best(k: int) -> Formula:
    return lambda rewards: best_of(rewards, k)


def centred_best(k: int) -> Formula:
    return lambda rewards: mean_baseline(best_of(rewards, k))


def gradients() -> Iterator[tuple[str, float, int, Callable[[Arms], list[float]], float]]:
    """(case, p, size of the group, its advantages, the gradient of their objective)"""
    for p, size, shrunk in ((0.5, 2, 0.125), (0.5, 4, 0.1875), (0.2, 4, 0.12), (0.2, 8, 0.14)):
        # d E r / d theta = p(1 - p), which the group's mean makes 1 - 1/n times as large
        yield "less the mean", p, size, of_rewards(mean_baseline), shrunk
        yield "less the mean of the others", p, size, of_rewards(leave_one_out), p * (1 - p)
    for p, size in itertools.product((0.05, 0.3, 0.5, 0.9), (2, 3, 4, 7)):
        # d/dp of -sum_{m=1}^{M} (1 - p)^m / m is sum_{m=1}^{M} (1 - p)^(m-1), times dp/dtheta = p(1 - p); M = n - 1,
        # and n without a baseline, r_i / mean
        terms = [p * (1 - p) ** m for m in range(1, size + 1)]
        yield "maxrl: maximum likelihood to the order n - 1", p, size, of_rewards(maxrl), sum(terms[:-1])
        plain = of_rewards(lambda rewards: [r * len(rewards) / max(1, sum(rewards)) for r in rewards])
        yield "maxrl without a baseline", p, size, plain, sum(terms)
    for p, k, gradient in ((0.5, 4, 0.125), (0.1, 4, 0.26244), (0.25, 4, 0.3164063), (0.1, 8, 0.3443737)):
        # d (1 - (1 - p)^k) / d theta = k p (1 - p)^k
        for size in (k, k + 1, k + 2):
            yield f"pass at {k}", p, size, of_rewards(best(k)), gradient
    for p, size in ((0.5, 4), (0.1, 4), (0.25, 3)):
        # who is right alone has n - 1, the others -1: g is 1 - 1/n instead of 1 - p, where it is not 0
        centred = (size - 1) * p * (1 - p) ** (size - 1)
        yield "centred pass at n", p, size, of_rewards(centred_best(size)), centred
    for size in (3, 4, 5, 6):  # E f = p^3 + 3 p^2 (1 - p), d E f / d theta = 6 p^2 (1 - p)^2
        yield "majority of 3", 0.6, size, of_votes(3), 0.3456


@pytest.mark.parametrize(("case", "p", "size", "formula", "gradient"), gradients())
def test_a_groups_mean_gradient_is_that_of_its_objective(case, p, size, formula, gradient):
    assert expected(p, size, formula)[0] == pytest.approx(gradient, abs=1e-7)


@pytest.mark.parametrize(
    ("p", "k", "variance", "plain"),
    [(0.5, 4, 0.0469, 0.7344), (0.1, 4, 0.1673, 0.1861), (0.25, 4, 0.1372, 0.3335), (0.1, 8, 0.1913, 0.3259)],
)
def test_more_completions_only_lower_the_variance_of_pass_at_k(p, k, variance, plain):
    """f sum_i s_i, leaving none out, is unbiased too, and noisier."""
    spreads = [expected(p, size, of_rewards(best(k)))[1] for size in (k, k + 1, k + 2)]
    assert spreads[0] == pytest.approx(variance, abs=5e-5) and spreads[0] - 1e-3 > spreads[1] > spreads[2] + 1e-3
    naive = of_rewards(lambda rewards: [k * max(rewards)] * k)
    assert expected(p, k, naive) == (pytest.approx(k * p * (1 - p) ** k), pytest.approx(plain, abs=5e-5))


def of_sixteen(p: float, formula: Formula) -> tuple[float, float]:
    """(mean, squared mean over variance) of the gradient from one group of 16 of which a share p is right."""
    first = second = 0.0
    for right in range(17):
        chance = math.comb(16, right) * p**right * (1 - p) ** (16 - right)
        values = formula([1.0] * right + [0.0] * (16 - right))
        gradient = (math.fsum(values[:right]) * (1 - p) - math.fsum(values[right:]) * p) / 16
        first, second = first + chance * gradient, second + chance * gradient**2
    return first, first**2 / (second - first**2)


@pytest.mark.parametrize(("p", "mean", "four", "eight"), [
    (0.05, 0.931, 1.099, 1.251), (0.1, 2.209, 3.216, 3.646), (0.2, 6.713, 16.334, 3.844), (0.3, 17.872, 24.064, 1.432),
    (0.5, 120.0, 3.881, 0.232),
])  # fmt: skip
def test_the_best_of_k_tells_more_than_the_mean_where_few_are_right_and_less_where_many_are(p, mean, four, eight):
    """Squared mean over variance of the gradient from one group of 16, as objectives.md has it: worked out with the
    advantages by hand, 1 - (c - 1)/15 and -c/15, or k C(16 - c, k - 1) / C(15, k - 1) for the c right ones only."""
    clarity = [of_sixteen(p, formula)[1] for formula in (leave_one_out, best(4), best(8))]
    assert clarity == pytest.approx([mean, four, eight], abs=2e-3)


@pytest.mark.parametrize(
    ("p", "size", "plain", "clarity"),
    [(0.05, 0.947, 1.099, 1.155), (0.1, 0.958, 3.216, 3.588), (0.3, 1.018, 24.064, 11.945), (0.5, 1.125, 3.881, 2.130)],
)
def test_centring_helps_the_best_of_four_where_few_are_right(p, size, plain, clarity):
    """The mean of the centred gradient over that of the plain one, and what each tells, as objectives.md has it: a
    right one among c has a (1 - c/16) instead of a (1 - p), a = 4 C(16 - c, 3) / C(15, 3)."""
    mean, clear = of_sixteen(p, best(4))
    centred, clear_centred = of_sixteen(p, centred_best(4))
    assert [centred / mean, clear, clear_centred] == pytest.approx([size, plain, clarity], abs=2e-3)
    by_hand = math.fsum(
        math.comb(16, c) * p**c * (1 - p) ** (16 - c)
        * c / 16 * 4 * math.comb(16 - c, 3) / math.comb(15, 3) * (1 - c / 16)
        for c in range(17)
    )  # fmt: skip
    assert centred == pytest.approx(by_hand, abs=1e-9)


def by_subsets(group: Sequence[float], k: int, value: Callable[[list[float]], float]) -> list[float]:
    """k times the mean over subsets of k that hold i of value(S) - value(S without i), as the definition says."""
    rows = []
    for i in range(len(group)):
        others = [[group[j] for j in rest] for rest in itertools.combinations(set(range(len(group))) - {i}, k - 1)]
        rows.append(k * math.fsum(value([group[i], *rest]) - value(rest) for rest in others) / len(others))
    return rows


@given(st.lists(st.sampled_from([0.5, -1.0, 0.0]) | st.floats(-2, 2), min_size=2, max_size=7))
def test_the_best_is_the_mean_over_all_subsets(rewards):
    for k in range(2, len(rewards) + 1):
        assert best_of(rewards, k) == pytest.approx(by_subsets(rewards, k, max), abs=1e-9)


def majority(group: Sequence[float]) -> float:
    """Share of the right answer (arm 0) among the most frequent of ANSWERS, 0 without votes."""
    counts = Counter(ANSWERS[int(arm)] for arm in group if ANSWERS[int(arm)] is not None)
    first = [answer for answer, count in counts.items() if count == max(counts.values())]
    return 1 / len(first) if ANSWERS[0] in first else 0.0


@given(st.lists(st.integers(0, 3), min_size=1, max_size=7))
def test_the_majority_is_the_mean_over_all_subsets(group):
    for k in range(1, len(group) + 1):
        assert of_votes(k)(group) == pytest.approx(by_subsets(group, k, majority), abs=1e-9)


def test_large_groups_agree_with_the_definition():
    """Summed over i, the definition gives sum_i A_i = n k (U_k - U_{k-1}), U_k the mean of f over all choices of k."""
    draw = random.Random(6)
    answers, rewards = [str(draw.randrange(40)) for _ in range(64)], sorted(draw.gauss(0, 1) for _ in range(64))
    right = [answer in ("1", "2", "3") for answer in answers]
    wrong = list(Counter(answer for answer, is_right in zip(answers, right, strict=True) if not is_right).values())
    gain = exact_majority_at_k(sum(right), wrong, 0, 32) - exact_majority_at_k(sum(right), wrong, 0, 31)
    assert abs(gain) > 1e-3
    assert math.fsum(majority_of(right, answers, 32)) == pytest.approx(64 * 32 * float(gain), abs=1e-9)
    u32, u31 = (
        math.fsum(math.comb(i, k - 1) * reward for i, reward in enumerate(rewards)) / math.comb(64, k) for k in (32, 31)
    )
    assert math.fsum(best_of(rewards, 32)) == pytest.approx(64 * 32 * (u32 - u31), abs=1e-9)


@pytest.mark.parametrize("k", [-1, 0, 1, 4])
def test_a_k_that_cannot_be_is_refused(k):
    with pytest.raises(ValueError, match="objective.advantage.k"):
        best_of([1.0, 0.0, 0.5], k)
    if k != 1:
        with pytest.raises(ValueError, match="objective.advantage.k"):
            majority_of([True, False, False], ["7", "8", "9"], k)


def reward(total: float, verdict: Verdict = Verdict.WRONG, correctness: float = 0.0, answer: str | None = None) -> Any:
    return Reward(total, total - correctness, correctness, 0.0, 0.0, verdict, answer=answer)


def scaled(groups: list[list[float | None]], scale: str) -> list[list[float | None]]:
    """Advantages of total rewards, None where nothing was graded."""
    rows = [[None if value is None else reward(value) for value in group] for group in groups]
    settings = read_objective({"name": "dr_grpo", "advantage": {"scale": scale}})
    return advantages(rows, settings.advantage, RewardWeights())


def of_group(rewards: list[Reward], name: str = "reinforce", **advantage: Any) -> list[float]:
    return group_advantages(rewards, read_objective({"name": name, "advantage": advantage}).advantage, RewardWeights())


SCALES = {
    "none": [[0.75, -0.25, -0.25, -0.25], [0.5, 0.5, -0.5, -0.5]],
    "minibatch": [[1.6036, -0.5345, -0.5345, -0.5345], [1.0690, 1.0690, -1.0690, -1.0690]],
    "group": [[1.7321, -0.5774, -0.5774, -0.5774], [1, 1, -1, -1]],
}


@pytest.mark.parametrize("scale", SCALES)
def test_scales_by_hand(scale):
    """Deviations are the population's: .467707 over all eight, sqrt(3)/4 and 1/2 over each group. Equal rewards give
    exactly 0, and their roundings are not made large."""
    assert deviation([0.75, -0.25, -0.25, -0.25, 0.5, 0.5, -0.5, -0.5]) == pytest.approx(0.467707, abs=1e-6)
    rows = scaled([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]], scale)
    assert rows == [pytest.approx(row, abs=1e-4) for row in SCALES[scale]]
    assert scaled([[0.1 + 0.9 + 0.1] * 7], scale) == [[0.0] * 7]
    assert scaled([[1.1, 1.1, 1.1], [1.0, 0.0, 0.0]], scale)[0] == [0.0, 0.0, 0.0]
    assert scaled([[0.1 + 0.2, 0.3, 0.3, 0.1 + 0.2]], scale) == [pytest.approx([0.0] * 4, abs=1e-15)]
    assert scale == "none" or scaled([[1e-7, 0.0]], scale) == [[1.0, -1.0]], "a difference of rewards, if a small one"


def test_masked_completions_are_in_no_mean_and_no_deviation():
    """(1, 0, -) has mean .5, (1, 1, 0) has 2/3: the masked one is neither a 0 nor a number at all."""
    groups = [[1.0, 0.0, None], [1.0, 1.0, 0.0]]
    assert scaled(groups, "none") == [[0.5, -0.5, None], pytest.approx([1 / 3, 1 / 3, -2 / 3])]
    std = math.sqrt((2 * 0.25 + 2 / 9 + 4 / 9) / 5)
    assert scaled(groups, "minibatch")[0] == [0.5 / std, -0.5 / std, None]


def test_a_group_is_diverse_by_exact_inequality_of_graded_rewards():
    same, near = [reward(1.1), reward(1.1)], [reward(1.1), reward(1.1 - 1e-12)]
    assert not diverse(same, "total") and diverse(near, "total") and diverse(same, "off")
    assert not diverse([reward(1.1), reward(0.0, Verdict.TIMEOUT)], "total")
    bonus = [reward(1.1, correctness=0.9), reward(1.0, correctness=0.9)]
    assert diverse(bonus, "total") and not diverse(bonus, "correctness")
    assert not diverse([reward(0.0, Verdict.CRASH)], "off")


@pytest.mark.parametrize("bad", [reward(math.nan), Reward(1.0, 0.0, math.inf, 0.0, 0.0, Verdict.CORRECT)])
def test_a_reward_that_is_not_finite_is_refused(bad):
    with pytest.raises(NonFinite):
        of_group([reward(1.0), bad])


@pytest.mark.parametrize("row", read_table("trainer/objectives/advantages"), ids=lambda row: row["case"])
def test_advantages_of_one_group_by_hand(row):
    mixed = [reward(1.1, Verdict.CORRECT, 0.9, "4"), reward(0.1, answer="5 x"), reward(0.2, answer=" 5X"), reward(0.0)]
    assert of_group(mixed, **row["advantage"]) == pytest.approx(row["expected"], abs=1e-6)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", ["pass_at_k", "majority", "maxrl"])
def test_what_is_left_of_equal_rewards_is_nothing_to_be_scaled(name, scale):
    """(0.1 + 0.9) - 0.9 is not 0.1: such a rounding is no advantage."""
    group = [Reward(0.1 + 0.9, 0.1, 0.9, 0.0, 0.0, Verdict.CORRECT, answer="1") for _ in range(3)]
    group.append(Reward(0.1, 0.1, 0.0, 0.0, 0.0, Verdict.WRONG, answer="2"))
    bare = [msgspec.structs.replace(each, total=each.correctness, format=0.0) for each in group]
    settings = read_objective({"name": name} | ({} if name == "maxrl" else {"advantage": {"scale": scale}}))
    (whole,), (alone,) = (advantages([rows], settings.advantage, RewardWeights()) for rows in (group, bare))
    assert whole == pytest.approx(alone, abs=1e-12)
    assert name != "pass_at_k" or whole == [0.0] * 4


def test_each_reward_is_normalised_by_itself():
    """Correctness (1, 0, 0, 0) has deviation sqrt(3)/4, whatever its size: (.75, -.25, ...) / .4330127; language
    (0, 1, 1, 0) and length (0, -.1, 0, -.1) have (-1, 1, 1, -1) and (1, -1, 1, -1). Equal formats add nothing."""
    parts = ((1, 0), (0, 1), (0, 1), (0, 0))
    group = [Reward(1.0, 0.1, c * 0.9, 0.0, language * 0.1, Verdict.WRONG) for c, language in parts]
    right, wrong, bonus = 0.75 / (3**0.5 / 4), -0.25 / (3**0.5 / 4), 1.0
    assert of_group(group, "magistral", kind="each_reward", scale="none") == pytest.approx(
        [0.9 * right - 0.1 * bonus, *[0.9 * wrong + 0.1 * bonus] * 2, 0.9 * wrong - 0.1 * bonus]
    )
    correctness, length = [0.9, 0.0, 0.0, 0.0], [0.0, -0.1, 0.0, -0.1]
    sums = pytest.approx([2.2320508, -1.0773503, -0.0773503, -1.0773503], abs=1e-6)
    assert each_reward([correctness, length], [1.0, 0.5]) == sums
    assert each_reward([length, [1000 * value for value in correctness]], [0.5, 1.0]) == sums
    varied, same = [1.0, 0.0, 1.0], [0.1 + 0.2] * 3
    assert each_reward([varied, same], [0.9, 5.0]) == each_reward([varied], [0.9]), "same for all: adds nothing"
    with pytest.raises(ValueError):
        each_reward([[1.0, 0.0], [0.0, 1.0]], [1.0])


@pytest.mark.parametrize("row", read_table("trainer/objectives/token_weights"), ids=lambda row: row["case"])
def test_token_weights_of_a_short_and_a_long_completion(row):
    weights = token_weights(row["lengths"], row["by"], 10)
    assert weights == [pytest.approx(group, abs=1e-9) for group in row["expected"]]
    if row["by"] == "constant":
        with pytest.raises(ValueError, match="max_completion_tokens"):
            token_weights(row["lengths"], "constant")


@given(
    st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=6), min_size=1, max_size=6).filter(
        lambda lengths: any(map(any, lengths))
    ),
    st.sampled_from(["group_tokens", "batch_tokens", "sequence"]),
)
def test_weights_over_all_tokens_sum_to_one(lengths, by):
    flat = zip(itertools.chain(*token_weights(lengths, by)), itertools.chain(*lengths), strict=True)
    assert sum(weight * tokens for weight, tokens in flat) == pytest.approx(1.0)


def group_of(index: int, rewards: list[Reward], lengths: list[int], *ends: str) -> Group:
    reasons = [*ends, *["stop"] * (len(lengths) - len(ends))]
    completions = [
        Completion(index, i, 0, [7] * n, [-1.0] * n, finish_reason=reason)
        for i, (n, reason) in enumerate(zip(lengths, reasons, strict=True))
    ]
    return Group(Prompt(index, Problem("p", "", ""), [4, 5]), completions, [*rewards])


def sequences(groups: list[Group], values: dict[str, float] | None = None, **objective: Any) -> Any:
    config = Config.model_validate({"objective": objective})
    return train_sequences(groups, objective_of(config), config, values=values)


def test_train_sequences_carry_prompt_advantage_and_weight_and_leave_masked_ones_out():
    group = group_of(0, [reward(1.0), reward(0.0), reward(0.0, Verdict.TIMEOUT)], [1, 3, 2])
    first, second = sequences([group], advantage={"scale": "none"})
    assert (first.token_ids, first.prompt_tokens, first.columns) == ([4, 5, 7], 2, {"behaviour": [-1.0]})
    assert (first.advantages, second.advantages) == ([0.5], [-0.5])
    assert first.weight == second.weight == 0.25 and first.group == second.group == 0
    group = group_of(3, [reward(1.0), reward(0.0)], [1, 1])
    first, second = sequences([group], {"p": 0.25}, name="spo")
    assert (first.advantages, second.advantages) == ([0.75], [-0.25]), "soft values come off the rewards"
    assert first.weight == second.weight == 0.5


def test_truncated_completions_leave_the_loss_but_not_the_mean_that_others_are_compared_with():
    """One of each group was cut. Advantages are those of all rewards, (0, 1, 0) and (0, 1); tokens 1 + 2 and 2."""
    groups = [
        group_of(0, [reward(0.0), reward(1.0), reward(0.0)], [4, 1, 2], "length"),
        group_of(1, [reward(0.0), reward(1.0)], [4, 2], "length"),
    ]
    above, below = 1 - 1 / 3, -1 / 3
    for settings, kept, tokens in (({}, (below, above, below, -0.5, 0.5), 13),
                                   ({"mask_truncated": True}, (above, below, 0.5), 5)):  # fmt: skip
        rows = sequences(groups, name="dr_grpo", loss_aggregation="batch_tokens", **settings)
        assert [(each.advantages, each.weight) for each in rows] == [([value], 1 / tokens) for value in kept]


def test_c_rlft_weighs_by_the_exponential_of_the_reward():
    """beta = 1 / ln 10: rewards 1, 0, 0, 2 count 10, 1, 1, 100, of which the mean is 28."""
    groups = [group_of(0, [reward(1.0), reward(0.0)], [2, 2]), group_of(1, [reward(0.0), reward(2.0)], [2, 2])]
    rows = sequences(groups, name=example("c_rlft"), beta=1 / math.log(10))
    assert [value for each in rows for value in each.advantages] == pytest.approx([10 / 28, 1 / 28, 1 / 28, 100 / 28])
    assert [each.advantages for each in sequences(groups[:1], name=example("c_rlft"), beta=1e-6)] == [[2.0], [0.0]]


def test_every_imitated_token_of_demonstrations_weighs_the_same():
    first, second = sft_sequences([Demonstration([1], [2, 3]), Demonstration([1, 1], [2])])
    assert first.weight == second.weight == pytest.approx(1 / 3)
    assert (second.mask, second.columns, second.advantages) == (bytes([0, 0, 2]), {}, [])
    [turns] = sft_sequences([Demonstration([1], [2, 3, 4, 5], bytes([2, 0, 0, 2]))])
    assert (turns.token_ids, turns.mask, turns.weight) == ([1, 2, 3, 4, 5], bytes([0, 2, 0, 0, 2]), 0.5)
