"""Held back, every trained token is exactly `max_async_level` versions old, whoever is faster; and every end is
reached."""

from __future__ import annotations

import asyncio
from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.config import Config
from shared.types import Completion, Prompt
from tests.trainer.test_ledger import PROBLEM, Simulation, end, finish_group, reward
from tests.trainer.test_stages import StagedSimulation
from trainer.ledger import Interrupted, Ledger, LedgerState, with_unfinished
from trainer.stages import Stages

P = 4
"""groups a step"""


def make_config(async_level: int, fixed_staleness: bool = True, steps: int = 20) -> Config:
    rollout = {
        "prompts_per_step": P,
        "group_size": 2,
        "max_async_level": async_level,
        "fixed_staleness": fixed_staleness,
    }
    return Config.model_validate({"steps": steps, "rollout": rollout})


class TimedSimulation(Simulation):
    """Scripted engines and a trainer of any speed; notes the age of every trained token; can stop and go on."""

    def __init__(
        self, config: Config, seed: int, no_signal: float = 0.3, train_ticks: int = 20, publish_ticks: int = 5,
        saved: bytes = b"", stop_after: int = 0,
    ):  # fmt: skip
        """Goes on from `saved`, if given; is interrupted after `stop_after` ticks, 0 for never."""
        super().__init__(config, seed, no_signal)
        self.train_ticks, self.publish_ticks, self.stop_after = train_ticks, publish_ticks, stop_after
        self.token_ages: dict[int, set[int]] = {}
        """version before a step -> ages of all tokens trained in it"""
        self.decoded: dict[tuple[int, int], list[int]] = {}
        """running completion -> version of each token"""
        self.saved = b""
        """the ledger after an interruption"""
        if saved:
            self.ledger.restore(msgspec.json.decode(saved, type=LedgerState))
            self.engine_version = self.ledger.version

    async def decode(self, completion: Completion, tokens: int, lucky: float) -> None:
        key = (completion.group, completion.index)
        versions = [span.version for span in completion.spans for _ in range(span.start, span.end)]
        self.decoded[key] = versions
        for _ in range(tokens):
            await asyncio.sleep(0)
            versions.append(self.engine_version)
        del self.decoded[key]
        done = end(completion, versions)
        self.ledger.receive(done)
        self.ledger.close(done, reward(lucky), "text")

    async def admit(self, tasks: asyncio.TaskGroup) -> None:
        for completion in self.ledger.unfinished():
            tasks.create_task(self.decode(completion, 10, float(completion.index == 0)))
        await super().admit(tasks)

    async def train(self) -> None:
        async with asyncio.TaskGroup() as publishing:
            while not self.ledger.exhausted:
                version = self.ledger.version
                try:
                    groups = await self.ledger.take()
                except Interrupted:
                    partial = [
                        msgspec.structs.replace(end(completion, self.decoded[key]), finish_reason=None)
                        for completion in self.ledger.unfinished()
                        if (key := (completion.group, completion.index)) in self.decoded
                    ]
                    self.saved = msgspec.json.encode(with_unfinished(self.ledger.state(), partial))
                    raise
                for _ in range(self.train_ticks):
                    await asyncio.sleep(0)
                self.trained += [group.prompt.index for group in groups]
                self.token_ages[version] = {
                    version - span.version for group in groups for c in group.completions for span in c.spans
                }
                self.ledger.trained(groups)
                publishing.create_task(self.publish(self.ledger.version))

    async def publish(self, version: int) -> None:
        for _ in range(self.publish_ticks):
            await asyncio.sleep(0)
        self.engine_version = max(self.engine_version, version)
        self.ledger.release(version)

    async def interrupt(self) -> None:
        for _ in range(self.stop_after):
            await asyncio.sleep(0)
        self.ledger.interrupt()

    async def run(self) -> None:
        try:
            async with asyncio.timeout(150), asyncio.TaskGroup() as tasks:
                if self.stop_after:
                    tasks.create_task(self.interrupt())
                tasks.create_task(self.admit(tasks))
                tasks.create_task(self.train())
        except* Interrupted:
            assert self.saved


