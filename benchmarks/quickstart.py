"""Train the quickstart on several seeds and write the table of results into README.md, with machine and date.

    python -m benchmarks.quickstart [--seeds 0 1 2] [--runs-dir runs/seeds] [--no-write]

Each seed is one ordinary launch (`python -m trainer configs/quickstart.toml`); a finished one is not repeated.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.section import ROOT, describe_machine, write
from shared import settings_file
from shared.metrics import read_rows
from trainer.evaluation import at_temperature, read_evaluations

CONFIG = "configs/quickstart.toml"


def launch(seed: int, runs_dir: Path) -> Path:
    """Train one seed unless it is finished; returns its run folder. Exits if the launch fails."""
    run_dir = runs_dir / f"quickstart-{seed}"
    if (run_dir / "plot.png").is_file():  # the last thing that a launch writes
        return run_dir
    command = [sys.executable, "-m", "trainer", CONFIG]
    command += [f"--seed={seed}", f"--name={run_dir.name}", f"--runs_dir={runs_dir}"]
    if code := subprocess.run(command, cwd=ROOT, check=False).returncode:
        raise SystemExit(code)
    return run_dir


def check(run_dir: Path) -> dict[str, float]:
    """Facts of one finished run; raises AssertionError if a group was trained twice or a token was too old."""
    config = settings_file.load(run_dir / "config.toml")
    rows = [row for row in read_rows(run_dir / "metrics.jsonl") if row["kind"] == "train"]
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
        "generated_per_s": statistics.median(row["tokens/generated_per_s"] for row in rows),
        "trained_per_s": statistics.median(row["tokens/trained_per_s"] for row in rows),
    }


def scores(run_dir: Path) -> list[str]:
    """Accuracy and consistency before and after, at temperature 1 and greedy: one table cell each."""
    records = read_evaluations(run_dir)
    cells = []
    for name in ("accuracy", "consistency"):
        for temperature in (1.0, 0.0):
            found = at_temperature(records, temperature)
            cells.append(f"{getattr(found[0].evaluation, name):.3f} → {getattr(found[-1].evaluation, name):.3f}")
    return cells


def wall(run_dir: Path) -> str:
    """From the making of the problems until the export, SFT and evaluations included."""
    began = (run_dir / "stacks" / "rank0.txt").stat().st_mtime  # its first line is written when the rank starts
    minutes, seconds = divmod(round((run_dir / "latest").stat(follow_symlinks=False).st_mtime - began), 60)
    return f"{minutes}:{seconds:02d} min"


def table(run_dirs: list[Path]) -> str:
    """The section of the README."""
    facts: list[dict[str, Any]] = [check(run_dir) for run_dir in run_dirs]
    lines = [
        f"Measured on {datetime.date.today():%Y-%m-%d} with `python -m benchmarks.quickstart` on "
        f"{describe_machine()}: 256 validation problems, before → after.",
        "",
        "| run | accuracy, T = 1 | greedy | language consistency, T = 1 | greedy | wall |",
        "|---|---|---|---|---|---|",
    ]
    for run_dir in run_dirs:
        lines.append(f"| {' | '.join([run_dir.name, *scores(run_dir), wall(run_dir)])} |")
    lines += [
        "",
        "| run | groups, each trained once | completions over 2+ policy versions | aborted | oldest token (bound) "
        "| stall of an update, median | mean log-prob difference (probe, largest) |",
        "|---|---|---|---|---|---|---|",
    ]
    for run_dir, fact in zip(run_dirs, facts, strict=True):
        lines.append(
            f"| {run_dir.name} | {fact['groups']:,} | {fact['spanning']:,} of {fact['completions']:,} | "
            f"{fact['aborted']:.0f} | {fact['oldest']:.0f} ({fact['bound']}) versions | {fact['stall_ms']:.0f} ms = "
            f"{fact['stall_steps']:.1f} decode steps | {fact['difference']:.1e} ({fact['probe']:.1e}) |"
        )
    lines += [
        "",
        "The log-prob difference of a step is between the weights that sampled and those that are trained, so it",
        "contains the staleness; the probe compares trainer and engine on the same weights.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Train, check, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--runs-dir", type=Path, default=ROOT / "runs" / "seeds")
    parser.add_argument("--no-write", action="store_true", help="print the table only")
    parser.add_argument("--also", type=Path, nargs="*", default=[], help="finished run folders to show first")
    options = parser.parse_args()
    section = table([*options.also, *(launch(seed, options.runs_dir) for seed in options.seeds)])
    print(section)
    if not options.no_write:
        write(section, ROOT / "README.md")


if __name__ == "__main__":
    main()
