"""metrics.jsonl: known names only, one whole line a step, no step twice after a resume."""

import json
import math

import numpy as np
import pytest

from shared.metrics import METRICS, MetricsLog, kind_of, read_rows, series


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "metrics.jsonl"


def test_every_metric_has_unit_and_definition_and_an_unknown_name_raises_with_the_nearest(path):
    assert all(metric.unit and metric.definition for metric in METRICS.values())
    with pytest.raises(KeyError, match="'rewards/mean'.*nearest: 'reward/mean'"):
        MetricsLog(path).write(1, {"rewards/mean": 1.0})
    assert read_rows(path) == []


def test_a_step_is_on_disk_as_soon_as_it_is_written_and_numbers_that_json_lacks_become_null(path):
    log = MetricsLog(path)
    log.write(1, {"loss": math.nan, "lr": math.inf, "accuracy": np.float32(0.5), "kl/k3": np.float32("nan")})
    (row,) = [json.loads(line) for line in path.read_text().splitlines()]
    assert (row["step"], row["kind"]) == (1, "train")
    assert (row["loss"], row["lr"], row["accuracy"], row["kl/k3"]) == (None, None, 0.5, None)
    assert series([row], "loss") == ([], [])
    log.write(1, {"accuracy": 1.0})
    assert series(read_rows(path), "accuracy") == ([1], [1.0]), "of two rows of one step the last counts"


def test_a_resume_drops_later_steps_and_keeps_the_sft_and_a_new_run_starts_empty(path):
    log = MetricsLog(path)
    for step in (1, 2, 9):
        log.write(step, {"sft/loss": 2.0})
    for step in (1, 2, 3, 4):
        log.write(step, {"reward/mean": 0.1 * step})
    log.write(3, {"evaluation/accuracy": 0.5})
    log = MetricsLog(path, resume_step=2)
    log.write(3, {"reward/mean": 0.9})
    rows = read_rows(path)
    assert series(rows, "reward/mean") == ([1, 2, 3], [0.1, 0.2, 0.9])
    assert series(rows, "sft/loss", "sft")[0] == [1, 2, 9]
    assert series(rows, "evaluation/accuracy", "evaluation") == ([], []) and len(rows) == 6
    MetricsLog(path)
    assert path.read_text() == ""


def test_a_cut_last_line_is_forgotten(path):
    MetricsLog(path).write(1, {"loss": 1.0})
    with path.open("ab") as stream:
        stream.write(b'{"step": 2, "kind": "train", "lo')
    assert [row["step"] for row in read_rows(path)] == [1]
    MetricsLog(path, resume_step=1).write(2, {"loss": 2.0})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_lines_wait_for_a_failing_disk_which_does_not_raise(path):
    log = MetricsLog(path)
    path.unlink()
    path.mkdir()  # opening it for writing fails, as a full disk would
    log.write(1, {"loss": 1.0})
    assert len(log.pending) == 1 and "metrics.jsonl cannot be written" in log.last_failure
    path.rmdir()
    path.write_bytes(b'{"step": 1, "ki')  # what a full disk leaves
    log.write(2, {"loss": 2.0})
    assert [row["step"] for row in read_rows(path)] == [1, 2] and not log.pending


def test_rows_have_kinds_and_both_evaluations_of_a_version_are_one(tmp_path):
    """At the sampling temperature, then greedy; a launch that goes back writes them again."""
    assert kind_of({"sft/loss": 1, "sft/lr": 2}) == "sft" and kind_of({"evaluation/accuracy": 1}) == "evaluation"
    assert kind_of({"evaluation/accuracy": 1, "loss": 2}) == kind_of({}) == "train"
    rows = [{"step": 5, "kind": "evaluation", **row} for row in ({"a": 1.0}, {"b": 2.0}, {"a": 3.0})]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_rows(tmp_path / "metrics.jsonl") == [{"step": 5, "kind": "evaluation", "a": 3.0, "b": 2.0}]
