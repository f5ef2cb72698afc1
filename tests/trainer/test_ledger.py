"""The ledger: bounded staleness without dropping, exact slots, nothing twice, everything restorable."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared import record_file
from shared.config import Config
from shared.errors import NoProgress, RunError
from shared.types import Completion, Group, Problem, Prompt, Reward, Verdict, VersionSpan
from trainer.checkpoint import ledger_file
from trainer.ledger import Interrupted, Ledger, LedgerState, with_unfinished
from trainer.stages import Stages

PROBLEM = Problem("p", "1+1=?", "2")


def make_config(steps: int = 30, **rollout: int) -> Config:
    settings = {"prompts_per_step": 4, "group_size": 2, **rollout}
    return Config.model_validate({"steps": steps, "rollout": settings})


def reward(total: float, verdict: Verdict = Verdict.CORRECT) -> Reward:
    return Reward(total, 0.1, 0.9 * (total > 0.5), 0.0, 0.0, verdict)


def end(completion: Completion, versions: list[int]) -> Completion:
    """The completion with one token of each version, ended."""
    starts = [place for place, version in enumerate(versions) if not place or version != versions[place - 1]]
    spans = [VersionSpan(versions[a], a, b) for a, b in itertools.pairwise([*starts, len(versions)])]
    return msgspec.structs.replace(
        completion, token_ids=[1] * len(versions), logprobs=[-1.0] * len(versions), spans=spans, finish_reason="stop"
    )


def finish_group(ledger: Ledger, index: int, totals: list[float]) -> None:
    for completion, total in zip(list(ledger.groups[index].completions), totals, strict=True):
        done = end(completion, [0, 0])
        ledger.receive(done)
        ledger.close(done, reward(total), "text")


def opened(ledger: Ledger, count: int) -> Ledger:
    """With groups 0 to count - 1 open."""
    for index in range(count):
        ledger.open(Prompt(index, PROBLEM, [1]), [7, 8])
    return ledger


def make_ledger(count: int = 0, **rollout: int) -> Ledger:
    return opened(Ledger(Stages(make_config(**rollout))), count)


def restored(ledger: Ledger, into: Ledger | None = None) -> Ledger:
    """A new ledger that goes on from this one, through bytes."""
    fresh = make_ledger(max_async_level=1) if into is None else into
    fresh.restore(msgspec.json.decode(msgspec.json.encode(ledger.state()), type=LedgerState))
    return fresh


class Simulation:
    """Scripted engines, a token a tick with their current version, and a trainer of any speed; can stop and go on."""

    def __init__(
        self, config: Config, seed: int, no_signal: float = 0.3, train_ticks: int = 20, publish_ticks: int = 5,
        saved: bytes = b"", stop_after: int = 0,
    ):  # fmt: skip
        """Goes on from `saved`, if given; is interrupted after `stop_after` ticks, 0 for never."""
        self.config, self.ledger, self.random = config, Ledger(Stages(config)), random.Random(seed)
        self.no_signal, self.train_ticks, self.publish_ticks = no_signal, train_ticks, publish_ticks
        self.stop_after = stop_after
        self.engine_version = 0
        self.ages: list[int] = []
        self.token_ages: dict[int, set[int]] = {}
        """version before a step -> ages of all tokens trained in it"""
        self.trained: list[int] = []
        self.filtered = 0
        self.sampled_lengths: list[int] = []
        self.trained_lengths: list[int] = []
        self.decoded: dict[tuple[int, int], list[int]] = {}
        """running completion -> version of each token"""
        self.saved = b""
        """the ledger after an interruption"""
        if saved:
            self.ledger.restore(msgspec.json.decode(saved, type=LedgerState))
            self.engine_version = self.ledger.version

    async def decode(self, completion: Completion, tokens: int, total: float) -> None:
        versions = [span.version for span in completion.spans for _ in range(span.start, span.end)]
        self.decoded[completion.group, completion.index] = versions
        for _ in range(tokens):
            await asyncio.sleep(0)
            versions.append(self.engine_version)
        done = end(completion, self.decoded.pop((completion.group, completion.index)))
        self.ledger.receive(done)
        self.ledger.close(done, reward(total), "text")

    async def admit(self, tasks: asyncio.TaskGroup) -> None:
        for completion in self.ledger.unfinished():
            tasks.create_task(self.decode(completion, 10, float(completion.index == 0)))
        while count := await self.ledger.slot():
            for _ in range(count):
                index = self.ledger.next_index
                group = self.ledger.open(Prompt(index, PROBLEM, [1]), [0] * self.ledger.settings.group_size)
                signal = self.random.random() >= self.no_signal
                for completion in group.completions:
                    tokens = max(2, int(self.random.lognormvariate(3, 1)))
                    self.sampled_lengths.append(tokens)
                    total = float(signal and completion.index == 0)
                    tasks.create_task(self.decode(completion, tokens, total))

    async def train(self) -> None:
        async with asyncio.TaskGroup() as publishing:
            while not self.ledger.exhausted:
                version = self.ledger.version
                try:
                    groups = await self.ledger.take()
                except Interrupted:
                    self.save()
                    raise
                for _ in range(self.train_ticks):
                    await asyncio.sleep(0)
                completions = [completion for group in groups for completion in group.completions]
                self.ages += [self.ledger.staleness(group) for group in groups]
                self.token_ages[version] = {version - span.version for each in completions for span in each.spans}
                self.trained += [group.prompt.index for group in groups]
                self.trained_lengths += [len(completion.token_ids) for completion in completions]
                self.filtered += len(self.ledger.trained(groups))
                publishing.create_task(self.publish(self.ledger.version))

    def save(self) -> None:
        partial = [
            msgspec.structs.replace(end(completion, self.decoded[key]), finish_reason=None)
            for completion in self.ledger.unfinished()
            if (key := (completion.group, completion.index)) in self.decoded
        ]
        self.saved = msgspec.json.encode(with_unfinished(self.ledger.state(), partial))

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
            async with asyncio.timeout(600), asyncio.TaskGroup() as tasks:
                if self.stop_after:
                    tasks.create_task(self.interrupt())
                tasks.create_task(self.admit(tasks))
                tasks.create_task(self.train())
        except* Interrupted:
            assert self.saved


@settings(max_examples=20)
@given(
    async_level=st.integers(0, 3),
    window=st.integers(1, 13),
    seed=st.integers(0, 1000),
    no_signal=st.sampled_from([0.0, 0.4]),
)
def test_age_is_bounded_nothing_is_dropped_and_slots_balance(
    async_level: int, window: int, seed: int, no_signal: float
):
    window = window if async_level else min(window, 4)
    simulation = Simulation(make_config(max_async_level=async_level, reorder_window=window), seed, no_signal)
    asyncio.run(simulation.run())
    ledger = simulation.ledger
    bound = async_level + math.ceil((window - 1) / 4) if async_level else 0
    assert max(simulation.ages) <= bound == simulation.config.max_staleness
    assert len(simulation.trained) == 30 * 4
    assert max(Counter(simulation.trained).values()) == 1
    assert ledger.started == len(simulation.trained) + ledger.filtered
    assert simulation.filtered == ledger.filtered, "told with a step, also those that ended while it was trained"
    assert not ledger.groups and ledger.busy_slots == 0


def test_trained_lengths_are_the_sampled_lengths():
    simulation = Simulation(make_config(steps=100, max_async_level=2), seed=1, no_signal=0.0)
    asyncio.run(simulation.run())
    assert sorted(simulation.trained) == list(range(400))
    assert sorted(simulation.trained_lengths) == sorted(simulation.sampled_lengths)
    early = sum(simulation.trained_lengths[:200]) / 200
    assert abs(early / (sum(simulation.sampled_lengths[:200]) / 200) - 1) < 0.15, "start-up favours short completions"


def distance(first: list[int], second: list[int]) -> float:
    """Kolmogorov-Smirnov: the largest difference of the two distribution functions."""
    points = np.unique(np.concatenate([first, second]))
    return float(
        np.abs(
            np.searchsorted(np.sort(first), points, "right") / len(first)
            - np.searchsorted(np.sort(second), points, "right") / len(second)
        ).max()
    )


@pytest.mark.soak
def test_start_up_window_and_filter_do_not_bias_lengths():
    """20,000 completions of a scripted engine, a third of the groups filtered: every part of a run trains lengths as
    they were sampled, its first and last batches too."""
    first, last, every, sampled = [], [], [], []
    for seed in range(210):
        simulation = Simulation(make_config(12, max_async_level=2), seed, no_signal=0.33)
        asyncio.run(simulation.run())
        lengths = simulation.trained_lengths
        first += lengths[: 2 * 4 * 2]
        last += lengths[-2 * 4 * 2 :]
        every += lengths
        sampled += simulation.sampled_lengths
    assert len(every) == 210 * 12 * 4 * 2 > 20_000
    assert distance(every, sampled) < 0.02
    noise = 1.36 / math.sqrt(len(first))  # 95 % of equal distributions are nearer
    assert distance(first, sampled) < noise and distance(last, sampled) < noise


def test_the_window_opens_and_closes_by_one_group_at_a_time():
    ledger = make_ledger(16, max_async_level=3, reorder_window=16)
    finish_group(ledger, 3, [1.0, 0.0])
    allowed = []
    for trained in (0, 8, 16, 24, 32):
        ledger.trained_groups = trained
        allowed.append(ledger._next() is not None)
    assert allowed == [False, False, False, True, True], "group 3 may be first when the window is 4"
    ledger.trained_groups = ledger.stage.target - 20
    assert ledger._next() is None, "towards the end the window is 3 again"


def test_the_first_batch_comes_from_the_window_of_the_oldest():
    ledger = make_ledger(12, max_async_level=2, reorder_window=4)
    ledger.trained_groups = 3 * ledger.OPENING_GROUPS
    for index in range(1, 12):
        finish_group(ledger, index, [1.0, 0.0])
    taken = []
    while (group := ledger._next()) is not None:
        taken.append(ledger._take_one(group).prompt.index)
    assert taken == [1, 2, 3], "a window of 4 lets three younger groups pass the oldest, not more"


def test_a_completion_cannot_arrive_or_be_scored_twice():
    ledger = make_ledger(1)
    done = end(ledger.groups[0].completions[0], [0])
    ledger.receive(done)
    with pytest.raises(RunError, match="arrived twice"):
        ledger.receive(done)
    ledger.close(done, reward(1.0), "")
    with pytest.raises(RunError, match="scored twice"):
        ledger.close(done, reward(1.0), "")


def test_a_group_with_a_completion_that_was_given_up_has_no_signal():
    ledger = make_ledger(1)
    for completion, reason, total in zip(
        list(ledger.groups[0].completions), ("stop", "abort"), (1.0, 0.0), strict=True
    ):
        done = msgspec.structs.replace(end(completion, [0]), finish_reason=reason)
        ledger.receive(done)
        ledger.close(done, reward(total), "")
    assert not ledger.groups and ledger.filtered == 1 and ledger.busy_slots == 0


def test_all_groups_without_signal_end_the_run_with_counts():
    ledger = make_ledger(prompts_per_step=1, max_async_level=2)
    with pytest.raises(NoProgress, match=r"in 20 attempts.*'correct': 40"):
        for index in range(40):
            ledger.open(Prompt(index, PROBLEM, [1]), [0, 0])
            finish_group(ledger, index, [1.0, 1.0])


def test_a_released_version_frees_the_slots_of_those_before_it():
    ledger = make_ledger(8, max_async_level=1)
    for first in (0, 4):
        for index in range(first, first + 4):
            finish_group(ledger, index, [1.0, 0.0])
        ledger.trained([ledger._take_one(ledger.groups[index]) for index in range(first, first + 4)])
    assert ledger.busy_slots == 8
    ledger.release(0)
    assert ledger.busy_slots == 8
    ledger.release(2)
    assert ledger.busy_slots == 0


def test_an_interrupted_take_gives_its_groups_back():
    async def interrupted() -> Ledger:
        ledger = make_ledger(4)
        for index in (0, 2):
            finish_group(ledger, index, [1.0, 0.0])
        waiting = asyncio.ensure_future(ledger.take())
        await asyncio.sleep(0)
        finish_group(ledger, 1, [1.0, 0.0])
        finish_group(ledger, 3, [1.0, 0.0])  # the batch is complete in the moment of the interruption
        ledger.interrupt()
        with pytest.raises(Interrupted):
            await waiting
        assert await ledger.slot() == 0
        return ledger

    ledger = asyncio.run(interrupted())
    assert list(ledger.groups) == [0, 1, 2, 3] and ledger.busy_slots == 4
    window = ledger.stages.now.window
    assert ledger.state().overtaken == [window, 0, 0, 0], "what was taken goes first"


def test_the_saved_state_holds_partial_completions_and_goes_on(tmp_path: Path):
    ledger = make_ledger(6, max_async_level=1)
    finish_group(ledger, 1, [1.0, 0.0])
    ledger.receive(end(ledger.groups[0].completions[0], [0]))
    running = ledger.groups[2].completions[1]
    partial = msgspec.structs.replace(running, token_ids=[5, 6], logprobs=[-1.0, -2.0], spans=[VersionSpan(0, 0, 2)])
    state, target = ledger.state(), ledger.stage.target
    ledger.groups[2].rewards[0] = ledger.groups[1].rewards[0]
    ledger.groups[0].completions[0].teacher = [-1.0]
    ledger.stage.target += 5
    written = ledger_file.write(tmp_path, state)
    assert written.bytes == (tmp_path / ledger_file.LEDGER).stat().st_size
    record_file.write(tmp_path / "engine-0.msgpack", [partial, Completion(77, 0, 0)])
    fresh, kept = make_ledger(max_async_level=1), ledger_file.read(tmp_path)
    assert kept.groups[2].rewards == [None, None] and not kept.groups[0].completions[0].teacher, "of that moment"
    assert kept.stage.target == target
    blob = msgspec.json.encode(kept)
    fresh.restore(kept)
    assert fresh.groups[2].completions[1] == partial
    assert [(c.group, c.index) for c in fresh.unscored()] == [(0, 0)]
    assert fresh.next_index == 6 and fresh.busy_slots == 6 and fresh.wanted() == 2 and fresh.ready() == 1
    assert msgspec.json.encode(fresh.state()) == blob


def with_objective(objective: dict[str, Any]) -> Ledger:
    return Ledger(Stages(make_config(max_async_level=1).model_copy(update={"objective": objective})))


def test_groups_that_a_new_filter_drops_give_their_slots_back_on_a_resume() -> None:
    before = opened(with_objective({"filter_groups_by": "off"}), 3)
    finish_group(before, 0, [1.0, 1.0])
    assert before.ready() == 1
    fresh = restored(before, with_objective({"filter_groups_by": "total"}))
    assert list(fresh.groups) == [1, 2] and fresh.busy_slots == 2 and fresh.filtered == 1
    assert fresh.wanted() == before.wanted() + 1


def test_groups_without_signal_are_reported_by_the_first_step_after_a_resume():
    ledger = make_ledger(3, max_async_level=1)
    finish_group(ledger, 1, [1.0, 1.0])
    fresh = restored(ledger)
    assert list(fresh.groups) == [0, 2]
    assert (
        fresh.trained([]) == ledger.trained([]) and [group.prompt.index for group in fresh._filtered_since_step] == []
    )


@pytest.mark.parametrize(("teacher", "asked"), [("", [(1, 0), (1, 1)]), ("one", []), ("two", [(1, 0), (1, 1)])])
def test_another_teacher_is_asked_about_what_has_ended(teacher: str, asked: list[tuple[int, int]]):
    """Log-probs of one model are never trained as those of another, nor left over where there is none any more."""

    def taught_by(name: str) -> Ledger:
        served = {"name": "distill", "teacher": {"kind": "served", "url": "http://x/v1", "model": name}}
        return with_objective(served if name else {})

    ledger = opened(taught_by("one"), 2)
    finish_group(ledger, 1, [1.0, 0.0])
    for completion in ledger.groups[1].completions:
        completion.teacher = [-1.0] * len(completion.token_ids)
    fresh = restored(ledger, taught_by(teacher))
    assert [(c.group, c.index) for c in fresh.unscored()] == asked
    assert all(bool(c.teacher) != bool(asked) for c in fresh.groups[1].completions)
    assert fresh.ready() == (0 if asked else 1)


# ---- who was overtaken how often -------------------------------------------------------------------------------------


class Thorough(Ledger):
    """Looks at every waiting group, not only at those in front."""

    def _take_one(self, group: Group) -> Group:
        index = group.prompt.index
        del self.groups[index], self._taken_after[index]
        self._ready.remove(index)
        for waiting in self._taken_after:
            if waiting < index:
                self._taken_after[waiting] += 1
        return group


async def take_and_interrupt(ledger: Ledger) -> list[Group]:
    """A batch, or nothing: what was taken in part is put back, as after Ctrl-C."""
    waiting = asyncio.ensure_future(ledger.take())
    await asyncio.sleep(0)
    ledger.interrupt()
    try:
        return await waiting
    except Interrupted:
        return []
    finally:
        ledger.interrupted = False


async def play(ledger: Ledger, seed: int) -> tuple[list[int], bytes]:
    """Open, finish in any order, take, put back, save and restore; ([taken], the state at the end)."""
    dice, taken = random.Random(seed), []
    ledger.trained_groups = 40 * ledger.OPENING_GROUPS  # the window is open
    for _ in range(300):
        event, batch = dice.random(), []
        unfinished = [index for index, group in ledger.groups.items() if not group.complete]
        if event < 0.35 and ledger.wanted():
            ledger.open(Prompt(ledger.next_index, PROBLEM, [1]), [0, 0])
        elif event < 0.7 and unfinished:
            finish_group(ledger, dice.choice(unfinished), [1.0, float(dice.random() < 0.1)])
        elif event < 0.95 and (group := ledger._next()) is not None:
            batch = [ledger._take_one(group)]
        elif event < 0.97:
            batch = await take_and_interrupt(ledger)
        elif event > 0.99:
            restored(ledger, ledger)
        taken += [group.prompt.index for group in batch]
        ledger.busy_slots -= len(batch)
    return taken, msgspec.json.encode(ledger.state())


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), window=st.sampled_from([1, 4, 13]))
def test_counting_in_front_is_counting_all(seed: int, window: int) -> None:
    config = make_config(max_async_level=3, reorder_window=window, steps=2_500)
    taken, state = asyncio.run(play(Ledger(Stages(config)), seed))
    assert (taken, state) == asyncio.run(play(Thorough(Stages(config)), seed))
    assert len(taken) > 20
