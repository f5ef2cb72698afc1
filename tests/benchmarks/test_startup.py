"""The phases of a launch, from the times that a run writes down."""

from __future__ import annotations

import pytest

from benchmarks.startup import BATCH, BEGIN, PEER, STEP, figures, phases
from shared.errors import RunError

BEGUN = [
    {"time": 104.0, "phase": "making"}, {"time": 106.0, "phase": "loading"}, {"time": 110.0, "phase": "training"},
    {"time": 119.0, "phase": "evaluating"},
]  # fmt: skip


def test_phases_fill_the_time_until_the_first_step_is_written() -> None:
    found = phases(100.0, BEGUN, {"time": 115.0, "time/wait_batch_s": 3.5})
    assert found == {BEGIN: 4.0, "making": 2.0, "loading": 4.0, BATCH: 3.5, STEP: 1.5}
    assert sum(found.values()) == 15.0


def test_a_phase_that_comes_twice_counts_both_times() -> None:
    begun = [{"time": 101.0, "phase": "a"}, {"time": 103.0, "phase": "b"}, {"time": 104.0, "phase": "a"}, *BEGUN[2:]]
    assert phases(100.0, begun, {"time": 115.0, "time/wait_batch_s": 1.0})["a"] == 2.0 + 6.0


def test_a_run_that_trained_in_no_phase_of_training_is_an_error() -> None:
    with pytest.raises(RunError, match="in the phase 'loading', not in 'training'"):
        phases(100.0, BEGUN, {"time": 109.0, "time/wait_batch_s": 1.0})


def test_the_sum_stands_beside_the_import() -> None:
    rows = {row.name: row for row in figures([{"a": 6.0, "b": 4.0}, {"a": 8.0}], [4.0, 6.0])}
    assert rows["launch to first trained step"].values == [10.0, 8.0]
    assert rows["launch to first trained step, beside the import"].values == [2.0, 1.6]
    assert rows[PEER].values == [4.0, 6.0] and rows["phase: b"].values == [4.0, 0.0]
