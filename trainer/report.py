"""The report of a run: a plot, a table of before and after, three completions, the next command.

Reads a run folder only (metrics.jsonl, evaluations.jsonl, config.toml), so `python -m trainer.report runs/NAME` shows a
finished, stopped or running run again.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
from rich import box
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from shared import clean_text, settings_file
from shared.config import Config
from shared.errors import DataError, InputError, as_typed, command_of, run_command
from shared.json_reader import decode_json
from shared.metrics import read_rows, series
from shared.progress import Progress
from trainer import bottleneck
from trainer.checkpoint import reader
from trainer.evaluation import (
    GREEDY,
    Evaluation,
    EvaluationRecord,
    Sampled,
    at_temperature,
    read_evaluations,
    was_evaluated,
)
from trainer.memory import size
from trainer.plot import write_plot
from trainer.run_lock import LockHolder, failure

SAMPLES, SAMPLE_CHARACTERS = 3, 700
SPEED = (
    ("tokens trained, a second", "tokens/trained_per_s", "sft/tokens_per_s", "{:,.0f}"),
    ("  of each trainer", "tokens/trained_per_s_per_device", "sft/tokens_per_s_per_device", "{:,.0f}"),
    ("tokens sampled, a second", "tokens/generated_per_s", "", "{:,.0f}"),
    ("  of each engine's GPU (CPU: engine)", "tokens/generated_per_s_per_device", "", "{:,.0f}"),
    ("TFLOP/s of a trainer", "tflops_per_device", "sft/tflops_per_device", "{:,.3g}"),
    ("MFU, of the data sheet's dense bfloat16 peak", "mfu", "sft/mfu", "{:.1%}"),
    ("memory of controller", "memory/controller_peak_bytes", "", "bytes"),
    ("memory of trainer", "memory/trainer_peak_bytes", "sft/trainer_peak_bytes", "bytes"),
    ("memory of engine", "memory/engine_peak_bytes", "", "bytes"),
    ("GPU memory of trainer", "memory/trainer_peak_gpu_bytes", "sft/trainer_peak_gpu_bytes", "bytes"),
    ("GPU memory of engine", "memory/engine_peak_gpu_bytes", "", "bytes"),
)
"""(label, metric of a step, that of an SFT step, format) of the table of speed"""


def show(config: Config, progress: Progress, whole: bool = False) -> None:
    """Print the report of a run and write its plot. A plot that cannot be drawn is a warning. whole: as of
    `sample_panels`."""
    run_dir = config.run_dir
    records = read_evaluations(run_dir)
    if records:
        progress.show(before_after_table(records, config.rollout.temperature))
        for panel in sample_panels(records, config.rollout.temperature, whole):
            progress.show(panel)
    rows = read_rows(run_dir / "metrics.jsonl")
    if (speed := speed_table(rows)) is not None:
        progress.show(speed)
    for line in bottleneck.lines(rows, config):
        progress.note(line)
    try:
        progress.note(f"plot: {write_plot(run_dir)}")
    except (OSError, ValueError, ImportError, DataError) as error:
        progress.warning(f"no plot: {error}")
    for name in ("latest", "best"):
        if (exports := run_dir / name).exists():
            progress.note(f"{name} model: {exports} (Hugging Face folder: safetensors, tokenizer, config)")
        if (adapter := run_dir / f"{name}-adapter").exists():
            progress.note(f"{name} adapter: {adapter} (PEFT folder; merged into the {name} model)")
    failed = failure(run_dir)
    if failed:
        progress.error(failed)
    again = f"{command_of('trainer')} {run_dir / 'config.toml'}     (once the cause is repaired)"
    progress.note(f"next: {again if failed else next_command(config)}")
    if (run_dir / "latest").exists():
        progress.note(f"serve: {command_of('serve')} --model {run_dir / 'latest'}")
    if (adapter := run_dir / "latest-adapter").exists():
        base = config.locate(config.model.path)
        progress.note(f"serve the adapter: {command_of('serve')} --model {base} --adapter {config.name}={adapter}")


def finished(config: Config) -> str:
    """One line for a run of which nothing is left to do with these settings, "" for any other: its last launch ended
    well, and the last version is evaluated and exported."""
    run_dir, version = config.run_dir, config.last_version
    try:
        before = decode_json((run_dir / "lock").read_bytes(), LockHolder)
        same = settings_file.load(run_dir / "config.toml") == config.with_template()
    except (OSError, msgspec.DecodeError, InputError):
        return ""
    exported = (run_dir / "latest").resolve() == (run_dir / "hf" / f"step_{version}").resolve()
    checked = not config.data.validation or was_evaluated(config, version, config.rollout.temperature)
    if not (before.ended == "exit code 0" and same and exported and checked and (run_dir / "latest").is_dir()):
        return ""
    newest = reader.newest(run_dir).newest
    if newest is None or newest.manifest.version != version:
        return ""
    return f"{run_dir} is finished: nothing is left after step {version} of {version}. To go on: {next_command(config)}"


def next_command(config: Config) -> str:
    """The command that trains the same run for as many steps again."""
    setting = "sft.steps" if config.mode == "sft" else "steps"
    return f"{command_of('trainer')} {config.run_dir / 'config.toml'} --{setting}={2 * max(config.last_version, 1)}"


# ---- table and samples -----------------------------------------------------------------------------------------


def before_after_table(records: list[EvaluationRecord], temperature: float) -> Table:
    """Validation figures of the first and the last evaluated version, sampled and greedy."""
    first, last = records[0].version, records[-1].version
    problems = records[-1].evaluation.problems
    table = Table(
        title=f"{problems} validation problems, version {first} and version {last}",
        title_justify="left", box=box.SIMPLE_HEAD,
    )  # fmt: skip
    table.add_column("", no_wrap=True)
    sampled, greedy = at_temperature(records, temperature), at_temperature(records, GREEDY)
    sides = [(name, side) for name, side in ((f"T = {temperature:g}", sampled), ("greedy", greedy)) if side]
    for name, _ in sides:
        table.add_column(f"{name}\nbefore", justify="right", no_wrap=True)
        table.add_column("\nafter", justify="right", style="bold", no_wrap=True)
    for label, form, value in _table_rows(records):
        values = [value(side[end].evaluation) for _, side in sides for end in (0, -1)]
        table.add_row(label, *("" if found is None else form.format(found) for found in values))
    return table


def _table_rows(records: list[EvaluationRecord]) -> list[tuple[str, str, Callable[[Evaluation], float | None]]]:
    """(label, format, value of an evaluation), of what the evaluations have."""
    evaluations = [record.evaluation for record in records]
    rows: list[tuple[str, str, Callable[[Evaluation], float | None]]] = [
        ("accuracy", "{:.3f}", attrgetter("accuracy")),
        ("  95 % interval", "±{:.3f}", lambda each: None if each.accuracy is None else each.accuracy_half_width),
    ]
    count = evaluations[-1].completions
    figures = (
        (f"pass@{count}", "pass_at_k"), (f"maj@{count}", "majority"), ("language consistency", "consistency"),
        ("format", "format"), ("reward", "reward"),
    )  # fmt: skip
    for name, figure in figures:
        if any(getattr(evaluation, figure) is not None for evaluation in evaluations):
            rows.append((name, "{:.3f}", attrgetter(figure)))
    rows.append(("tokens of a completion", "{:.0f}", attrgetter("tokens")))
    for name in sorted({name for evaluation in evaluations for name in evaluation.parts}):
        rows.append((f"accuracy, {name.replace('/', ' ')}", "{:.3f}", partial(_accuracy_of, name)))
    return rows


def _accuracy_of(name: str, evaluation: Evaluation) -> float | None:
    breakdown = evaluation.parts.get(name)
    return None if breakdown is None else breakdown.accuracy


def speed_table(rows: list[dict[str, Any]]) -> Table | None:
    """Speed (median over the steps) and largest memory of a run, of its SFT where it did nothing else; None before the
    first step."""
    trained = any(row["kind"] == "train" for row in rows)
    table = Table(title="speed (median of the steps) and largest memory", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    for label, metric, sft_metric, form in SPEED:
        name, kind = (metric, "train") if trained else (sft_metric, "sft")
        if values := series(rows, name, kind)[1]:
            table.add_row(label, size(max(values)) if form == "bytes" else form.format(statistics.median(values)))
    return table if table.row_count else None


def clean(text: str, limit: int = SAMPLE_CHARACTERS) -> str:
    """A model's text, of which what is longer than `limit` characters is cut."""
    safe = clean_text.clean(text)
    return safe if len(safe) <= limit else safe[:limit] + f" … ({len(safe) - limit} more characters)"


