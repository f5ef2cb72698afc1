"""Stages: each group under one stage's settings, ends by step or metric, everything restorable."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from rollout.client import EngineClient
from shared.config import Config
from shared.types import Problem, Prompt
from tests.trainer.test_data import LetterChat
from tests.trainer.test_ledger import Simulation, finish_group
from trainer.data.data_source import DataSource, PromptFormat
from trainer.ledger import Ledger, LedgerState
from trainer.objectives.objective import Need
from trainer.objectives.registry import complaints, needs
from trainer.stages import Stages
from verify.scorer import RewardScorer


def make_config(stages: list[dict[str, Any]], steps: int = 20) -> Config:
    rollout = {"prompts_per_step": 4, "group_size": 2, "max_async_level": 2, "max_completion_tokens": 64}
    return Config.model_validate({"steps": steps, "rollout": rollout, "stages": stages})


THREE = [
    {"name": "short", "until_step": 5},
    {"name": "long", "until_step": 12, "rollout": {"max_completion_tokens": 96, "prompts_per_step": 3}},
    {"name": "small", "rollout": {"prompts_per_step": 2, "max_async_level": 1}, "data": {"pass_rate": [0.0, 0.8]}},
]


class StagedSimulation(Simulation):
    """Scripted engines through stages, as the controller goes through them."""

    def __init__(self, config: Config, seed: int):
        super().__init__(config, seed)
        self.lines: list[str] = []
        self.begun: list[tuple[int, int]] = []
        """policy version and first draw of each later stage"""
        self.by_step: list[list[int]] = []

    async def train(self) -> None:
        async with asyncio.TaskGroup() as publishing:
            sync = None
            while not self.ledger.exhausted:
                while self.ledger.stage_over:
                    assert sync is not None and not self.ledger.groups, "a stage ends with an empty ledger"
                    await sync
                    self.lines.append(self.ledger.next_stage())
                    self.begun.append((self.ledger.version, self.ledger.next_index))
                groups = await self.ledger.take()
                for _ in range(20):
                    await asyncio.sleep(0)
                self.ages += [self.ledger.staleness(group) for group in groups]
                self.by_step.append([group.prompt.index for group in groups])
                self.ledger.trained(groups)
                if reason := self.ledger.stages.observe({"accuracy": len(self.by_step) / 10}, groups):
                    self.ledger.end_stage(reason)
                sync = publishing.create_task(self.publish(self.ledger.version))


def test_three_stages_train_every_group_once_under_its_own_settings():
    simulation = StagedSimulation(make_config(THREE), seed=3)
    asyncio.run(simulation.run())
    assert [len(step) for step in simulation.by_step] == [4] * 5 + [3] * 7 + [2] * 8
    trained = [index for step in simulation.by_step for index in step]
    assert len(trained) == len(set(trained)) == 20 + 21 + 16
    (first, long_index), (second, small_index) = simulation.begun
    assert (first, second) == (5, 12)
    for number, step in enumerate(simulation.by_step):
        low, high = (0, long_index) if number < 5 else (long_index, small_index) if number < 12 else (small_index, 999)
        assert all(low <= index < high for index in step), "no group is trained in a later stage than its own"
    assert max(simulation.ages) <= max(simulation.config.at_stage(number).max_staleness for number in range(3))
    assert simulation.lines == [
        "stage short ends after step 5 (step 5); stage long begins: rollout.max_completion_tokens = 96, "
        "rollout.prompts_per_step = 3; 0 solved problems left out",
        "stage long ends after step 12 (step 12); stage small begins: data.pass_rate = [0.0, 0.8], "
        "rollout.prompts_per_step = 2, rollout.max_async_level = 1; 0 solved problems left out",
    ]


def test_a_condition_ends_a_stage_when_its_mean_holds():
    stages = [{"name": "easy", "until": "accuracy > 0.45", "over_steps": 3}, {"name": "hard"}]
    simulation = StagedSimulation(make_config(stages), seed=1)
    asyncio.run(simulation.run())
    # accuracy is 0.1, 0.2, ...: the mean of steps 4, 5, 6 is the first above 0.45; what was open then is still trained
    version, _ = simulation.begun[0]
    assert "accuracy > 0.45 (mean of 3 steps: 0.5)" in simulation.lines[0]
    assert 6 < version <= 6 + 3
    assert len(simulation.by_step) == 20 and all(len(step) == 4 for step in simulation.by_step)


def test_a_stage_whose_last_step_has_passed_is_gone_through():
    """The condition holds at step 6 at the earliest; the second stage was to end after step 5."""
    stages = [{"name": "easy", "until": "accuracy > 0.45", "over_steps": 3}, {"name": "short", "until_step": 5}]
    simulation = StagedSimulation(make_config([*stages, {"name": "hard"}]), seed=1)
    asyncio.run(asyncio.wait_for(simulation.run(), 600))
    assert [line.split(" ends")[0] for line in simulation.lines] == ["stage easy", "stage short"]
    assert simulation.begun[0] == simulation.begun[1] and len(simulation.by_step) == 20


def test_a_run_goes_on_in_the_stage_where_it_was_saved():
    config = make_config(THREE)
    ledger = Ledger(Stages(config))
    for _ in range(7):
        if ledger.stage_over:
            ledger.next_stage()
        for _ in range(ledger.settings.prompts_per_step):
            index = ledger.next_index
            ledger.open(Prompt(index, Problem(str(index % 3), "1+1", "2"), [1]), [0, 0])
            finish_group(ledger, index, [1.0, 0.0])
        groups = asyncio.run(ledger.take())
        ledger.trained(groups)
        ledger.release(ledger.version)
        ledger.stages.observe({}, groups)
    state = msgspec.json.decode(msgspec.json.encode(ledger.state()), type=LedgerState)
    again = Ledger(Stages(config))
    again.restore(state)
    assert again.stages.stage.name == "long" and again.stages.now.rollout.prompts_per_step == 3
    assert (again.trained_groups, again.stage.target) == (20 + 6, 20 + 21)
    again = Ledger(Stages(make_config(THREE, steps=30)))
    again.restore(state)
    assert again.stages.stage.name == "long" and again.stage.target == 41, "more steps are the last stage's"


def test_source_engines_and_scorer_read_the_settings_of_the_stage() -> None:
    reward = {"length_max": 48, "overlong_buffer": 8}
    config = make_config(
        [{"name": "short", "until_step": 5, "reward": reward}, {**THREE[1], "reward": {"length_max": 90}}]
    )
    stages = Stages(config)
    ledger = Ledger(stages)
    source = DataSource([Problem("p", "?", "1")], stages, PromptFormat(LetterChat(), config.data))  # type: ignore[arg-type]
    engines = EngineClient(None, range(1), lambda: stages.now, print)  # type: ignore[arg-type]
    scorer = RewardScorer(stages, LetterChat())  # type: ignore[arg-type]

    def sizes() -> tuple[int, ...]:
        return ledger.slots, source.room, engines.config.rollout.prompts_per_step, scorer.scorer.settings.length_max

    assert sizes() == (3 * 4, 512 - 64, 4, 48)
    ledger.version, ledger.trained_groups = 5, 20
    ledger.next_stage()
    assert sizes() == (3 * 3, 512 - 96, 3, 90)


def test_solved_problems_are_left_out_from_the_next_stage_on():
    config = make_config([{"name": "a", "until_step": 1}, {"name": "b", "data": {"drop_solved_after": 2}}])
    ledger = Ledger(Stages(config))

    def end(problem: str, totals: list[float]) -> None:
        index = ledger.next_index
        group = ledger.open(Prompt(index, Problem(problem, "1+1", "2"), [1]), [0, 0])
        finish_group(ledger, index, totals)
        wrong = [msgspec.structs.replace(r, verdict="wrong") if r.total < 0.5 else r for r in group.rewards if r]
        group.rewards = [msgspec.convert(msgspec.to_builtins(r), type(r)) for r in wrong]
        ledger.stages.observe({}, [group])

    for problem, totals in (("x", [1, 1]), ("x", [1, 1]), ("y", [1, 1]), ("y", [1, 0]), ("z", [1, 1])):
        end(problem, [float(total) for total in totals])
    ledger.version, ledger.trained_groups = 1, 4
    ledger.groups.clear()
    ledger.next_stage()
    assert ledger.stage.retired == ["x"] and ledger.stage.solved == {"x": 2, "z": 1}
    assert ledger.stage.success == {"x": 1.0, "y": 0.5, "z": 1.0}, "of the last group of each"
    again = msgspec.json.decode(msgspec.json.encode(ledger.state()), type=LedgerState)
    assert again.stage.success == ledger.stage.success


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([{"name": "a"}, {"name": "b"}], "stages.a never ends"),
        ([{"name": "a", "until_step": 5}, {"name": "a"}], "a name of its own"),
        ([{"name": "a", "until_step": 5}, {"name": "b", "until_step": 4}], r"until_step = 4 must be above"),
        ([{"name": "a", "until": "accuracy"}], "METRIC > NUMBER"),
        ([{"name": "a", "until": "acuracy > 0.5"}], "did you mean accuracy"),
        ([{"name": "a", "rollout": {"max_sequences": 2}}], "rollout.max_sequences cannot change during a run"),
        ([{"name": "a", "rollout": {"max_completion_tokens": 9999}}], "leaves no room for a prompt"),
        ([{"name": "a", "reward": {"workers": 2}}], "reward.workers cannot change during a run"),
    ],
)
def test_impossible_stages_are_refused_by_name(stages: list[dict[str, Any]], message: str):
    with pytest.raises(ValueError, match=message):
        make_config(stages)


OBJECTIVES: list[dict[str, Any]] = [
    {"name": "a", "until_step": 5, "objective": {"clip_high": 0.3}},
    {
        "name": "b",
        "until_step": 9,
        "objective": {"name": "pass_at_k", "advantage": {"k": 2}},
        "reward": {"extra": {"repetition": 0.1}},
    },
    {"name": "c", "objective": {"advantage": {"k": 0}}, "reward": {"extra": {}, "correctness": 1.0}},
]


def test_objectives_and_rewards_change_by_stage() -> None:
    """A name replaces all settings of the objective, others add to them; filters and rewards follow at once."""
    stages = Stages(make_config(OBJECTIVES))
    ledger, scorer = Ledger(stages), RewardScorer(stages, LetterChat())  # type: ignore[arg-type]

    def state() -> tuple[dict[str, Any], list[str], float]:
        weights = scorer.scorer
        return stages.now.objective, [one.name for one in weights.extras], weights.settings.correctness

    assert state() == ({"clip_high": 0.3}, [], 0.9)
    ledger.version, ledger.trained_groups = 5, 20
    line = ledger.next_stage()
    assert (
        "objective.name = pass_at_k, objective.advantage = {'k': 2}" in line
        and "reward.extra = {'repetition': 0.1}" in line
    )
    assert state() == ({"name": "pass_at_k", "advantage": {"k": 2}}, ["repetition"], 0.9)
    ledger.version, ledger.trained_groups = 9, 36
    ledger.next_stage()
    assert state() == ({"name": "pass_at_k", "advantage": {"k": 0}}, [], 1.0)


def test_what_an_objective_of_a_stage_contradicts_is_told_with_its_stage() -> None:
    def told(*stages: dict[str, Any], **others: Any) -> list[str]:
        return list(complaints(make_config(list(stages)).model_copy(update=others)))

    assert told(*OBJECTIVES) == []
    assert "stages.a: objective.clip_high = 0.3 has no effect" in told({"name": "a", "objective": {
        "name": "aipo", "clip_high": 0.3}})[0]  # fmt: skip
    assert "stages.a changes objective.reference, and a model" in told({"name": "a", "objective": {"name": "agro"}})[0]
    assert "stages.a: objective.advantage.k = 3 must be at least 2" in told({"name": "a", "objective": {
        "name": "pass_at_k", "advantage": {"k": 3}}})[0]  # fmt: skip
    assert "changes rewards or objective" in told(
        {"name": "a", "objective": {"beta": 0.2}}, objective={"name": "spo"})[0]  # fmt: skip
    jepo = make_config([{"name": "a", "until_step": 2}, {"name": "b", "objective": {"name": "jepo"}}])
    assert Need.GROUND_TRUTH in needs(jepo) and Need.GROUND_TRUTH not in needs(jepo.at_stage(0))


def test_a_clip_high_that_steps_moved_is_kept_by_a_checkpoint_until_a_stage_has_its_own() -> None:
    target = {"entropy_target": {"nats": 0.5}}
    config = make_config([{"name": "a", "until_step": 5, "objective": target}, {"name": "b", "until_step": 9},
                          {"name": "c", "objective": {"clip_high": 0.25}}])  # fmt: skip
    ledger = Ledger(Stages(config))
    ledger.stages.move({"clip_high": 0.31})
    state = msgspec.json.decode(msgspec.json.encode(ledger.state()), type=LedgerState)
    again = Ledger(Stages(config))
    again.restore(state)
    assert again.stages.now.objective == {**target, "clip_high": 0.31}
    again.next_stage()
    assert again.stages.now.objective == {**target, "clip_high": 0.31}, "the stage has none of its own"
    again.next_stage()
    assert again.stages.now.objective == {**target, "clip_high": 0.25}
