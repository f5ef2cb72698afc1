"""What finished runs say: windows and curves, Student's intervals, verdicts over paired seeds, table, data and plot."""

import json
import math
from pathlib import Path

import pytest

from lab.ablate.__main__ import main
from lab.ablate.ablation import read, window_of
from lab.ablate.report import Report, band, interval, metric_label, number, smooth
from lab.ablate.results import (
    NOT_REPRODUCED,
    REPRODUCED,
    UNCLEAR,
    Estimate,
    FinishedRuns,
    decide_all,
    estimate,
    select,
    student,
    verdict_on,
)
from lab.ablate.runner import TIMES
from lab.ablate.runs import plan
from shared.metrics import MetricsLog
from tests.lab.ablate.conftest import TEXT

ABOVE, BELOW, SPREAD = (0.09, 0.10, 0.11), (-0.09, -0.10, -0.11), (0.3, -0.1, 0.1)
"""differences x - y over three seeds; the interval of ABOVE is 0.10 +- 4.3027 * 0.01 / sqrt(3) = 0.0248"""


@pytest.mark.parametrize(("count", "quantile"), [(2, 12.7062), (3, 4.3027), (4, 3.1824), (6, 2.5706), (31, 2.0423)])
def test_quantiles_of_students_t(count, quantile):
    assert student(count) == pytest.approx(quantile, abs=5e-5)


def test_an_interval_by_hand_and_one_seed_has_none():
    mean = estimate([1.0, 2.0, 6.0])  # mean 3, variance (4 + 1 + 9) / 2 = 7
    assert mean.mean == 3 and mean.count == 3 and mean.half == pytest.approx(4.3027 * math.sqrt(7 / 3), rel=1e-4)
    assert (mean.low, mean.high) == pytest.approx((3 - 6.5723, 3 + 6.5723), rel=1e-4)
    alone = estimate([0.5])
    assert alone.half is None and (alone.low, alone.high) == (-math.inf, math.inf)


@pytest.mark.parametrize(("window", "values"), [
    ("start", [1]), ("end", [5]), ("all steps", [1, 2, 3, 4, 5]), ("last 2 steps", [4, 5]), ("last 1 step", [5]),
    ("first 3 steps", [1, 2, 3]), ("steps 2 to 3", [2, 3]), ("steps 7 to 9", []), ("last 99 steps", [1, 2, 3, 4, 5]),
])  # fmt: skip
def test_windows(window, values):
    assert select([(step, float(step)) for step in range(1, 6)], window) == values and select([], window) == []
    assert window_of("evaluation/accuracy", "", window) == "end", "figures of validation are taken at the end"
    assert window_of("entropy", "", window) == window and window_of("entropy", "start", window) == "start"


def test_curves_and_values_of_runs(finished):
    runs = FinishedRuns(finished)
    assert runs.seeds == [0, 1, 2] and runs.finished("base") == [0, 1, 2]
    assert runs.curve("base", 1, "entropy") == [(1, 1.0), (2, 0.9), (3, pytest.approx(0.8)), (4, pytest.approx(0.6))]
    assert runs.values("symmetric", "entropy", "last 2 steps") == pytest.approx({0: 0.3, 1: 0.5, 2: 0.4})
    for metric, curve in (
        ("evaluation/accuracy", [(0, 0.0), (4, pytest.approx(0.4))]),
        ("evaluation/accuracy/language/de", [(0, 0.0), (4, 0.7)]),
        ("evaluation/consistency/language/de", [(0, 0.5), (4, 0.5)]),
        ("evaluation/accuracy/language/xx", []),
        ("kl/k3", []),
    ):
        assert runs.curve("symmetric", 1, metric) == curve
    assert runs.parts("language") == ["language/de", "language/fr"] and runs.parts("domain") == []


def test_unfinished_runs_say_nothing(launches, write_run):
    for launch in (launches[0], launches[2]):
        write_run(launch, {"entropy": [1, 2, 3, 4]}, {"de": 0.5})
    (launches[2].run_dir / "latest").unlink()
    assert FinishedRuns(launches).values("base", "entropy", "all steps") == {0: 2.5}


