"""The ledger: bounded staleness without dropping, exact slots, nothing twice, everything restorable; held back, every
trained token is exactly `max_async_level` versions old, whoever is faster."""

from __future__ import annotations

import asyncio
import itertools
import math
import operator
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared import record_file
from shared.config import Config
from shared.errors import NoProgress, RunError
from shared.types import Completion, Group, Problem, Prompt, Reward, Turn, Verdict, VersionSpan
from trainer.checkpoint import ledger_file
from trainer.ledger import Interrupted, Ledger, LedgerState, with_unfinished
from trainer.stages import Stages
from trainer.step_metrics import filtered_text

PROBLEM = Problem("p", "1+1=?", "2")
P = 4
"""groups a step"""


def make_config(steps: int = 30, stages: Sequence[dict[str, Any]] = (), **rollout: int) -> Config:
    settings = {"prompts_per_step": P, "group_size": 2, **rollout}
    return Config.model_validate({"steps": steps, "rollout": settings, "stages": list(stages)})


def reward(total: float, verdict: Verdict = Verdict.CORRECT) -> Reward:
    return Reward(total, 0.1, 0.9 * (total > 0.5), 0.0, 0.0, verdict)


def end(completion: Completion, versions: list[int], reason: Any = "stop") -> Completion:
    """The completion with one token of each version, ended."""
    starts = [place for place, version in enumerate(versions) if not place or version != versions[place - 1]]
    spans = [VersionSpan(versions[a], a, b) for a, b in itertools.pairwise([*starts, len(versions)])]
    count = len(versions)
    return msgspec.structs.replace(
        completion, token_ids=[1] * count, logprobs=[-1.0] * count, spans=spans, finish_reason=reason
    )


def finish_group(ledger: Ledger, index: int, totals: list[float], reason: str = "stop") -> None:
    for completion, total in zip(list(ledger.groups[index].completions), totals, strict=True):
        ledger.receive(done := end(completion, [0, 0], reason))
        ledger.close(done, reward(total), "text")


def opened(ledger: Ledger, count: int, ready: Sequence[int] = ()) -> Ledger:
    """With groups 0 to count - 1 open, of which these are ready."""
    for index in range(count):
        ledger.open(Prompt(index, PROBLEM, [1]), [7, 8])
    for index in ready:
        finish_group(ledger, index, [1.0, 0.0])
    return ledger


def make_ledger(count: int = 0, ready: Sequence[int] = (), **rollout: int) -> Ledger:
    return opened(Ledger(Stages(make_config(**rollout))), count, ready)


def through_bytes(state: LedgerState) -> LedgerState:
    return msgspec.json.decode(msgspec.json.encode(state), type=LedgerState)


def restored(ledger: Ledger, into: Ledger) -> Ledger:
    """`into`, which goes on from the other one."""
    into.restore(through_bytes(ledger.state()))
    return into


