"""Table, data and plot of finished runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab.ablate.__main__ import main
from lab.ablate.ablation import read
from lab.ablate.report import Report, band, interval, metric_label, number, smooth
from lab.ablate.results import Estimate, FinishedRuns, decide_all
from lab.ablate.runner import TIMES
from lab.ablate.runs import AblationRun, plan
from shared.metrics import MetricsLog
from tests.lab.ablate.conftest import TEXT, Write

PNG = b"\x89PNG\r\n\x1a\n"


def report(file: Path) -> Path:
    assert main([str(file), "--report", "--runs-dir=runs"]) == 0
    return Path("runs/clips")


def rows(table: str, first: str) -> list[list[str]]:
    """Cells of the table rows that begin with a cell."""
    lines = [line for line in table.splitlines() if line.startswith(f"| {first} |")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_table_has_a_row_a_variant_and_the_claims_decided(file: Path, finished: list[AblationRun]) -> None:
    (Path("runs/clips") / TIMES).write_text('{"run": "base-0", "seconds": 50.0, "code": 130}\n' * 3)
    table = (report(file) / "table.md").read_text(encoding="utf-8")
    assert table.startswith("# Two clips\n") and "6 runs of 4 steps, seeds 0, 1, 2, 2:30 min in all" in table
    assert rows(table, "variant")[0][2:] == ["seeds", "validation accuracy", "reward", "entropy"], "no empty column"
    [base] = rows(table, "clip-higher")
    assert base == ["clip-higher", "-", "3", "0.700 ± 0.000", "0.350 ± 0.000", "0.700 ± 0.248"]
    assert rows(table, "symmetric")[0][1] == "`--objective.clip_high=0.2`"
    claim = rows(table, "Higher entropy")[0]
    assert claim[1] == "entropy of clip-higher above symmetric, last 2 steps"
    assert claim[2:] == ["0.700 ± 0.248 against 0.400 ± 0.248", "+0.300 (+0.052 to +0.548)", "**reproduced**"]
    assert [row[4] for row in rows(table, "More in each language")] == ["**unclear**", "**reproduced**"]
    assert "validation accuracy, fr of clip-higher above symmetric, end" in table


def test_the_data_hold_every_seed(file: Path, finished: list[AblationRun]) -> None:
    data = json.loads((report(file) / "results.json").read_text(encoding="utf-8"))
    entropy = data["variants"]["base"]["figures"]["entropy"]
    assert entropy["over"] == "last 2 steps" and entropy["seeds"] == pytest.approx({"0": 0.6, "1": 0.7, "2": 0.8})
    assert data["variants"]["symmetric"]["figures"]["evaluation/accuracy/language/fr"]["mean"] == pytest.approx(0.1)
    assert data["claims"][0]["verdict"] == "reproduced" and data["claims"][0]["difference"]["count"] == 3
    assert data["failures"] == []


def test_the_plot_is_drawn(file: Path, finished: list[AblationRun]) -> None:
    content = (report(file) / "plot.png").read_bytes()
    assert content.startswith(PNG) and len(content) > 20_000


def test_without_a_finished_run_there_is_a_table_and_no_plot(file: Path) -> None:
    folder = report(file)
    table = (folder / "table.md").read_text(encoding="utf-8")
    assert "0 of 6 runs" in table and "there are no curves" in table and "**unclear** (no seed has both)" in table
    assert not (folder / "plot.png").exists()


def test_curves_are_smoothed_backwards_only() -> None:
    assert smooth([(1, 1.0), (2, 3.0), (3, 5.0)], 2) == [(1, 1.0), (2, 2.0), (3, 4.0)]


def test_the_band_spans_the_seeds_where_all_have_the_step() -> None:
    assert band([[(1, 1.0), (2, 4.0)], [(2, 2.0), (3, 9.0)]]) == ([2], [3.0], [2.0], [4.0])


def test_numbers_are_short() -> None:
    assert [number(value) for value in (0.8125, -0.5, 31.46, 1234.0, 0.000213, 1e-17)] == [
        "0.812", "-0.500", "31.5", "1,234", "2.13e-04", "0.000",
    ]  # fmt: skip
    assert interval(Estimate(-0.1, 0.2, 3)) == "-0.100 (-0.300 to +0.100)"
    assert interval(Estimate(0.1, None, 1)) == "+0.100"
    assert (
        metric_label("evaluation/accuracy/domain/code") == "validation accuracy, code"
        and metric_label("grad_norm") == "grad_norm"
    )


def test_pass_at_k_and_maj_at_k_are_columns_and_claims(file: Path, write_run: Write) -> None:
    claims = [
        f"""[[claims]]
says = "{figure} rises"
variant = "base"
metric = "evaluation/{figure}"
relation = "above"
than_over = "start"
"""
        for figure in ("pass_at_k", "majority")
    ]
    columns = 'columns = ["evaluation/pass_at_k", "evaluation/majority"]\n'
    file.write_text(TEXT.replace("[variants.base]", columns + "[variants.base]", 1) + "".join(claims))
    ablation = read(file)
    launches = plan(ablation, file, Path("runs"), ablation.seeds)
    for launch in launches:
        write_run(launch, {}, {"de": 0.5})
        log = MetricsLog(launch.run_dir / "metrics.jsonl")
        for step, high, low in ((0, 0.2, 0.1), (4, 0.8 + 0.01 * launch.seed, 0.5)):
            log.write(step, {"evaluation/pass_at_k": high, "evaluation/majority": low})
    runs = FinishedRuns(launches)
    assert runs.values("base", "evaluation/pass_at_k", "end") == pytest.approx({0: 0.8, 1: 0.81, 2: 0.82})
    decisions = decide_all(ablation, runs)[-2:]
    assert [(found.claim.metric, found.verdict) for found in decisions] == [
        ("evaluation/pass_at_k", "reproduced"), ("evaluation/majority", "reproduced")
    ]  # fmt: skip
    assert (
        "| validation pass@k | validation maj@k |" in Report(ablation, "command", runs, decisions, [], 1.0).markdown()
    )