def sample_panels(records: list[EvaluationRecord], temperature: float, whole: bool = False) -> list[Panel]:
    """Panels of SAMPLES completions of the last evaluation, of different languages where there are several. whole: of
    all that it keeps, with nothing left out."""
    count, limit = (sys.maxsize, sys.maxsize) if whole else (SAMPLES, SAMPLE_CHARACTERS)
    side = at_temperature(records, temperature) or records
    by_language: dict[str, list[Sampled]] = {}
    for sample in side[-1].evaluation.samples:
        by_language.setdefault(sample.problem.language, []).append(sample)
    firsts = [samples[0] for samples in by_language.values()]
    others = [sample for samples in by_language.values() for sample in samples[1:]]
    return [
        Panel(
            f"[bold]{escape(clean(sample.problem.text, limit))}[/]\n\n{_said(sample, limit)}",
            title=_title(sample),
            subtitle=f"{sample.reward.verdict.value}, reward {sample.reward.total:.2f}, {sample.tokens} tokens",
            title_align="left",
            subtitle_align="left",
        )
        for sample in [*firsts, *others][:count]
    ]


def _title(sample: Sampled) -> str:
    named, answer = sample.problem.environment, escape(clean(sample.problem.answer, 40))
    asked = sample.problem.reasoning_language
    parts = [sample.problem.language, f"asked for {asked}" if asked else ""]
    parts.append(f"environment {escape(clean(named, 40))}" if named else "")
    return "  ".join(filter(None, [*parts, f"ground truth {answer}" if answer or not named else ""]))