async def ticks(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@dataclass
class Simulation:
    """Scripted engines, a token a tick with their current version, and a trainer of any speed, which goes through
    stages as the controller does. Goes on from `saved`; is interrupted after `stop_after` ticks, 0 for never."""

    config: Config
    seed: int
    no_signal: float = 0.3
    train_ticks: int = 20
    publish_ticks: int = 5
    saved: bytes = b""
    """in the end: the ledger after an interruption"""
    stop_after: int = 0
    filtered: int = 0
    steps: list[list[Group]] = field(default_factory=list)
    ages: list[list[int]] = field(default_factory=list)
    """of the groups of each step"""
    token_ages: dict[int, set[int]] = field(default_factory=dict)
    """version before a step -> ages of all tokens trained in it"""
    sampled_lengths: list[int] = field(default_factory=list)
    decoded: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """running completion -> version of each token"""
    lines: list[str] = field(default_factory=list)
    """of each later stage, and below its first policy version and draw"""
    begun: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ledger, self.random = Ledger(Stages(self.config)), random.Random(self.seed)
        if self.saved:
            self.ledger.restore(msgspec.json.decode(self.saved, type=LedgerState))
        self.saved, self.engine_version = b"", self.ledger.version

    @property
    def trained(self) -> list[int]:
        return [group.prompt.index for step in self.steps for group in step]

    @property
    def trained_lengths(self) -> list[int]:
        return [len(each.token_ids) for step in self.steps for group in step for each in group.completions]

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
                prompt = Prompt(self.ledger.next_index, PROBLEM, [1])
                group = self.ledger.open(prompt, [0] * self.ledger.settings.group_size)
                signal = self.random.random() >= self.no_signal
                for completion in group.completions:
                    tokens = max(2, int(self.random.lognormvariate(3, 1)))
                    self.sampled_lengths.append(tokens)
                    tasks.create_task(self.decode(completion, tokens, float(signal and completion.index == 0)))

    async def train(self) -> None:
        async with asyncio.TaskGroup() as publishing:
            sync = None
            while not self.ledger.exhausted:
                while self.ledger.stage_over:
                    assert sync is not None and not self.ledger.groups, "a stage ends with an empty ledger"
                    await sync
                    self.lines.append(self.ledger.next_stage())
                    self.begun.append((self.ledger.version, self.ledger.next_index))
                version = self.ledger.version
                try:
                    groups = await self.ledger.take()
                except Interrupted:
                    self.save()
                    raise
                await ticks(self.train_ticks)
                self.steps.append(groups)
                self.ages.append([self.ledger.staleness(group) for group in groups])
                spans = [span for group in groups for completion in group.completions for span in completion.spans]
                self.token_ages[version] = {version - span.version for span in spans}
                self.filtered += len(self.ledger.trained(groups))
                if reason := self.ledger.stages.observe({"accuracy": len(self.steps) / 10}, groups):
                    self.ledger.end_stage(reason)
                sync = publishing.create_task(self.publish(self.ledger.version))

    def save(self) -> None:
        partial = [
            end(completion, self.decoded[key], reason=None)
            for completion in self.ledger.unfinished()
            if (key := (completion.group, completion.index)) in self.decoded
        ]
        self.saved = msgspec.json.encode(with_unfinished(self.ledger.state(), partial))

    async def publish(self, version: int) -> None:
        await ticks(self.publish_ticks)
        self.engine_version = max(self.engine_version, version)
        self.ledger.release(version)

    async def interrupt(self) -> None:
        await ticks(self.stop_after)
        self.ledger.interrupt()

    async def work(self) -> None:
        try:
            async with asyncio.timeout(600), asyncio.TaskGroup() as tasks:
                if self.stop_after:
                    tasks.create_task(self.interrupt())
                tasks.create_task(self.admit(tasks))
                tasks.create_task(self.train())
        except* Interrupted:
            assert self.saved

    def run(self) -> Simulation:
        asyncio.run(self.work())
        return self


@settings(max_examples=20)
@given(
    level=st.integers(0, 3), window=st.integers(1, 13), seed=st.integers(0, 1000), no_signal=st.sampled_from([0.0, 0.4])
)
def test_age_is_bounded_nothing_is_dropped_and_slots_balance(level, window, seed, no_signal):
    window = window if level else min(window, P)
    simulation = Simulation(make_config(max_async_level=level, reorder_window=window), seed, no_signal).run()
    ledger = simulation.ledger
    bound = level + math.ceil((window - 1) / P) if level else 0
    assert max(map(max, simulation.ages)) <= bound == simulation.config.max_staleness
    assert len(simulation.trained) == len(set(simulation.trained)) == 30 * P
    assert ledger.started == 30 * P + ledger.filtered
    assert simulation.filtered == ledger.filtered, "told with a step, also those that ended while it was trained"
    assert not ledger.groups and ledger.busy_slots == 0


def test_trained_lengths_are_the_sampled_lengths():
    simulation = Simulation(make_config(steps=100, max_async_level=2), seed=1, no_signal=0.0).run()
    assert sorted(simulation.trained) == list(range(400))
    trained, sampled = simulation.trained_lengths, simulation.sampled_lengths
    assert sorted(trained) == sorted(sampled)
    for period in (slice(200), slice(-200, None)):
        assert abs(sum(trained[period]) / sum(sampled[period]) - 1) < 0.15, "start or end favours some lengths"


def test_the_window_opens_and_closes_by_one_group_at_a_time():
    ledger = make_ledger(16, ready=[3], max_async_level=3, reorder_window=16)
    allowed = []
    for trained in (0, 8, 16, 24, 32, ledger.stage.target - 20):
        ledger.trained_groups = trained
        allowed.append(ledger._next() is not None)
    assert allowed == [False, False, False, True, True, False], "group 3 may be first when the window is 4, at most"


def test_the_first_batch_comes_from_the_window_of_the_oldest():
    ledger = make_ledger(12, ready=range(1, 12), max_async_level=2, reorder_window=4)
    ledger.trained_groups = 3 * ledger.OPENING_GROUPS
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


def test_completions_share_the_objects_of_their_token_ids():
    """28 of the 70 bytes that the controller held of a token."""
    ledger = make_ledger(2)
    sent = msgspec.msgpack.encode([300, 70_000])
    for index in range(2):
        ids = msgspec.msgpack.decode(sent, type=list[int])
        ledger.receive(Completion(index, 0, 0, ids, [-1.0, -1.0], [VersionSpan(0, 0, 2)], "stop"))
    first, second = (ledger.groups[index].completions[0].token_ids for index in range(2))
    assert first == second == [300, 70_000] and all(map(operator.is_, first, second))


def test_a_group_with_a_completion_that_was_given_up_has_no_signal():
    ledger = make_ledger(1)
    for completion, reason in zip(list(ledger.groups[0].completions), ("stop", "abort"), strict=True):
        ledger.receive(done := end(completion, [0], reason))
        ledger.close(done, reward(float(reason == "stop")), "")
    assert not ledger.groups and ledger.filtered == 1 and ledger.busy_slots == 0


@pytest.mark.parametrize(("credit", "discount", "kept"), [("turn", 0.5, 1), ("turn", 1.0, 1), ("episode", 1.0, 0)])
def test_with_credit_by_turn_a_group_of_equal_totals_is_kept_where_a_turn_differs(credit, discount, kept):
    config = make_config().model_dump() | {"environment": {"name": "guess", "credit": credit, "discount": discount}}
    ledger = opened(Ledger(Stages(Config.model_validate(config))), 1)
    for completion, rewards in zip(list(ledger.groups[0].completions), ((0.0, 1.0), (1.0, 0.0)), strict=True):
        turns = [Turn(turn, turn + 1, reward=value) for turn, value in enumerate(rewards)]
        ledger.receive(done := msgspec.structs.replace(end(completion, [0, 0]), turns=turns))
        ledger.close(done, reward(1.0), "")
    assert len(ledger.groups) == kept and ledger.filtered == 1 - kept


def test_all_groups_without_signal_end_the_run_with_counts():
    ledger = make_ledger(prompts_per_step=1, max_async_level=2)
    with pytest.raises(NoProgress, match=r"in 20 attempts.*'correct': 40"):
        for index in range(40):
            ledger.open(Prompt(index, PROBLEM, [1]), [0, 0])
            finish_group(ledger, index, [1.0, 1.0])


def test_a_released_version_frees_the_slots_of_those_before_it():
    ledger = make_ledger(8, ready=range(8), max_async_level=1)
    for batch in (range(4), range(4, 8)):
        ledger.trained([ledger._take_one(ledger.groups[index]) for index in batch])
    busy = [ledger.busy_slots]
    for version in (0, 2):
        ledger.release(version)
        busy.append(ledger.busy_slots)
    assert busy == [8, 8, 0]


def test_an_interrupted_take_gives_its_groups_back():
    async def interrupted() -> Ledger:
        ledger = make_ledger(4, ready=[0, 2])
        waiting = asyncio.ensure_future(ledger.take())
        await asyncio.sleep(0)
        for index in (1, 3):  # the batch is complete in the moment of the interruption
            finish_group(ledger, index, [1.0, 0.0])
        ledger.interrupt()
        with pytest.raises(Interrupted):
            await waiting
        assert await ledger.slot() == 0
        return ledger

    ledger = asyncio.run(interrupted())
    assert list(ledger.groups) == [0, 1, 2, 3] and ledger.busy_slots == 4
    assert ledger.state().overtaken == [ledger.stages.now.window, 0, 0, 0], "what was taken goes first"


def test_the_saved_state_holds_partial_completions_and_goes_on(tmp_path):
    ledger = make_ledger(6, ready=[1], max_async_level=1)
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
    fresh.restore(through_bytes(kept))
    assert fresh.groups[2].completions[1] == partial
    assert [(c.group, c.index) for c in fresh.unscored()] == [(0, 0)]
    assert fresh.next_index == 6 and fresh.busy_slots == 6 and fresh.wanted() == 2 and fresh.ready() == 1
    assert fresh.state() == kept


def with_objective(objective: dict[str, Any]) -> Ledger:
    return Ledger(Stages(make_config(max_async_level=1).model_copy(update={"objective": objective})))


def test_groups_that_a_new_filter_drops_give_their_slots_back_on_a_resume():
    before = opened(with_objective({"filter_groups_by": "off"}), 3)
    finish_group(before, 0, [1.0, 1.0])
    assert before.ready() == 1
    fresh = restored(before, with_objective({"filter_groups_by": "total"}))
    assert list(fresh.groups) == [1, 2] and fresh.busy_slots == 2 and fresh.filtered == 1
    assert fresh.wanted() == before.wanted() + 1


@pytest.mark.parametrize(("teacher", "asked"), [("", [(1, 0), (1, 1)]), ("one", []), ("two", [(1, 0), (1, 1)])])
def test_another_teacher_is_asked_about_what_has_ended(teacher, asked):
    """Log-probs of one model are never trained as those of another, nor left over where there is none any more."""

    def taught_by(name: str) -> Ledger:
        served = {"name": "distill", "teacher": {"kind": "served", "url": "http://x/v1", "model": name}}
        return with_objective(served if name else {})

    ledger = opened(taught_by("one"), 2, ready=[1])
    for completion in ledger.groups[1].completions:
        completion.teacher = [-1.0] * len(completion.token_ids)
    fresh = restored(ledger, taught_by(teacher))
    assert [(c.group, c.index) for c in fresh.unscored()] == asked
    assert all(bool(c.teacher) != bool(asked) for c in fresh.groups[1].completions)
    assert fresh.ready() == (0 if asked else 1)


class Thorough(Ledger):
    """Looks at every waiting group, not only at those in front."""

    def _take_one(self, group: Group) -> Group:
        index = group.prompt.index
        del self.groups[index], self._taken_after[index]
        self._ready.remove(index)
        self._taken_after = {each: count + (each < index) for each, count in self._taken_after.items()}
        return group


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
            waiting = asyncio.ensure_future(ledger.take())
            await asyncio.sleep(0)
            ledger.interrupt()  # what was taken in part is put back, as after Ctrl-C
            with suppress(Interrupted):
                batch = await waiting
            ledger.interrupted = False
        elif event > 0.99:
            restored(ledger, ledger)
        taken += [group.prompt.index for group in batch]
        ledger.busy_slots -= len(batch)
    return taken, msgspec.json.encode(ledger.state())


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), window=st.sampled_from([1, 4, 13]))
def test_counting_in_front_is_counting_all(seed, window):
    config = make_config(max_async_level=3, reorder_window=window, steps=2_500)
    taken, state = asyncio.run(play(Ledger(Stages(config)), seed))
    assert (taken, state) == asyncio.run(play(Thorough(Stages(config)), seed))
    assert len(taken) > 20


