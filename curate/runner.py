"""Runs a stage over files: reads all rows, judges those that the journal lacks, writes results.

Ctrl-C cancels the rows under way; decisions made so far are in the journal, and the same command resumes from it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from curate.journal import Journal, Question, digest
from curate.results import Files, Report, finished, write
from curate.stage import Decision, Stage
from shared.bar import Bar
from shared.errors import ConfigError, DataError
from shared.jsonl import Row, read_rows

PREPARING, JUDGING = ("preparing", "prepared"), ("judging", "judged")


class Outcome:
    """The result of running a stage: its report, and the number of rows judged."""

    def __init__(self, report: Report, fresh: int):
        self.report, self.fresh = report, fresh
        """`fresh`: number of rows judged in this run; -1 if the results already existed"""


def read_inputs(paths: Sequence[Path]) -> tuple[list[Row], list[dict[str, str]]]:
    """Return all rows of the files in order, and the files' names and digests. Raises DataError, ConfigError."""
    rows = [row for path in paths for row in read_rows(path)]
    digests = [{"file": path.name, "digest": digest(path)} for path in paths]
    if not rows:
        raise DataError(f"{', '.join(map(str, paths))}: no rows")
    return rows, digests


def run(stage: Stage, inputs: Sequence[Path], out: Path, *, restart: bool = False, quiet: bool = False) -> Outcome:
    """Run a stage to its end. Raises MaestraleError, or KeyboardInterrupt, after which the same call resumes."""
    files = Files(out)
    for path in inputs:
        if path.resolve() in (files.kept.resolve(), files.rejected.resolve()):
            raise ConfigError(f"--out = {out} would overwrite the input {path}: give another")
    rows, digests = read_inputs(inputs)
    question: Question = {"stage": stage.name, "settings": stage.settings, "inputs": digests}
    report = None if restart else finished(files, question)
    if report is not None:
        return Outcome(report, -1)
    journal = Journal(files.journal, question, out, restart)
    try:
        if restart:
            files.remove_results()
        before = len(journal.found)
        if before and not quiet:
            sys.stderr.write(f"{files.journal} holds {before} of {len(rows)} decisions: going on\n")
        asyncio.run(_decide(stage, rows, journal, quiet))
        return Outcome(write(files, question, rows, journal.found), len(rows) - before)
    finally:
        journal.close()


async def _decide(stage: Stage, rows: Sequence[Row], journal: Journal, quiet: bool) -> None:
    """Judge the rows that the journal lacks, and add their decisions to it. Cancelled by Ctrl-C."""
    missing = (index for index in range(len(rows)) if index not in journal.found)
    bars = _Bars(quiet)
    waiting: dict[asyncio.Task[Decision], int] = {}
    try:
        if len(journal.found) == len(rows):
            return
        await stage.prepare(rows, bars.prepare)
        bars.judge(len(journal.found), len(rows))
        while True:
            while len(waiting) < max(1, stage.under_way) and (index := next(missing, None)) is not None:
                waiting[asyncio.ensure_future(stage.judge(index, rows[index]))] = index
            if not waiting:
                return
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                journal.add(waiting.pop(task), task.result())
            journal.flush()
            bars.judge(len(journal.found), len(rows))
    finally:
        bars.close()
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await stage.close()


class _Bars:
    """Shows one progress bar while a stage prepares, another while it judges."""

    def __init__(self, quiet: bool):
        self.quiet, self.words = quiet, ("", "")
        self.bar: Bar | None = None

    def _show(self, words: tuple[str, str], done: int, total: int) -> None:
        if self.quiet:
            return
        if self.words != words or self.bar is None:
            self.close()
            self.bar, self.words = Bar(*words, done, total), words
        self.bar.show(done)

    async def prepare(self, done: int, total: int) -> None:
        """Show the progress of the preparation."""
        self._show(PREPARING, done, total)
        await asyncio.sleep(0)

    def judge(self, done: int, total: int) -> None:
        """Show the number of rows that are decided."""
        self._show(JUDGING, done, total)

    def close(self) -> None:
        """Remove the bar."""
        if self.bar is not None:
            self.bar.close()
        self.bar = None
