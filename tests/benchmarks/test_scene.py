"""The whole controller loop against scripted ranks in another process; nothing here is a matter of speed."""

from __future__ import annotations

import math

import pytest

from benchmarks.speed.asynchrony import Sides, script_for, sides
from benchmarks.speed.controller import GROUP_SIZE, flatness, group_bytes, summary, token_bytes
from benchmarks.speed.scene import Measures, Step, play_in_folder
from benchmarks.speed.script import Script, length_table


@pytest.mark.slow
@pytest.mark.parametrize("async_level", [0, 2])
def test_a_run_trains_every_step_with_scripted_ranks(async_level: int) -> None:
    told: list[int] = []
    script = Script(trainers=2, engines=3, seats=4, token_s=1e-4, mean_tokens=8, sigma=0.5, accumulate_s=1e-3,
                    update_s=1e-3)  # fmt: skip
    measures = play_in_folder(
        script, steps=5, prompts_per_step=4, group_size=4, async_level=async_level, told=told.append
    )
    assert told == [1, 2, 3, 4, 5]
    lengths = set(length_table(script))
    assert all(16 * min(lengths) <= step.completion_tokens <= 16 * max(lengths) for step in measures.steps)
    times = [step.time_s for step in measures.steps]
    assert times == sorted(times) and measures.steps[-1].ranks_cpu_s > 0


def steps(seconds: list[float], tokens: int = 64) -> Measures:
    found = [Step(time_s, time_s, 0.0, 100 + 10 * number, tokens) for number, time_s in enumerate(seconds)]
    return Measures(found, groups_per_step=8)


def test_rates_are_of_the_groups_after_the_first_steps() -> None:
    measures = steps([10.0, 11.0, 13.0, 14.0])
    assert measures.groups(0) == 24 and measures.wall_s(0) == 4.0 and measures.rate(1) == 16 / 3.0


def test_the_ideal_step_is_as_long_as_the_slower_side() -> None:
    found = Sides(step=0.66, generation=0.6, training=0.3)
    assert found.of_ideal == pytest.approx(1.1)
    assert found.idle == pytest.approx((1 - 0.6 / 0.66, 1 - 0.3 / 0.66))


def test_generation_takes_what_its_tokens_take_on_all_places() -> None:
    script = Script(engines=2, seats=4, token_s=0.1, accumulate_s=0.2, step_s=0.1)
    measures = steps([0.0, 5.0, 6.0, 8.0, 30.0], tokens=64)
    assert sides(measures, script, rest=1) == pytest.approx((1.5, 64 * 0.1 / 8, 0.3))


def test_a_script_takes_so_long_on_average() -> None:
    script = script_for(0.6, 0.4)
    lengths = length_table(script)
    step_s = 16 * 8 * sum(lengths) / len(lengths) * script.token_s / (script.engines * script.seats)
    assert math.isclose(step_s, 0.6) and math.isclose(script.accumulate_s + script.step_s, 0.4)


def test_memory_at_the_end_is_beside_that_after_a_quarter() -> None:
    row = flatness([steps([float(number) for number in range(8)])], "x")
    assert row.values == [170 / 120] and row.met is False


def test_memory_of_a_group_grows_with_its_tokens() -> None:
    """Two places of 8 bytes in lists for each token and its log-prob, a float of 24 bytes and an int of 28 or 32."""
    assert 8 + 8 + 24 + 28 <= token_bytes() <= 8 + 8 + 24 + 32 + 20
    assert group_bytes(40) - group_bytes(20) > 20 * GROUP_SIZE * (8 + 8 + 24)


def test_means_of_parts_in_order() -> None:
    assert summary([1.0, 3.0, 5.0, 7.0, 9.0], parts=2) == [2.0, 6.0]
