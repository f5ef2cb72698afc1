"""The command `two-stage`: Magistral's difficulty filter (2506.10910, section 4.1), with a grader trained for it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path

from rich.markup import escape

from curate import runner
from curate.difficulty import DifficultyStage, LabelsStage, least_option, majority_option, most_option
from curate.sample import SampleStage
from curate.stage import Command, CurationStage, digest, option
from shared import settings_file
from shared.config import Config
from shared.errors import ConfigError, RunError
from shared.progress import CleanConsole
from shared.supervisor import supervised

PARTS = ("1_sampled", "2_learnable", "4_graded", "5_labelled")
"""PART in OUTPUT.PART.jsonl, each with its rejected rows and report; part 3 is a run, part 6 is OUTPUT.jsonl"""
CHILD = (
    "import sys; from shared.launch import watchdog; watchdog.die_with_parent(); "
    "from trainer.__main__ import main; sys.exit(main(sys.argv[1:]))"
)
"""program that runs the trainer's command and ends with this process"""


@dataclass
class TwoStage(Command):
    """Sample, filter, train a grader, filter the whole set with it.

    parts, each with its own files OUTPUT.PART.jsonl, .rejected.jsonl and .report.json:
      1 sample      every problem with --model
      2 difficulty  problems that it never solves, or solves too often, are left out for now
      3 train       python -m trainer GRADER.toml --data.train=OUTPUT.2_learnable.jsonl, which gives the grader
      4 sample      the whole original set with the grader
      5 labels      problems whose ground truth most of its samples contradict are dropped
      6 difficulty  problems that even the grader never solves, or solves too often, are dropped (OUTPUT.jsonl, without
                    "samples", with "pass_rate")
    A weak model alone would drop hard but valid problems, and could not detect a wrong ground truth. Labels come
    before difficulty so that the reasons are distinct: a problem with a wrong ground truth is also never solved.
    GRADER.toml also says how to sample: prompts, verifiers, lengths, temperature, engine. Its run is named after the
    problems left: other problems are another run. Ctrl-C stops; the same command goes on, also inside the training.

    example:
      python -m curate two-stage problems.jsonl --grader grader.toml --out curated.jsonl --samples 16 --most 0.9
    """

    name = "two-stage"
    grader: Path = option(MISSING, "settings of its training", type=Path, metavar="GRADER.toml")
    model: str = option("", "samples first (default: model.path of GRADER.toml)", metavar="FOLDER")
    samples: int = option(16, "per problem (default %(default)s)")
    least: float = least_option()
    most: float = most_option()
    majority: float = majority_option()
    workers: int = option(0, "verifier processes (default: one per core)")

    def run(self, inputs: Sequence[Path], out: Path, restart: bool) -> None:
        """Run all parts. Raises MaestraleError, or KeyboardInterrupt."""
        runner.OutputFiles(out)  # a bad --out is an error before hours of work
        config = settings_file.load(self.grader)
        sampled, learnable, graded, labelled = (out.with_name(f"{out.stem}.{part}.jsonl") for part in PARTS)

        def part(number: int, text: str, stage: CurationStage, given: Sequence[Path], found: Path) -> None:
            _announce(number, text)
            report = runner.run(stage, given, found, restart=restart).report
            CleanConsole().print(runner.table(report))
            if not report["rows_out"]:
                raise ConfigError(
                    f"{found}: nothing is left after part {number} ({text}): see {runner.OutputFiles(found).report} "
                    "for the reasons, then widen --least and --most, or take another model"
                )

        difficulty = DifficultyStage(self.least, self.most)
        first = SampleStage(self.model or config.locate(config.model.path), self.samples, self.grader)
        part(1, f"sample with {first.model_dir}", first, inputs, sampled)
        part(2, "difficulty for that model", difficulty, [sampled], learnable)
        grader = train(config, self.grader, learnable)
        second = SampleStage(str(grader.resolve()), self.samples, self.grader)
        part(4, f"sample with {grader}", second, inputs, graded)
        part(5, "labels", LabelsStage(self.majority, workers=self.workers), [graded], labelled)
        part(6, "difficulty for the grader", DifficultyStage(self.least, self.most, True), [labelled], out)


def _announce(number: int, text: str) -> None:
    CleanConsole().print(
        f"[bold cyan]==>[/] [bold]part {number} of 6: {escape(text)}[/]", soft_wrap=True, highlight=False
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
    process = subprocess.Popen(supervised(command), start_new_session=True)
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
