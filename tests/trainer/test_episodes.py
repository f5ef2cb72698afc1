"""What stands between two turns: limits, what is resumed, and waves in synchronous mode."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from rollout.client import EngineClient
from shared.config import Config
from shared.types import Completion, Group, Problem, Prompt, Reward, Turn, Verdict
from tests.environments.test_host import WRONG, play, playing, prompt_of, sampled
from trainer.checkpoint.ledger_file import LedgerState
from trainer.controller import TrainingLoop
from trainer.learner import Learner
from trainer.ledger import Ledger, with_unfinished
from trainer.objectives.objective import train_sequences
from trainer.objectives.registry import objective_of
from trainer.run_log import RunLogger
from trainer.stages import Stages


@pytest.mark.parametrize(
    ("settings", "kind", "turns", "reason"),
    [
        ({"max_turns": 1}, "goes on", 1, "stop"),
        ({"max_turns": 3}, "goes on", 3, "stop"),
        ({"max_turns": 50, "max_tokens": 180}, "goes on", 0, "length"),
        ({"max_turns": 50, "max_completion_tokens": 9}, "goes on", 3, "length"),
        ({"max_turns": 50, "episode_s": 0.8}, "slow", 0, "timeout"),
    ],
)
def test_limits_end_an_episode(tmp_path: Path, settings: dict[str, Any], kind: str, turns: int, reason: str) -> None:
    async def run() -> None:
        async with playing(tmp_path, **settings) as episodes:
            one = await play(episodes, kind)
            assert one.finish_reason == reason, one
            assert len(one.turns) == (turns or len(one.turns)) and one.turns[-1].end == len(one.token_ids)
            prompt = prompt_of(episodes, kind)
            assert len(prompt.token_ids) + len(one.token_ids) <= episodes.config.model.max_tokens
            assert one.sampled_tokens <= episodes.config.rollout.max_completion_tokens
            if "max_tokens" in settings:  # another turn of the same size would not have fitted
                step = one.turns[1].end - one.turns[0].end
                assert len(prompt.token_ids) + len(one.token_ids) + step > settings["max_tokens"]

    asyncio.run(run())


@pytest.mark.parametrize("end", ["length", "abort"])
def test_a_turn_that_is_cut_or_given_up_ends_the_episode(tmp_path: Path, end: str) -> None:
    async def run() -> None:
        async with playing(tmp_path) as episodes:
            prompt = await episodes.open(prompt_of(episodes, "goes on"))
            first = await episodes.advance(prompt, episodes.end_turn(await sampled(Completion(0, 0, 7), episodes.chat)))
            one = await episodes.advance(prompt, episodes.end_turn(await sampled(first, episodes.chat, end=end)))
            assert one.finish_reason == end and [turn.reward for turn in one.turns] == [1.0, 0.0]
            assert not episodes.host.alive((0, 0)), "its instance is closed"

    asyncio.run(run())


def test_an_episode_goes_on_between_turns_and_within_one_after_a_restart(tmp_path: Path) -> None:
    """Other `Episodes`, as of another launch: the instance is made by repeating the turns, and the tokens are those of
    an episode that was not interrupted."""

    async def run() -> None:
        async with playing(tmp_path) as episodes:
            whole = await play(episodes, "goes on", 3)
            prompt = await episodes.open(prompt_of(episodes, "goes on", 3))
            one = Completion(3, 0, 10)
            one = await episodes.advance(prompt, episodes.end_turn(await sampled(one, episodes.chat)))
            within, waiting = one, episodes.end_turn(await sampled(one, episodes.chat))
            assert waiting.waiting and within.turn_start == len(within.token_ids) and not within.waiting
        for begun in (within, waiting):
            async with playing(tmp_path) as episodes:
                again = await episodes.advance(prompt, begun) if begun.waiting else begun
                again = await episodes.play(prompt, again, lambda one: sampled(one, episodes.chat))
            assert again.token_ids == whole.token_ids and again.finish_reason == "stop" and again.anew == 0
            assert [(turn.start, turn.end, turn.reward) for turn in again.turns] == [
                (turn.start, turn.end, turn.reward) for turn in whole.turns
            ]

    asyncio.run(run())


def test_a_checkpoint_keeps_the_turn_that_ended_since_the_engines_wrote() -> None:
    """The engine's part of a turn is older than the ledger's turn, or newer than an answer: the longer one counts."""
    ended = Completion(0, 0, 7, [1, 2, 3], [-1.0] * 3, turns=[Turn(0, 3)])
    begun = Completion(0, 1, 7, [1, 2, 3, 9], [-1.0] * 3 + [0.0], turns=[Turn(0, 3)])
    parts = [
        Completion(0, 0, 7, [1, 2], [-1.0] * 2),
        Completion(0, 1, 7, [1, 2, 3, 9, 4], [-1.0] * 5, turns=[Turn(0, 3)]),
    ]
    group = Group(Prompt(0, Problem("p", "?", "1", environment="guess"), [5]), [ended, begun], [None, None])
    [found] = with_unfinished(LedgerState(0, 1, 1, 0, 0, [group], [0]), parts).groups
    assert found.completions[0].waiting and found.completions[0].token_ids == [1, 2, 3]
    assert found.completions[1].token_ids == [1, 2, 3, 9, 4] and not found.completions[1].waiting


class Engines:
    """In place of the client: ends what it is given, plain completions after the turns of episodes."""

    continue_turns = EngineClient.continue_turns

    def __init__(self, config: Config) -> None:
        self.config, self.training_in_flight = config, 0
        self.waves: list[list[tuple[int, int]]] = []
        self.queue: asyncio.Queue[Completion] = asyncio.Queue()
        self.routed: set[tuple[int, int]] = set()

    def _free(self, one: Completion) -> bool:
        return one.unfinished and not one.waiting and (one.group, one.index) not in self.routed

    async def submit(self, groups: list[Group]) -> None:
        free = [one for group in groups for one in group.completions if self._free(one)]
        self.waves.append([(one.group, one.index) for one in free])
        self.routed |= set(self.waves[-1])
        self.training_in_flight += len(free)
        for one in sorted(free, key=lambda one: one.group == 1):
            assert len(one.token_ids) == one.turn_start
            tokens, logprobs = [*one.token_ids, 5, 6], [*one.logprobs, -1.0, -1.0]
            self.queue.put_nowait(replace(one, token_ids=tokens, logprobs=logprobs, finish_reason="stop"))

    async def finished(self) -> Any:
        while True:
            one = await self.queue.get()
            await asyncio.sleep(0.01)
            self.routed.discard((one.group, one.index))
            self.training_in_flight -= 1
            yield one


class ThreeTurns:
    """Environments that answer at once, with one token, twice."""

    def end_turn(self, completion: Completion) -> Completion:
        turn = Turn(completion.turn_start, len(completion.token_ids), 1.0)
        return replace(completion, turns=[*completion.turns, turn], finish_reason=None)

    async def advance(self, prompt: Prompt, one: Completion) -> Completion:
        if len(one.turns) == 3:
            return replace(one, finish_reason="stop")
        return replace(one, token_ids=[*one.token_ids, 9], logprobs=[*one.logprobs, 0.0])


def loop_of(ledger: Ledger, engines: Any, scorer: Any, episodes: Any, logger: Any) -> TrainingLoop:
    learner = Learner(None, ledger, None, None)  # type: ignore[arg-type]
    return TrainingLoop(ledger, engines, scorer, episodes, None, learner, None, logger, None, [])  # type: ignore[arg-type]


def test_in_synchronous_mode_turns_wait_for_one_another_and_for_completions_without_an_environment() -> None:
    """A wave of an episode's group and a plain one that ends last: nothing else would send the second turns out."""

    async def run() -> list[list[tuple[int, int]]]:
        config = Config.model_validate({"rollout": {"max_async_level": 0, "prompts_per_step": 2, "group_size": 2}})
        ledger, engines = Ledger(Stages(config)), Engines(config)
        logger = SimpleNamespace(note_waiting=lambda: None)

        async def score(problem: Problem, completion: Completion) -> tuple[Reward, str]:
            return Reward(float(completion.index), 0.0, 0.0, 0.0, 0.0, Verdict.WRONG), ""

        async def settle(_: Group, *scored: Any) -> list[tuple[Any, ...]]:
            return [scored]

        scorer = SimpleNamespace(score=score, settle=settle)
        loop = loop_of(ledger, engines, scorer, ThreeTurns(), logger)
        for index, name in enumerate(("guess", "")):
            ledger.open(Prompt(index, Problem("p", "?", "1", environment=name), [1]), [7, 8])
        await engines.submit(list(ledger.groups.values()))
        collecting = asyncio.ensure_future(loop.collect())
        groups = await asyncio.wait_for(ledger.take(), 300)
        collecting.cancel()
        assert [len(one.turns) for group in groups for one in group.completions] == [3, 3, 0, 0]
        return engines.waves

    assert asyncio.run(run()) == [[(0, 0), (0, 1), (1, 0), (1, 1)], [(0, 0), (0, 1)], [(0, 0), (0, 1)]]


