"""What came of the examples: time, memory, figures and samples of their finished runs, into the pages of examples/.

The runs are made by the commands of those pages; an example without a finished run keeps what its page says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks import report
from benchmarks.figures import ROOT, NotMeasured, Section, benchmark
from benchmarks.runs import exported_version, pick, shown, table, trained_on, training_rows, wall
from evaluation.tables import difference_table
from shared.metrics import read_rows
from shared.types import Verdict
from trainer.evaluation import Evaluation

RUNS = {
    "quickstart": "quickstart", "own": "own", "gsm8k": "smollm2-gsm8k", "lora": "smollm2-lora", "code": "programs",
    "languages": "languages", "distill": "distill", "python": "python", "agent": "agent",
}  # fmt: skip
"""folder of an example -> name of its run"""
ROLES = ("controller", "trainer", "engine")
CURVES = ("reward/mean", "reward/extra", "accuracy", "consistency", "length/mean")
FEW = 3
"""steps at either end of a run whose mean is shown"""
CURVE_HEADS = ["training", f"first {FEW} steps", f"last {FEW} steps"]


def figures(run_dir: Path) -> str:
    """Return Markdown about a finished run: where, how long, how much memory; evaluations, the ends of its curves."""
    rows = training_rows(run_dir)
    lines = [
        f"{trained_on(run_dir)}, {len(rows)} steps; written by `python -m benchmarks examples`. Wall time "
        f"{wall(run_dir)}, start and evaluations included; {peaks(rows)}.",
        "",
        report.table(CURVE_HEADS, *ends(rows)),
    ]  # fmt: skip
    if (run_dir / "evaluations.jsonl").exists():
        before, after = pick(run_dir, 0), pick(run_dir, None)
        lines += [table({"before": before, "after": after}), *sample(before, after)]
    return "\n".join(lines)


def peaks(rows: list[dict[str, Any]]) -> str:
    """Say the peak memory of each role, from the metrics of a run's steps."""
    found = (f"{role} {max(row[f'memory/{role}_peak_bytes'] for row in rows) / 2**30:.1f}" for role in ROLES)
    return f"peak memory in GiB: {', '.join(found)}"


def stations(folder: Path) -> str:
    """Return Markdown about the four stations of the example cold_start, from the folder of its two runs and of the
    comparison of its two evaluations through the API."""
    sft, rl = folder / "smollm2-sft", folder / "smollm2-rl"
    rows = training_rows(rl)
    before, middle, after = pick(sft, 0), pick(sft, exported_version(sft / "best")), pick(rl, None)
    compared = json.loads((folder / "difference" / "compare.json").read_text(encoding="utf-8"))
    return "\n".join([
        f"{trained_on(rl)}, {len(rows)} steps of reinforcement learning; written by `python -m benchmarks examples`.",
        f"Wall time: SFT {wall(sft)}, reinforcement learning {wall(rl)}, with start and evaluations; {peaks(rows)}.",
        "",
        "Evaluations of the two launches:",
        "",
        table({"as downloaded": before, "after SFT": middle, "after reinforcement learning": after}),
        "Stations 1 and 4, through the API:",
        "",
        difference_table("", compared).markdown(),
        *sample(before, after),
    ])  # fmt: skip


def ends(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Rows of a table: the mean of each curve at the beginning and at the end."""
    found = []
    for name in CURVES:
        values = [row[name] for row in rows if name in row]
        if values and (any(values) or name != "reward/extra"):
            found.append([name, f"{mean(values[:FEW]):.3f}", f"{mean(values[-FEW:]):.3f}"])
    return found


def sample(before: Evaluation, after: Evaluation) -> list[str]:
    """Markdown: the first problem that was shown in both evaluations and is solved in the second alone."""
    later = {one.problem.id: one for one in after.samples}
    for one in before.samples:
        other = later.get(one.problem.id)
        if other and one.reward.verdict is not Verdict.CORRECT and other.reward.verdict is Verdict.CORRECT:
            pair = (("before", one), ("after", other))
            return [line for title, found in pair for line in shown(title, found.problem, found.text, found.reward)]
    return []


def beside(whole: Path, adapters: Path) -> str:
    """Return Markdown: what a run with adapters takes and reaches, beside one of all weights."""
    rows = dict[str, list[str]]()
    for run_dir in (whole, adapters):
        found, trained = read_rows(run_dir / "metrics.jsonl"), training_rows(run_dir)
        for title, name, factor, kind in (
            ("largest memory of the trainer, GiB", "memory/trainer_peak_bytes", 2**-30, max),
            ("of the engine, GiB", "memory/engine_peak_bytes", 2**-30, max),
            ("bytes of an update, MB", "sync/bytes", 1e-6, max),
            ("SFT, tokens a second, at its end", "sft/tokens_per_s", 1.0, lambda values: values[-1]),
            ("a step, median, s", "time/step_s", 1.0, median),
        ):
            values = [row[name] for row in found if name in row]
            rows.setdefault(title, []).append(f"{kind(values) * factor:.3g}")
        reward = mean(row["reward/mean"] for row in trained[-FEW:])
        rows.setdefault(f"mean reward, last {FEW} steps", []).append(f"{reward:.3f}")
    told = f"{trained_on(adapters)}, {len(trained)} steps each; written by `python -m benchmarks examples`."
    return f"{told}\n\n" + report.table(
        ["", "all weights", "adapters"], *([title, *cells] for title, cells in rows.items())
    )


@benchmark(page="examples/README.md")
def examples(quick: bool, runs_dir: Path = ROOT / "runs") -> Iterator[Section]:
    """Write what the finished runs of a folder came to. runs_dir: the folder."""
    found = {folder: runs_dir / name for folder, name in RUNS.items() if (runs_dir / name / "latest").exists()}
    recipe = runs_dir / "recipe"
    compared = (recipe / "difference" / "compare.json").exists()
    if not found and not compared:
        raise NotMeasured(f"{runs_dir} holds no finished run of an example")
    for folder, run_dir in found.items():
        yield Section(figures(run_dir).rstrip() + "\n", page=f"examples/{folder}/README.md", mark="figures")
    without = runs_dir / "languages-without"
    if (without / "latest").exists():
        page, mark = "examples/languages/README.md", "without the language reward"
        text = f"{trained_on(without)}; written by `python -m benchmarks examples`.\n\n"
        curves = report.table(CURVE_HEADS, *ends(training_rows(without)))
        yield Section(text + curves.rstrip() + "\n", page=page, mark=mark)
    if compared:
        yield Section(stations(recipe).rstrip() + "\n", page="examples/cold_start/README.md", mark="figures")
    if {"gsm8k", "lora"} <= found.keys():
        yield Section(
            beside(found["gsm8k"], found["lora"]).rstrip() + "\n", page="docs/lora.md", mark="beside all weights"
        )
