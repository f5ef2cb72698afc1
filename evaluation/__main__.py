"""Evaluate a served model: `python -m evaluation aime24 --url http://127.0.0.1:8000/v1`; `--help` says the rest."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from evaluation import report, tables
from evaluation.client import EvaluationClient, weights_of
from evaluation.grading import ResponseGrader
from evaluation.results import Json, summarise
from evaluation.runner import SampleRunner, jobs_of
from evaluation.samples import LAUNCHES, EvaluationFolder, identify, label
from evaluation.settings import EvaluationSettings, load
from evaluation.tasks import Benchmark, read_benchmarks
from shared.atomic_write import write_whole
from shared.errors import ConfigError, RunError, run_command
from shared.progress import CleanConsole, duration
from shared.progress_bar import ProgressBar
from shared.sandbox_settings import Sandbox
from verify.answer_checker import AnswerChecker, worker_count
from verify.code.runner import ProgramVerifier

RESULTS, SUMMARY, REPORT = "results.json", "summary.md", "report.html"
FLIPPED = 20
"""largest number of flipped problems that the terminal lists in each direction"""


async def choose_model(settings: EvaluationSettings, client: EvaluationClient) -> dict[str, Any]:
    """The model as the server describes it, {"id": ...} at least. Raises ConfigError."""
    listed = await client.models()
    if settings.model:
        return next((one for one in listed if one["id"] == settings.model), {"id": settings.model})
    if len(listed) != 1:
        names = ", ".join(one["id"] for one in listed[:20]) or f"none that {client.url}/models tells"
        raise ConfigError(f"model is missing: the server has {names}: choose one with --model")
    return listed[0]


def context_of(model: dict[str, Any]) -> int | None:
    """Tokens of the model's context, where the server tells them."""
    context = model.get("max_model_len")
    return context if isinstance(context, int) else None


def warn_of_context(model: dict[str, Any], benchmarks: list[Benchmark]) -> None:
    """Tell before hours of work that completions cannot become as long as they may."""
    context = context_of(model)
    longest = max(benchmark.sampling.max_tokens for benchmark in benchmarks)
    if context is not None and longest >= context:
        print(f"warning: max_tokens = {longest}, but the model's context is {context} tokens, prompt included: longer "
              "responses are cut, or refused", file=sys.stderr)  # fmt: skip


async def evaluate(settings: EvaluationSettings) -> tuple[Path, Json | None]:
    """Ask for what is missing, then sum up; returns folder and results (None after a signal). Raises MaestraleError."""
    benchmarks = read_benchmarks(settings)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    client, programs = EvaluationClient(settings), ProgramVerifier(Sandbox())
    async with AnswerChecker(workers=worker_count(0)) as checker:
        try:
            model = await choose_model(settings, client)
            if any(task.kind == "program" for benchmark in benchmarks for task in benchmark.tasks):
                print(await programs.start(), file=sys.stderr)
            weights = await weights_of(client, model["id"])
            identity = identify(settings, model["id"], weights, benchmarks)
            out = Path(settings.out or f"runs/evaluations/{re.sub(r'[^A-Za-z0-9_-]+', '_', label(identity))}")
            with EvaluationFolder(
                out, identity, [task for benchmark in benchmarks for task in benchmark.tasks]
            ) as folder:
                warn_of_context(model, benchmarks)
                runner = SampleRunner(settings, client, ResponseGrader(checker, programs), folder, context_of(model))
                if not await draw_missing(runner, benchmarks, stop):
                    return out, None
                if await weights_of(client, model["id"]) not in (weights, ""):
                    raise RunError(f"the server has changed its weights meanwhile: delete {out} and begin again")
                results = await summarise(identity, benchmarks, folder.rows, checker)
                await asyncio.to_thread(write, folder, benchmarks, results)
                return out, results
        finally:
            await programs.close()
            await client.close()


