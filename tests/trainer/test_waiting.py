"""Episodes that wait for their environments: how many, how long, and what stands idle because of them."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from msgspec.structs import replace

from rollout.client import EngineClient
from shared.config import Config
from shared.metrics import METRICS
from shared.progress import Progress
from shared.types import Completion, Group, Problem, Prompt, Reward, Turn, VersionSpan
from trainer.controller import TrainingLoop
from trainer.ledger import Ledger
from trainer.run_log import RunLogger
from trainer.stages import Stages
from trainer.step_metrics import rollout_metrics
from trainer.timing import IdleSeats


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds, which the test sets."""
    now = [100.0]
    monkeypatch.setattr("trainer.timing.time.monotonic", lambda: now[0])
    return now


def share(clock: list[float], *moments: tuple[float, int, int, int]) -> float:
    """moments: (seconds that it lasts, busy, seats, waiting)."""
    seats = IdleSeats()
    for lasts, *counts in moments:
        seats.note(*counts)
        clock[0] += lasts
    return seats.take_share()


def test_idle_is_what_waiting_episodes_would_take_by_time(clock: list[float]) -> None:
    assert share(clock) == 0.0
    assert share(clock, (5, 8, 8, 100)) == 0.0, "full engines do not idle, whatever waits"
    assert share(clock, (5, 4, 8, 0)) == 0.0, "free seats that nobody could take"
    assert share(clock, (5, 4, 256, 4)) == 0.5, "half as many are decoded as could be, of many seats"
    assert share(clock, (5, 6, 8, 100)) == 0.25, "no more than the free seats"
    assert share(clock, (5, 0, 8, 3)) == 1.0
    assert share(clock, (30, 8, 8, 0), (10, 0, 8, 8)) == 0.25, "by time: 240 and 80 seconds of a seat"
    assert share(clock, (5, 12, 8, 5)) == 0.0, "more in flight than seats"


def test_each_step_has_its_own_share_and_goes_on_from_the_last_counts(clock: list[float]) -> None:
    seats = IdleSeats()
    seats.note(0, 8, 8)
    clock[0] += 5
    assert seats.take_share() == 1.0
    clock[0] += 5
    assert seats.take_share() == 1.0, "they still wait"
    seats.note(8, 8, 0)
    clock[0] += 5
    assert seats.take_share() == 0.0


class Environments:
    """Answers the turn of completion i as over if i is odd, when the test lets it."""

    def __init__(self) -> None:
        self.go = [asyncio.Event() for _ in range(4)]

    def end_turn(self, completion: Completion) -> Completion:
        return Completion(0, completion.index, 0, [5], [-1.0], turns=[Turn(0, 1)])

    async def advance(self, prompt: Prompt, completion: Completion) -> Completion:
        await self.go[completion.index].wait()
        if completion.index % 2:
            return replace(completion, finish_reason="stop")
        return replace(completion, token_ids=[*completion.token_ids, 7], logprobs=[*completion.logprobs, 0.0])


class Engines:
    """In place of the client: every completion ends once."""

    live: ClassVar = {1: 0}
    continue_turns = EngineClient.continue_turns

    def __init__(self, config: Config):
        self.config, self.training_in_flight, self.submitted = config, 4, 0
        self.asked: set[int] = set()

    def slots(self) -> int:
        return 8

    def _free(self, completion: Completion) -> bool:
        return (
            completion.unfinished
            and not completion.waiting
            and completion.index not in self.asked
            and bool(completion.turns)
        )

    async def submit(self, groups: list[Group]) -> None:
        free = {each.index for group in groups for each in group.completions if self._free(each)}
        self.submitted, self.asked = self.submitted + 1, self.asked | free
        self.training_in_flight += len(free)

    async def finished(self) -> AsyncIterator[Completion]:
        for index in range(4):
            self.training_in_flight -= 1
            yield Completion(0, index, 0, [5], [-1.0], finish_reason="stop")
        await asyncio.Event().wait()


async def waiting_counts(max_async_level: int) -> tuple[list[int], int]:
    """How many wait after each of four answers, and how often something was submitted."""
    config = Config.model_validate({"rollout": {"max_async_level": max_async_level, "group_size": 4}})
    environments, engines, ledger = Environments(), Engines(config), Ledger(Stages(config))
    ledger.open(Prompt(0, Problem("p", "?", "", environment="x"), [1]), [0] * 4)
    logger: Any = SimpleNamespace(engines=engines, ledger=ledger, waiting=0, _idle=IdleSeats())
    logger.note_waiting = lambda: RunLogger.note_waiting(logger)

    async def score(problem: Problem, completion: Completion) -> tuple[Reward, str]:
        await asyncio.Event().wait()
        raise AssertionError

    parts: Any = (ledger, engines, SimpleNamespace(score=score), environments, None, None, None, logger, None, [])
    collecting = asyncio.create_task(TrainingLoop(*parts).collect())
    counts = []
    for event in (None, *environments.go):
        if event is not None:
            event.set()
        for _ in range(8):
            await asyncio.sleep(0)
        counts.append(logger.waiting)
    collecting.cancel()
    return counts, engines.submitted


def test_an_episode_waits_until_its_environment_answers() -> None:
    assert asyncio.run(waiting_counts(2)) == ([4, 3, 2, 1, 0], 2)


def test_in_synchronous_mode_an_answered_episode_waits_for_the_others() -> None:
    assert asyncio.run(waiting_counts(0)) == ([4, 4, 3, 3, 0], 1)


def test_the_line_of_progress_says_how_many_wait_if_any() -> None:
    stream = io.StringIO()
    progress = Progress(stream, clock=iter(range(0, 1000, 20)).__next__)
    given: Any = {"done": 1, "needed": 9, "in_flight": 4, "tokens_per_s": 1, "oldest_wait_s": 1, "step": 1, "steps": 2}
    progress.batch(**given)
    assert "wait" not in stream.getvalue()
    progress.batch(**given, waiting=3)
    assert "4 in flight  oldest 1.0 s  3 wait for environments\n" in stream.getvalue() and not progress.failures


def test_calls_of_tools_are_counted_by_episode_and_failures_by_call() -> None:
    def episode(*infos: dict[str, float]) -> Completion:
        turns = [Turn(0, 1, reward=1.0, seconds=2.0, info=info) for info in infos]
        return Completion(0, 0, 0, [5], [-1.0], [VersionSpan(0, 0, 1)], "stop", turns=turns)

    prompt = Prompt(0, Problem("p", "?", "", environment="x"), [1])
    calls = [episode({"tool_calls": 3, "failed_calls": 1, "depth": 2}, {"tool_calls": 1}), episode({}, {})]
    row = rollout_metrics([Group(prompt, calls, [None, None])], [0], [])
    found = {name: value for name, value in row.items() if name.startswith("environment/")}
    assert found == {
        "environment/turns": 2.0, "environment/wait_s": 2.0, "environment/failed": 0.0, "environment/tool_calls": 2.0,
        "environment/failed_calls": 0.25, "environment/info/depth": 2.0, "environment/started_anew": 0.0,
    }  # fmt: skip
    assert {"environment/tool_calls", "environment/failed_calls", "environment/waiting"} <= set(METRICS)
    none = rollout_metrics([Group(prompt, [episode({"tool_calls": 0})], [None])], [0], [])
    assert none["environment/failed_calls"] == 0.0 and none["environment/tool_calls"] == 0.0
    assert "environment/tool_calls" not in rollout_metrics([Group(prompt, [episode({})], [None])], [0], [])
