"""The command `two-stage`: Magistral's difficulty filter, with a grader that is trained for it.

    1 sample      every problem with the initial model
    2 difficulty  problems that it never solves, or solves too often, are left out for now
    3 train       python -m trainer GRADER.toml on the rest, which gives the grader
    4 sample      the whole original set with the grader
    5 labels      problems whose label most of its samples contradict are dropped
    6 difficulty  problems that even the grader never solves, or solves too often, are dropped

A weak model alone would drop hard but valid problems, and could not detect wrong labels. Labels come before difficulty
so that the reasons are distinct: a problem with a wrong label is also never solved. The rows kept are the same either
way. Every part can be resumed by itself, so the whole can. The grader's run is named after its problems: other problems
are another run.
Source: Magistral (2506.10910), section 4.1.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape

from curate import difficulty, labels, runner, sample
from curate.difficulty import Difficulty
from curate.journal import digest
from curate.labels import Labels
from curate.results import Files, table
from curate.sample_settings import SAMPLES, make_config
from curate.stage import Stage
from shared import settings_file
from shared.config import Config
from shared.errors import ConfigError, RunError

NAME = "two-stage"
PARTS = ("1_sampled", "2_learnable", "4_graded", "5_labelled")
"""PART in OUTPUT.PART.jsonl, each with its rejected rows and report; part 3 is a run, part 6 is OUTPUT.jsonl"""

EXPLANATION = """
parts, each with its own files OUTPUT.PART.jsonl, .rejected.jsonl and .report.json:
  1 sample with --model, 2 difficulty, 3 python -m trainer GRADER.toml --data.train=OUTPUT.2_learnable.jsonl,
  4 sample all problems with the grader, 5 labels, 6 difficulty (OUTPUT.jsonl, without "samples", with "pass_rate")
GRADER.toml also says how to sample: prompts, verifiers, lengths, temperature, engine. Its run gets a name that depends
on the problems left. Ctrl-C stops; the same command goes on, also inside the training.

example:
  python -m curate two-stage problems.jsonl --grader grader.toml --out curated.jsonl --samples 16 --most 0.9
"""
CHILD = (
    "import sys; from shared import watchdog; watchdog.die_with_parent(); "
    "from trainer.__main__ import main; sys.exit(main(sys.argv[1:]))"
)
"""program that runs the trainer's command and ends with this process"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of all parts."""
    parser.add_argument("--grader", type=Path, required=True, metavar="GRADER.toml", help="settings of its training")
    parser.add_argument("--model", metavar="FOLDER", help="samples first (default: model.path of GRADER.toml)")
    parser.add_argument("--samples", type=int, default=SAMPLES, metavar="N", help=f"per problem (default {SAMPLES})")
    difficulty.add_thresholds(parser)
    labels.add_options(parser)


def part_file(out: Path, part: str) -> Path:
    """Return the path of a part's rows: curated.jsonl -> curated.1_sampled.jsonl."""
    return out.with_name(f"{out.stem}.{part}.jsonl")


def carry_out(options: argparse.Namespace) -> int:
    """Run all parts; returns the exit code. Raises MaestraleError, or KeyboardInterrupt."""
    from shared.model import hf

    Files(options.out)  # a bad --out is told before hours of work
    config = settings_file.load(options.grader)
    sampled, learnable, graded, labelled = (part_file(options.out, part) for part in PARTS)
    model_dir = hf.resolve(options.model or config.model.path)
    hf.check(model_dir)

    def part(number: int, text: str, stage: Stage, inputs: Sequence[Path], out: Path) -> None:
        _run(number, text, stage, inputs, out, options.restart)

    def sampling(folder: Path) -> Stage:
        return sample.Sampling(make_config(options.grader, {}, folder), folder, options.samples)

    def filtering(last: bool) -> Stage:
        return Difficulty(options.least, options.most, without_samples=last)

    part(1, f"sample with {model_dir}", sampling(model_dir), options.inputs, sampled)
    part(2, "difficulty for that model", filtering(False), [sampled], learnable)
    grader = train(config, options.grader, learnable)
    part(4, f"sample with {grader}", sampling(grader.resolve()), options.inputs, graded)
    part(5, "labels", Labels(options.majority, options.workers), [graded], labelled)
    part(6, "difficulty for the grader", filtering(True), [labelled], options.out)
    return 0


class Several(NamedTuple):
    """The command-line interface of a command that runs several stages; see `stage.Command`."""

    summary: str
    explanation: str
    add_options: Callable[[argparse.ArgumentParser], None]
    carry_out: Callable[[argparse.Namespace], int]
    """returns the exit code. Raises MaestraleError, or KeyboardInterrupt"""


def _announce(number: int, text: str) -> None:
    Console().print(f"[bold cyan]==>[/] [bold]part {number} of 6: {escape(text)}[/]", soft_wrap=True, highlight=False)


def _run(number: int, text: str, stage: Stage, inputs: Sequence[Path], out: Path, restart: bool) -> None:
    """Run one part and print its table. Raises ConfigError if no rows are left."""
    _announce(number, text)
    outcome = runner.run(stage, inputs, out, restart=restart)
    Console().print(table(outcome.report))
    if not outcome.report["rows_out"]:
        raise ConfigError(
            f"{out}: nothing is left after part {number} ({text}): see {Files(out).report} for the reasons, then "
            "widen --least and --most, or take another model"
        )


def train(config: Config, path: Path, problems: Path) -> Path:
    """Train the grader on these problems, or resume; returns its export. config: of the settings file `path`.

    Raises RunError if training fails, KeyboardInterrupt after Ctrl-C (the run has saved a checkpoint then).
    """
    name = f"{config.name}-{digest(problems)[:8]}"
    export = Path(config.runs_dir) / name / "latest"
    _announce(3, f"train the grader {export.parent}")
    if export.resolve().name == f"step_{config.steps}":
        return export
    command = [sys.executable, "-c", CHILD, str(path), f"--data.train={problems}", f"--name={name}"]
    # of its own session: Ctrl-C reaches it once, through us
    process = subprocess.Popen(command, start_new_session=True)
    interrupted = False
    while True:
        try:
            code = process.wait()
            break
        except KeyboardInterrupt:
            if not interrupted:
                process.send_signal(signal.SIGINT)
            interrupted = True
    if interrupted or code == 130:
        raise KeyboardInterrupt
    if code:
        raise RunError(f"the grader's training ended with exit code {code}; its own message stands above")
    if not export.is_dir():
        raise RunError(f"the grader's training left no model in {export}")
    return export


COMMAND = Several(
    summary="sample, filter, train a grader, filter the whole set with it",
    explanation=EXPLANATION,
    add_options=add_options,
    carry_out=carry_out,
)
