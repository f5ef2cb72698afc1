"""Alarms: a healthy run has none, and each planted fault raises its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dashboard.alarms import Look, find
from dashboard.columns import Numbers
from tests.dashboard.run_folders import metrics

STEPS = 60
HEALTHY = [metrics(step, STEPS) for step in range(1, STEPS + 1)]
Fault = Callable[[int, dict[str, float]], dict[str, float]]


def look_at(rows: list[dict[str, float]]) -> Look:
    def look(name: str) -> Numbers:
        return np.array([row.get(name, np.nan) for row in rows], float)

    return look


def names(rows: list[dict[str, float]], bound: int | None = 3) -> list[str]:
    return [alarm.name for alarm in find(look_at(rows), bound)]


def late(**values: Any) -> Fault:
    """From step 30 on these values, of which each may be a function of the step."""
    return lambda step, row: row if step < 30 else {
        **row, **{name.replace("__", "/"): value(step) if callable(value) else value for name, value in values.items()}
    }  # fmt: skip


FAULTS: dict[str, Fault] = {
    "The reward is flat": lambda step, row: {**row, "reward/mean": 0.3 + 0.02 * (step % 3), "accuracy": 0.2},
    "Nearly all groups are filtered": late(groups__filtered=300),
    "Many completions are cut": late(truncated=0.45),
    "The entropy has collapsed": late(entropy=0.01),
    "Trainer and engine drift apart": late(logprob_difference__mean=lambda step: 0.003 * (step - 25)),
    "The gradient jumped": lambda step, row: {**row, "grad_norm": 90.0} if step == STEPS else row,
    "Trainers wait for completions": late(time__wait_batch_s=3.2, time__train_s=0.5),
    "Engines are idle": late(time__wait_batch_s=0.0, time__train_s=3.7),
    "Weight updates hold the run up": late(time__wait_sync_s=1.5),
    "Engines are idle while environments work": late(environment__idle_seats=0.6),
    "Verifications fail": late(verify__timeout=lambda step: 20.0 * step),
    "Engines died": late(engine__restarts=2),
    "Tokens are older than the bound": late(staleness__max=4),
}


def test_a_healthy_run_has_no_alarm() -> None:
    assert names(HEALTHY) == []


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_has_its_alarm(name: str) -> None:
    faulty = [FAULTS[name](step, row) for step, row in enumerate(HEALTHY, 1)]
    assert names(faulty) == [name]
    alarm = find(look_at(faulty), 3)[0]
    assert len(alarm.advice) > 40 and any(character.isdigit() for character in alarm.seen)


def test_tokens_as_old_as_the_bound_are_allowed() -> None:
    assert names(HEALTHY, bound=2) == [] and names(HEALTHY, bound=1) == ["Tokens are older than the bound"]


def test_a_run_without_numbers_has_no_alarm() -> None:
    assert names([]) == [] and names([{}]) == [] and names([{"reward/mean": float("nan")}] * 50) == []
