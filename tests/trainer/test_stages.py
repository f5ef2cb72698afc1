"""Stages: each group under one stage's settings, ends by step or metric, everything restorable."""

import asyncio
from operator import itemgetter
from typing import Any

import pytest

from rollout.client import EngineClient
from shared.config import Config
from shared.types import Problem, Prompt, Verdict
from tests.tables import read_table
from tests.trainer import test_ledger
from tests.trainer.test_data import LetterChat
from tests.trainer.test_ledger import Simulation, finish_group, restored, reward, through_bytes
from trainer.data.data_source import DataSource, PromptFormat
from trainer.ledger import Ledger
from trainer.objectives.objective import Need
from trainer.objectives.registry import complaints, needs
from trainer.stages import Stages
from verify.scorer import RewardScorer

THREE = [
    {"name": "short", "until_step": 5},
    {"name": "long", "until_step": 12, "rollout": {"max_completion_tokens": 96, "prompts_per_step": 3}},
    {"name": "small", "rollout": {"prompts_per_step": 2, "max_async_level": 1}, "data": {"pass_rate": [0.0, 0.8]}},
]
EASY = {"name": "easy", "until": "accuracy > 0.45", "over_steps": 3}
"""accuracy is 0.1, 0.2, ...: the mean of steps 4, 5, 6 is the first above it; what was open then is still trained"""
PASS_AT_2 = {"name": "pass_at_k", "advantage": {"k": 2}}
OBJECTIVES: list[dict[str, Any]] = [
    {"name": "a", "until_step": 5, "objective": {"clip_high": 0.3}},
    {"name": "b", "until_step": 9, "objective": PASS_AT_2, "reward": {"extra": {"repetition": 0.1}}},
    {"name": "c", "objective": {"advantage": {"k": 0}}, "reward": {"extra": {}, "correctness": 1.0}},
]


def make_config(*stages: dict[str, Any], steps: int = 20) -> Config:
    return test_ledger.make_config(steps, stages, max_async_level=2, max_completion_tokens=64)


def pass_steps(ledger: Ledger, steps: int, trained: int) -> str:
    """As if the stage had been trained to its end; the line that the next one begins with."""
    ledger.version, ledger.trained_groups = steps, trained
    ledger.groups.clear()
    return ledger.next_stage()


def test_three_stages_train_every_group_once_under_its_own_settings():
    simulation = Simulation(make_config(*THREE), seed=3).run()
    assert [len(step) for step in simulation.steps] == [4] * 5 + [3] * 7 + [2] * 8
    assert len(simulation.trained) == len(set(simulation.trained)) == 20 + 21 + 16
    assert [version for version, _ in simulation.begun] == [5, 12]
    begun = [index for _, index in simulation.begun]
    stages = [sum(index >= first for first in begun) for index in simulation.trained]
    assert stages == [0] * 20 + [1] * 21 + [2] * 16, "no group is trained in a later stage than its own"
    assert max(map(max, simulation.ages)) <= max(simulation.config.at_stage(n).max_staleness for n in range(3))
    assert simulation.lines == [
        "stage short ends after step 5 (step 5); stage long begins: rollout.max_completion_tokens = 96, "
        "rollout.prompts_per_step = 3; 0 solved problems left out",
        "stage long ends after step 12 (step 12); stage small begins: data.pass_rate = [0.0, 0.8], "
        "rollout.prompts_per_step = 2, rollout.max_async_level = 1; 0 solved problems left out",
    ]


def test_a_condition_ends_a_stage_when_its_mean_holds_and_a_stage_whose_last_step_has_passed_is_gone_through():
    """The condition holds at step 6 at the earliest; the second stage was to end after step 5."""
    simulation = Simulation(make_config(EASY, {"name": "short", "until_step": 5}, {"name": "hard"}), seed=1).run()
    assert [line.split(" ends")[0] for line in simulation.lines] == ["stage easy", "stage short"]
    assert "accuracy > 0.45 (mean of 3 steps: 0.5)" in simulation.lines[0]
    assert simulation.begun[0] == simulation.begun[1] and 6 < simulation.begun[0][0] <= 6 + 3
    assert [len(step) for step in simulation.steps] == [4] * 20


def test_a_run_goes_on_in_the_stage_where_it_was_saved():
    ledger = Ledger(Stages(make_config(*THREE)))
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
    again = restored(ledger, Ledger(Stages(make_config(*THREE))))
    assert again.stages.stage.name == "long" and again.stages.now.rollout.prompts_per_step == 3
    assert (again.trained_groups, again.stage.target) == (20 + 6, 20 + 21)
    again = restored(ledger, Ledger(Stages(make_config(*THREE, steps=30))))
    assert again.stages.stage.name == "long" and again.stage.target == 41, "more steps are the last stage's"


