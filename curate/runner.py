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
from rich.table import Table

from curate.stage import CurationStage, Decision, Kept, Rejected, as_setting
from shared.atomic_write import beside, open_log, write_whole
from shared.errors import ConfigError, DataError
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


def _difference(job: Job, other: Mapping[str, Any]) -> str:
    """Describe the first difference of another job from this one, "" if they are the same."""
    if job["stage"] != other.get("stage"):
        return f"stage {other.get('stage')!r}, now {job['stage']!r}"
    if job["inputs"] != other.get("inputs"):
        return "other input files"
    before, now = other.get("settings"), job["settings"]
    if not isinstance(before, dict):
        return "unreadable settings"
    for name in sorted(now.keys() | before.keys()):
        if now.get(name) != before.get(name):
            return f"{name} = {json.dumps(before.get(name))}, now {json.dumps(now.get(name))}"
    return ""


class DecisionJournal:
    """Appends decisions to a file and holds those of earlier launches. Locked: a second process is refused."""

    def __init__(self, path: Path, job: Job, out: Path, restart: bool = False):
        """Open or create the file; restart: discard its contents. A last line that a kill has cut is removed.

        Raises ConfigError if another process has it, or if it holds another job.
        """
        self.decisions: dict[int, Decision] = {}
        self._stream, lines = open_log(path, f"--out = {out}", restart)
        try:
            if lines:
                self._read(path, job, lines)
            else:
                self._stream.write(_encode(job))
                self.flush()
        except BaseException:
            self.close()
            raise

    def _read(self, path: Path, job: Job, lines: list[bytes]) -> None:
        repair = "give the same again, another --out, or --restart to begin anew"
        try:
            if other := _difference(job, parse_json(lines[0])):
                raise ConfigError(f"{path} was begun with {other}: {repair}")
            for line in lines[1:]:
                entry = parse_json(line)
                index = entry.pop("row")
                self.decisions[index] = Kept(**entry) if "rows" in entry else Rejected(**entry)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} is no journal of this command: {repair}") from error

    def add(self, index: int, decision: Decision) -> None:
        """Add one row's decision; `flush` writes it to the file."""
        self.decisions[index] = decision
        self._stream.write(_encode({"row": index, **msgspec.structs.asdict(decision)}))

    def flush(self) -> None:
        """Write what was added to the file (without fsync)."""
        self._stream.flush()

    def close(self) -> None:
        """Write what is left and release the lock."""
        self._stream.close()


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
    journal = DecisionJournal(files.journal, job, out, restart)
    try:
        if restart:
            for path in (files.report, files.kept, files.rejected):
                path.unlink(missing_ok=True)
        before = len(journal.decisions)
        if before and not quiet:
            sys.stderr.write(f"{files.journal} holds {before} of {len(rows)} decisions: going on\n")
        asyncio.run(_decide_all(stage, rows, journal, quiet))
        return Outcome(_write_results(files, job, rows, journal.decisions), len(rows) - before)
    finally:
        journal.close()


async def _decide_all(stage: CurationStage, rows: Sequence[Row], journal: DecisionJournal, quiet: bool) -> None:
    """Decide about the rows that the journal lacks, and add the decisions to it. Cancelled by Ctrl-C."""
    missing = (index for index in range(len(rows)) if index not in journal.decisions)
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
        if len(journal.decisions) == len(rows):
            return
        await stage.prepare(rows, show)
        if bar is not None:
            bar.close()
        bar = None if quiet else ProgressBar("deciding", "decided", len(journal.decisions), len(rows))
        while True:
            while len(waiting) < max(1, stage.concurrency) and (index := next(missing, None)) is not None:
                waiting[asyncio.ensure_future(stage.decide(index, rows[index]))] = index
            if not waiting:
                return
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                journal.add(waiting.pop(task), task.result())
            journal.flush()
            if bar is not None:
                bar.show(len(journal.decisions))
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
        report = parse_json(files.report.read_text(encoding="utf-8"))
        other = _difference(job, report)
    except (ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"{files.report} is no report of this command: {repair}") from error
    if other:
        raise ConfigError(f"--out = {files.kept} was made with {other}: {repair}")
    missing = next((path for path in (files.kept, files.rejected) if not path.exists()), None)
    if missing is not None:
        raise ConfigError(f"{files.report} is there, but {missing} is not: {repair}")
    return dict(report)


def _write_results(files: OutputFiles, job: Job, rows: Sequence[Row], decisions: dict[int, Decision]) -> Report:
    """Write the three files under other names, rename them, and return the report."""
    kept = [decision for _, decision in sorted(decisions.items()) if isinstance(decision, Kept)]
    rejected = [(rows[index].fields, one) for index, one in sorted(decisions.items()) if isinstance(one, Rejected)]
    reasons = Counter(why.reason for _, why in rejected)
    counts: Counter[str] = Counter()
    for decision in decisions.values():
        counts.update(decision.counts)
    report = {
        **job,
        "rows_in": len(decisions),
        "rows_kept": len(kept),
        "rows_out": sum(len(decision.rows) for decision in kept),
        "rows_rejected": len(rejected),
        "rejected": _descending(reasons),
        "counts": _descending(counts),
    }
    with beside(files.kept) as partial, partial.open("wb") as stream:
        stream.writelines(_encode(row) for decision in kept for row in decision.rows)
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
    made = Table(title=f"stage {report['stage']}", title_justify="left")
    made.add_column("")
    for head in ("rows", "of input"):
        made.add_column(head, justify="right")
    for name in ("read", "kept", "rejected"):
        _add(made, name, report["rows_in" if name == "read" else f"rows_{name}"], report["rows_in"])
    for reason, count in report["rejected"].items():
        _add(made, f"  {reason}", count, report["rows_in"])
    made.add_section()
    if report["rows_out"] != report["rows_kept"]:
        _add(made, "rows written", report["rows_out"])
    for name, count in report["counts"].items():
        _add(made, name, count)
    return made


def _add(made: Table, name: str, count: int, total: int = 0) -> None:
    """Add a row; its share of the input is shown where `total` is given."""
    made.add_row(name, f"{count:,}", f"{count / total:.1%}" if total else "")
