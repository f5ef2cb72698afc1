"""Scale on paper: `python -m lab.plan MODEL --gpus N [options]`; `--help` has examples.

The options are fields of the scenario's records.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, replace
from fractions import Fraction
from typing import Any

from lab.plan import report, split
from lab.plan.scenario import CARDS, MODELS, Lengths, Machine, Scenario, Workload, find_decoder
from shared.command_line import CommandParser
from shared.errors import ConfigError, InputError, print_error, run_command
from shared.progress import CleanConsole

DESCRIPTION = """Scale on paper: compute what a run would need and take before you rent a GPU.

From a model's shape, the lengths of completions and a cluster it computes the memory of every rank, the time of a step
(sampling, training, weight update; synchronous and asynchronous), and the split of the GPUs between trainers and
engines with the shortest step, as settings to copy. A single GPU is shared by both. It loads and measures nothing:
docs/plan.md has the formulas, and how far they are from published step times.
"""
EXAMPLES = """
examples
  an 8B model on one node, completions of 2,000 tokens on average and 8,000 at the 99th percentile:
      python -m lab.plan 8b --gpus 8 --mean 2000 --p99 8000
  a folder's model on 4 nodes of H200, 64 prompts of 16 completions, up to 32k tokens:
      python -m lab.plan models/my-model --gpus 32 --card h200 --prompts 64 --mean 6000 --p99 30000 \\
          --max-completion 32768
  the cost of a reference model:
      python -m lab.plan 24b --gpus 64 --reference
  what a given split would do, as JSON:
      python -m lab.plan 70b --gpus 256 --engines 16 --tensor-parallel 8 --async-level 2 --json
  cards that have no name here:
      python -m lab.plan 32b --gpus 16 --memory 96 --tflops 500 --bandwidth 4000

exit codes: 0 done, 2 an option is wrong or nothing fits (one line says what)
"""
SHARES = ("mfu", "bandwidth_share", "usable", "kept")


def flag(name: str) -> str:
    """Return the option of a name: the_name -> --the-name."""
    return "--" + name.replace("_", "-")


def options_of(record: type[Any]) -> Iterator[tuple[str, Field[Any]]]:
    """Yield (name of the option, field) of the fields of a dataclass that are options."""
    for field in fields(record):
        if field.metadata:
            yield field.metadata["name"] or field.name, field


def add_options(parser: argparse.ArgumentParser, title: str, record: type[Any]) -> Any:
    """Add a group with the options of a dataclass, and return it."""
    group = parser.add_argument_group(title)
    for name, field in options_of(record):
        default = 0.0 if field.default in (MISSING, None) else float(field.default / field.metadata["unit"])
        shown = f" ({default:g})" if default else ""
        kind = float if field.type == "float" else int
        group.add_argument(flag(name), type=kind, metavar="N", help=field.metadata["meaning"] + shown)
    return group


def given_of(record: type[Any], given: argparse.Namespace) -> dict[str, Any]:
    """Return field -> value, in the field's own unit, of the options of a dataclass that were given."""
    return {
        field.name: value if field.metadata["unit"] == 1 else float(Fraction(value) * field.metadata["unit"])
        for name, field in options_of(record)
        if (value := getattr(given, name)) is not None
    }


def make_parser() -> argparse.ArgumentParser:
    """Return the parser with all options."""
    parser = CommandParser(
        prog="python -m lab.plan", description=DESCRIPTION, epilog=EXAMPLES, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("model", nargs="?", help=f"{', '.join(MODELS)}, or a folder with a config.json")
    cluster = add_options(parser, "cluster", Machine)
    cluster.add_argument("--card", default="h100", metavar="NAME", help=f"{', '.join(CARDS)} (%(default)s)")
    work = add_options(parser, "work of a step", Workload)
    work.add_argument("--mean", type=float, default=2000, metavar="N", help="mean completion, tokens (%(default)s)")
    work.add_argument("--p99", type=float, metavar="N", help="99th percentile, tokens (4 times the mean)")
    work.add_argument("--reference", action="store_true", help="a reference model scores the batch too")
    fixed = add_options(parser, "instead of the best", Scenario)
    fixed.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


def read(arguments: list[str]) -> tuple[Scenario, bool]:
    """Parse and check options; returns the scenario, and whether to print JSON.

    Raises ConfigError, ModelError, DataError, each one line; SystemExit after --help.
    """
    given = make_parser().parse_args(arguments)
    for name, value in vars(given).items():
        if isinstance(value, (int, float)) and not isinstance(value, bool) and not (0 < value < math.inf):
            raise ConfigError(f"{flag(name)} {value:g} must be above 0")
    for name in SHARES:
        if (getattr(given, name) or 0) > 1:
            raise ConfigError(f"{flag(name)} {getattr(given, name):g} is a share: at most 1")
    if given.engines and not given.tensor_parallel:
        raise ConfigError("--engines needs --tensor-parallel, the GPUs of each")
    card = CARDS.get(given.card.lower())
    if card is None:
        raise ConfigError(f"--card {given.card} is none of {', '.join(CARDS)}; give --memory, --tflops, --bandwidth")
    machine = replace(card, card=given.card.lower(), **given_of(Machine, given))
    if given.model is None:
        raise ConfigError(f"no model: name one ({', '.join(MODELS)}), or a folder with a config.json")
    decoder = find_decoder(given.model)
    if decoder.heads % (sharers := (given.tensor or 1) * (given.context or 1)):
        raise ConfigError(f"--tensor x --context = {sharers} must divide the {decoder.heads} heads")
    width = given.tensor_parallel or 0
    if width > (most := min(machine.node_gpus, machine.gpus)) or (width and decoder.heads % width):
        raise ConfigError(
            f"--tensor-parallel {width} must divide the {decoder.heads} heads and be at most {most}, the GPUs of a node"
        )
    return Scenario(decoder, machine, work_of(given), **given_of(Scenario, given)), given.json


def work_of(given: argparse.Namespace) -> Workload:
    """Return the workload. Raises ConfigError for lengths that no lognormal has."""
    p99 = given.p99 or 4 * given.mean
    limit = given.max_completion or math.ceil(p99)
    chosen = {**given_of(Workload, given), "max_completion_tokens": limit}
    return Workload(Lengths(given.mean, p99, limit), extra_forwards=int(given.reference), **chosen)


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 done, 2 bad input."""
    try:
        scenario, as_json = read(arguments)
        best = split.best(scenario)
    except InputError as error:
        return print_error(error)
    if as_json:
        print(json.dumps(report.as_json(scenario, best), indent=2))
    else:
        CleanConsole(highlight=False).print(report.show(scenario, best))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1:])))