def test_source_engines_and_scorer_read_the_settings_of_the_stage():
    short = {**THREE[0], "reward": {"length_max": 48, "overlong_buffer": 8}}
    config = make_config(short, {**THREE[1], "reward": {"length_max": 90}})
    stages = Stages(config)
    ledger, chat = Ledger(stages), LetterChat()
    source = DataSource([Problem("p", "?", "1")], stages, PromptFormat(chat, config.data))
    engines = EngineClient(None, range(1), lambda: stages.now, print)
    scorer = RewardScorer(stages, chat)

    def sizes() -> tuple[int, ...]:
        return ledger.slots, source.room, engines.config.rollout.prompts_per_step, scorer.scorer.settings.length_max

    assert sizes() == (3 * 4, 512 - 64, 4, 48)
    pass_steps(ledger, 5, 20)
    assert sizes() == (3 * 3, 512 - 96, 3, 90)


def test_solved_problems_are_left_out_from_the_next_stage_on():
    """Twice in a row by all completions; an open problem is never solved."""
    ledger = Ledger(
        Stages(make_config({"name": "a", "until_step": 1}, {"name": "b", "data": {"drop_solved_after": 2}}))
    )
    right, wrong, unverified = Verdict.CORRECT, Verdict.WRONG, Verdict.OPEN
    ended = [("x", right, right)] * 2 + [("y", right, right), ("y", right, wrong), ("z", right, right)]
    for name, *verdicts in [*ended, ("open", unverified, unverified)]:
        group = ledger.open(Prompt(ledger.next_index, Problem(name, "1+1", "2"), [1]), [0, 0])
        group.rewards = [reward(float(verdict is right), verdict) for verdict in verdicts]
        ledger.stages.observe({}, [group])
    pass_steps(ledger, 1, 4)
    assert ledger.stage.retired == ["x"] and ledger.stage.solved == {"x": 2, "z": 1}
    assert ledger.stage.success.items() >= {"x": 1.0, "y": 0.5, "z": 1.0}.items(), "of the last group of each"
    assert through_bytes(ledger.state()).stage.success == ledger.stage.success


@pytest.mark.parametrize("row", read_table("trainer/stages"), ids=itemgetter("name"))
def test_impossible_stages_are_refused_by_name(row):
    try:
        config = make_config(*row["stages"]).model_copy(update={"objective": row.get("objective", {})})
        refusal = next(iter(complaints(config)), "none")
    except ValueError as error:
        refusal = str(error)
    assert row["message"] in refusal


def test_objectives_and_rewards_change_by_stage():
    """A name replaces all settings of the objective, others add to them; filters and rewards follow at once."""
    stages = Stages(make_config(*OBJECTIVES))
    ledger, scorer = Ledger(stages), RewardScorer(stages, LetterChat())

    def state() -> tuple[dict[str, Any], list[str], float]:
        weights = scorer.scorer
        return stages.now.objective, [each.name for each in weights.extras], weights.settings.correctness

    assert state() == ({"clip_high": 0.3}, [], 0.9)
    line = pass_steps(ledger, 5, 20)
    assert "objective.name = pass_at_k, objective.advantage = {'k': 2}" in line
    assert "reward.extra = {'repetition': 0.1}" in line
    assert state() == (PASS_AT_2, ["repetition"], 0.9)
    pass_steps(ledger, 9, 36)
    assert state() == ({"name": "pass_at_k", "advantage": {"k": 0}}, [], 1.0)


def test_stages_without_a_contradiction_are_not_complained_of_and_a_run_needs_what_any_of_them_needs():
    assert list(complaints(make_config(*OBJECTIVES))) == []
    jepo = make_config({"name": "a", "until_step": 2}, {"name": "b", "objective": {"name": "jepo"}})
    assert Need.GROUND_TRUTH in needs(jepo) and Need.GROUND_TRUTH not in needs(jepo.at_stage(0))


def test_a_clip_high_that_steps_moved_is_kept_by_a_checkpoint_until_a_stage_has_its_own():
    target = {"entropy_target": {"nats": 0.5}}
    config = make_config({"name": "a", "until_step": 5, "objective": target}, {"name": "b", "until_step": 9},
                         {"name": "c", "objective": {"clip_high": 0.25}})  # fmt: skip
    ledger = Ledger(Stages(config))
    ledger.stages.move({"clip_high": 0.31})
    again, seen = restored(ledger, Ledger(Stages(config))), []
    for _ in range(3):
        seen.append(again.stages.now.objective)
        if not again.stages.is_last:
            again.next_stage()
    assert seen == [target | {"clip_high": bound} for bound in (0.31, 0.31, 0.25)], "the second has none of its own"
