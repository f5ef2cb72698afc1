"""The numbers of a growing metrics.jsonl as columns: what is read when, over which axis, and what thinning keeps."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

from dashboard.columns import MetricColumns, thin
from shared.metrics import MetricsLog

KEYS = ("reward/mean", "tokens/trained_per_s", "time/step_s", "time/total_s")


def append(path: Path, *rows: object) -> None:
    with path.open("a") as stream:
        stream.write("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))


def test_a_file_is_read_once_while_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log, columns = MetricsLog(path), MetricColumns(path)
    log.write(1, {"reward/mean": 0.5})
    columns.look()
    log.write(2, {"reward/mean": 0.75, "accuracy": 1})
    append(path, '{"step": 3, "kind": "train", "reward/m')  # a line that is not whole yet
    before = path.read_bytes()
    path.write_bytes(b"x" * before.index(b"\n") + before[before.index(b"\n") :])  # who reads it again sees no first row
    columns.look()
    table = columns.table("train")
    assert table.numbers("reward/mean").tolist() == [0.5, 0.75] and columns.damaged == 0
    assert math.isnan(table.numbers("accuracy")[0]) and table.numbers("accuracy")[1] == 1
    append(path, 'ean": 0.25}\n')
    columns.look()
    assert columns.table("train").numbers("reward/mean").tolist() == [0.5, 0.75, 0.25]


def test_a_resume_writes_the_file_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log, columns = MetricsLog(path), MetricColumns(path)
    for step in range(1, 6):
        log.write(step, {"reward/mean": step / 10})
    columns.look()
    MetricsLog(path, resume_step=2).write(3, {"reward/mean": 0.9})
    columns.look()
    assert columns.table("train").numbers("reward/mean").tolist() == [0.1, 0.2, 0.9]
    path.unlink()
    columns.look()
    assert columns.tables == {}


def test_rows_of_a_step_replace_each_other_and_come_in_order(tmp_path: Path) -> None:
    path, kind = tmp_path / "metrics.jsonl", {"kind": "train"}
    append(path, {"step": 2, **kind, "a": 2}, {"step": 1, **kind, "a": 1}, {"step": 2, **kind, "a": 3})
    columns = MetricColumns(path)
    columns.look()
    assert columns.table("train").numbers("a").tolist() == [1, 3] and columns.over("train", "step").tolist() == [1, 2]


def test_what_is_no_row_is_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, "{broken\n", [1], {"step": "x"}, {"step": 10**30}, {"step": 4, "kind": 7}, "\n")
    append(path, {"step": 5, "a": "text", "b": True, "c": None, "d": 1e308, "e": [1]})
    columns = MetricColumns(path)
    columns.look()
    assert columns.damaged == 6 and columns.table("train").names == ["step", "d"], "an older run has no kind"


def test_too_many_names_are_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, {"step": 1, **{f"n{number}": number for number in range(5000)}, "x" * 500: 1})
    columns = MetricColumns(path)
    columns.look()
    assert len(columns.table("train").columns) == 500


def test_axes_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log, columns = MetricsLog(path), MetricColumns(path)
    log.write(1, dict(zip(KEYS, (0.1, 100.0, 2.0, 1800.0), strict=True)))
    log.write(2, {"time/total_s": 2700.0})  # of a step without speed
    log.write(3, dict(zip(KEYS, (0.2, 50.0, 4.0, 3600.0), strict=True)))
    columns.look()
    assert columns.over("train", "tokens").tolist() == [200.0, 200.0, 400.0]
    assert columns.over("train", "time").tolist() == [0.5, 0.75, 1.0]
    assert columns.over("evaluation", "time").tolist() == []


def test_thinning_keeps_every_spike() -> None:
    x = np.arange(10_000, dtype=float)
    calm, spiked = np.sin(x / 500), np.zeros(10_000)
    spiked[[1234, 5678]] = 9, -9
    spiked[100:400] = np.nan
    short, (one, other) = thin(x, [calm, spiked], 800)
    assert len(short) == len(one) == len(other) <= 802 and (np.diff(short) > 0).all()
    assert other[np.isfinite(other)].max() == 9 and other[np.isfinite(other)].min() == -9
    at = short[np.nanargmax(np.nan_to_num(other))]
    assert abs(at - 1234) <= 25, "where it was, up to one run of neighbours"
    assert np.isnan(other[(short > 130) & (short < 370)]).all(), "a gap stays a gap"
    assert abs(np.interp(5000, short, one) - math.sin(10)) < 0.05


def test_few_points_are_left_alone() -> None:
    x = np.arange(700.0)
    same, (values,) = thin(x, [x], 800)
    assert same is x and values is x
