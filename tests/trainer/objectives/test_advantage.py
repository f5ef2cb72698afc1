"""Advantages and weights of a minibatch by hand: scales, masks, denominators, and the sequences that carry them."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.config import Config
from shared.errors import NonFinite
from shared.sections import RewardWeights
from shared.types import Completion, Group, Problem, Prompt, Reward, Verdict
from trainer.objectives.advantage import advantages, deviation, diverse, group_advantages, token_weights
from trainer.objectives.objective import train_sequences
from trainer.objectives.registry import objective_of, read_objective
from trainer.objectives.sequences import Demonstration, sft_sequences

TWO_GROUPS = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]]
SCALES = ("minibatch", "group", "none")


def reward(
    total: float, verdict: Verdict = Verdict.WRONG, correctness: float = 0.0, answer: str | None = None
) -> Reward:
    return Reward(total, total - correctness, correctness, 0.0, 0.0, verdict, answer=answer)


def scaled(groups: list[list[float | None]], scale: str) -> list[list[float | None]]:
    """Advantages of total rewards, None where nothing was graded."""
    rows = [[None if value is None else reward(value) for value in group] for group in groups]
    settings = read_objective({"name": "dr_grpo", "advantage": {"scale": scale}})
    return advantages(rows, settings.advantage, RewardWeights())


def of_group(rewards: list[Reward], name: str = "reinforce", **advantage: Any) -> list[float]:
    return group_advantages(rewards, read_objective({"name": name, "advantage": advantage}).advantage, RewardWeights())


@pytest.mark.parametrize(
    ("scale", "first", "second"),
    [
        ("none", [0.75, -0.25, -0.25, -0.25], [0.5, 0.5, -0.5, -0.5]),
        ("minibatch", [1.6036, -0.5345, -0.5345, -0.5345], [1.0690, 1.0690, -1.0690, -1.0690]),
        ("group", [1.7321, -0.5774, -0.5774, -0.5774], [1, 1, -1, -1]),
    ],
)
def test_scales_by_hand(scale: str, first: list[float], second: list[float]) -> None:
    """Deviations are the population's: .467707 over all eight, sqrt(3)/4 and 1/2 over each group."""
    assert deviation([0.75, -0.25, -0.25, -0.25, 0.5, 0.5, -0.5, -0.5]) == pytest.approx(0.467707, abs=1e-6)
    assert scaled(TWO_GROUPS, scale) == [pytest.approx(first, abs=1e-4), pytest.approx(second, abs=1e-4)]


def test_masked_completions_are_in_no_mean_and_no_deviation() -> None:
    """(1, 0, -) has mean .5, (1, 1, 0) has 2/3: the masked one is neither a 0 nor a number at all."""
    groups = [[1.0, 0.0, None], [1.0, 1.0, 0.0]]
    assert scaled(groups, "none") == [[0.5, -0.5, None], pytest.approx([1 / 3, 1 / 3, -2 / 3])]
    std = math.sqrt((2 * 0.25 + 2 / 9 + 4 / 9) / 5)
    assert scaled(groups, "minibatch")[0] == [0.5 / std, -0.5 / std, None]


@pytest.mark.parametrize("scale", SCALES)
def test_equal_rewards_give_exactly_zero_and_roundings_are_not_made_large(scale: str) -> None:
    assert scaled([[0.1 + 0.9 + 0.1] * 7], scale) == [[0.0] * 7]
    assert scaled([[1.1, 1.1, 1.1], [1.0, 0.0, 0.0]], scale)[0] == [0.0, 0.0, 0.0]
    (rounded,) = scaled([[0.1 + 0.2, 0.3, 0.3, 0.1 + 0.2]], scale)
    assert max(abs(value) for value in rounded if value is not None) < 1e-15
    if scale != "none":
        assert scaled([[1e-7, 0.0]], scale) == [[1.0, -1.0]], "a difference of rewards, though a small one"


def test_a_group_is_diverse_by_exact_inequality_of_graded_rewards() -> None:
    assert not diverse([reward(1.1), reward(1.1)], "total")
    assert diverse([reward(1.1), reward(1.1 - 1e-12)], "total")
    assert not diverse([reward(1.1), reward(0.0, Verdict.TIMEOUT)], "total")
    bonus = [reward(1.1, correctness=0.9), reward(1.0, correctness=0.9)]
    assert diverse(bonus, "total") and not diverse(bonus, "correctness")
    assert diverse([reward(1.1), reward(1.1)], "off")
    assert not diverse([reward(0.0, Verdict.CRASH)], "off")


