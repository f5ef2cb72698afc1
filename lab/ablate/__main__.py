"""Run ablations and write their tables and plots: `python -m lab.ablate configs/ablations/NAME.toml ...`."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from lab.ablate import times
from lab.ablate.ablation import Ablation, read
from lab.ablate.launch import Launch, chosen, plan
from lab.ablate.runner import Failure, run_all
from shared.atomic_write import beside
from shared.errors import ConfigError, InputError

EXAMPLES = """
examples:
  python -m lab.ablate configs/ablations/quick.toml                   every run, table and plot
  python -m lab.ablate configs/ablations/quick.toml --list            what would be run, and what is finished
  python -m lab.ablate configs/ablations/quick.toml --only base kl_return --seeds 0 1 2 3 4
  python -m lab.ablate configs/ablations/quick.toml --report          table and plot of what is finished

A file names the settings of all runs, the one line that each variant changes, and the claims that the runs are to
decide (docs/ablations.md). Runs go one after the other, seed by seed. Ctrl-C saves and stops; the same command goes on,
and repeats no finished run.

in RUNS_DIR/NAME/: table.md, plot.png, results.json; VARIANT-SEED/ is a run, VARIANT-SEED.log what it printed
exit codes: 0 done, 1 a run failed (the others were made), 2 a file or option is wrong, 130 stopped
"""


def parse(arguments: list[str]) -> argparse.Namespace:
    """Options of this command."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.ablate",
        description="Train the same run with one setting changed, on several seeds: a table, a plot, claims decided.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
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
        print("\n".join(f"error: {line}" for line in str(error).splitlines()), file=sys.stderr)
        return error.exit_code
    launches = [launch for launches in plans.values() for launch in launches if names is None or launch.serves & names]
    if options.list:
        with contextlib.suppress(BrokenPipeError):  # of "| head"
            print("\n".join(line for launch in launches for line in listed(launch)), flush=True)
        return 0
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts us with & has it ignored
    try:
        failures = [] if options.report else run_all(launches)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130
    for path, ablation in ablations.items():
        command = shlex.join(argument for argument in arguments if argument != "--report")
        report(ablation, command, options.runs_dir / path.stem, plans[path], failures)
    return 1 if failures else 0


def read_all(paths: Sequence[Path]) -> dict[Path, Ablation]:
    """The files in the order given. Raises ConfigError with the mistakes of all of them."""
    found: dict[Path, Ablation] = {}
    mistakes: list[str] = []
    for path in paths:
        if path.stem in {other.stem for other in found}:
            mistakes.append(f"{path}: another file has the name {path.stem} too, and their runs would share a folder")
        try:
            found[path] = read(path)
        except ConfigError as error:
            mistakes.append(str(error))
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return found


def listed(launch: Launch) -> list[str]:
    """A run, how far it is, and its command."""
    state = "finished" if launch.finished else launch.progress if launch.run_dir.exists() else "not begun"
    return [f"{launch.title}: {state}", f"    python -m trainer {shlex.join(launch.arguments)}"]


def report(
    ablation: Ablation, command: str, folder: Path, launches: Sequence[Launch], failures: Sequence[Failure]
) -> None:
    """Write and show table, data and plot of one file."""
    # late: they load torch, which needs memory that the runs can use
    from lab.ablate.figures import Runs
    from lab.ablate.plot import write_plot
    from lab.ablate.table import as_data, markdown
    from lab.ablate.verdict import decide_all

    runs = Runs(launches)
    titles = {launch.title for launch in launches}
    ours = [failure for failure in failures if failure.title in titles]
    decisions = decide_all(ablation, runs)
    seconds = times.wall_s(folder)
    folder.mkdir(parents=True, exist_ok=True)
    text = markdown(ablation, f"python -m lab.ablate {command}", runs, decisions, ours, seconds)
    if not write_plot(ablation, runs, folder / "plot.png"):
        (folder / "plot.png").unlink(missing_ok=True)
        text = text.replace("![curves](plot.png)\n", "No run is finished: there are no curves.\n")
    with beside(folder / "table.md") as partial:
        partial.write_text(text, encoding="utf-8")
    data = as_data(ablation, runs, decisions, ours, seconds)
    with beside(folder / "results.json") as partial:
        partial.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(text)
    written = [folder / name for name in ("table.md", "plot.png", "results.json")]
    print(", ".join(str(path) for path in written if path.exists()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
