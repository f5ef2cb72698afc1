"""The command that runs the benchmarks: what it writes, refuses and compares; figures, and what counts as slower."""

import json
import os
import select
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import __main__ as command
from benchmarks import report
from benchmarks.__main__ import choose, declared, main, medians, stolen_share
from benchmarks.figures import Figure, Measured, Place, decode, encode
from shared.errors import ConfigError

HERE = Place("2 cores of X", {"python": "3.11"}, "abc", "2026-01-02")
STANDS = declared(Path(__file__).parent / "stand_ins", "tests.benchmarks.stand_ins")


def measured(*rows: Figure, machine: str = HERE.machine, **others: Any) -> Measured:
    return Measured(Place(machine, HERE.versions, HERE.commit, HERE.date), list(rows), **others)


@pytest.mark.parametrize(("values", "better", "target", "met"), [
    ([0.6, 0.9, 0.7], "higher", 0.7, True), ([0.6, 0.9, 0.69], "higher", 0.7, False),
    ([2.0, 2.1, 9.0], "lower", 2.1, True), ([2.2], "lower", 2.1, False), ([2.2], "", None, None),
])  # fmt: skip
def test_the_median_meets_a_target_from_the_better_side(values, better, target, met):
    assert Figure("a", values, "", better=better, target=target).met is met


def test_a_figure_has_values_or_a_reason_and_the_file_is_read_again():
    with pytest.raises(ValueError, match="not_measured"):
        Figure("a", [], "")
    with pytest.raises(ValueError, match="better"):
        Figure("a", [1.0], "", target=1.0)
    assert Figure("a", [], "", better="higher", target=2.0, not_measured="no GPU").met is None
    results = {"b": measured(Figure("a", [3.0, 1.0, 2.0], "s", of="x")), "c": Measured(HERE, not_measured="no GPU")}
    content = encode(results)
    row = json.loads(content)["b"]["rows"][0]
    assert decode(content) == results and (row["median"], row["lowest"], row["highest"]) == (2.0, 1.0, 3.0)


@pytest.mark.parametrize(("value", "unit", "text"), [
    (0.1873, "%", "18.7 %"), (1234.5, "groups/s", "1,234 groups/s"), (12.34, "ms", "12.3 ms"), (1.0, "", "1.00"),
    (0.1234, "", "0.123"), (0.000123, "s", "1.23e-04 s"), (0.0, "s", "0.000 s"), (-0.5, "", "-0.500"),
])  # fmt: skip
def test_values_are_shown_with_three_digits(value, unit, text):
    assert report.shown(value, unit) == text


def test_the_table_has_targets_missed_what_was_not_measured_and_time_that_others_took():
    rows = [
        Figure("write", [0.5, 0.6, 0.7], "", "memcpy", "higher", 0.5),
        Figure("step", [3.0], "s", "", "lower", 2.0),
        Figure("on a card", [], "s", not_measured="no GPU"),
    ]
    results = {"sync": measured(*rows, stolen=0.123), "train": Measured(HERE, not_measured="no GPU")}
    text = report.section(results, {"sync": "Speed."})
    for line in (
        "### sync\n\nSpeed.\n\nMeasured on 2026-01-02 at commit abc on 2 cores of X; python 3.11.",
        "| write | 0.600 (0.500 to 0.700) | memcpy | >= 0.500, met |\n",
        "| step | 3.00 s |  | <= 2.00 s, **missed** |\n",
        "| on a card | not measured: no GPU |  |  |\n", "\nNot measured: no GPU.\n",
        "The host gave 12% of the processors' working time to others meanwhile.",
    ):  # fmt: skip
        assert line in text
    assert "host gave" not in report.section({"a": measured(Figure("x", [1.0], ""), stolen=0.004)}, {})
    Times = namedtuple("Times", "user system idle iowait steal guest guest_nice")
    before, after = Times(10, 5, 100, 1, 2, 3, 0), Times(16, 7, 120, 2, 6, 5, 0)
    assert stolen_share(before, after) == pytest.approx(4 / 12)  # 6 + 2 + 4 were wanted; guests count as user
    assert stolen_share(before, before) == 0.0 and stolen_share(psutil.cpu_times(), psutil.cpu_times()) >= 0.0