@pytest.mark.parametrize("bad", [reward(math.nan), Reward(1.0, 0.0, math.inf, 0.0, 0.0, Verdict.CORRECT)])
def test_a_reward_that_is_not_finite_is_refused(bad: Reward) -> None:
    with pytest.raises(NonFinite, match="finite"):
        of_group([reward(1.0), bad])


@pytest.mark.parametrize(
    ("lengths", "by", "expected"),
    [
        ([[1, 3]], "group_tokens", [[0.25, 0.25]]),
        ([[1, 3]], "batch_tokens", [[0.25, 0.25]]),
        ([[1, 3]], "sequence", [[0.5, pytest.approx(1 / 6)]]),
        ([[1, 3]], "constant", [[0.05, 0.05]]),
        # two groups of 4 and 12 tokens: each group weighs one half, or each token 1/16
        ([[1, 3], [6, 6]], "group_tokens", [[1 / 8, 1 / 8], [1 / 24, 1 / 24]]),
        ([[1, 3], [6, 6]], "batch_tokens", [[1 / 16, 1 / 16], [1 / 16, 1 / 16]]),
        # masked completions and groups leave the denominators
        ([[1, 3, 0], [2]], "completions", [[0.25, 0.25, 0.0], [0.5]]),
        ([[1, 0, 3], [0, 0, 0]], "group_tokens", [[0.25, 0.0, 0.25], [0.0, 0.0, 0.0]]),
        ([[2, 0], [0, 0]], "sequence", [[0.5, 0.0], [0.0, 0.0]]),
        ([[2, 0, 4], [0, 0, 0]], "constant", [[0.05, 0.0, 0.05], [0.0, 0.0, 0.0]]),
    ],
)
def test_token_weights_of_a_short_and_a_long_completion(lengths: Any, by: Any, expected: Any) -> None:
    assert token_weights(lengths, by, 10) == expected


def test_a_constant_denominator_needs_its_setting() -> None:
    with pytest.raises(ValueError, match="max_completion_tokens"):
        token_weights([[1]], "constant")


@given(
    st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=6), min_size=1, max_size=6).filter(
        lambda lengths: any(map(any, lengths))
    )
)
def test_weights_over_all_tokens_sum_to_one(lengths: list[list[int]]) -> None:
    for loss_aggregation in ("group_tokens", "batch_tokens", "sequence"):
        weights = token_weights(lengths, loss_aggregation)
        total = sum(w * n for row, row_n in zip(weights, lengths, strict=True) for w, n in zip(row, row_n, strict=True))
        assert total == pytest.approx(1.0)


MIXED = [
    reward(1.1, Verdict.CORRECT, 0.9, "4"),
    reward(0.1, answer="5 x"),
    reward(0.2, answer=" 5X"),
    reward(0.0),
]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"kind": "mean"}, [0.75, -0.25, -0.15, -0.35]),
        ({"kind": "leave_one_out"}, [1.0, -1 / 3, -0.2, -7 / 15]),
        ({"kind": "reward"}, [1.1, 0.1, 0.2, 0.0]),
        ({"kind": "none"}, [0.0] * 4),
        # only the one that is right: 4 (.9 - 0); what is left of the rewards (.2 .1 .2 0) less the others' mean
        ({"kind": "pass_at_k", "k": 0}, [3.6 + 0.1, 0.1 - 2 / 15, 0.1, -1 / 6]),
        # (1 - 1/4) / (1/4) = 3 and -1
        ({"kind": "maxrl"}, [2.7 + 0.1, -0.9 + 0.1 - 2 / 15, -0.9 + 0.1, -0.9 - 1 / 6]),
        # votes 4, 5x, 5x and none. The right one's vote changes nothing, without a 5x it is a tie: 4 (0 - 1/2) .9
        ({"kind": "majority", "k": 0}, [0.1, -1.8 + 0.1 - 2 / 15, -1.8 + 0.1, -1 / 6]),
    ],
)
def test_advantages_of_one_group_by_hand(settings: dict[str, Any], expected: list[float]) -> None:
    assert of_group(MIXED, **settings) == pytest.approx(expected)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", ["pass_at_k", "majority", "maxrl"])
def test_what_is_left_of_equal_rewards_is_nothing_to_be_scaled(name: str, scale: str) -> None:
    """(0.1 + 0.9) - 0.9 is not 0.1: such a rounding is no advantage."""
    group = [Reward(0.1 + 0.9, 0.1, 0.9, 0.0, 0.0, Verdict.CORRECT, answer="1") for _ in range(3)]
    group.append(Reward(0.1, 0.1, 0.0, 0.0, 0.0, Verdict.WRONG, answer="2"))
    bare = [msgspec.structs.replace(each, total=each.correctness, format=0.0) for each in group]
    settings = read_objective({"name": name} | ({} if name == "maxrl" else {"advantage": {"scale": scale}}))  # type: ignore[arg-type]
    (whole,), (expected,) = (advantages([rows], settings.advantage, RewardWeights()) for rows in (group, bare))
    assert whole == pytest.approx(expected, abs=1e-12)
    if name == "pass_at_k":
        assert whole == [0.0] * 4