def _said(sample: Sampled, most: int) -> str:
    """The completion, at most so many characters; an episode as one paragraph for each turn and for each answer of the
    environment."""
    limit, lines = max(most // max(len(sample.turns), 1), most // 5), []
    for turn in sample.turns:
        given = f" (reward {turn.reward:g})" if turn.reward is not None else ""
        given += f" (failed: {escape(clean(turn.failure, 200))})" if turn.failure else ""
        lines.append(f"[dim]{turn.role}{given}:[/] {escape(clean(turn.text.strip(), limit))}")
    return "\n".join(lines) if sample.turns else escape(clean(sample.text, most))


def main(arguments: list[str]) -> int:
    """`python -m trainer.report runs/NAME`: show the report of a run folder; returns the exit code."""
    progress, whole = Progress(), "--samples" in arguments
    arguments = [argument for argument in arguments if argument != "--samples"]
    if len(arguments) != 1 or arguments[0].startswith("-"):
        asked = arguments in (["--help"], ["-h"])
        (sys.stdout if asked else sys.stderr).write(as_typed(
            "usage: python -m trainer.report RUN_FOLDER [--samples]\n\nWhat a run did, how fast it was, what to try. "
            "--samples: all completions that the last evaluation kept, in full\n"
        ))  # fmt: skip
        return 0 if asked else 2
    run_dir = Path(arguments[0])
    try:
        config = settings_file.load_run(run_dir)
    except InputError as error:
        progress.error(failure(run_dir) or str(error))  # it may have failed before its settings were written
        return error.exit_code
    here = run_dir.resolve()  # a folder that was moved is shown from where it is now
    show(config.model_copy(update={"name": here.name, "runs_dir": os.path.relpath(here.parent)}), progress, whole)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1:])))
