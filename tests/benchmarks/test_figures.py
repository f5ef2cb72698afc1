"""Figures, their table, and what counts as slower."""

from __future__ import annotations

import json
from collections import namedtuple
from typing import Any

import psutil
import pytest

from benchmarks import report
from benchmarks.__main__ import stolen_share
from benchmarks.figures import Figure, Measured, Place, decode, encode

HERE = Place("2 cores of X", {"python": "3.11"}, "abc", "2026-01-02")


def measured(*rows: Figure, machine: str = HERE.machine, **others: Any) -> Measured:
    return Measured(Place(machine, HERE.versions, HERE.commit, HERE.date), list(rows), **others)


def test_the_median_meets_a_target_from_the_better_side() -> None:
    assert Figure("a", [0.6, 0.9, 0.7], "", better="higher", target=0.7).met is True
    assert Figure("a", [0.6, 0.9, 0.69], "", better="higher", target=0.7).met is False
    assert Figure("a", [2.0, 2.1, 9.0], "", better="lower", target=2.1).met is True
    assert Figure("a", [2.2], "", better="lower", target=2.1).met is False
    assert Figure("a", [2.2], "").met is None


def test_a_row_has_values_or_a_reason() -> None:
    with pytest.raises(ValueError, match="give values, or say in not_measured"):
        Figure("a", [], "")
    with pytest.raises(ValueError, match="a target needs better"):
        Figure("a", [1.0], "", target=1.0)
    assert Figure("a", [], "", better="higher", target=2.0, not_measured="no GPU").met is None


def test_the_file_holds_medians_and_spread_and_is_read_again() -> None:
    results = {"b": measured(Figure("a", [3.0, 1.0, 2.0], "s", of="x")), "c": Measured(HERE, not_measured="no GPU")}
    content = encode(results)
    assert decode(content) == results
    written = json.loads(content)["b"]["rows"][0]
    assert (written["median"], written["lowest"], written["highest"]) == (2.0, 1.0, 3.0)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.1873, "%", "18.7 %"), (1234.5, "groups/s", "1,234 groups/s"), (12.34, "ms", "12.3 ms"), (1.0, "", "1.00"),
        (0.1234, "", "0.123"), (0.000123, "s", "1.23e-04 s"), (0.0, "s", "0.000 s"), (-0.5, "", "-0.500"),
    ],
)  # fmt: skip
def test_values_are_shown_with_three_digits(value: float, unit: str, text: str) -> None:
    assert report.shown(value, unit) == text


def test_the_table_says_targets_missed_and_what_was_not_measured() -> None:
    rows = [
        Figure("write", [0.5, 0.6, 0.7], "", "memcpy", "higher", 0.5),
        Figure("step", [3.0], "s", "", "lower", 2.0),
        Figure("on a card", [], "s", not_measured="no GPU"),
    ]
    text = report.section({"sync": measured(*rows), "train": Measured(HERE, not_measured="no GPU")}, {"sync": "Speed."})
    assert "### sync\n\nSpeed.\n\nMeasured on 2026-01-02 at commit abc on 2 cores of X; python 3.11.\n" in text
    assert "| write | 0.600 (0.500 to 0.700) | memcpy | >= 0.500, met |\n" in text
    assert "| step | 3.00 s |  | <= 2.00 s, **missed** |\n" in text
    assert "| on a card | not measured: no GPU |  |  |\n" in text
    assert text.endswith("\nNot measured: no GPU.\n")


def told(old: Measured, new: Measured) -> list[bool]:
    return [verdict.regressed for verdict in report.compare({"b": old}, {"b": new})]


@pytest.mark.parametrize(
    ("better", "kind", "before", "after", "slower"),
    [
        ("higher", "throughput", 100.0, 95.0, False), ("higher", "throughput", 100.0, 94.9, True),
        ("lower", "throughput", 100.0, 105.0, False), ("lower", "throughput", 100.0, 105.1, True),
        ("higher", "sync", 100.0, 90.1, False), ("higher", "sync", 100.0, 89.9, True),
        ("lower", "sync", 1.0, 1.09, False), ("lower", "sync", 1.0, 1.11, True),
        ("higher", "throughput", 100.0, 200.0, False), ("lower", "sync", 2.0, 0.1, False),
    ],
)  # fmt: skip
def test_throughput_may_lose_5_percent_and_sync_10(
    better: Any, kind: Any, before: float, after: float, slower: bool
) -> None:
    rows = [Figure("a", [value], "s", "x", better, kind=kind) for value in (before, after)]
    assert told(measured(rows[0]), measured(rows[1])) == [slower]


def test_absolute_figures_are_compared_only_on_the_same_machine() -> None:
    old, new = Figure("a", [100.0], "s", better="higher"), Figure("a", [50.0], "s", better="higher")
    assert told(measured(old), measured(new)) == [True]
    assert told(measured(old), measured(new, machine="another")) == [False]
    ratio = [Figure("a", [value], "", "x", "higher") for value in (1.0, 0.5)]
    assert told(measured(ratio[0]), measured(ratio[1], machine="another")) == [True]


def test_what_cannot_be_compared_is_told_and_is_no_regression() -> None:
    old = measured(Figure("a", [1.0], "", "x", "higher"), Figure("context", [1.0], ""))
    for new, words in (
        (measured(Figure("b", [1.0], "")), "b, a: not compared: there is no such figure any more"),
        (measured(Figure("a", [], "", not_measured="no GPU")), "b, a: not compared: no GPU"),
        (Measured(HERE, not_measured="no vllm"), "b: not compared, it is not measured now: no vllm"),
        (measured(Figure("a", [0.1], "", "x", "higher"), quick=True), "b: not compared, one of the two is a quick try"),
    ):
        (verdict,) = report.compare({"b": old}, {"b": new})
        assert verdict == (False, words)
    assert report.compare({"b": old}, {"c": old}) == []


def test_time_that_others_took_is_told() -> None:
    Times = namedtuple("Times", "user system idle iowait steal guest guest_nice")
    before, after = Times(10, 5, 100, 1, 2, 3, 0), Times(16, 7, 120, 2, 6, 5, 0)
    assert stolen_share(before, after) == pytest.approx(4 / 12)  # 6 + 2 + 4 were wanted; guests count as user
    assert stolen_share(before, before) == 0.0
    assert stolen_share(psutil.cpu_times(), psutil.cpu_times()) >= 0.0
    text = report.section({"a": measured(Figure("x", [1.0], ""), stolen=0.123)}, {})
    assert "The host gave 12% of the processors' working time to others meanwhile." in text
    assert "host gave" not in report.section({"a": measured(Figure("x", [1.0], ""), stolen=0.004)}, {})
