"""Stages of a run: when one ends, and what the next one changes.

A stage ends with its step (`until_step`), when the mean of a metric passes a bound (`until`), or with the run. Then its
open groups are trained, nothing new is started, and the next stage begins with an empty ledger: every group is sampled,
scored and trained under the settings of one stage, and the staleness bound of each stage holds as it stands. All state
is in the ledger (`StageState`), so a run that was killed goes on in the stage it was in.
Source: Magistral (2506.10910), section 5.1: harder problems are added and solved ones removed, the allowed length
grows, and the batch shrinks as completions get longer.
"""

from __future__ import annotations

import operator
import statistics
from collections.abc import Iterable, Mapping

from shared.config import Config
from shared.sections import CONDITION, Stage
from shared.types import Group, Verdict
from trainer.ledger import Ledger

SIGNS = {"<": operator.lt, ">": operator.gt}
WHOLE_RUN = Stage(name="whole run")


class Stages:
    """Follows a run through its stages. `now` are the settings in force."""

    def __init__(self, config: Config, ledger: Ledger):
        """Start, or after a resume go on, in the ledger's stage."""
        self.config, self.ledger = config, ledger
        self._enter()

    @property
    def stage(self) -> Stage:
        """The stage that the run is in."""
        return self.config.stages[self.ledger.stage.number] if self.config.stages else WHOLE_RUN

    def _enter(self) -> None:
        """Take the settings of the ledger's stage, and plan its end."""
        state, stages = self.ledger.stage, self.config.stages
        state.number = min(state.number, max(len(stages) - 1, 0))
        self.now: Config = self.config.at_stage(state.number) if stages else self.config
        is_last = state.number >= len(stages) - 1
        last_step = self.config.steps if is_last else min(self.stage.until_step or self.config.steps, self.config.steps)
        if not state.ended_by:
            batches = max(last_step - state.first_version, 0)
            state.target = state.first_trained + batches * self.now.rollout.prompts_per_step
        self.ledger.begin_stage(self.now)

    def observe(self, row: Mapping[str, float], groups: Iterable[Group]) -> None:
        """Take a trained step into account: its metrics, and all groups that ended with it (filtered ones too)."""
        state = self.ledger.stage
        for group in groups:
            name = group.prompt.problem.id
            if all(reward is not None and reward.verdict is Verdict.CORRECT for reward in group.rewards):
                state.solved[name] = state.solved.get(name, 0) + 1
            else:
                state.solved.pop(name, None)
        is_last = state.number >= len(self.config.stages) - 1
        condition = CONDITION.fullmatch(self.stage.until)
        if condition is None or is_last or state.ended_by:
            return
        if (value := row.get(condition["metric"])) is not None:
            state.values = [*state.values, float(value)][-self.stage.over_steps :]
        if len(state.values) == self.stage.over_steps:
            mean = statistics.fmean(state.values)
            if SIGNS[condition["sign"]](mean, float(condition["number"])):
                self.ledger.end_stage(f"{self.stage.until} (mean of {self.stage.over_steps} steps: {mean:.3g})")

    def next(self) -> str:
        """Enter the next stage; returns one line about the change, for people."""
        state, ledger, before = self.ledger.stage, self.ledger, self.stage.name
        reason = state.ended_by or f"step {ledger.version}"
        state.number += 1
        state.first_version, state.first_index = ledger.version, ledger.next_index
        state.first_trained = ledger.trained_groups
        state.values, state.ended_by = [], ""
        self._enter()
        if limit := self.now.data.drop_solved_after:
            newly = [name for name, count in state.solved.items() if count >= limit]
            state.retired = sorted({*state.retired, *newly})
        changes = [
            f"{section}.{name} = {value}"
            for section in ("data", "rollout", "reward", "optimiser")
            for name, value in getattr(self.stage, section).items()
        ]
        return (
            f"stage {before} ends after step {ledger.version} ({reason}); stage {self.stage.name} begins: "
            f"{', '.join(changes) or 'the same settings'}; {len(state.retired)} solved problems left out"
        )
