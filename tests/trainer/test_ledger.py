"""The ledger: bounded staleness without dropping, exact slots, nothing twice, everything restorable."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared import record_file
from shared.config import Config
from shared.errors import NoProgress, RunError
from shared.types import Completion, Problem, Prompt, Reward, Verdict, VersionSpan
from trainer.checkpoint import ledger_file
from trainer.ledger import Interrupted, Ledger, LedgerState
from trainer.objectives.advantage import diverse
from trainer.stages import Stages

PROBLEM = Problem("p", "1+1=?", "2")


def make_config(steps: int = 30, **rollout: int) -> Config:
    settings = {"prompts_per_step": 4, "group_size": 2, **rollout}
    return Config.model_validate({"steps": steps, "rollout": settings})


def reward(total: float, verdict: Verdict = Verdict.CORRECT) -> Reward:
    return Reward(total, 0.1, 0.9 * (total > 0.5), 0.0, 0.0, verdict)


def end(completion: Completion, versions: list[int]) -> Completion:
    spans: list[VersionSpan] = []
    for position, version in enumerate(versions):
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(version, spans[-1].start, position + 1)
        else:
            spans.append(VersionSpan(version, position, position + 1))
    return msgspec.structs.replace(
        completion, token_ids=[1] * len(versions), logprobs=[-1.0] * len(versions), spans=spans, finish_reason="stop"
    )


def finish_group(ledger: Ledger, index: int, totals: list[float]) -> None:
    for completion, total in zip(list(ledger.groups[index].completions), totals, strict=True):
        done = end(completion, [0, 0])
        ledger.receive(done)
        ledger.close(done, reward(total), "text")


class Simulation:
    """Scripted engines: each completion decodes one token a tick with the engines' current version."""

    def __init__(self, config: Config, seed: int, no_signal: float = 0.3):
        self.ledger, self.random, self.no_signal = Ledger(Stages(config)), random.Random(seed), no_signal
        self.engine_version = 0
        self.config = config
        self.ages: list[int] = []
        self.trained: list[int] = []
        self.filtered = 0
        self.sampled_lengths: list[int] = []
        self.trained_lengths: list[int] = []

    async def decode(self, completion: Completion, tokens: int, lucky: float) -> None:
        versions = []
        for _ in range(tokens):
            await asyncio.sleep(0)
            versions.append(self.engine_version)
        done = end(completion, versions)
        self.ledger.receive(done)
        self.ledger.close(done, reward(lucky), "text")

    async def admit(self, tasks: asyncio.TaskGroup) -> None:
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
            for step in range(self.config.steps):
                groups = await self.ledger.take()
                for _ in range(20):
                    await asyncio.sleep(0)
                self.ages += [self.ledger.staleness(group) for group in groups]
                self.trained += [group.prompt.index for group in groups]
                self.trained_lengths += [len(c.token_ids) for group in groups for c in group.completions]
                self.filtered += len(self.ledger.trained(groups))
                publishing.create_task(self.publish(step + 1))

    async def publish(self, version: int) -> None:
        for _ in range(5):
            await asyncio.sleep(0)
        self.engine_version = max(self.engine_version, version)
        self.ledger.release(version)

    async def run(self) -> None:
        async with asyncio.timeout(150), asyncio.TaskGroup() as tasks:
            tasks.create_task(self.admit(tasks))
            tasks.create_task(self.train())


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
    config = Config.model_validate(
        {"steps": 400, "rollout": {"prompts_per_step": 4, "group_size": 2, "max_async_level": 2}}
    )
    simulation = Simulation(config, seed=1, no_signal=0.0)
    asyncio.run(simulation.run())
    assert sorted(simulation.trained) == list(range(1600))
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