def held_back(level: int, fixed_staleness: bool = True, stages: Sequence[dict[str, Any]] = ()) -> Config:
    return make_config(20, stages, max_async_level=level, fixed_staleness=fixed_staleness)


@settings(max_examples=30)
@given(
    level=st.sampled_from([1, 2, 8]), seed=st.integers(0, 1000), no_signal=st.sampled_from([0.0, 0.4]),
    train_ticks=st.sampled_from([0, 20, 300]), publish_ticks=st.sampled_from([0, 5, 100]),
    stop_after=st.integers(1, 4000) | st.just(0),
)  # fmt: skip
def test_held_back_every_token_has_the_same_age_whoever_is_faster_also_after_an_interruption(
    level, seed, no_signal, train_ticks, publish_ticks, stop_after
):
    config, speeds = held_back(level), (no_signal, train_ticks, publish_ticks)
    parts = [Simulation(config, seed, *speeds, stop_after=stop_after).run()]
    if parts[0].saved:
        parts.append(Simulation(config, seed + 1, *speeds, saved=parts[0].saved).run())
    ages = [entry for part in parts for entry in part.token_ages.items()]
    assert ages == [(version, {min(version, level)}) for version in range(20)] and config.max_staleness == level
    trained, ledger = [index for part in parts for index in part.trained], parts[-1].ledger
    assert trained == sorted(trained), "oldest first, whatever the window"
    assert max(Counter(trained).values()) == 1 and len(trained) == 20 * P == ledger.started - ledger.filtered
    assert sum(part.filtered for part in parts) == ledger.filtered, "told with a step, also after a resume"
    assert not ledger.groups and ledger.busy_slots == 0


