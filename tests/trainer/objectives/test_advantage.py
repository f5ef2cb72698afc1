import itertools
import math

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


def reward(total: float, verdict: Verdict = Verdict.WRONG, correctness: float = 0.0) -> Reward:
    return Reward(total, 0.1, correctness, 0.0, 0.0, verdict)


def scaled(groups: list[list[float | None]], scale: str) -> list[list[float | None]]:
    """Advantages of total rewards, None where nothing was graded."""
    rows = [[None if value is None else reward(value) for value in group] for group in groups]
    settings = read_objective({"name": "dr_grpo", "advantage": {"scale": scale}})
    return advantages(rows, settings.advantage, RewardWeights())


def test_minibatch_scale_uses_the_population_deviation_over_sequences() -> None:
    centred = scaled(TWO_GROUPS, "none")
    assert centred == [[0.75, -0.25, -0.25, -0.25], [0.5, 0.5, -0.5, -0.5]]
    assert deviation([value for group in centred for value in group]) == pytest.approx(0.467707, abs=1e-6)
    first, second = scaled(TWO_GROUPS, "minibatch")
    assert first == pytest.approx([1.6036, -0.5345, -0.5345, -0.5345], abs=1e-4)
    assert second == pytest.approx([1.0690, 1.0690, -1.0690, -1.0690], abs=1e-4)


def test_group_scale_divides_by_the_groups_own_deviation() -> None:
    first, second = scaled(TWO_GROUPS, "group")
    assert first == pytest.approx([1.7321, -0.5774, -0.5774, -0.5774], abs=1e-4)
    assert second == pytest.approx([1, 1, -1, -1])


def test_masked_completions_are_in_no_mean_and_no_deviation() -> None:
    # (1, 0, -) has mean .5, (1, 1, 0) has 2/3: the masked one is neither a 0 nor a number at all
    found = scaled([[1.0, 0.0, None], [1.0, 1.0, 0.0]], "none")
    assert found[0] == [0.5, -0.5, None]
    assert found[1] == pytest.approx([1 / 3, 1 / 3, -2 / 3])
    found = scaled([[1.0, 0.0, None], [1.0, 1.0, 0.0]], "minibatch")
    std = math.sqrt((2 * 0.25 + 2 / 9 + 4 / 9) / 5)
    assert found[0] == [0.5 / std, -0.5 / std, None]


def test_equal_rewards_give_exactly_zero_whatever_the_mean_rounds_to() -> None:
    assert scaled([[0.1 + 0.9 + 0.1] * 7], "none") == [[0.0] * 7]
    for scale in ("minibatch", "group", "none"):
        assert scaled([[1.1, 1.1, 1.1], [1.0, 0.0, 0.0]], scale)[0] == [0.0, 0.0, 0.0]
        assert scaled([[1.1, 1.1, 1.1]], scale) == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize("scale", ["minibatch", "group"])
def test_rewards_that_differ_by_their_rounding_alone_are_not_made_large(scale: str) -> None:
    totals = [0.1 + 0.2, 0.3, 0.3, 0.1 + 0.2]
    assert len(set(totals)) == 2
    (found,) = scaled([totals], scale)
    assert max(abs(value) for value in found if value is not None) < 1e-15
    assert scaled([[1e-7, 0.0]], scale) == [[1.0, -1.0]], "a difference of rewards, though a small one"


def test_a_group_is_diverse_by_exact_inequality_of_graded_rewards() -> None:
    assert not diverse([reward(1.1), reward(1.1)], "total")
    assert diverse([reward(1.1), reward(1.1 - 1e-12)], "total")
    assert not diverse([reward(1.1), reward(0.0, Verdict.TIMEOUT)], "total")
    # a language bonus alone makes rewards differ, correctness does not
    bonus = [reward(1.1, correctness=0.9), reward(1.0, correctness=0.9)]
    assert diverse(bonus, "total") and not diverse(bonus, "correctness")
    assert diverse([reward(1.1), reward(1.1)], "off")
    assert not diverse([reward(0.0, Verdict.CRASH)], "off")


def test_expected_gradient_of_two_arms_is_the_policy_gradient_shrunk_by_the_group() -> None:
    """E[(1/G) sum A_i s(a_i)] = (1 - 1/G) p (1 - p), by enumeration of all groups."""
    for p, size, expected in ((0.5, 2, 0.125), (0.5, 4, 0.1875), (0.2, 4, 0.12)):
        total = 0.0
        for group in itertools.product((1.0, 0.0), repeat=size):
            probability = math.prod(p if value else 1 - p for value in group)
            (row,) = scaled([list(group)], "none")
            total += probability * sum(a * (value - p) for a, value in zip(row, group, strict=True)) / size
        assert total == pytest.approx(expected)


