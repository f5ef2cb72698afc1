"""Writes the results of a finished stage: kept rows, rejected rows with reasons, a report; and renders its table.

Files are written under another name and renamed, the report last: if it exists, the other two are complete. Nothing in
them depends on the machine, the order of work or the time.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from curate.journal import Question, difference, encode
from curate.stage import Decision, Fields, Kept, Rejected
from shared.atomic_write import beside
from shared.errors import ConfigError
from shared.jsonl import Row

Report = dict[str, Any]
"""{"stage", "settings", "inputs", "rows_in", "rows_kept", "rows_out", "rows_rejected", "rejected": {reason: rows},
"counts": {...}}"""


class Files:
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

    def remove_results(self) -> None:
        """Delete all files but the journal (--restart)."""
        for path in (self.report, self.kept, self.rejected):
            path.unlink(missing_ok=True)


def finished(files: Files, question: Question) -> Report | None:
    """Return the report of this question if its results exist. Raises ConfigError if those of another do."""
    repair = "give another --out, or --restart to overwrite it"
    if not files.report.exists():
        if files.kept.exists() and not files.journal.exists():
            raise ConfigError(f"--out = {files.kept} exists and has no report of this command: {repair}")
        return None
    try:
        report = json.loads(files.report.read_text(encoding="utf-8"))
        other = difference(question, report)
    except (ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"{files.report} is no report of this command: {repair}") from error
    if other:
        raise ConfigError(f"--out = {files.kept} was made with {other}: {repair}")
    missing = next((path for path in (files.kept, files.rejected) if not path.exists()), None)
    if missing is not None:
        raise ConfigError(f"{files.report} is there, but {missing} is not: {repair}")
    return dict(report)


def write(files: Files, question: Question, rows: Sequence[Row], decisions: dict[int, Decision]) -> Report:
    """Write the three files and return the report. `decisions`: of every row, by its index."""
    stage = question["stage"]
    _write_rows(files.kept, _kept(decisions, len(rows)))
    _write_rows(files.rejected, _rejected(stage, rows, decisions))
    report = _summarise(question, decisions)
    with beside(files.report) as partial:
        partial.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    files.journal.unlink(missing_ok=True)
    return report


def _write_rows(path: Path, rows: Iterator[Fields]) -> None:
    with beside(path) as partial, partial.open("wb") as stream:
        stream.writelines(map(encode, rows))


def _kept(decisions: dict[int, Decision], count: int) -> Iterator[Fields]:
    for index in range(count):
        decision = decisions[index]
        if isinstance(decision, Kept):
            yield from decision.rows


def _rejected(stage: str, rows: Sequence[Row], decisions: dict[int, Decision]) -> Iterator[Fields]:
    for index, row in enumerate(rows):
        decision = decisions[index]
        if isinstance(decision, Rejected):
            why = {"stage": stage, "reason": decision.reason, "detail": decision.detail}
            yield {**row.fields, "rejected": why}


def _summarise(question: Question, decisions: dict[int, Decision]) -> Report:
    kept = [decision for decision in decisions.values() if isinstance(decision, Kept)]
    reasons = Counter(decision.reason for decision in decisions.values() if isinstance(decision, Rejected))
    counts: Counter[str] = Counter()
    for decision in decisions.values():
        counts.update(decision.counts)
    return {
        **question,
        "rows_in": len(decisions),
        "rows_kept": len(kept),
        "rows_out": sum(len(decision.rows) for decision in kept),
        "rows_rejected": reasons.total(),
        "rejected": _ordered(reasons),
        "counts": _ordered(counts),
    }


def _ordered(counts: Counter[str]) -> dict[str, int]:
    """Sort counts in descending order, equal ones by name."""
    return dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))


def table(report: Report) -> Table:
    """Return a table of counts and reasons for a terminal."""
    made = Table(title=f"stage {report['stage']}", title_justify="left")
    made.add_column("")
    for head in ("rows", "of input"):
        made.add_column(head, justify="right")
    total = max(1, report["rows_in"])

    def line(name: str, count: int, share: bool = True) -> None:
        made.add_row(name, f"{count:,}", f"{count / total:.1%}" if share else "")

    line("read", report["rows_in"])
    line("kept", report["rows_kept"])
    line("rejected", report["rows_rejected"])
    for reason, count in report["rejected"].items():
        line(f"  {reason}", count)
    made.add_section()
    if report["rows_out"] != report["rows_kept"]:
        line("rows written", report["rows_out"], share=False)
    for name, count in report["counts"].items():
        line(name, count, share=False)
    return made