@pytest.mark.parametrize(("relation", "margin", "differences", "verdict"), [
    ("above", 0.0, ABOVE, REPRODUCED), ("above", 0.07, ABOVE, REPRODUCED), ("above", 0.08, ABOVE, UNCLEAR),
    ("above", 0.13, ABOVE, NOT_REPRODUCED), ("above", 0.0, BELOW, NOT_REPRODUCED), ("above", 0.0, SPREAD, UNCLEAR),
    ("below", 0.0, BELOW, REPRODUCED), ("below", 0.0, ABOVE, NOT_REPRODUCED), ("below", 0.13, BELOW, NOT_REPRODUCED),
    ("not above", 0.13, ABOVE, REPRODUCED), ("not above", 0.07, ABOVE, NOT_REPRODUCED),
    ("not below", 0.0, ABOVE, REPRODUCED), ("not below", 0.07, BELOW, NOT_REPRODUCED),
    ("not below", 0.13, BELOW, REPRODUCED), ("as", 0.13, ABOVE, REPRODUCED), ("as", 0.13, BELOW, REPRODUCED),
    ("as", 0.10, ABOVE, UNCLEAR), ("as", 0.05, ABOVE, NOT_REPRODUCED), ("as", 0.05, BELOW, NOT_REPRODUCED),
    ("as", 0.05, SPREAD, UNCLEAR), ("above", 0.0, (0.0, 0.0), NOT_REPRODUCED),
    ("not below", 0.0, (0.0, 0.0), REPRODUCED), ("above", 0.0, (0.1,), UNCLEAR),
])  # fmt: skip
def test_relations(relation, margin, differences, verdict):
    assert verdict_on(relation, margin, [(1 + difference, 1.0) for difference in differences]) == verdict


@pytest.mark.parametrize(("relation", "margin", "base", "verdict"), [
    ("above", "9 %", 4.0, REPRODUCED), ("above", "12 %", 4.0, NOT_REPRODUCED), ("above", "12 %", -4.0, NOT_REPRODUCED),
    ("not above", "12 %", -4.0, REPRODUCED),
])  # fmt: skip
def test_a_share_is_of_the_size_of_the_other_value(relation, margin, base, verdict):
    pairs = [(base + difference, base) for difference in (0.39, 0.40, 0.41)]  # of 4: about a tenth
    assert verdict_on(relation, margin, pairs) == verdict


def test_pairs_remove_what_seeds_have_in_common():
    """The seeds differ by 1, the variants by 0.1: only pairs can tell."""
    shared = [(seed + 0.1 + 0.01 * seed, float(seed)) for seed in range(3)]
    crossed = [(shared[seed][0], shared[(seed + 1) % 3][1]) for seed in range(3)]
    assert (verdict_on("above", 0.0, shared), verdict_on("above", 0.0, crossed)) == (REPRODUCED, UNCLEAR)


def test_claims_are_decided_for_each_language_and_need_pairs(ablation, finished):
    entropy, german, french = decide_all(ablation, FinishedRuns(finished))
    assert entropy.difference is not None and entropy.difference.mean == pytest.approx(0.3)
    assert entropy.difference.half == pytest.approx(4.3027 * 0.1 / 3**0.5, rel=1e-4)  # 0.3, 0.2, 0.4
    assert (entropy.verdict, entropy.subset) == (REPRODUCED, "")
    assert (german.verdict, german.subset) == (UNCLEAR, "language/de")
    assert (french.verdict, french.subset) == (REPRODUCED, "language/fr")
    assert french.left is not None and french.left.mean == pytest.approx(0.9)
    for run in finished:
        if (run.variant, run.seed) not in (("base", 0), ("symmetric", 0), ("symmetric", 1)):
            (run.run_dir / "latest").unlink()
    decision = decide_all(ablation, FinishedRuns(finished))[0]
    assert (decision.verdict, decision.why) == (UNCLEAR, "one seed")
    (finished[0].run_dir / "latest").unlink()
    decision = decide_all(ablation, FinishedRuns(finished))[0]
    assert (decision.verdict, decision.why, decision.difference) == (UNCLEAR, "no seed has both", None)


def test_a_variant_is_compared_with_itself_at_another_time(file, finished):
    """Entropy of base: 1.0 at the first of four steps, 0.6, 0.7, 0.8 in the last two. In French 0 before, 0.9 after."""
    text = file.read_text()
    earlier = text.replace('relation = "above"', 'relation = "below"', 1)
    earlier = earlier.replace('than = "symmetric"', 'than_over = "first 1 step"', 1)
    file.write_text(earlier.replace('than = "symmetric"', 'than_over = "start"'))
    entropy, german, french = decide_all(read(file), FinishedRuns(finished))
    assert entropy.difference is not None and entropy.difference.mean == pytest.approx(-0.3)
    assert french.difference is not None and french.difference.mean == pytest.approx(0.9)
    assert [claim.verdict for claim in (entropy, german, french)] == [REPRODUCED] * 3
    file.write_text(text.replace('each = "language"\n\n[[panels', 'each = "domain"\n\n[[panels'))
    domain = decide_all(read(file), FinishedRuns(finished))[1]
    assert (domain.verdict, domain.why) == (UNCLEAR, "no evaluation tells several domains apart")