def test_start_up_window_and_filter_do_not_bias_lengths():
    """20,000 completions of a scripted engine, a third of the groups filtered: every part of a run trains lengths as
    they were sampled, its first and last batches too."""
    first, last, every, sampled = [], [], [], []
    for seed in range(210):
        simulation = Simulation(make_config(max_async_level=2).model_copy(update={"steps": 12}), seed, no_signal=0.33)
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
    ledger = Ledger(Stages(make_config(max_async_level=3, reorder_window=16)))
    for index in range(16):
        ledger.open(Prompt(index, PROBLEM, [1]), [0, 0])
    finish_group(ledger, 3, [1.0, 0.0])
    allowed = []
    for trained in (0, 8, 16, 24, 32):
        ledger.trained_groups = trained
        allowed.append(ledger._next() is not None)
    assert allowed == [False, False, False, True, True], "group 3 may be first when the window is 4"
    ledger.trained_groups = ledger.stage.target - 20
    assert ledger._next() is None, "towards the end the window is 3 again"


def test_the_first_batch_comes_from_the_window_of_the_oldest():
    ledger = Ledger(Stages(make_config(max_async_level=2, reorder_window=4)))
    ledger.trained_groups = 3 * ledger.OPENING_GROUPS
    for index in range(12):
        ledger.open(Prompt(index, PROBLEM, [1]), [0, 0])
    for index in range(1, 12):
        finish_group(ledger, index, [1.0, 0.0])
    taken = []
    while (group := ledger._next()) is not None:
        taken.append(ledger._take_one(group).prompt.index)
    assert taken == [1, 2, 3], "a window of 4 lets three younger groups pass the oldest, not more"


def test_a_completion_cannot_arrive_or_be_scored_twice():
    ledger = Ledger(Stages(make_config()))
    group = ledger.open(Prompt(0, PROBLEM, [1]), [0, 0])
    done = end(group.completions[0], [0])
    ledger.receive(done)
    with pytest.raises(RunError, match="twice"):
        ledger.receive(done)
    ledger.close(done, reward(1.0), "")
    with pytest.raises(RunError, match="twice"):
        ledger.close(done, reward(1.0), "")


@pytest.mark.parametrize(
    ("totals", "filter_groups_by", "expected"),
    [
        ([1.0, 1.0], "total", False),
        ([1.0, 0.99999], "total", True),
        ([-0.1, -0.1], "total", False),
        ([1.0, 0.9], "correctness", False),
        ([1.0, 0.1], "correctness", True),
        ([1.0, 1.0], "off", True),
    ],
)
def test_zero_variance_is_exact_equality_over_the_complete_group(totals, filter_groups_by, expected):
    assert diverse([reward(total) for total in totals], filter_groups_by) is expected


def test_ungraded_verdicts_give_no_signal():
    assert not diverse([reward(1.0), reward(0.0, Verdict.TIMEOUT)], "total")


def test_all_groups_without_signal_end_the_run_with_counts():
    ledger = Ledger(Stages(make_config(prompts_per_step=1, max_async_level=2)))
    with pytest.raises(NoProgress, match=r"no trainable group in 20 attempts.*'correct': 40"):
        for index in range(40):
            ledger.open(Prompt(index, PROBLEM, [1]), [0, 0])
            finish_group(ledger, index, [1.0, 1.0])


def test_an_interrupted_take_gives_its_groups_back():
    async def interrupted() -> Ledger:
        ledger = Ledger(Stages(make_config()))
        for index in range(4):
            ledger.open(Prompt(index, PROBLEM, [1]), [0, 0])
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
    assert list(ledger.groups) == [0, 1, 2, 3]
    assert ledger.busy_slots == 4