def test_each_reward_is_normalised_by_itself() -> None:
    """Formats equal: they add nothing. Correctness (1, 0, 0, 0) has deviation sqrt(3)/4; language (0, 1, 1, 0) 1/2."""
    parts = ((1, 0), (0, 1), (0, 1), (0, 0))
    group = [Reward(1.0, 0.1, c * 0.9, 0.0, language * 0.1, Verdict.WRONG) for c, language in parts]
    right, wrong, bonus = 0.75 / (3**0.5 / 4), -0.25 / (3**0.5 / 4), 1.0
    assert of_group(group, "magistral", kind="each_reward", scale="none") == pytest.approx(
        [0.9 * right - 0.1 * bonus, *[0.9 * wrong + 0.1 * bonus] * 2, 0.9 * wrong - 0.1 * bonus]
    )


# ---- sequences -------------------------------------------------------------------------------------------------------


def group_of(index: int, rewards: list[Reward], lengths: list[int], ends: tuple[str, ...] = ()) -> Group:
    reasons = [*ends, *["stop"] * (len(lengths) - len(ends))]
    completions = [
        Completion(index, i, 0, [7] * n, [-1.0] * n, finish_reason=reason)
        for i, (n, reason) in enumerate(zip(lengths, reasons, strict=True))
    ]
    return Group(Prompt(index, Problem("p", "", ""), [4, 5]), completions, [*rewards])


def sequences(groups: list[Group], values: dict[str, float] | None = None, **objective: Any) -> Any:
    config = Config.model_validate({"objective": objective})
    return train_sequences(groups, objective_of(config), config, values=values)


def test_train_sequences_carry_prompt_advantage_and_weight_and_leave_masked_ones_out() -> None:
    group = group_of(0, [reward(1.0), reward(0.0), reward(0.0, Verdict.TIMEOUT)], [1, 3, 2])
    first, second = sequences([group], advantage={"scale": "none"})
    assert (first.token_ids, first.prompt_tokens, first.columns) == ([4, 5, 7], 2, {"behaviour": [-1.0]})
    assert (first.advantages, second.advantages) == ([0.5], [-0.5])
    assert first.weight == second.weight == 0.25 and first.group == second.group == 0


def test_truncated_completions_leave_the_loss_but_not_the_mean_that_others_are_compared_with() -> None:
    """One of each group was cut. Advantages are those of all rewards, (0, 1, 0) and (0, 1); tokens 1 + 2 and 2."""
    groups = [
        group_of(0, [reward(0.0), reward(1.0), reward(0.0)], [4, 1, 2], ("length",)),
        group_of(1, [reward(0.0), reward(1.0)], [4, 2], ("length",)),
    ]

    def trained(**settings: Any) -> list[tuple[list[float], float]]:
        rows = sequences(groups, name="dr_grpo", loss_aggregation="batch_tokens", **settings)
        return [(each.advantages, each.weight) for each in rows]

    above, below = 1 - 1 / 3, -1 / 3
    assert trained() == [([a], 1 / 13) for a in (below, above, below, -0.5, 0.5)]
    assert trained(mask_truncated=True) == [([a], 1 / 5) for a in (above, below, 0.5)]


def test_soft_values_come_off_the_rewards() -> None:
    group = group_of(3, [reward(1.0), reward(0.0)], [1, 1])
    first, second = sequences([group], {"p": 0.25}, name="spo")
    assert (first.advantages, second.advantages) == ([0.75], [-0.25]) and first.weight == second.weight == 0.5


def test_every_imitated_token_of_demonstrations_weighs_the_same() -> None:
    first, second = sft_sequences([Demonstration([1], [2, 3]), Demonstration([1, 1], [2])])
    assert first.weight == second.weight == pytest.approx(1 / 3)
    assert (second.mask, second.columns, second.advantages) == (bytes([0, 0, 2]), {}, [])
    [turns] = sft_sequences([Demonstration([1], [2, 3, 4, 5], bytes([2, 0, 0, 2]))])
    assert (turns.token_ids, turns.mask, turns.weight) == ([1, 2, 3, 4, 5], bytes([0, 2, 0, 0, 2]), 0.5)
