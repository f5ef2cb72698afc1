"""Windows, curves, and Student's intervals against the table of every textbook."""

from __future__ import annotations

import math

import pytest

from lab.ablate.ablation import window_of
from lab.ablate.results import FinishedRuns, estimate, select, student
from lab.ablate.runs import AblationRun
from tests.lab.ablate.conftest import Write


@pytest.mark.parametrize(("count", "quantile"), [(2, 12.7062), (3, 4.3027), (4, 3.1824), (6, 2.5706), (31, 2.0423)])
def test_quantiles_of_students_t(count: int, quantile: float) -> None:
    assert student(count) == pytest.approx(quantile, abs=5e-5)


def test_an_interval_by_hand() -> None:
    found = estimate([1.0, 2.0, 6.0])  # mean 3, variance (4 + 1 + 9) / 2 = 7
    assert found.mean == 3 and found.count == 3
    assert found.half == pytest.approx(4.3027 * math.sqrt(7 / 3), rel=1e-4)
    assert (found.low, found.high) == pytest.approx((3 - 6.5723, 3 + 6.5723), rel=1e-4)


def test_one_seed_has_no_interval() -> None:
    found = estimate([0.5])
    assert found.half is None and (found.low, found.high) == (-math.inf, math.inf)


@pytest.mark.parametrize(
    ("window", "values"),
    [("start", [1]), ("end", [5]), ("all steps", [1, 2, 3, 4, 5]), ("last 2 steps", [4, 5]), ("last 1 step", [5]),
     ("first 3 steps", [1, 2, 3]), ("steps 2 to 3", [2, 3]), ("steps 7 to 9", []), ("last 99 steps", [1, 2, 3, 4, 5])],
)  # fmt: skip
def test_windows(window: str, values: list[float]) -> None:
    points = [(step, float(step)) for step in range(1, 6)]
    assert select(points, window) == values
    assert select([], window) == []


def test_validation_figures_are_taken_at_the_end() -> None:
    assert window_of("evaluation/accuracy", "", "last 9 steps") == "end"
    assert window_of("entropy", "", "last 9 steps") == "last 9 steps"
    assert window_of("entropy", "start", "last 9 steps") == "start"


def test_curves_and_values_of_runs(finished: list[AblationRun]) -> None:
    runs = FinishedRuns(finished)
    assert runs.seeds == [0, 1, 2] and runs.finished("base") == [0, 1, 2]
    assert runs.curve("base", 1, "entropy") == [(1, 1.0), (2, 0.9), (3, pytest.approx(0.8)), (4, pytest.approx(0.6))]
    assert runs.values("symmetric", "entropy", "last 2 steps") == pytest.approx({0: 0.3, 1: 0.5, 2: 0.4})
    assert runs.curve("symmetric", 1, "evaluation/accuracy") == [(0, 0.0), (4, pytest.approx(0.4))]
    assert runs.curve("symmetric", 1, "evaluation/accuracy/language/de") == [(0, 0.0), (4, 0.7)]
    assert runs.curve("symmetric", 1, "evaluation/consistency/language/de") == [(0, 0.5), (4, 0.5)]
    assert runs.curve("symmetric", 1, "evaluation/accuracy/language/xx") == []
    assert runs.curve("symmetric", 1, "kl/k3") == [], "no run wrote it"
    assert runs.parts("language") == ["language/de", "language/fr"] and runs.parts("domain") == []


def test_unfinished_runs_say_nothing(launches: list[AblationRun], write_run: Write) -> None:
    write_run(launches[0], {"entropy": [1, 2, 3, 4]}, {"de": 0.5})
    write_run(launches[2], {"entropy": [1, 2, 3, 4]}, {"de": 0.5})
    (launches[2].run_dir / "latest").unlink()
    assert FinishedRuns(launches).values("base", "entropy", "all steps") == {0: 2.5}