def test_a_reward_that_is_not_finite_is_refused() -> None:
    with pytest.raises(NonFinite, match="nan"):
        scaled([[1.0, math.nan]], "none")


def test_token_weights_of_a_short_and_a_long_completion() -> None:
    """|o| = (1, 3): 1/4 each by group tokens, 1/2 and 1/6 by sequence."""
    assert token_weights([[1, 3]], "group_tokens") == [[0.25, 0.25]]
    assert token_weights([[1, 3]], "batch_tokens") == [[0.25, 0.25]]
    assert token_weights([[1, 3]], "sequence") == [[0.5, pytest.approx(1 / 6)]]
    assert token_weights([[1, 3]], "completions") == [[0.5, 0.5]]
    assert token_weights([[1, 3, 0], [2]], "completions") == [[0.25, 0.25, 0.0], [0.5]]
    assert token_weights([[1, 3]], "constant", 10) == [[0.05, 0.05]]
    # two groups of 4 and 12 tokens: each group weighs one half, or each token 1/16
    assert token_weights([[1, 3], [6, 6]], "group_tokens") == [[1 / 8, 1 / 8], [1 / 24, 1 / 24]]
    assert token_weights([[1, 3], [6, 6]], "batch_tokens") == [[1 / 16, 1 / 16], [1 / 16, 1 / 16]]


def test_masked_completions_and_groups_leave_the_denominators() -> None:
    assert token_weights([[1, 0, 3], [0, 0, 0]], "group_tokens") == [[0.25, 0.0, 0.25], [0.0, 0.0, 0.0]]
    assert token_weights([[2, 0], [0, 0]], "sequence") == [[0.5, 0.0], [0.0, 0.0]]
    assert token_weights([[2, 0, 4], [0, 0, 0]], "constant", 10) == [[0.05, 0.0, 0.05], [0.0, 0.0, 0.0]]
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


def test_train_sequences_carry_prompt_advantage_and_weight_and_leave_masked_ones_out() -> None:
    completions = [Completion(0, i, 0, [7] * n, [-1.0] * n) for i, n in enumerate((1, 3, 2))]
    group = Group(
        Prompt(0, Problem("p", "", ""), [4, 5]),
        completions,
        [reward(1.0), reward(0.0), reward(0.0, Verdict.TIMEOUT)],
    )
    config = Config.model_validate({"objective": {"advantage": {"scale": "none"}}})
    first, second = train_sequences([group], objective_of(config), config)
    assert (first.token_ids, first.prompt_tokens, first.columns) == ([4, 5, 7], 2, {"behaviour": [-1.0]})
    assert (first.advantages, second.advantages) == ([0.5], [-0.5])
    assert first.weight == second.weight == 0.25 and first.group == second.group == 0


def test_truncated_completions_leave_the_loss_but_not_the_mean_that_others_are_compared_with() -> None:
    """The last of each group was cut. Advantages are those of all rewards, (1, 0, 0) and (1, 0); tokens 1 + 2 and 2."""
    groups = []
    for index, lengths in enumerate([(1, 2), (2,)]):
        ends = [*((n, "stop") for n in lengths), (4, "length")]
        completions = [Completion(index, i, 0, [7] * n, [-1.0] * n, finish_reason=e) for i, (n, e) in enumerate(ends)]
        rewards = [reward(1.0), *[reward(0.0)] * len(lengths)]
        groups.append(Group(Prompt(index, Problem(str(index), "", ""), [4, 5]), completions, rewards))

    def trained(**settings: object) -> list[tuple[list[float], float]]:
        name = {"name": "dr_grpo", "loss_aggregation": "batch_tokens"}
        config = Config.model_validate({"objective": {**name, **settings}})
        return [(one.advantages, one.weight) for one in train_sequences(groups, objective_of(config), config)]

    above, below = 1 - 1 / 3, -1 / 3
    assert trained() == [([a], 1 / 13) for a in (above, below, below, 0.5, -0.5)]
    assert trained(mask_truncated=True) == [([a], 1 / 5) for a in (above, below, 0.5)]


def graded(total: float, correctness: float, answer: str | None = None) -> Reward:
    verdict = Verdict.CORRECT if correctness else Verdict.WRONG
    return Reward(total, total - correctness, correctness, 0.0, 0.0, verdict, answer=answer)


MIXED = [graded(1.1, 0.9, "4"), graded(0.1, 0.0, "5"), graded(0.2, 0.0, "5 "), graded(0.0, 0.0)]