def test_a_batch_comes_together_whatever_its_environments_do(tmp_path: Path) -> None:
    """A group of each kind at once: those that fail say nothing and give up their slots, and the others are trained."""
    failing, sound = ["raises", "1 MB", "hangs", "sys.exit"], ["control", "goes on", "ends"]

    async def run() -> None:
        rollout = {"prompts_per_step": len(sound), "group_size": 2}
        async with playing(tmp_path, rollout=rollout, objective={"filter_groups_by": "off"}) as episodes:
            config, scorer, logger = episodes.config, episodes.scorer, SimpleNamespace(waiting=0)
            ledger, engines = Ledger(Stages(config)), Engines(config)
            logger.ledger, logger.engines, logger._idle = ledger, engines, SimpleNamespace(note=lambda *_: None)
            logger.note_waiting = lambda: RunLogger.note_waiting(logger)  # type: ignore[arg-type]
            engines.live, engines.slots = {}, lambda: 8  # type: ignore[attr-defined]
            loop = loop_of(ledger, engines, scorer, episodes, logger)
            for index, kind in enumerate(failing + sound):
                ledger.open(prompt_of(episodes, kind, index), [7, 8])
            await engines.submit(list(ledger.groups.values()))
            taking, collecting = asyncio.ensure_future(ledger.take()), asyncio.ensure_future(loop.collect())
            await asyncio.wait({taking, collecting}, timeout=600, return_when=asyncio.FIRST_COMPLETED)
            assert taking.done(), collecting.exception() if collecting.done() else ledger.groups
            collecting.cancel()
            groups = taking.result()
            assert [[one.finish_reason for one in group.completions] for group in groups] == [["stop"] * 2] * len(sound)
            assert [len(group.completions[1].turns) for group in groups] == [4, 4, 1]
            trained = train_sequences(groups, objective_of(config), config)
            assert [one.group for one in trained] == [4, 4, 5, 5, 6, 6]
            filtered = {group.prompt.problem.text: group for group in ledger.trained(groups)}
            for kind in failing:
                assert [one.finish_reason for one in filtered[kind].completions] == [WRONG[kind][0]] * 2
                assert not any(reward.verdict.graded for reward in filtered[kind].rewards)
            assert logger.waiting == 0

    asyncio.run(run())
