"""A step by hand: sampling with engines of a simple speed, the straggler, the age of tokens, simulated too."""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass

import pytest

from lab.plan import times
from lab.plan.lengths import Lengths
from lab.plan.times import EngineModel
from tests.lab.plan.shapes import ROUND, decoder, work

TEN = Lengths((10.0,), (1.0,))
MIXED = Lengths((10.0, 30.0), (0.5, 0.5))


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
    many = Lengths((10.0, 30.0), (0.999999, 0.000001))
    sampled = times.sampling_times(ENGINE, work(many, prompts=1000, group=1000), engines=1, slots=1e6)
    longest = many.longest(10**6)  # 30 with probability 1 - 1/e
    assert math.isclose(longest, 30 - 20 * math.exp(-1), rel_tol=1e-4)
    assert math.isclose(sampled.together_s, longest + 0.1 * 10**6 * 10, rel_tol=1e-3), "each token is paid once"


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
    # three batches' worth of 10,000 x 20 tokens over 30 positions would run: 20,000; only one batch is open
    assert math.isclose(sampled.decode_s, 1 + 0.1 * 10_000) and math.isclose(sampled.longest_s, 30 * 1001)


def test_the_straggler_has_the_time_of_its_slot_and_of_one_overtaking() -> None:
    assert times.straggler_s(10, 3, 1, async_level=2) == 14 / 4
    assert times.straggler_s(10, 3, 1, async_level=0, overtaken=0) == 14, "synchronous: nothing overlaps"


@pytest.mark.parametrize(
    ("decode_s", "queue_s", "kept", "age"),
    [
        (0.1, 0.0, 1.0, 2.0),  # done within a step
        (0.2, 0.0, 1.0, 1.5),  # two steps: the second half of the tokens is a version younger
        (0.1, 1.0, 1.0, 1.0),  # waited for a step
        (0.1, 0.5, 1.0, 1.5),
        (0.1, 0.0, 0.5, 0.5),  # slots are held for 1.5 steps: tokens of the first half step are one version old
        (0.1, 9.0, 1.0, 0.0),
    ],
)
def test_mean_age_of_ten_tokens(decode_s: float, queue_s: float, kept: float, age: float) -> None:
    assert math.isclose(times.mean_age(TEN, 2, 1.0, decode_s, queue_s, kept), age, abs_tol=1e-12)


def test_waiting_for_a_slot() -> None:
    # async level 2, 4 completions a step on one engine: 12 slots less a half batch, 4 of them decode, 6 wait 1.5 steps
    assert times.queue_s(work(TEN), engines=1, async_level=2, slots=4, busy=0.5, step_s=2.0) == 3.0
    assert times.queue_s(work(TEN), engines=1, async_level=2, slots=40, busy=0.5, step_s=2.0) == 0


def test_the_age_agrees_with_a_simulated_pipeline() -> None:
    """Trainers are waited for: batches of P completions, (async_level + 1) P slots, a version a second."""
    prompts, async_level, steps, decode_s = 32, 3, 200, 0.012
    draw = random.Random(1)
    lengths = Lengths((50.0, 150.0), (0.5, 0.5))
    waiting: list[tuple[int, float, int]] = [
        (i, 0.0, draw.choice((50, 150))) for i in range((async_level + 1) * prompts)
    ]
    heapq.heapify(waiting)
    started, ages = len(waiting), []
    for version in range(steps):  # released at time `version`; trained during the second after it
        batch = [heapq.heappop(waiting) for _ in range(prompts)]
        for _, start, length in batch:
            seen = (min(math.floor(start + i * decode_s), version) for i in range(length))
            ages += [version - at for at in seen] if version > steps // 2 else []
        for _ in batch:
            heapq.heappush(waiting, (started, float(version + 1), draw.choice((50, 150))))
            started += 1
    assert math.isclose(sum(ages) / len(ages), times.mean_age(lengths, async_level, 1.0, decode_s), rel_tol=0.02)
