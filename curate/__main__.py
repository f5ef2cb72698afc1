"""Curate problems with `python -m curate STAGE INPUT... --out OUTPUT.jsonl`; `--help` lists stages."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from rich.console import Console

from curate import (
    difficulty,
    duplicates,
    form,
    grading,
    harvest,
    human,
    labels,
    programs,
    runner,
    sample,
    translate,
)
from curate.results import Files, table
from curate.stage import Command
from shared.errors import MaestraleError
from shared.progress import duration

STAGES: dict[str, Command] = {
    "format": form.COMMAND,
    "duplicates": duplicates.COMMAND,
    "programs": programs.COMMAND,
    "translate": translate.COMMAND,
    "human": human.COMMAND,
    "sample": sample.COMMAND,
    "difficulty": difficulty.COMMAND,
    "labels": labels.COMMAND,
    "harvest": harvest.COMMAND,
}
"""name on the command line -> stage; a new stage is one line here"""
SEVERAL = {grading.NAME: grading.COMMAND}
"""name -> command that runs several stages"""

EXAMPLES = """
files: rows are JSON objects, one a line (.jsonl or .jsonl.gz): "problem", "answer" or "tests", "id"?, "language"?,
"domain"? ("math", "code", "open"). Every stage writes
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
    whole = argparse.ArgumentParser(
        prog="python -m curate",
        description="Filter, rewrite and translate training problems, one stage at a time.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    stages = whole.add_subparsers(dest="stage", metavar="STAGE", required=True, title="stages")
    for name, command in (STAGES | SEVERAL).items():
        parser = stages.add_parser(
            name,
            help=command.summary,
            description=command.summary,
            epilog=command.explanation,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("inputs", type=Path, nargs="+", metavar="INPUT", help="problems, .jsonl or .jsonl.gz")
        parser.add_argument("--out", type=Path, required=True, metavar="OUTPUT.jsonl", help="where kept rows go")
        parser.add_argument("--restart", action="store_true", help="begin anew: forget the journal, overwrite OUTPUT")
        command.add_options(parser)
    return whole.parse_args(arguments)


def carry_out(options: argparse.Namespace) -> int:
    """Run the chosen stage and show what it came to. Raises MaestraleError, or KeyboardInterrupt."""
    if options.stage in SEVERAL:
        return SEVERAL[options.stage].carry_out(options)
    started = time.monotonic()
    command = STAGES[options.stage]
    inputs = command.find(options.inputs)
    outcome = runner.run(command.make(options), inputs, options.out, restart=options.restart)
    report, files = outcome.report, Files(options.out)
    console = Console()
    console.print(table(report))
    took = duration(time.monotonic() - started)
    when = "all of it was there before" if outcome.fresh < 0 else f"{outcome.fresh} judged now, in {took}"
    console.print(
        f"{report['rows_out']} rows in {files.kept}, {report['rows_rejected']} in {files.rejected}; {when}",
        soft_wrap=True, highlight=False,
    )  # fmt: skip
    return 0


def main(arguments: list[str]) -> int:
    """Parse and run; returns the exit code."""
    options = parse(arguments)
    try:
        return carry_out(options)
    except KeyboardInterrupt:
        sys.stderr.write(f"stopped; the same command goes on with what {options.out} lacks\n")
        return 130
    except BrokenPipeError:
        return 1
    except (MaestraleError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code if isinstance(error, MaestraleError) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
