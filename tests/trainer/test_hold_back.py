"""Held back, every trained token is exactly `max_async_level` versions old, whoever is faster; and every end is
reached."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.config import Config
from shared.types import Prompt
from tests.trainer.test_ledger import PROBLEM, Simulation, finish_group, opened
from tests.trainer.test_stages import StagedSimulation
from trainer.ledger import Interrupted, Ledger
from trainer.stages import Stages

P = 4
"""groups a step"""


def make_config(async_level: int, fixed_staleness: bool = True, **others: Any) -> Config:
    rollout = {
        "prompts_per_step": P,
        "group_size": 2,
        "max_async_level": async_level,
        "fixed_staleness": fixed_staleness,
    }
    return Config.model_validate({"steps": 20, "rollout": rollout, **others})


@settings(max_examples=25)
@given(
    async_level=st.sampled_from([1, 2, 8]), seed=st.integers(0, 1000), no_signal=st.sampled_from([0.0, 0.4]),
    train_ticks=st.sampled_from([0, 20, 300]), publish_ticks=st.sampled_from([0, 5, 100]),
)  # fmt: skip
def test_every_token_is_lead_versions_old_whoever_is_faster(
    async_level: int, seed: int, no_signal: float, train_ticks: int, publish_ticks: int
) -> None:
    config = make_config(async_level)
    simulation = Simulation(config, seed, no_signal, train_ticks, publish_ticks)
    asyncio.run(simulation.run())
    ledger = simulation.ledger
    assert simulation.token_ages == {version: {min(version, async_level)} for version in range(20)}
    assert config.max_staleness == async_level
    assert simulation.trained == sorted(simulation.trained), "oldest first, whatever the window"
    assert len(simulation.trained) == 20 * P and ledger.started == 20 * P + ledger.filtered
    assert not ledger.groups and ledger.busy_slots == 0


def test_without_it_the_faster_side_decides() -> None:
    """A trainer without delay brings new weights to completions under way: most batches hold younger tokens too."""
    simulation = Simulation(make_config(2, fixed_staleness=False), seed=0, train_ticks=0, publish_ticks=0)
    asyncio.run(simulation.run())
    assert sum(ages != {2} for version, ages in simulation.token_ages.items() if version >= 2) > 9


@settings(max_examples=25)
@given(
    async_level=st.sampled_from([1, 2, 8]), seed=st.integers(0, 1000), stop_after=st.integers(1, 4000),
    train_ticks=st.sampled_from([0, 20, 300]),
)  # fmt: skip
def test_a_run_that_was_interrupted_goes_on_with_the_same_ages(
    async_level: int, seed: int, stop_after: int, train_ticks: int
) -> None:
    parts = [Simulation(make_config(async_level), seed, 0.3, train_ticks, stop_after=stop_after)]
    asyncio.run(parts[0].run())
    if parts[0].saved:
        parts.append(Simulation(make_config(async_level), seed + 1, 0.3, train_ticks, saved=parts[0].saved))
        asyncio.run(parts[1].run())
    ages = [entry for part in parts for entry in part.token_ages.items()]
    assert ages == [(version, {min(version, async_level)}) for version in range(20)]
    trained = [index for part in parts for index in part.trained]
    assert max(Counter(trained).values()) == 1 and len(trained) == 20 * P


def test_stages_end_and_begin_with_their_own_ages() -> None:
    """The first ends by a condition, with batches ahead already complete; the others by their step and the run's
    end. Ages begin again from 0 in each."""
    stages = [
        {"name": "easy", "until": "accuracy > 0.45", "over_steps": 3},
        {"name": "small", "until_step": 13, "rollout": {"prompts_per_step": 2, "max_async_level": 1}},
        {"name": "far", "rollout": {"max_async_level": 3}},
    ]
    config = make_config(2, stages=stages)
    simulation = StagedSimulation(config, seed=1)
    asyncio.run(asyncio.wait_for(simulation.run(), 100))
    ages, begun = iter(simulation.ages), [0, *(version for version, _ in simulation.begun)]
    # accuracy passes 0.45 at step 6; the two batches ahead are trained before the stage ends
    assert begun == [0, 8, 13] and len(simulation.by_step) == 20
    for version, batch in enumerate(simulation.by_step):
        number = sum(version >= first for first in begun) - 1
        expected = min(version - begun[number], [2, 1, 3][number])
        assert [next(ages) for _ in batch] == [expected] * len(batch)


def filled(async_level: int, ready: int) -> Ledger:
    """Eight groups are open, of which so many are ready."""
    ledger = opened(Ledger(Stages(make_config(async_level))), 8)
    for index in range(ready):
        finish_group(ledger, index, [1.0, 0.0])
    return ledger


async def waiting(ledger: Ledger) -> asyncio.Future[Any]:
    """A batch that is asked for, and does not come yet."""
    taking = asyncio.ensure_future(ledger.take())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not taking.done()
    return taking


def test_a_batch_waits_for_the_batches_after_it() -> None:
    async def work() -> list[int]:
        ledger = filled(1, ready=7)
        taking = await waiting(ledger)
        finish_group(ledger, 7, [1.0, 1.0])  # no signal: another takes its slot
        for _ in range(20):
            await asyncio.sleep(0)
        assert not taking.done() and ledger.ready() == 7 and await ledger.slot() == 1
        ledger.open(Prompt(8, PROBLEM, [1]), [0, 0])
        finish_group(ledger, 8, [1.0, 0.0])
        return [group.prompt.index for group in await taking]

    assert asyncio.run(work()) == [0, 1, 2, 3]


def test_the_end_of_a_stage_lets_go_what_is_complete() -> None:
    async def work() -> int:
        ledger = filled(2, ready=8)
        taking = await waiting(ledger)  # four slots are free
        ledger.end_stage("enough")
        return len(await taking)

    assert asyncio.run(work()) == P


def test_an_interruption_ends_the_wait_and_loses_nothing() -> None:
    async def work() -> Ledger:
        ledger = filled(1, ready=7)
        taking = await waiting(ledger)
        ledger.interrupt()
        with pytest.raises(Interrupted):
            await taking
        return ledger

    ledger = asyncio.run(work())
    assert list(ledger.groups) == list(range(8)) and ledger.ready() == 7 and ledger.busy_slots == 8