def test_not_held_back_the_faster_side_decides():
    """A trainer without delay brings new weights to completions under way: most batches hold younger tokens too."""
    ages = Simulation(held_back(2, fixed_staleness=False), seed=0, train_ticks=0, publish_ticks=0).run().token_ages
    assert sum(ages[version] != {2} for version in range(2, 20)) > 9


def test_held_back_stages_end_and_begin_with_their_own_ages():
    """The first ends by a condition, with batches ahead already complete; the others by their step and the run's
    end. Ages begin again from 0 in each."""
    stages = [
        {"name": "easy", "until": "accuracy > 0.45", "over_steps": 3},
        {"name": "small", "until_step": 13, "rollout": {"prompts_per_step": 2, "max_async_level": 1}},
        {"name": "far", "rollout": {"max_async_level": 3}},
    ]
    simulation = Simulation(held_back(2, stages=stages), seed=1).run()
    begun = [0, *(version for version, _ in simulation.begun)]
    # accuracy passes 0.45 at step 6; the two batches ahead are trained before the stage ends
    assert begun == [0, 8, 13] and len(simulation.steps) == 20
    for version, (batch, ages) in enumerate(zip(simulation.steps, simulation.ages, strict=True)):
        number = sum(version >= first for first in begun) - 1
        assert ages == [min(version - begun[number], [2, 1, 3][number])] * len(batch)