@pytest.mark.parametrize(("better", "kind", "before", "after", "slower"), [
    ("higher", "throughput", 100.0, 95.0, False), ("higher", "throughput", 100.0, 94.9, True),
    ("lower", "throughput", 100.0, 105.0, False), ("lower", "throughput", 100.0, 105.1, True),
    ("higher", "sync", 100.0, 90.1, False), ("higher", "sync", 100.0, 89.9, True),
    ("lower", "sync", 1.0, 1.09, False), ("lower", "sync", 1.0, 1.11, True),
    ("higher", "throughput", 100.0, 200.0, False), ("lower", "sync", 2.0, 0.1, False),
])  # fmt: skip
def test_throughput_may_lose_5_percent_and_sync_10(better, kind, before, after, slower):
    old, new = (measured(Figure("a", [value], "s", "x", better, kind=kind)) for value in (before, after))
    assert [verdict.regressed for verdict in report.compare({"b": old}, {"b": new})] == [slower]


def test_absolute_figures_are_compared_only_on_the_same_machine():
    for of, machine, slower in (("", HERE.machine, True), ("", "another", False), ("x", "another", True)):
        old, new = (Figure("a", [value], "s", of, "higher") for value in (100.0, 50.0))
        [verdict] = report.compare({"b": measured(old)}, {"b": measured(new, machine=machine)})
        assert verdict.regressed is slower


def test_figures_that_cannot_be_compared_are_listed_and_are_no_regression():
    old = measured(Figure("a", [1.0], "", "x", "higher"), Figure("context", [1.0], ""))
    for new, words in (
        (measured(Figure("b", [1.0], "")), "b, a: not compared: there is no such figure any more"),
        (measured(Figure("a", [], "", not_measured="no GPU")), "b, a: not compared: no GPU"),
        (Measured(HERE, not_measured="no vllm"), "b: not compared, it is not measured now: no vllm"),
        (measured(Figure("a", [0.1], "", "x", "higher"), quick=True), "b: not compared, one of the two is a quick try"),
    ):
        assert report.compare({"b": old}, {"b": new}) == [(False, words)]
    assert report.compare({"b": old}, {"c": old}) == []


def test_a_file_that_decorates_a_function_of_its_name_is_a_benchmark():
    assert list(STANDS) == ["absent", "broken", "good", "paged", "starts"], "echo.py is none"
    assert STANDS["good"] == ("tests.benchmarks.stand_ins.good", "Measures what it was told.", "")
    assert STANDS["paged"].page == "docs/none.md"
    assert {"end_to_end", "training", "rollout", "weight_update", "verify", "serve", "quickstart"} <= declared().keys()
    assert choose([], STANDS) == ["absent", "broken", "good"], "all without a page"
    assert choose(["paged", "good"], STANDS) == ["paged", "good"]
    with pytest.raises(ConfigError, match="did you mean 'good'"):
        choose(["god"], STANDS)


def test_a_wrong_name_file_or_option_ends_with_code_2(tmp_path, capsys):
    missing = str(tmp_path / "no.json")
    for arguments, words in (
        (["god"], "did you mean 'good'"), (["--compare", missing, "good"], "no.json is no file of results"),
        (["--against", missing], "needs --compare"),
        (["good", "paged", "--loud"], "--loud: options of a benchmark need one NAME"),
    ):  # fmt: skip
        assert main(arguments, STANDS) == 2 and words in capsys.readouterr().err


def test_a_launch_ends_with_the_command_that_measures(tmp_path):
    line = tmp_path / "line"
    os.mkfifo(line)
    code = f"import benchmarks.__main__ as m; m.measure({STANDS['starts'].module!r}, False, ['--line={line}'])"
    runner = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(command.ROOT)})
    reader = os.open(line, os.O_RDONLY)
    try:
        assert os.read(reader, 1) == b"x"
        runner.terminate()
        assert select.select([reader], [], [], 120)[0] and os.read(reader, 1) == b""
    finally:
        runner.kill()
        runner.wait()
        os.close(reader)


