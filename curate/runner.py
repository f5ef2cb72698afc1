"""Runs a stage over files: reads all rows, decides about those that the journal lacks, writes the results.

    OUTPUT.journal          the job, then {"row": index, ...} for every row decided, in the order of their ends
    OUTPUT.jsonl            the rows kept
    OUTPUT.rejected.jsonl   the others, each with "rejected": {"stage", "reason", "detail"}
    OUTPUT.report.json      the job, and counts by reason; written last: if it exists, the other two are complete

Ctrl-C cancels the rows under way, and the same command goes on from the journal. A journal or report of another job is
refused. Nothing in the results depends on the machine, the order of work or the time.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.table import Column, Table

from curate.stage import CurationStage, Decision, as_setting
from shared.atomic_write import beside, write_whole
from shared.errors import ConfigError, DataError
from shared.journal import Journal, check_same
from shared.json_reader import parse_json
from shared.jsonl import Row
from shared.progress_bar import ProgressBar
from verify.published import problem_rows

Job = dict[str, Any]
"""{"stage", "settings", "inputs": [{"file", "digest"}]}: the same job has the same result on every machine"""
Report = dict[str, Any]
"""a job, and {"rows_in", "rows_kept", "rows_out", "rows_rejected", "rejected": {reason: rows}, "counts": {...}}"""


class Outcome(NamedTuple):
    """The result of running a stage."""

    report: Report
    decided: int
    """number of rows decided in this run; -1 if the results already existed"""


class OutputFiles:
    """The paths of the files that belong to one --out."""

    def __init__(self, out: Path):
        """Raises ConfigError unless it is NAME.jsonl in an existing folder."""
        if out.suffix != ".jsonl" or out.stem.endswith((".rejected", ".report")):
            raise ConfigError(f"--out = {out}: must be a name such as filtered.jsonl")
        if not out.parent.is_dir():
            raise ConfigError(f"--out = {out}: there is no folder {out.parent}: create it first")
        self.kept = out
        self.rejected = out.with_suffix(".rejected.jsonl")
        self.report = out.with_suffix(".report.json")
        self.journal = out.with_suffix(".journal")


def _encode(value: Mapping[str, Any]) -> bytes:
    """Encode one JSON line; characters are escaped only in rows with lone surrogates, which UTF-8 cannot hold."""
    try:
        return json.dumps(value, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(value).encode() + b"\n"


class DecidedRow(msgspec.Struct, omit_defaults=True):
    """A line of the journal: the decision about one row, as `Kept` or as `Rejected`."""

    row: int
    """index over all input files, from 0"""
    rows: list[dict[str, Any]] | None = None
    """None for a row that was rejected"""
    reason: str = ""
    detail: str = ""
    counts: dict[str, int] = {}


def run(
    stage: CurationStage, inputs: Sequence[Path], out: Path, *, restart: bool = False, quiet: bool = False,
    columns: Mapping[str, str] | None = None,
) -> Outcome:  # fmt: skip
    """Run a stage to its end. columns: of the inputs, see `verify.published.renamed`. Raises MaestraleError, or
    KeyboardInterrupt, after which the same call resumes."""
    files = OutputFiles(out)
    for path in inputs:
        if path.resolve() in (files.kept.resolve(), files.rejected.resolve()):
            raise ConfigError(f"--out = {out} would overwrite the input {path}: give another")
    rows = [row for path in inputs for row in problem_rows(path, columns=columns)]
    if not rows:
        raise DataError(f"{', '.join(map(str, inputs))}: no rows")
    job: Job = {"stage": stage.name, "settings": stage.settings, "inputs": as_setting(list(inputs))}
    if columns:
        job["settings"] = job["settings"] | {"columns": dict(columns)}
    report = None if restart else _earlier_report(files, job)
    if report is not None:
        return Outcome(report, -1)
    with Journal(
        files.journal, DecidedRow, lambda decided: decided.row, job, where=f"--out = {files.kept}", sync=False,
        repair="give the same again, another --out, or --restart to begin anew", restart=restart,
    ) as journal:  # fmt: skip
        if restart:
            for path in (files.report, files.kept, files.rejected):
                path.unlink(missing_ok=True)
        before = len(journal.rows)
        if before and not quiet:
            sys.stderr.write(f"{files.journal} holds {before} of {len(rows)} decisions: going on\n")
        asyncio.run(_decide_all(stage, rows, journal, quiet))
        decided = [journal.rows[index] for index in range(len(rows))]
        return Outcome(_write_results(files, job, rows, decided), len(rows) - before)


async def _decide_all(
    stage: CurationStage, rows: Sequence[Row], journal: Journal[int, DecidedRow], quiet: bool
) -> None:
    """Decide about the rows that the journal lacks, and add the decisions to it. Cancelled by Ctrl-C."""
    missing = (index for index in range(len(rows)) if journal.lacks(index))
    waiting: dict[asyncio.Task[Decision], int] = {}
    bar: ProgressBar | None = None

    async def show(done: int, total: int) -> None:
        nonlocal bar
        if bar is None and not quiet:
            bar = ProgressBar("preparing", "prepared", done, total)
        if bar is not None:
            bar.show(done)
        await asyncio.sleep(0)

    try:
        if len(journal.rows) == len(rows):
            return
        await stage.prepare(rows, show)
        if bar is not None:
            bar.close()
        bar = None if quiet else ProgressBar("deciding", "decided", len(journal.rows), len(rows))
        while True:
            while len(waiting) < max(1, stage.concurrency) and (index := next(missing, None)) is not None:
                waiting[asyncio.ensure_future(stage.decide(index, rows[index]))] = index
            if not waiting:
                return
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                journal.add(DecidedRow(waiting.pop(task), **msgspec.structs.asdict(task.result())))
            if bar is not None:
                bar.show(len(journal.rows))
    finally:
        if bar is not None:
            bar.close()
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await stage.close()


def _earlier_report(files: OutputFiles, job: Job) -> Report | None:
    """Return the report of this job if its results exist. Raises ConfigError if those of another do."""
    repair = "give another --out, or --restart to overwrite it"
    if not files.report.exists():
        if files.kept.exists() and not files.journal.exists():
            raise ConfigError(f"--out = {files.kept} exists and has no report of this command: {repair}")
        return None
    try:
        report = dict(parse_json(files.report.read_text(encoding="utf-8")))
        before = {name: report[name] for name in job}
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{files.report} is no report of this command: {repair}") from error
    check_same(before, job, f"--out = {files.kept}", repair)
    missing = next((path for path in (files.kept, files.rejected) if not path.exists()), None)
    if missing is not None:
        raise ConfigError(f"{files.report} is there, but {missing} is not: {repair}")
    return report


def _write_results(files: OutputFiles, job: Job, rows: Sequence[Row], decided: Sequence[DecidedRow]) -> Report:
    """Write the three files under other names, rename them, and return the report."""
    output = [fields for decision in decided for fields in decision.rows or ()]
    rejected = [(row.fields, why) for row, why in zip(rows, decided, strict=True) if why.rows is None]
    counts: Counter[str] = Counter()
    for decision in decided:
        counts.update(decision.counts)
    report = {
        **job,
        "rows_in": len(decided),
        "rows_kept": len(decided) - len(rejected),
        "rows_out": len(output),
        "rows_rejected": len(rejected),
        "rejected": _descending(Counter(why.reason for _, why in rejected)),
        "counts": _descending(counts),
    }
    with beside(files.kept) as partial, partial.open("wb") as stream:
        stream.writelines(map(_encode, output))
    with beside(files.rejected) as partial, partial.open("wb") as stream:
        for row, why in rejected:
            rejected_by = {"stage": job["stage"], "reason": why.reason, "detail": why.detail}
            stream.write(_encode({**row, "rejected": rejected_by}))
    write_whole(files.report, json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    files.journal.unlink(missing_ok=True)
    return report


def _descending(counts: Counter[str]) -> dict[str, int]:
    """Sort counts in descending order, equal ones by name."""
    return dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))


def table(report: Report) -> Table:
    """Return a table of counts and reasons for a terminal."""
    right = (Column(head, justify="right") for head in ("rows", "of input"))
    made, total = Table("", *right, title=f"stage {report['stage']}", title_justify="left"), report["rows_in"]
    shares = {"read": total, "kept": report["rows_kept"], "rejected": report["rows_rejected"]}
    for name, count in [*shares.items(), *((f"  {reason}", count) for reason, count in report["rejected"].items())]:
        made.add_row(name, f"{count:,}", f"{count / total:.1%}")
    made.add_section()
    written = {"rows written": report["rows_out"]} if report["rows_out"] != report["rows_kept"] else {}
    for name, count in [*written.items(), *report["counts"].items()]:
        made.add_row(name, f"{count:,}")
    return made