def report(file: Path) -> Path:
    assert main([str(file), "--report", "--runs-dir=runs"]) == 0
    return Path("runs/clips")


def rows(table: str, first: str) -> list[list[str]]:
    """Cells of the table rows that begin with a cell."""
    lines = [line for line in table.splitlines() if line.startswith(f"| {first} |")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_a_report_has_table_data_and_plot(file, finished):
    (Path("runs/clips") / TIMES).write_text('{"run": "base-0", "seconds": 50.0, "code": 130}\n' * 3)
    folder = report(file)
    table = (folder / "table.md").read_text(encoding="utf-8")
    assert table.startswith("# Two clips\n") and "6 runs of 4 steps, seeds 0, 1, 2, 2:30 min in all" in table
    assert rows(table, "variant")[0][2:] == ["seeds", "validation accuracy", "reward", "entropy"], "no empty column"
    assert rows(table, "clip-higher") == [["clip-higher", "-", "3", "0.700 ± 0.000", "0.350 ± 0.000", "0.700 ± 0.248"]]
    assert rows(table, "symmetric")[0][1] == "`--objective.clip_high=0.2`"
    assert rows(table, "Higher entropy")[0][1:] == [
        "entropy of clip-higher above symmetric, last 2 steps", "0.700 ± 0.248 against 0.400 ± 0.248",
        "+0.300 (+0.052 to +0.548)", "**reproduced**",
    ]  # fmt: skip
    assert [row[4] for row in rows(table, "More in each language")] == ["**unclear**", "**reproduced**"]
    assert "validation accuracy, fr of clip-higher above symmetric, end" in table
    data = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    entropy = data["variants"]["base"]["figures"]["entropy"]
    assert entropy["over"] == "last 2 steps" and entropy["seeds"] == pytest.approx({"0": 0.6, "1": 0.7, "2": 0.8})
    assert data["variants"]["symmetric"]["figures"]["evaluation/accuracy/language/fr"]["mean"] == pytest.approx(0.1)
    assert data["claims"][0]["verdict"] == "reproduced" and data["claims"][0]["difference"]["count"] == 3
    assert data["failures"] == []
    picture = (folder / "plot.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n") and len(picture) > 20_000


def test_without_a_finished_run_there_is_a_table_and_no_plot(file):
    folder = report(file)
    table = (folder / "table.md").read_text(encoding="utf-8")
    assert "0 of 6 runs" in table and "there are no curves" in table and "**unclear** (no seed has both)" in table
    assert not (folder / "plot.png").exists()


def test_curves_are_smoothed_backwards_bands_span_the_seeds_and_numbers_are_short():
    assert smooth([(1, 1.0), (2, 3.0), (3, 5.0)], 2) == [(1, 1.0), (2, 2.0), (3, 4.0)]
    assert band([[(1, 1.0), (2, 4.0)], [(2, 2.0), (3, 9.0)]]) == ([2], [3.0], [2.0], [4.0])
    assert [number(value) for value in (0.8125, -0.5, 31.46, 1234.0, 0.000213, 1e-17)] == [
        "0.812", "-0.500", "31.5", "1,234", "2.13e-04", "0.000",
    ]  # fmt: skip
    assert interval(Estimate(-0.1, 0.2, 3)) == "-0.100 (-0.300 to +0.100)"
    assert interval(Estimate(0.1, None, 1)) == "+0.100" and metric_label("grad_norm") == "grad_norm"
    assert metric_label("evaluation/accuracy/domain/code") == "validation accuracy, code"


def test_pass_at_k_and_maj_at_k_are_columns_and_claims(file, write_run):
    claim = '[[claims]]\nsays = "x"\nvariant = "base"\nmetric = "{}"\nrelation = "above"\nthan_over = "start"\n'
    metrics = ("evaluation/pass_at_k", "evaluation/majority")
    columns = f"columns = {json.dumps(metrics)}\n"
    file.write_text(
        TEXT.replace("[variants.base]", columns + "[variants.base]", 1) + "".join(map(claim.format, metrics))
    )
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
    assert [(each.claim.metric, each.verdict) for each in decisions] == [(metric, REPRODUCED) for metric in metrics]
    table = Report(ablation, "command", runs, decisions, [], 1.0).markdown()
    assert "| validation pass@k | validation maj@k |" in table