def test_two_files_are_compared_without_measuring(tmp_path, capsys):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    for path, value in ((old, 1.0), (new, 0.9)):
        path.write_bytes(encode({"good": measured(Figure("a", [value], "", "x", "higher"))}))
    assert main(["--compare", str(old), "--against", str(new)], STANDS) == 1
    assert "SLOWER  good, a: 1.00 -> 0.900, 10.0% worse (allowed 5%)" in capsys.readouterr().out
    assert main(["--compare", str(new), "--against", str(old)], STANDS) == 0


def test_two_checkouts_are_measured_in_turn_and_put_together_by_their_medians(tmp_path, monkeypatch, capsys):
    order: list[Path] = []
    values = iter([4.0, 2.0, 9.0, 4.0, 4.0, 1.0])

    def of_checkout(folder: Path, names: list[str], quick: bool) -> dict[str, object]:
        order.append(folder)
        return {names[0]: measured(Figure("rate", [next(values)], "x/s", better="higher"))}

    monkeypatch.setattr(command, "of_checkout", of_checkout)
    assert main(["good", "--compare", str(tmp_path)], STANDS) == 1
    assert order == [tmp_path, command.ROOT, command.ROOT, tmp_path, tmp_path, command.ROOT]
    assert "SLOWER  good, rate: 4.00 x/s -> 2.00 x/s" in capsys.readouterr().out, "medians of 4 4 4 and 2 9 1"
    runs = [{"a": measured(Figure("x", [value, value, 9.0], ""), Figure("y", [1.0], ""))} for value in (3.0, 1.0, 2.0)]
    runs[0]["a"].rows.pop()
    assert medians(runs)["a"].rows == [Figure("x", [3.0, 1.0, 2.0], "")], "a figure that one run lacks is left out"


@pytest.mark.soak  # in make test: the other commands of this file
@pytest.mark.slow
def test_figures_are_written_failures_shown_and_what_is_not_run_is_kept(tmp_path, capfd):
    results, document = tmp_path / "results.json", tmp_path / "performance.md"
    document.write_text("# Speed\n<!-- results -->\nOUTDATED\n<!-- end of results -->\nthe end\n")
    kept = measured(Figure("a", [1.0], "", "x", "higher"), seconds=3.0)
    results.write_bytes(encode({"broken": kept}))
    assert main(["--json", str(results), "--document", str(document)], STANDS) == 1, "one of them failed"
    written = decode(results.read_bytes())
    assert written["good"].rows == [Figure("rate", [2.0, 1.0, 3.0], "x/s", better="higher", target=1.5)]
    assert written["good"].place.versions.keys() == {"python", "torch", "vllm", "transformers"}
    assert written["absent"].not_measured == "no such card here"
    assert written["broken"] == kept, "the figures of the last run"
    text = document.read_text()
    assert "| rate | 2.00 x/s (1.00 x/s to 3.00 x/s) |  | >= 1.50 x/s, met |" in text
    assert "Not measured: no such card here." in text and "OUTDATED" not in text and text.endswith("the end\n")
    shown = capfd.readouterr()
    assert "broken failed" in shown.out and "it broke" in shown.err and "noise" in shown.err
    page = tmp_path / "page.md"
    with pytest.raises(SystemExit) as refused:
        main(["paged"], STANDS)
    assert refused.value.code == 2 and "--page" in capfd.readouterr().err
    assert main(["paged", "--page", str(page), "--loud", "--no-write"], STANDS) == 0
    assert not page.exists() and "LOUD" in capfd.readouterr().out
    assert main(["paged", "--page", str(page), "--loud"], STANDS) == 0
    assert page.read_text() == "LOUD" and page.with_suffix(".png").read_bytes() == b"\x89PNG"


@pytest.mark.slow
def test_a_run_is_compared_with_old_figures_and_quick_tries_are_not_committed(tmp_path, capfd):
    before = command.RESULTS.read_bytes()
    assert main(["good", "--quick", "--values", "8"], STANDS) == 0
    assert command.RESULTS.read_bytes() == before and "rate: 4.00 x/s" in capfd.readouterr().out
    old = tmp_path / "old.json"
    old.write_bytes(encode({"good": measured(Figure("rate", [4.0], "", "x", "higher"))}))
    assert main(["good", "--no-write", "--compare", str(old)], STANDS) == 1
    assert "SLOWER  good, rate" in capfd.readouterr().out
