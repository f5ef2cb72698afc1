"""Run ablations and write their tables and plots: `python -m lab.ablate configs/ablations/NAME.toml ...`."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from lab.ablate.ablation import Ablation, read
from lab.ablate.runner import run_all
from lab.ablate.runs import chosen, plan
from shared.command_line import CommandParser
from shared.errors import ConfigError, InputError, command_of, print_error, run_command

EXAMPLES = """
examples:
  python -m lab.ablate configs/ablations/quick.toml                   every run, table and plot
  python -m lab.ablate configs/ablations/quick.toml --list            what would be run, and what is finished
  python -m lab.ablate configs/ablations/quick.toml --only base kl_return --seeds 0 1 2 3 4
  python -m lab.ablate configs/ablations/quick.toml --report          table and plot of what is finished

A file names the settings of all runs, the one line that each variant changes, and the claims that the runs decide
(docs/ablations.md). Runs go one after the other, seed by seed. Ctrl-C saves and stops; the same command goes on, and
repeats no finished run.

in RUNS_DIR/NAME/: table.md, plot.png, results.json; VARIANT-SEED/ is a run, VARIANT-SEED.log what it printed
exit codes: 0 done, 1 a run failed (the others were made), 2 a file or option is wrong, 130 stopped
"""


def parse(arguments: list[str]) -> argparse.Namespace:
    """Options of this command."""
    parser = CommandParser(
        prog="python -m lab.ablate",
        description="Train the same run with one setting changed, on several seeds: a table, a plot, claims decided.",
        epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE.toml", help="ablations")
    parser.add_argument("--seeds", type=int, nargs="+", metavar="N", help="instead of those of the files")
    parser.add_argument("--only", nargs="+", metavar="VARIANT", help="run these variants and no others")
    parser.add_argument("--steps", type=int, metavar="N", help="optimiser steps of every run, instead of the files'")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs/ablations"), metavar="DIR", help="%(default)s")
    parser.add_argument("--list", action="store_true", help="show the runs and their commands; start nothing")
    parser.add_argument("--report", action="store_true", help="write table and plot of finished runs; start nothing")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Check, run, report; returns the exit code."""
    options = parse(arguments)
    try:
        ablations = read_all(options.files)
        names = chosen(options.only, ablations)
        more = [] if options.steps is None else [f"--steps={options.steps}"]
        plans = {
            path: plan(ablation, path, options.runs_dir, list(dict.fromkeys(options.seeds or ablation.seeds)), more)
            for path, ablation in ablations.items()
        }
    except InputError as error:
        return print_error(error)
    runs = [run for planned in plans.values() for run in planned if run.serves & names]
    if options.list:
        for run in runs:
            state = "finished" if run.finished else run.progress if run.run_dir.exists() else "not begun"
            print(f"{run.title}: {state}\n    {command_of('trainer')} {shlex.join(run.arguments)}", flush=True)
        return 0
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts us with & has it ignored
    try:
        failures = {} if options.report else run_all(runs)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130
    from lab.ablate.report import write_report  # late: it loads torch, which needs memory that the runs can use

    command = shlex.join(["python", "-m", "lab.ablate", *(each for each in arguments if each != "--report")])
    for path, ablation in ablations.items():
        text, written = write_report(ablation, command, options.runs_dir / path.stem, plans[path], failures)
        print(f"{text}\n{', '.join(map(str, written))}")
    return 1 if failures else 0


def read_all(paths: Sequence[Path]) -> dict[Path, Ablation]:
    """The files in the order given. Raises ConfigError with the mistakes of all of them."""
    ablations: dict[Path, Ablation] = {}
    mistakes: list[str] = []
    for path in paths:
        if path.stem in {other.stem for other in ablations}:
            mistakes.append(f"{path}: another file has the name {path.stem} too, and their runs would share a folder")
        try:
            ablations[path] = read(path)
        except ConfigError as error:
            mistakes.append(str(error))
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return ablations


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1:])))
