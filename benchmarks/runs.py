"""Pages about training runs: launch a run once, show its evaluations side by side, curves, completions, wall time.

What is shown is read from run folders.
"""

from __future__ import annotations

import datetime
import io
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.figures import ROOT, describe_machine
from lab.ablate.runner import note_time
from shared import settings_file
from shared.errors import ConfigError, RunError
from shared.metrics import read_rows, series
from shared.types import Problem, Reward
from trainer.evaluation import Evaluation, at_temperature, read_evaluations
from trainer.report import clean


def launch(name: str, runs_dir: Path, *arguments: str) -> None:
    """Run `python -m trainer FILE ...` to its end; a run that ended is not repeated, one that was stopped goes on.

    Raises ConfigError if the run folder was made with other settings, RunError if the run fails."""
    run_dir = runs_dir / name
    options = [*arguments, f"--name={name}", f"--runs_dir={runs_dir}"]
    if (run_dir / "config.toml").exists():
        config = settings_file.load(ROOT / options[0], options[1:])
        if settings_file.load(run_dir / "config.toml") != config:
            raise ConfigError(f"{run_dir} was made with other settings: delete it, or give another --runs-dir")
    if (run_dir / "latest").exists():
        return
    began = time.monotonic()
    code = 1
    try:
        code = subprocess.run([sys.executable, "-m", "trainer", *options], cwd=ROOT, check=False).returncode
    finally:
        runs_dir.mkdir(parents=True, exist_ok=True)
        note_time(run_dir, time.monotonic() - began, code)
    if code:
        raise RunError(f"the run {name} ended with code {code}")


def trained_on(run_dir: Path) -> str:
    """Say the day of a run's export, and this machine (on which the page's command has trained)."""
    day = datetime.date.fromtimestamp((run_dir / "latest").stat(follow_symlinks=False).st_mtime)
    return f"Trained on {day} on {describe_machine()}"


def wall(run_dir: Path) -> str:
    """Format the time from the making of the problems until the export, SFT and evaluations included."""
    began = (run_dir / "stacks" / "rank0.txt").stat().st_mtime  # its first line is written when the rank starts
    minutes, seconds = divmod(round((run_dir / "latest").stat(follow_symlinks=False).st_mtime - began), 60)
    return f"{minutes}:{seconds:02d} min"


def training_rows(run_dir: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run's steps of reinforcement learning."""
    return [row for row in read_rows(run_dir / "metrics.jsonl") if row["kind"] == "train"]


def exported_version(link: Path) -> int:
    """Return the version that `latest` or `best` of a run leads to."""
    return int(link.resolve().name.rpartition("_")[2])


def pick(run_dir: Path, version: int | None) -> Evaluation:
    """Return the sampled evaluation of a version, None for the last."""
    config = settings_file.load(run_dir / "config.toml")
    records = at_temperature(read_evaluations(run_dir), config.rollout.temperature)
    chosen = records[-1] if version is None else next(record for record in records if record.version == version)
    return chosen.evaluation


def clearly_above(after: Evaluation, before: Evaluation) -> bool:
    """Whether the 95 % intervals of pass@1 over problems do not overlap."""
    if after.accuracy is None or before.accuracy is None:
        return False
    return after.accuracy - after.accuracy_half_width > before.accuracy + before.accuracy_half_width


def interval(accuracy: float | None, half_width: float) -> str:
    """Format an accuracy with its interval, e.g. "0.210 (0.172 to 0.248)"; "" without one."""
    if accuracy is None:
        return ""
    return f"{accuracy:.3f} ({max(0.0, accuracy - half_width):.3f} to {min(1.0, accuracy + half_width):.3f})"


def table(columns: dict[str, Evaluation]) -> str:
    """Format a Markdown table: one column an evaluation."""
    found, rows = list(columns.values()), list[list[str]]()
    rows.append(["**pass@1** (95 % interval over problems)",
                 *(interval(e.accuracy, e.accuracy_half_width) for e in found)])  # fmt: skip
    count = found[-1].completions
    named = [(f"pass@{count}", "pass_at_k"), (f"maj@{count}", "majority"), ("format", "format"),
             ("language consistency", "consistency")]  # fmt: skip
    for title, name in named:
        values = [getattr(e, name) for e in found]
        # evaluations of older runs and of agents lack some; of two votes none is a majority
        if any(value is not None for value in values) and (name != "majority" or count > 2):
            rows.append([title, *("" if value is None else f"{value:.3f}" for value in values)])
    rows.append(["tokens of a completion", *(f"{e.tokens:.1f}" for e in found)])
    for name in found[-1].parts:
        parts = [e.parts[name] for e in found]
        kind, _, value = name.partition("/")
        label = f"pass@1, {'asked for ' * (kind == 'asked')}{value}"
        rows.append([label, *(interval(p.accuracy, p.accuracy_half_width) for p in parts)])
    return report.table(["", *columns], *rows)


def draw(run_dir: Path) -> bytes:
    """Draw a PNG of reinforcement learning: training accuracy, format, length; validation pass@1 with its interval."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from trainer.plot import BLUE, GREEN, ORANGE, STYLE

    rows = read_rows(run_dir / "metrics.jsonl")
    temperature = settings_file.load(run_dir / "config.toml").rollout.temperature
    records = [
        record
        for record in at_temperature(read_evaluations(run_dir), temperature)
        if record.evaluation.accuracy is not None
    ]
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
        for axis, names, title in (
            (axes[0], (("accuracy", BLUE, "training, sampled"), ("format", GREEN, "format")), "Accuracy"),
            (axes[1], (("length/mean", BLUE, "mean length, tokens"),), "Completion length"),
        ):
            for name, color, label in names:
                axis.plot(*series(rows, name), color=color, label=label, linewidth=1.3)
            axis.set_title(title)
            axis.set_xlabel("optimiser step")
        axes[0].errorbar(
            [record.version for record in records], [record.evaluation.accuracy for record in records],
            yerr=[record.evaluation.accuracy_half_width for record in records], color=ORANGE, marker="o", capsize=3,
            linestyle="--", label="validation pass@1",
        )  # fmt: skip
        axes[0].set_ylim(0, 1.03)
        for axis in axes:
            axis.legend(loc="best")
        found = io.BytesIO()
        figure.savefig(found, dpi=110)
        pyplot.close(figure)
    return found.getvalue()


def shown(title: str, problem: Problem, text: str, reward: Reward) -> list[str]:
    """Return Markdown: a problem and its completion, made harmless."""
    passed = "" if reward.share is None else f"{reward.share:.0%} of the tests passed, "
    known = f"true answer {problem.answer}, " if problem.answer else passed
    lines = [f"**{title}**, {known}{reward.verdict.value}, reward {reward.total:.2f}", "", "````text"]
    return [*lines, clean(problem.text), "", clean(text).replace("````", "'```"), "````", ""]


def one_of_each(evaluation: Evaluation, count: int = 5) -> list[str]:
    """Return Markdown: completions as they came, one of each kind of problem."""
    kinds = {sample.problem.source: sample for sample in reversed(evaluation.samples)}
    found = sorted(kinds.items())[:count]
    return [line for kind, one in found for line in shown(kind, one.problem, one.text, one.reward)]
