"""The numbers of a growing metrics.jsonl as columns: what is read when, over which axis, and what thinning keeps; and
alarms: a healthy run has none, and each planted fault raises its own."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dashboard.alarms import Look, find
from dashboard.columns import MetricColumns, thin
from shared.metrics import MetricsLog
from tests.dashboard.run_folders import metrics

KEYS = ("reward/mean", "tokens/trained_per_s", "time/step_s", "time/total_s")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def append(path: Path, *rows: object) -> None:
    with path.open("a") as stream:
        stream.write("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))


def looked(columns: MetricColumns, name: str = "reward/mean") -> list[float]:
    columns.look()
    return columns.table("train").numbers(name).tolist()


def test_a_file_is_read_once_while_it_grows_and_anew_after_a_resume(path):
    log, columns = MetricsLog(path), MetricColumns(path)
    log.write(1, {"reward/mean": 0.5})
    columns.look()
    log.write(2, {"reward/mean": 0.75, "accuracy": 1})
    append(path, '{"step": 3, "kind": "train", "reward/m')  # a line that is not whole yet
    before = path.read_bytes()
    path.write_bytes(b"x" * before.index(b"\n") + before[before.index(b"\n") :])  # who reads it again sees no first row
    assert looked(columns) == [0.5, 0.75] and columns.damaged == 0
    assert np.array_equal(looked(columns, "accuracy"), [np.nan, 1], equal_nan=True)
    append(path, 'ean": 0.25}\n')
    assert looked(columns) == [0.5, 0.75, 0.25]
    path.write_bytes(before[: before.rindex(b"\n") + 1])
    MetricsLog(path, resume_step=1).write(2, {"reward/mean": 0.9})
    assert looked(columns) == [0.5, 0.9]
    path.unlink()
    columns.look()
    assert columns.tables == {}


def test_rows_of_a_step_replace_each_other_and_come_in_order(path):
    append(path, *({"step": step, "kind": "train", "a": value} for step, value in ((2, 2), (1, 1), (2, 3))))
    columns = MetricColumns(path)
    assert looked(columns, "a") == [1, 3] and columns.over("train", "step").tolist() == [1, 2]


def test_what_is_no_row_is_left_out_and_counted(path):
    append(path, "{broken\n", [1], {"step": "x"}, {"step": 10**30}, {"step": 4, "kind": 7}, "\n")
    append(path, {"step": 5, "a": "text", "b": True, "c": None, "d": 1e308, "e": [1]})
    columns = MetricColumns(path)
    columns.look()
    assert columns.damaged == 6 and columns.table("train").names == ["step", "d"], "an older run has no kind"
    append(path, {"step": 6, **{f"n{number}": number for number in range(5000)}, "x" * 500: 1})
    columns.look()
    assert len(columns.table("train").columns) == 500, "too many names are not kept"


def test_axes_by_hand(path):
    log, columns = MetricsLog(path), MetricColumns(path)
    log.write(1, dict(zip(KEYS, (0.1, 100.0, 2.0, 1800.0), strict=True)))
    log.write(2, {"time/total_s": 2700.0})  # of a step without speed
    log.write(3, dict(zip(KEYS, (0.2, 50.0, 4.0, 3600.0), strict=True)))
    columns.look()
    assert columns.over("train", "tokens").tolist() == [200.0, 200.0, 400.0]
    assert columns.over("train", "time").tolist() == [0.5, 0.75, 1.0]
    assert columns.over("evaluation", "time").tolist() == []


def test_thinning_keeps_every_spike():
    x = np.arange(10_000, dtype=float)
    calm, spiked = np.sin(x / 500), np.zeros(10_000)
    spiked[[1234, 5678]] = 9, -9
    spiked[100:400] = np.nan
    short, (thin_calm, other, rising, falling) = thin(x, [calm, spiked, x, -x], 800)
    assert len(short) == len(thin_calm) == len(other) <= 802 and (np.diff(short) > 0).all()
    assert (np.diff(rising) > 0).all() and (np.diff(falling) < 0).all(), "in their order"
    assert other[np.isfinite(other)].max() == 9 and other[np.isfinite(other)].min() == -9
    at = short[np.nanargmax(np.nan_to_num(other))]
    assert abs(at - 1234) <= 25, "where it was, up to one run of neighbours"
    assert np.isnan(other[(short > 130) & (short < 370)]).all(), "a gap stays a gap"
    assert abs(np.interp(5000, short, thin_calm) - math.sin(10)) < 0.05
    few, (values,) = thin(x[:700], [x[:700]], 800)
    assert values.tolist() == few.tolist() == x[:700].tolist(), "few points are left alone"


STEPS = 60
HEALTHY = [metrics(step, STEPS) for step in range(1, STEPS + 1)]
Fault = Callable[[int, dict[str, float]], dict[str, float]]


def look_at(rows: list[dict[str, float]]) -> Look:
    return lambda name: np.array([row.get(name, np.nan) for row in rows], float)


def names(rows: list[dict[str, float]], bound: int | None = 3) -> list[str]:
    return [alarm.name for alarm in find(look_at(rows), bound)]


def late(**values: Any) -> Fault:
    """From step 30 on these values, of which each may be a function of the step."""

    def fault(step: int, row: dict[str, float]) -> dict[str, float]:
        given = {name.replace("__", "/"): value(step) if callable(value) else value for name, value in values.items()}
        return {**row, **given} if step >= 30 else row

    return fault


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


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_has_its_alarm(name):
    faulty = [FAULTS[name](step, row) for step, row in enumerate(HEALTHY, 1)]
    assert names(faulty) == [name]
    alarm = find(look_at(faulty), 3)[0]
    assert len(alarm.advice) > 40 and any(character.isdigit() for character in alarm.seen)


def test_a_healthy_run_and_one_without_numbers_have_no_alarm():
    for rows in (HEALTHY, [], [{}], [{"reward/mean": float("nan")}] * 50):
        assert names(rows) == []
    assert names(HEALTHY, bound=2) == [], "tokens as old as the bound are allowed"
    assert names(HEALTHY, bound=1) == ["Tokens are older than the bound"]