async def draw_missing(runner: SampleRunner, benchmarks: list[Benchmark], stop: asyncio.Event) -> bool:
    """Draw the samples that the runner's folder lacks; returns False if `stop` was set first."""
    folder = runner.folder
    jobs = jobs_of(benchmarks)
    missing = [job for job in jobs if folder.lacks(job.key)]
    there = len(jobs) - len(missing)
    if there:
        does = "going on" if missing else "no request is made (--out takes another folder, to ask once more)"
        print(f"{folder.folder} holds {there} of {len(jobs)} samples: {does}", file=sys.stderr)
    folder.note(LAUNCHES, {"began": datetime.now(UTC).isoformat(timespec="seconds"), "missing": len(missing),
                 "settings": runner.settings.model_dump(), "maestrale": version("maestrale")})  # fmt: skip
    if not missing:
        return True
    print(f"to be asked: {runner.forecast(missing)}; the time left is told with the first responses", file=sys.stderr)
    bar = ProgressBar("asking", "asked", there, len(jobs))
    try:
        return await runner.run(missing, stop, bar)
    finally:
        bar.close()
        took = duration(time.monotonic() - bar.started)
        print(", ".join(filter(None, (f"{bar.done - there:,} samples in {took}", bar.note))), file=sys.stderr)


def write(folder: EvaluationFolder, benchmarks: list[Benchmark], results: Json) -> None:
    """results.json, summary.md, report.html."""
    for name, text in (
        (RESULTS, json.dumps(results, indent=1, sort_keys=True) + "\n"),
        (SUMMARY, tables.markdown(results)),
        (REPORT, report.render(results, benchmarks, folder.rows)),
    ):
        write_whole(folder.folder / name, text)


def show(console: Console, results: Json) -> None:
    """The tables on the terminal."""
    shown = (tables.score_table(results), tables.instruction_table(results), *tables.language_tables(results))
    for table in filter(None, shown):
        console.print(table.rich())
    for line in tables.warning_lines(results):
        console.print(f"warning: {line}", style="yellow", markup=False, soft_wrap=True)


def compare(settings: EvaluationSettings, console: Console) -> int:
    """Compare the two folders of the settings; with --out, compare.json, compare.md and compare.html go there."""
    if len(paths := settings.benchmarks) != 2:
        given, missing = ", ".join(paths) or "none", " and ".join(("BEFORE", "AFTER")[len(paths) :]) or "nothing"
        raise ConfigError(f"--compare BEFORE AFTER takes two folders of evaluations: given {given}, missing {missing}")
    comparison = tables.compare(*(tables.read_run(Path(path)) for path in paths))
    names = (f"{path} = {label(comparison[when])}" for path, when in zip(paths, ("before", "after"), strict=True))
    table = tables.difference_table(f"{' -> '.join(names)} (*: the interval does not hold 0)", comparison)
    console.print(table.rich())
    for line in tables.comparison_lines(comparison, FLIPPED):
        console.print(line, markup=False, soft_wrap=True)
    for line in comparison["warnings"]:
        console.print(f"warning: not the same in both: {line}", style="yellow", markup=False, soft_wrap=True)
    if settings.out:
        (out := Path(settings.out)).mkdir(parents=True, exist_ok=True)
        write_whole(out / "compare.json", json.dumps(comparison, indent=1, sort_keys=True) + "\n")
        write_whole(out / "compare.md", tables.comparison_markdown(table, comparison))
        write_whole(out / "compare.html", report.render_comparison(table, comparison))
        console.print(f"{out}: compare.json, compare.md, compare.html", markup=False, soft_wrap=True)
    return 0


def run(settings: EvaluationSettings) -> int:
    """Everything after the settings; returns the exit code. Raises MaestraleError."""
    console = CleanConsole()
    console.width = max(console.width, tables.WIDTH)
    if settings.compare:
        return compare(settings, console)
    began = time.monotonic()
    folder, results = asyncio.run(evaluate(settings))
    if results is None:
        print(f"stopped; the same command goes on with what {folder} lacks", file=sys.stderr)
        return 130
    show(console, results)
    took = duration(time.monotonic() - began)
    console.print(f"{folder}: {RESULTS}, {SUMMARY}, {REPORT} (open it in a browser); {took}", soft_wrap=True)
    return int(any(found["errors"] for found in results["benchmarks"].values()))


def main(arguments: list[str]) -> int:
    """Parse and run; returns the exit code."""
    return run_command(lambda: run(load(arguments)))


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1:])))
