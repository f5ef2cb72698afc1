"""Curate problems with `python -m curate STAGE INPUT... --out OUTPUT.jsonl`; `--help` lists stages."""

from __future__ import annotations

import argparse
import inspect
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

from curate import runner
from curate.demonstrations import DemonstrationsStage
from curate.difficulty import DifficultyStage, LabelsStage
from curate.duplicates import DuplicatesStage
from curate.format import FormatStage
from curate.languages import HumanStage, RequestStage, TranslateStage
from curate.programs import ProgramsStage
from curate.sample import SampleStage
from curate.stage import CurationStage
from shared.command_line import CommandParser
from shared.errors import run_command
from shared.progress import CleanConsole, duration
from trainer.data.data_sets import HUB, fetch_to
from verify.published import columns_of

_ALL: tuple[type[CurationStage], ...] = (
    FormatStage, DuplicatesStage, ProgramsStage, TranslateStage, HumanStage, RequestStage, SampleStage,
    DifficultyStage, LabelsStage, DemonstrationsStage,
)  # fmt: skip
"""a new stage is one name here"""
HUB_S = 600.0
"""longest wait for the next row of a data set of the Hub"""
COMMANDS = {stage.name: stage for stage in _ALL}

EXAMPLES = """
files: rows are JSON objects, one a line (.jsonl; also .json, .csv, .tsv, each with .gz, and .parquet): "problem",
"answer" or "tests", "id"?, "language"?, "domain"? ("math", "code", "open"). Published sets may keep their own columns
(docs/data.md). Every stage writes
  OUTPUT.jsonl            the rows kept, changed where the stage changes them
  OUTPUT.rejected.jsonl   the others, each with "rejected": {"stage", "reason", "detail"}
  OUTPUT.report.json      counts by reason, and the settings
Ctrl-C stops; the same command goes on where it was (OUTPUT.journal holds what is decided).

examples:
  python -m curate format raw.jsonl.gz --out formatted.jsonl
  python -m curate duplicates formatted.jsonl --against test.jsonl --out single.jsonl
  python -m curate format --help

exit codes: 0 done, 1 failed, 2 the input or an option is wrong (one line says which, and the repair), 130 stopped
"""


def parse(arguments: list[str]) -> argparse.Namespace:
    """Options of the command."""
    whole = CommandParser(
        prog="python -m curate", description="Filter, rewrite and translate training problems, one stage at a time.",
        epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    common = CommandParser(add_help=False)
    common.add_argument(
        "inputs", type=Path, nargs="+", metavar="INPUT", help="files of problems, or hub:OWNER/NAME/CONFIG:SPLIT"
    )
    common.add_argument("--out", type=Path, required=True, metavar="OUTPUT.jsonl", help="where kept rows go")
    common.add_argument("--restart", action="store_true", help="begin anew: forget the journal, overwrite OUTPUT")
    common.add_argument(
        "--columns", default="", metavar="FIELD=COLUMN,...", help="columns of the input that hold fields of a row"
    )
    stages = whole.add_subparsers(dest="stage", metavar="STAGE", required=True, title="stages")
    for name, command in COMMANDS.items():
        summary, _, rest = inspect.cleandoc(command.__doc__ or "").partition("\n")
        command.add_options(
            stages.add_parser(
                name, help=summary, description=summary, epilog=rest.strip(), parents=[common],
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
        )  # fmt: skip
    return whole.parse_args(arguments)


def fetched(given: Path, out: Path) -> Path:
    """The file of an input; a data set of the Hub is written next to --out, once. Raises as `data_sets.fetch_to`."""
    if not str(given).startswith(HUB):
        return given
    return fetch_to(out.with_suffix(f".{zlib.crc32(str(given).encode()):08x}.jsonl"), "INPUT", str(given), HUB_S)


def run_stage(stage: CurationStage, inputs: Sequence[Path], out: Path, restart: bool, columns: str = "") -> None:
    """Run a stage and show what it came to. Raises MaestraleError, or KeyboardInterrupt."""
    started = time.monotonic()
    files, named = runner.OutputFiles(out), columns_of(columns)
    paths = stage.find([fetched(path, out) for path in inputs])
    report, decided = runner.run(stage, paths, out, restart=restart, columns=named)
    console = CleanConsole()
    console.print(runner.table(report))
    took = duration(time.monotonic() - started)
    when = "all of it was there before" if decided < 0 else f"{decided} decided now, in {took}"
    console.print(
        f"{report['rows_out']} rows in {files.kept}, {report['rows_rejected']} in {files.rejected}; {when}",
        soft_wrap=True, highlight=False,
    )  # fmt: skip


def main(arguments: list[str]) -> int:
    """Parse and run; returns the exit code."""
    options = parse(arguments)

    def run() -> int:
        stage = COMMANDS[options.stage].of(vars(options))
        run_stage(stage, options.inputs, options.out, options.restart, options.columns)
        return 0

    return run_command(run, f"stopped; the same command goes on with what {options.out} lacks")


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1:])))
