"""A step by hand: sampling with engines of a simple speed, and the straggler."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lab.plan import split, times
from lab.plan.scenario import CARDS, MODELS, Lengths, Scenario, Workload
from lab.plan.times import EngineModel
from tests.lab.plan.shapes import ROUND, decoder, work

TEN = Lengths(10, 10, 10)
MIXED = Lengths(20, 60, 60)


@dataclass(frozen=True)
class Simple(EngineModel):
    """A decode step of 1 s and 0.1 s a completion; prompts cost nothing."""

    def decode_s(self, running: float, context: float) -> float:
        """See above."""
        return 1 + 0.1 * running

    def prefill_s(self, prompt_tokens: float) -> float:
        """Nothing."""
        return 0.0


ENGINE = Simple(decoder(), ROUND, 1)


def test_equal_completions_started_together() -> None:
    sampled = times.sampling_times(ENGINE, work(TEN), engines=2, slots=2)  # two each: 10 steps of 1.2 s
    assert math.isclose(sampled.together_s, 12) and math.isclose(sampled.full_s, 12)


def test_completions_without_a_seat_wait() -> None:
    sampled = times.sampling_times(ENGINE, work(TEN), engines=2, slots=1)  # one after the other: 20 steps of 1.1 s
    assert math.isclose(sampled.together_s, 22) and math.isclose(sampled.full_s, 22)


def test_the_longest_completion_keeps_a_thinning_batch_alive() -> None:
    many = Lengths(10, 40, 400)
    sampled = times.sampling_times(ENGINE, work(many, prompts=1000, group=1000), engines=1, slots=1e6)
    longest = many.longest(10**6)
    assert 100 < longest < 400
    assert math.isclose(sampled.together_s, longest + 0.1 * 10**6 * many.mean), "each token is paid once"


def test_more_open_completions_fill_the_engines_better() -> None:
    one, two = (
        times.sampling_times(ENGINE, work(TEN), engines=2, slots=100, async_level=async_level).full_s
        for async_level in (1, 2)
    )
    assert math.isclose(one, 12) and math.isclose(two, 2 * 10 * 1.4 / 4)


def test_groups_without_signal_are_sampled_in_vain() -> None:
    wasted = times.sampling_times(ENGINE, work(TEN, kept=0.5), engines=2, slots=2)
    assert math.isclose(wasted.full_s, 24) and math.isclose(wasted.together_s, 24)


def test_the_longest_completion_at_the_load_of_its_step() -> None:
    sampled = times.sampling_times(ENGINE, work(MIXED, prompts=100, group=100), engines=1, slots=1e9, async_level=1)
    # three batches' worth of 10,000 x 20 tokens over 60 positions would run: 10,000 less what is cut
    running = 3 * 10_000 * MIXED.mean / 60
    assert math.isclose(sampled.decode_s, 1 + 0.1 * running, rel_tol=1e-6)
    assert math.isclose(sampled.longest_s, 60 * (1 + 0.1 * running), rel_tol=1e-6)


def test_the_straggler_has_the_time_of_its_slot_and_of_one_overtaking() -> None:
    usual = Workload(Lengths(2000, 8000, 8000), 8000, 64, 16, 200)
    plan = split.place(Scenario(MODELS["8b"], replace(CARDS["h100"], gpus=64), usual), 4, 4, async_level=2)
    assert plan is not None
    assert plan.bounds["longest completion"] == (plan.sampling.longest_s + plan.train_s + plan.update_s) / 4