def test_the_saved_state_holds_partial_completions_and_goes_on(tmp_path: Path):
    ledger = Ledger(Stages(make_config(max_async_level=1)))
    for index in range(6):
        ledger.open(Prompt(index, PROBLEM, [1]), [7, 8])
    finish_group(ledger, 1, [1.0, 0.0])
    ledger.receive(end(ledger.groups[0].completions[0], [0]))
    running = ledger.groups[2].completions[1]
    partial = msgspec.structs.replace(running, token_ids=[5, 6], logprobs=[-1.0, -2.0], spans=[VersionSpan(0, 0, 2)])
    state, target = ledger.state(), ledger.stage.target
    ledger.groups[2].rewards[0] = ledger.groups[1].rewards[0]
    ledger.groups[0].completions[0].teacher = [-1.0]
    ledger.stage.target += 5
    written = {ledger_file.LEDGER: ledger_file.write(tmp_path, state)}
    assert written[ledger_file.LEDGER].bytes == (tmp_path / ledger_file.LEDGER).stat().st_size
    record_file.write(tmp_path / "engine-0.msgpack", [partial, Completion(77, 0, 0)])
    fresh, found = Ledger(Stages(make_config(max_async_level=1))), ledger_file.read(tmp_path)
    assert found.groups[2].rewards == [None, None] and not found.groups[0].completions[0].teacher, "of that moment"
    assert found.stage.target == target
    blob = msgspec.json.encode(found)
    fresh.restore(found)
    assert fresh.groups[2].completions[1] == partial
    assert [(c.group, c.index) for c in fresh.unscored()] == [(0, 0)]
    assert fresh.next_index == 6 and fresh.busy_slots == 6 and fresh.wanted() == 2
    assert fresh.ready() == 1
    assert msgspec.json.encode(fresh.state()) == blob


def test_groups_that_a_new_filter_drops_give_their_slots_back_on_a_resume() -> None:
    def ledger_of(filter_groups_by: str) -> Ledger:
        objective = {"filter_groups_by": filter_groups_by}
        return Ledger(Stages(make_config(max_async_level=1).model_copy(update={"objective": objective})))

    before = ledger_of("off")
    for index in range(3):
        before.open(Prompt(index, PROBLEM, [1]), [7, 8])
    finish_group(before, 0, [1.0, 1.0])
    assert before.ready() == 1
    fresh = ledger_of("total")
    fresh.restore(msgspec.json.decode(msgspec.json.encode(before.state()), type=LedgerState))
    assert list(fresh.groups) == [1, 2] and fresh.busy_slots == 2 and fresh.filtered == 1
    assert fresh.wanted() == before.wanted() + 1


def test_groups_without_signal_are_reported_by_the_first_step_after_a_resume(tmp_path: Path):
    ledger = Ledger(Stages(make_config(max_async_level=1)))
    for index in range(3):
        ledger.open(Prompt(index, PROBLEM, [1]), [7, 8])
    finish_group(ledger, 1, [1.0, 1.0])
    ledger_file.write(tmp_path, ledger.state())
    fresh = Ledger(Stages(make_config(max_async_level=1)))
    fresh.restore(ledger_file.read(tmp_path))
    assert list(fresh.groups) == [0, 2]
    (filtered,) = fresh.trained([])
    assert filtered.prompt.index == 1 and [c.token_ids for c in filtered.completions] == [
        c.token_ids for c in ledger.trained([])[0].completions
    ]
    assert fresh.trained([]) == []


@pytest.mark.parametrize(("teacher", "asked"), [("", [(1, 0), (1, 1)]), ("one", []), ("two", [(1, 0), (1, 1)])])
def test_another_teacher_is_asked_about_what_has_ended(teacher: str, asked: list[tuple[int, int]]):
    """Log-probs of one model are never trained as those of another, nor left over where there is none any more."""

    def taught_by(name: str) -> Ledger:
        served = {"name": "distill", "teacher": {"kind": "served", "url": "http://x/v1", "model": name}}
        return Ledger(Stages(make_config().model_copy(update={"objective": served if name else {}})))

    ledger = taught_by("one")
    for index in range(2):
        ledger.open(Prompt(index, PROBLEM, [1]), [7, 8])
    finish_group(ledger, 1, [1.0, 0.0])
    for completion in ledger.groups[1].completions:
        completion.teacher = [-1.0] * len(completion.token_ids)
    fresh = taught_by(teacher)
    fresh.restore(msgspec.json.decode(msgspec.json.encode(ledger.state()), type=LedgerState))
    assert [(c.group, c.index) for c in fresh.unscored()] == asked
    assert all(bool(c.teacher) != bool(asked) for c in fresh.groups[1].completions)
    assert fresh.ready() == (0 if asked else 1)