@pytest.mark.parametrize(
    ("name", "k", "expected"),
    [
        ("mean", None, [0.75, -0.25, -0.15, -0.35]),
        ("leave_one_out", None, [1.0, -1 / 3, -0.2, -7 / 15]),
        ("reward", None, [1.1, 0.1, 0.2, 0.0]),
        ("none", None, [0.0] * 4),
        # only the one that is right: 4 (.9 - 0); what is left of the rewards (.2 .1 .2 0) less the others' mean
        ("pass_at_k", 0, [3.6 + 0.1, 0.1 - 2 / 15, 0.1, -1 / 6]),
        # (1 - 1/4) / (1/4) = 3 and -1
        ("maxrl", None, [2.7 + 0.1, -0.9 + 0.1 - 2 / 15, -0.9 + 0.1, -0.9 - 1 / 6]),
        # votes 4, 5, 5 and none. The right one's vote changes nothing (5 wins), without a 5 it is a tie: 4 (0 - 1/2) .9
        ("majority", 0, [0.1, -1.8 + 0.1 - 2 / 15, -1.8 + 0.1, -1 / 6]),
    ],
)
def test_advantages_of_one_group_by_hand(name: str, k: int | None, expected: list[float]) -> None:
    settings = read_objective({"name": "reinforce", "advantage": {"kind": name} | ({} if k is None else {"k": k})})
    assert group_advantages(MIXED, settings.advantage, RewardWeights()) == pytest.approx(expected)


@pytest.mark.parametrize("scale", ["group", "minibatch", "none"])
@pytest.mark.parametrize("name", ["pass_at_k", "majority", "maxrl"])
def test_what_is_left_of_equal_rewards_is_nothing_to_be_scaled(name: str, scale: str) -> None:
    """(0.1 + 0.9) - 0.9 is not 0.1: such a rounding is no advantage. Of the best of 4 none of three right ones is one;
    the others have the advantages of their correctness alone."""
    group = [Reward(0.1 + 0.9, 0.1, 0.9, 0.0, 0.0, Verdict.CORRECT, answer="1") for _ in range(3)]
    group.append(Reward(0.1, 0.1, 0.0, 0.0, 0.0, Verdict.WRONG, answer="2"))
    bare = [msgspec.structs.replace(one, total=one.correctness, format=0.0) for one in group]
    settings = read_objective({"name": name} | ({} if name == "maxrl" else {"advantage": {"scale": scale}}))  # type: ignore[arg-type]
    (found,), (expected,) = (advantages([rows], settings.advantage, RewardWeights()) for rows in (group, bare))
    assert found == pytest.approx(expected, abs=1e-12)
    if name == "pass_at_k":
        assert found == [0.0] * 4


def test_each_reward_is_normalised_by_itself() -> None:
    """Formats equal: they add nothing. Correctness (1, 0, 0, 0) has deviation sqrt(3)/4; language (0, 1, 1, 0) 1/2."""
    group = [
        Reward(1.0, 0.1, c * 0.9, 0.0, language * 0.1, Verdict.WRONG)
        for c, language in ((1, 0), (0, 1), (0, 1), (0, 0))
    ]
    settings = read_objective({"advantage": {"kind": "each_reward", "scale": "none"}})
    right, wrong, bonus = 0.75 / (3**0.5 / 4), -0.25 / (3**0.5 / 4), 1.0
    assert group_advantages(group, settings.advantage, RewardWeights()) == pytest.approx(
        [0.9 * right - 0.1 * bonus, *[0.9 * wrong + 0.1 * bonus] * 2, 0.9 * wrong - 0.1 * bonus]
    )


def test_soft_values_come_off_the_rewards() -> None:
    completions = [Completion(0, i, 0, [7], [-1.0]) for i in range(2)]
    group = Group(Prompt(3, Problem("p", "", ""), [4]), completions, [reward(1.0), reward(0.0)])
    config = Config.model_validate({"objective": {"name": "spo"}})
    first, second = train_sequences([group], objective_of(config), config, values={"p": 0.25})
    assert (first.advantages, second.advantages) == ([0.75], [-0.25]) and first.weight == second.weight == 0.5


def test_sft_sequences_weigh_every_token_the_same() -> None:
    first, second = sft_sequences([Demonstration([1], [2, 3]), Demonstration([1, 1], [2])])
    assert first.weight == second.weight == pytest.approx(1 / 3)
    assert (second.mask, second.columns, second.advantages) == (bytes([0, 0, 2]), {}, [])


def test_of_a_demonstration_of_several_turns_only_the_turns_are_imitated() -> None:
    [one] = sft_sequences([Demonstration([1], [2, 3, 4, 5], bytes([2, 0, 0, 2]))])
    assert (one.token_ids, one.mask, one.weight) == ([1, 2, 3, 4, 5], bytes([0, 2, 0, 0, 2]), 0.5)
