"""Stages of a run: when one ends, and what the next one changes.

A stage ends with its step (`until_step`), when the mean of a metric passes a bound (`until`), or with the run. Then its
open groups are trained, nothing new is started, and the next stage begins with an empty ledger: every group is sampled,
scored and trained under the settings of one stage, and the staleness bound of each stage holds as it is. All state
is in `StageState`, which the ledger saves, so a run that was killed goes on in the stage it was in.
Source: Magistral (2506.10910), section 5.1: harder problems are added and solved ones removed, the allowed length
grows, and the batch shrinks as completions get longer.
"""

from __future__ import annotations

import operator
import statistics
from collections.abc import Iterable, Mapping

import msgspec

from shared.config import Config
from shared.sections import CONDITION, STAGED, Stage
from shared.types import Group, Verdict

SIGNS = {"<": operator.lt, ">": operator.gt}
WHOLE_RUN = Stage(name="whole run")


class StageState(msgspec.Struct):
    """Where the run is in its stages."""

    number: int = 0
    """number of the stage, 0-based"""
    first_version: int = 0
    """policy version at its start"""
    first_index: int = 0
    """index of its first draw"""
    first_trained: int = 0
    """groups trained before it"""
    target: int = 0
    """groups trained, ever, when it ends"""
    ended_by: str = ""
    """the condition that ended it, "" while none has"""
    values: list[float] = []
    """values of the metric of `until`, one a step"""
    solved: dict[str, int] = {}
    """problem id -> its last so many groups were solved by all completions"""
    success: dict[str, float] = {}
    """problem id -> share of right completions in its last group"""
    objective: dict[str, float] = {}
    """settings of [objective] as the steps of this stage moved them"""
    retired: list[str] = []
    """ids of problems that are drawn no more"""


class Stages:
    """Follows a run through its stages."""

    def __init__(self, config: Config):
        self.config = config
        self.enter(StageState())

    def enter(self, state: StageState) -> None:
        """Be in the stage of `state`, a saved one after a resume: take its settings, and plan its end."""
        stages = self.config.stages
        state.number = min(state.number, max(len(stages) - 1, 0))
        self.state = state
        self.now: Config = self.config.at_stage(state.number) if stages else self.config
        """the settings in force; every part of the controller reads them here"""
        self.move(state.objective if "entropy_target" in self.now.objective else {})
        steps = self.config.steps
        last_step = steps if self.is_last else min(self.stage.until_step or steps, steps)
        if not state.ended_by:
            batches = max(last_step - state.first_version, 0)
            state.target = state.first_trained + batches * self.now.rollout.prompts_per_step

    def move(self, objective: dict[str, float]) -> None:
        """Let these settings of the objective be in force, until a stage has some of its own."""
        if objective:
            self.state.objective = dict(objective)
            self.now = self.now.model_copy(update={"objective": self.now.objective | objective})

    @property
    def stage(self) -> Stage:
        """The stage that the run is in."""
        return self.config.stages[self.state.number] if self.config.stages else WHOLE_RUN

    @property
    def is_last(self) -> bool:
        """Whether the stage goes on to the end of the run."""
        return self.state.number >= len(self.config.stages) - 1

    def observe(self, row: Mapping[str, float], groups: Iterable[Group]) -> str:
        """Take a trained step into account: its metrics, and all groups that ended with it (filtered ones too).

        Returns why the stage is to end now, "" if it goes on (`Ledger.end_stage`).
        """
        state = self.state
        for group in groups:
            name = group.prompt.problem.id
            if all(reward is not None and reward.verdict is Verdict.CORRECT for reward in group.rewards):
                state.solved[name] = state.solved.get(name, 0) + 1
            else:
                state.solved.pop(name, None)
            if right := [r.verdict is Verdict.CORRECT for r in group.rewards if r is not None and r.verdict.graded]:
                state.success[name] = sum(right) / len(right)
        condition = CONDITION.fullmatch(self.stage.until)
        if condition is None or self.is_last or state.ended_by:
            return ""
        if (value := row.get(condition["metric"])) is not None:
            state.values = [*state.values, float(value)][-self.stage.over_steps :]
        if len(state.values) == self.stage.over_steps:
            mean = statistics.fmean(state.values)
            if SIGNS[condition["sign"]](mean, float(condition["number"])):
                return f"{self.stage.until} (mean of {self.stage.over_steps} steps: {mean:.3g})"
        return ""

    def next(self, version: int, next_index: int, trained: int) -> str:
        """Enter the next stage at this version, draw and number of trained groups; returns a line about the change."""
        state, before = self.state, self.stage.name
        reason = state.ended_by or f"step {version}"
        state.number += 1
        state.first_version, state.first_index, state.first_trained = version, next_index, trained
        state.values, state.ended_by = [], ""
        if self.stage.objective:
            state.objective = {}
        self.enter(state)
        if limit := self.now.data.drop_solved_after:
            newly = [name for name, count in state.solved.items() if count >= limit]
            state.retired = sorted({*state.retired, *newly})
        changes = [
            f"{section}.{name} = {value}"
            for section in (*STAGED, "objective")
            for name, value in getattr(self.stage, section).items()
        ]
        return (
            f"stage {before} ends after step {version} ({reason}); stage {self.stage.name} begins: "
            f"{', '.join(changes) or 'the same settings'}; {len(state.retired)} solved problems left out"
        )