def test_held_back_a_batch_waits_for_those_after_it_unless_the_stage_or_the_run_ends():
    async def waiting(level: int, ready: int) -> tuple[Ledger, asyncio.Future[Any]]:
        """A batch that is asked for, and does not come yet: eight groups are open, of which so many are ready."""
        ledger = opened(Ledger(Stages(held_back(level))), 8, range(ready))
        taking = asyncio.ensure_future(ledger.take())
        await ticks()
        assert not taking.done()
        return ledger, taking

    async def work() -> None:
        ledger, taking = await waiting(1, ready=7)
        finish_group(ledger, 7, [1.0, 1.0])  # no signal: another takes its slot
        await ticks()
        assert not taking.done() and ledger.ready() == 7 and await ledger.slot() == 1
        ledger.open(Prompt(8, PROBLEM, [1]), [0, 0])
        finish_group(ledger, 8, [1.0, 0.0])
        assert [group.prompt.index for group in await taking] == [0, 1, 2, 3]

        ledger, taking = await waiting(2, ready=8)  # four slots are free
        ledger.end_stage("enough")
        assert len(await taking) == P

        ledger, taking = await waiting(1, ready=7)
        ledger.interrupt()
        with pytest.raises(Interrupted):
            await taking
        assert list(ledger.groups) == list(range(8)) and ledger.ready() == 7 and ledger.busy_slots == 8

    asyncio.run(work())


def test_groups_that_are_thrown_away_are_counted_with_the_reason():
    ledger = make_ledger(6, prompts_per_step=6)
    wrong, right, broken = Verdict.WRONG, Verdict.CORRECT, Verdict.NO_ANSWER
    assert filtered_text(ledger.filtered_since_step) == ""
    for index, verdicts in enumerate(
        ((wrong, wrong), (wrong, broken), (right, right), (right, wrong), (Verdict.OPEN,) * 2)
    ):
        for completion, verdict in zip(list(ledger.groups[index].completions), verdicts, strict=True):
            ledger.receive(done := end(completion, [0]))
            ledger.close(done, reward(0.5, verdict), "")
    text = "5 groups thrown away (2 all wrong, 2 all the same reward, 1 all right)"
    assert filtered_text(ledger.filtered_since_step) == text
    ledger.trained([])
    assert filtered_text(ledger.filtered_since_step) == "", "of this step"
