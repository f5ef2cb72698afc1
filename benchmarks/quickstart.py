"""The quickstart trained on several seeds: accuracy and language before and after, and what was kept on the way.

Each seed is one ordinary launch (`python -m trainer configs/quickstart.toml`); a finished one is not repeated.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from benchmarks.figures import ROOT, Section, benchmark, measured_with
from benchmarks.report import table
from benchmarks.runs import launch, training_rows, wall
from shared import settings_file
from trainer.evaluation import at_temperature, read_evaluations

CONFIG = "configs/quickstart.toml"
SEEDS = [0, 1, 2]
SMALL = ("--steps=4", "--sft.steps=60", "--stories.validation=32")
"""settings of a quick try"""
SCORES = ("run", "accuracy, T = 1", "greedy", "language consistency, T = 1", "greedy", "wall")
FACTS = (
    "run", "groups, each trained once", "completions over 2+ policy versions", "aborted", "oldest token (bound)",
    "stall of an update, median", "mean log-prob difference (probe, largest)",
)  # fmt: skip


def check(run_dir: Path) -> dict[str, float]:
    """Return facts of a finished run. Raises AssertionError if a group was trained twice or a token was too old."""
    config = settings_file.load(run_dir / "config.toml")
    rows = training_rows(run_dir)
    trained: Counter[int] = Counter()
    spanning = completions = 0
    for path in (run_dir / "rollouts").glob("step_*.jsonl"):
        for line in path.read_bytes().splitlines():
            group = msgspec.json.decode(line)
            trained[group["prompt"]["index"]] += 1
            completions += len(group["completions"])
            spanning += sum(len(completion["spans"]) > 1 for completion in group["completions"])
    groups = config.steps * config.rollout.prompts_per_step
    assert len(trained) == groups and set(trained.values()) == {1}, "a group was lost or trained twice"
    oldest = max(row["staleness/max"] for row in rows)
    assert oldest <= config.max_staleness, f"a token was {oldest} versions old, the bound is {config.max_staleness}"
    stalls = [row for row in rows if row["sync/stall_ms"] > 0]
    return {
        "groups": groups,
        "completions": completions,
        "spanning": spanning,
        "aborted": sum(row["completions/aborted"] for row in rows),
        "oldest": oldest,
        "bound": config.max_staleness,
        "stall_ms": statistics.median(row["sync/stall_ms"] for row in stalls),
        "stall_steps": statistics.median(row["sync/stall_steps"] for row in stalls),
        "difference": statistics.mean(row["logprob_difference/mean"] for row in rows),
        "probe": max(row["sync/logprob_diff_mean"] for row in rows),
    }


def scores(run_dir: Path) -> list[str]:
    """Return accuracy and consistency before and after, at temperature 1 and greedy: one table cell each."""
    records = read_evaluations(run_dir)
    cells = []
    for name in ("accuracy", "consistency"):
        for temperature in (1.0, 0.0):
            found = at_temperature(records, temperature)
            cells.append(f"{getattr(found[0].evaluation, name):.3f} → {getattr(found[-1].evaluation, name):.3f}")
    return cells


def facts_row(run_dir: Path) -> list[str]:
    """Return the cells under FACTS."""
    fact = check(run_dir)
    return [
        run_dir.name, f"{fact['groups']:,}", f"{fact['spanning']:,} of {fact['completions']:,}",
        f"{fact['aborted']:.0f}", f"{fact['oldest']:.0f} ({fact['bound']}) versions",
        f"{fact['stall_ms']:.0f} ms = {fact['stall_steps']:.1f} decode steps",
        f"{fact['difference']:.1e} ({fact['probe']:.1e})",
    ]  # fmt: skip


@benchmark(page="README.md")
def quickstart(
    quick: bool,
    seeds: list[int] = SEEDS,
    runs_dir: Path = ROOT / "runs" / "seeds",
    also: list[Path] = [],  # noqa: B006
) -> Iterator[Section]:
    """Train each seed, then check. also: finished run folders to show first."""
    runs = list(also)
    for seed in seeds[: 1 if quick else None]:
        name = f"quickstart-{seed}"
        launch(f"{name}-quick" if quick else name, runs_dir, CONFIG, f"--seed={seed}", *(SMALL if quick else ()))
        runs.append(runs_dir / (f"{name}-quick" if quick else name))
    problems = read_evaluations(runs[0])[-1].evaluation.problems
    scored = [[run_dir.name, *scores(run_dir), wall(run_dir)] for run_dir in runs]
    yield Section(
        f"{measured_with('quickstart')}: {problems} validation problems, before → after.\n\n{table(SCORES, *scored)}",
        mark="results",
    )  # fmt: skip
    yield Section(
        f"{table(FACTS, *map(facts_row, runs))}\n"
        "The log-prob difference of a step is between the weights that sampled and those that are trained, so it\n"
        "contains the staleness; the probe compares trainer and engine on the same weights.\n",
        page="docs/results/quickstart.md", mark="facts",
    )  # fmt: skip
