"""Contradictions between settings are refused, with both named; derived numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from shared.config import Config

TABLE = Path(__file__).with_name("contradictions.jsonl").read_text(encoding="utf-8").splitlines()
"""settings that contradict each other, and what the error names"""


@pytest.mark.parametrize("row", map(json.loads, TABLE), ids=lambda row: str(row["settings"])[:60])
def test_a_contradiction_names_every_setting_of_it(row: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        Config.model_validate(row["settings"])
    (error,) = caught.value.errors()
    lines = str(error["ctx"]["error"]).splitlines()
    assert len(lines) == 1 and all(name in lines[0] for name in row["names"])


def test_all_contradictions_come_at_once() -> None:
    with pytest.raises(ValidationError) as caught:
        Config.model_validate({"model": {"max_tokens": 128}, "sft": {"steps": 5}, "name": ""})
    assert len(str(caught.value.errors()[0]["ctx"]["error"]).splitlines()) == 3


def test_settings_cannot_change_later() -> None:
    with pytest.raises(ValidationError):
        Config().seed = 3


@pytest.mark.parametrize(
    ("async_level", "window", "bound"),
    [(0, 0, 0), (1, 1, 1), (2, 0, 3), (2, 32, 3), (2, 33, 3), (2, 34, 4), (1, 64, 3)],
)
def test_the_bound_of_staleness(async_level: int, window: int, bound: int) -> None:
    """async_level + ceil((W - 1) / P) for P = 32."""
    rollout = {"max_async_level": async_level, "reorder_window": window}
    assert Config.model_validate({"rollout": rollout}).max_staleness == bound


@pytest.mark.parametrize(("async_level", "window"), [(1, 0), (2, 32), (8, 0)])
def test_held_back_the_largest_age_is_the_async_level(async_level: int, window: int) -> None:
    rollout = {"max_async_level": async_level, "reorder_window": window, "fixed_staleness": True}
    assert Config.model_validate({"rollout": rollout}).max_staleness == async_level


def test_other_deadlines_follow_that_of_a_weight_update() -> None:
    deadlines = Config.model_validate({"deadlines": {"sync_s": 30}}).deadlines
    assert (deadlines.heartbeat_s, deadlines.token_s) == (15, 30)
    assert (Config().deadlines.heartbeat_s, Config().deadlines.token_s) == (60, 120)


@pytest.mark.parametrize(("test_s", "compile_s"), [(4.0, 10.0), (0.5, 10.0), (20.0, 50.0)])
def test_compiling_may_take_longer_where_a_test_may(test_s: float, compile_s: float) -> None:
    assert Config.model_validate({"reward": {"sandbox": {"test_s": test_s}}}).reward.sandbox.compile_s == compile_s


def test_ranks_of_a_launch() -> None:
    assert Config.model_validate({"placement": {"trainers": 2, "engines": 5}}).world_size == 8