@settings(max_examples=25)
@given(
    async_level=st.sampled_from([1, 2, 8]), seed=st.integers(0, 1000), no_signal=st.sampled_from([0.0, 0.4]),
    train_ticks=st.sampled_from([0, 20, 300]), publish_ticks=st.sampled_from([0, 5, 100]),
)  # fmt: skip
def test_every_token_is_lead_versions_old_whoever_is_faster(
    async_level: int, seed: int, no_signal: float, train_ticks: int, publish_ticks: int
) -> None:
    config = make_config(async_level)
    simulation = TimedSimulation(config, seed, no_signal, train_ticks, publish_ticks)
    asyncio.run(simulation.run())
    ledger = simulation.ledger
    assert simulation.token_ages == {version: {min(version, async_level)} for version in range(20)}
    assert config.max_staleness == async_level
    assert simulation.trained == sorted(simulation.trained), "oldest first, whatever the window"
    assert len(simulation.trained) == 20 * P and ledger.started == 20 * P + ledger.filtered
    assert not ledger.groups and ledger.busy_slots == 0


def test_without_it_the_faster_side_decides() -> None:
    """A trainer without delay brings new weights to completions under way: most batches hold younger tokens too."""
    simulation = TimedSimulation(make_config(2, fixed_staleness=False), seed=0, train_ticks=0, publish_ticks=0)
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
    parts = [TimedSimulation(make_config(async_level), seed, 0.3, train_ticks, stop_after=stop_after)]
    asyncio.run(parts[0].run())
    if parts[0].saved:
        parts.append(TimedSimulation(make_config(async_level), seed + 1, 0.3, train_ticks, saved=parts[0].saved))
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
    rollout = {
        "prompts_per_step": P,
        "group_size": 2,
        "max_async_level": 2,
        "max_completion_tokens": 64,
        "fixed_staleness": True,
    }
    config = Config.model_validate({"steps": 20, "rollout": rollout, "stages": stages})
    simulation = StagedSimulation(config, seed=1)
    asyncio.run(asyncio.wait_for(simulation.run(), 100))
    ages, begun = iter(simulation.ages), [0, *(version for version, _ in simulation.begun)]
    # accuracy passes 0.45 at step 6; the two batches ahead are trained before the stage ends
    assert begun == [0, 8, 13] and len(simulation.by_step) == 20
    for version, batch in enumerate(simulation.by_step):
        number = sum(version >= first for first in begun) - 1
        expected = min(version - begun[number], [2, 1, 3][number])
        assert [next(ages) for _ in batch] == [expected] * len(batch)


def filled(async_level: int, opened: int) -> Ledger:
    ledger = Ledger(Stages(make_config(async_level)))
    for index in range(opened):
        ledger.open(Prompt(index, PROBLEM, [1]), [0, 0])
    return ledger


def test_a_batch_waits_for_the_batches_after_it() -> None:
    async def work() -> list[int]:
        ledger = filled(async_level=1, opened=8)
        for index in range(7):
            finish_group(ledger, index, [1.0, 0.0])
        taking = asyncio.ensure_future(ledger.take())
        await asyncio.sleep(0.01)
        assert not taking.done() and ledger.ready() == 7
        finish_group(ledger, 7, [1.0, 1.0])  # no signal: another takes its slot
        await asyncio.sleep(0.01)
        assert not taking.done() and await ledger.slot() == 1
        ledger.open(Prompt(8, PROBLEM, [1]), [0, 0])
        finish_group(ledger, 8, [1.0, 0.0])
        return [group.prompt.index for group in await asyncio.wait_for(taking, 30)]

    assert asyncio.run(work()) == [0, 1, 2, 3]


def test_the_end_of_a_stage_lets_go_what_is_complete() -> None:
    async def work() -> int:
        ledger = filled(async_level=2, opened=8)
        for index in range(8):
            finish_group(ledger, index, [1.0, 0.0])
        taking = asyncio.ensure_future(ledger.take())
        await asyncio.sleep(0.01)
        assert not taking.done(), "four slots are free"
        ledger.end_stage("enough")
        return len(await asyncio.wait_for(taking, 30))

    assert asyncio.run(work()) == P


def test_an_interruption_ends_the_wait_and_loses_nothing() -> None:
    async def work() -> Ledger:
        ledger = filled(async_level=1, opened=8)
        for index in range(7):
            finish_group(ledger, index, [1.0, 0.0])
        taking = asyncio.ensure_future(ledger.take())
        await asyncio.sleep(0.01)
        ledger.interrupt()
        with pytest.raises(Interrupted):
            await asyncio.wait_for(taking, 30)
        return ledger

    ledger = asyncio.run(work())
    assert list(ledger.groups) == list(range(8)) and ledger.ready() == 7 and ledger.busy_slots == 8
