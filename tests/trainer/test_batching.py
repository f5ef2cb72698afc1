"""A batch cut into minibatches and micro-batches: whole, within the budget, balanced, and added up again."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.types import Group, MicroBatch, Problem, Prompt, TrainSequence
from tests.trainer.sequences import make_sequence
from trainer.step.batching import BatchPlan, Learned, combine, first_fit_decreasing, plan_batch, split, spread
from trainer.step.forward_backward import StepSums
from trainer.step.rank import Stepped


def sequences(lengths: list[int]) -> list[TrainSequence]:
    """Sequences of different prompts."""
    return [make_sequence([number] * length, 1, None, 0.0, 0.0) for number, length in enumerate(lengths)]


def group(prompt: int, prompt_tokens: int, completions: list[int]) -> list[TrainSequence]:
    """Sequences of one prompt."""
    return [
        make_sequence([prompt] * prompt_tokens + [number] * length, prompt_tokens, None, 0.0, 0.0)
        for number, length in enumerate(completions)
    ]


def sizes(plan: BatchPlan) -> list[list[int]]:
    """Sequences of every micro-batch of every rank."""
    return [[len(batch.sequences) for batch in share] for share in plan.micro_batches]


def test_longest_first_each_into_the_first_bin_with_room():
    # by length: 6 (index 1), 5 (2), 4 (0), 4 (4), 1 (3) into bins of 10
    assert first_fit_decreasing([4, 6, 5, 1, 4], 10) == [[1, 0], [2, 4, 3]]
    assert first_fit_decreasing([30, 4], 10) == [[0], [1]] and first_fit_decreasing([], 10) == []
    assert spread([6, 6, 6], 10, 2) is None, "the budget does not allow it"
    assert spread([6, 6, 4], 10, 2) == [[0, 2], [1]]
    with pytest.raises(ValueError, match="ranks = 0"):
        plan_batch([], 0, 10)


@pytest.mark.parametrize(("kind", "next_fit", "decreasing"), [("lognormal", 0.171, 0.002), ("uniform", 0.252, 0.015)])
def test_collation_saves_padding_against_filling_in_order_of_arrival(kind, next_fit, decreasing):
    """2048 sequences into 32768-token micro-batches; the paper reports 19 % less padding."""
    budget, draw = 32768, np.random.default_rng(1)
    lognormal = np.clip(draw.lognormal(8.6, 0.8, 2048), 64, budget).astype(int)
    lengths = (lognormal if kind == "lognormal" else draw.integers(64, budget, 2048)).tolist()
    arrival, room = 1, budget
    for length in lengths:
        if length > room:
            arrival, room = arrival + 1, budget
        room -= length
    plan = plan_batch(sequences(lengths), 1, budget)
    assert 1 - sum(lengths) / (arrival * budget) == pytest.approx(next_fit, abs=5e-4)
    assert plan.padding_share == pytest.approx(decreasing, abs=5e-4)


@given(st.lists(st.integers(2, 60), max_size=60), st.integers(1, 8), st.integers(60, 200))
def test_ranks_need_no_more_rounds_than_first_fit_bins_ask_for(lengths, ranks, budget):
    bins = len(first_fit_decreasing(lengths, budget))
    assert len(plan_batch(sequences(lengths), ranks, budget).micro_batches[0]) == max(1, -(-bins // ranks))


def test_work_is_balanced_over_ranks_and_the_largest_micro_batch_runs_first():
    balanced = plan_batch(sequences([10] * 8), 4, 100)
    assert sizes(balanced) == [[2]] * 4 and balanced.imbalance == 0, "bins would leave some idle"
    assert sizes(plan_batch(group(1, 10, [20] * 16), 4, 1000)) == [[4]] * 4, "one group is split over ranks"
    assert sorted(sizes(plan_batch(sequences([500, 3]), 4, 100))) == [[0], [0], [1], [1]], "ranks without work"
    [share] = plan_batch(sequences([90, 10, 50, 45, 30]), 1, 100).micro_batches
    tokens = [sum(len(sequence.token_ids) for sequence in batch.sequences) for batch in share]
    assert tokens == sorted(tokens, reverse=True)


def test_completions_of_a_prompt_stay_together_and_count_it_once():
    """A group beyond the budget is split, and each part repeats the prompt."""
    pairs = zip(group(1, 40, [10] * 4), group(2, 40, [10] * 4), strict=True)
    interleaved = [sequence for pair in pairs for sequence in pair]
    plan = plan_batch(interleaved, 1, 80)
    assert [{sequence.token_ids[0] for sequence in batch.sequences} for batch in plan.micro_batches[0]] == [{1}, {2}]
    assert (plan.tokens, plan.stored_tokens, plan.padding_share) == (400, 160, 0.0)
    assert sizes(plan_batch(interleaved, 1, 1000)) == [[8]]
    large = plan_batch(group(1, 40, [30, 30, 30]), 1, 100)
    assert sorted(sizes(large)[0]) == [1, 2] and large.stored_tokens == 40 + 60 + 40 + 30


@given(
    st.lists(st.tuples(st.integers(1, 30), st.lists(st.integers(1, 30), min_size=1, max_size=6)), max_size=8),
    st.integers(1, 8), st.integers(1, 120), st.booleans(),
)  # fmt: skip
def test_every_sequence_is_in_one_micro_batch_within_the_budget_and_ranks_have_equal_counts(
    groups, ranks, budget, together
):
    """Every second group is drawn from the prompt of the one before: a group of its own all the same. Only a single
    sequence, or a group that must stay together, may be over the budget."""
    made = []
    for number, (prompt, completions) in enumerate(groups):
        same = groups[number - 1][0] if number % 2 else prompt
        made += [msgspec.structs.replace(s, group=100 + number) for s in group(number // 2, same, completions)]
    plan = plan_batch(made, ranks, budget, together)
    assert plan == plan_batch(made, ranks, budget, together)
    assert len(plan.micro_batches) == ranks
    assert len({len(share) for share in plan.micro_batches}) == 1 and plan.micro_batches[0]
    batches = [batch.sequences for share in plan.micro_batches for batch in share]
    assert sorted(map(id, made)) == sorted(id(sequence) for batch in batches for sequence in batch)
    for batch in batches:
        parts = {s.group if together else tuple(s.token_ids[: s.prompt_tokens]): s.prompt_tokens for s in batch}
        stored = sum(parts.values()) + sum(len(s.token_ids) - s.prompt_tokens for s in batch)
        assert stored <= budget or (len(parts) if together else len(batch)) == 1
    if together:
        names = [name for batch in batches for name in {s.group for s in batch}]
        assert len(names) == len(groups), "no group is in two micro-batches"
    assert plan.tokens == sum(len(sequence.token_ids) for sequence in made)
    assert 0 <= plan.padding_share <= 1 and plan.imbalance > -1e-9


def test_whole_groups_stay_together_whatever_their_prompts_and_the_budget():
    """A prompt drawn twice is two groups, which a small budget parts; one longer than it has a micro-batch alone."""
    twice = [msgspec.structs.replace(s, group=name) for name in (4, 9) for s in group(1, 10, [20, 20])]
    apart = plan_batch(twice, 1, 60, together=True).micro_batches[0]
    assert [{s.group for s in batch.sequences} for batch in apart] == [{4}, {9}]
    [both] = plan_batch(twice, 1, 100, together=True).micro_batches[0]
    assert [s.group for s in both.sequences] == [4, 4, 9, 9]
    lengths = ([50] * 4, [5], [5])
    made = [msgspec.structs.replace(s, group=n) for n, each in enumerate(lengths) for s in group(n, 5, each)]
    plan = plan_batch(made, 2, 40, together=True)
    shares = [sorted({s.group for s in batch.sequences}) for share in plan.micro_batches for batch in share]
    assert sorted(shares) == [[0], [1, 2]] and 0 <= plan.padding_share < 1


def test_minibatches_hold_whole_groups_in_order():
    groups = [Group(Prompt(index, Problem("p", "?", "1"), [1]), [], []) for index in range(6)]
    parts = split(groups, 3)
    assert [[g.prompt.index for g in part] for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert split(groups, 1) == [groups]
    with pytest.raises(ValueError, match="cut into 4"):
        split(groups, 4)


def test_numbers_of_two_steps_are_added_or_averaged():
    def step(loss: float, tokens: float, ratio: float, norm: float) -> Learned:
        plan = BatchPlan([[MicroBatch([])], [MicroBatch([])]], tokens=int(tokens), stored_tokens=5, padding_share=0.2,
                    imbalance=0.0)  # fmt: skip
        sums = {"loss": loss, "tokens": tokens, "entropy": 2 * tokens}
        return Learned(plan, StepSums(sums, {"ratio": ratio}, 1.5, int(tokens)), Stepped(norm, 0.5))

    both = combine([step(0.2, 10, 1.1, 1.0), step(0.4, 30, 1.4, 3.0)])
    assert both.sums.sums == {"loss": pytest.approx(0.3), "tokens": 40, "entropy": 80}
    assert both.sums.maxima == {"ratio": 1.4} and both.sums.seconds == 3.0
    assert both.stepped == Stepped(2.0, 1.0)
    assert [len(share) for share in both.plan.micro_batches] == [2, 2] and both.plan.tokens == 40
    single = step(0.2, 10, 1.1, 1.0)
    assert combine([single]) is single
