"""The stage `harvest`: selects right completions of a run, or of a graded file, as demonstrations for a cold start.

    only right ones, the same text once per problem
    not of the first --skip-steps steps; not short and early: in the first --early of the steps and shorter than
        --shortest of all right completions
    at most --per-problem per problem, drawn with a seed
    --copies times each, for problems whose pass rate is at most --hard
pass rate: right completions of the problem by its graded ones, over all steps that are not skipped. A run keeps the
groups that it trained: those that were all right or all wrong are not among them, so its rates are nearer to one half.
Source: Magistral (2506.10910), cold start of Small, which prints no numbers: the defaults are ours.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from curate.attempts import Attempt, find_files, read_row, read_verdicts
from curate.draw import place
from curate.journal import digest
from curate.stage import Command, Decision, Fields, Kept, Rejected, Show
from shared.errors import ConfigError
from shared.jsonl import Row
from shared.types import Verdict


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the stage."""

    skip_steps: int = 0
    early: float = 0.3
    shortest: float = 0.25
    per_problem: int = 4
    hard: float = 0.25
    copies: int = 2
    seed: int = 0


class Harvest:
    """The stage that selects demonstrations; the module's docstring has the rules."""

    name = "harvest"
    under_way = 1

    def __init__(self, options: Settings, verdicts: Path | None = None):
        """verdicts: output of `python -m verify` for the input file. Raises ConfigError if it cannot be read."""
        self.options, self.verdicts = options, verdicts
        self.settings: dict[str, Any] = msgspec.to_builtins(options)
        self.settings["verdicts"] = digest(verdicts) if verdicts is not None else ""
        self.decisions: list[Decision] = []

    async def prepare(self, rows: Sequence[Row], show: Show) -> None:
        """Read all completions and choose. Raises DataError for rows that hold none."""
        records = read_verdicts(self.verdicts) if self.verdicts is not None else {}
        attempts: list[Attempt] = []
        for index, row in enumerate(rows):
            attempts += read_row(index, row, records)
            if index % 100 == 0:
                await show(index, len(rows))
        chosen, lost = choose(attempts, self.options)
        by_row: dict[int, list[Fields]] = defaultdict(list)
        for attempt, rate in chosen:
            by_row[attempt.row] += self._demonstrations(attempt, rate)
        for index in range(len(rows)):
            counts = {f"completions {reason}": count for reason, count in lost.get(index, Counter()).items()}
            if index in by_row:
                counts["demonstrations"] = len(by_row[index])
                self.decisions.append(Kept(by_row[index], counts))
            else:
                self.decisions.append(Rejected("no completion to imitate", ", ".join(counts), counts))

    def _demonstrations(self, attempt: Attempt, rate: float) -> list[Fields]:
        problem = attempt.problem
        row = {
            "id": problem.id, "problem": problem.text, "completion": attempt.text, "language": problem.language,
            "domain": problem.domain, "pass_rate": rate,
        }  # fmt: skip
        return [row] * (self.options.copies if rate <= self.options.hard else 1)

    async def judge(self, index: int, row: Row) -> Decision:
        """Return the decision that `prepare` made."""
        return self.decisions[index]

    async def close(self) -> None:
        """Do nothing; there is nothing to stop."""


def choose(
    attempts: Sequence[Attempt], options: Settings
) -> tuple[list[tuple[Attempt, float]], dict[int, Counter[str]]]:
    """Return the chosen attempts with their problems' pass rates and, for each row, why its others were not chosen."""
    steps = sorted({attempt.step for attempt in attempts})
    skipped = set(steps[: options.skip_steps]) if steps != [0] else set()
    left = [step for step in steps if step not in skipped]
    early = set(left[: round(options.early * len(left))]) if left != [0] else set()
    lost: dict[int, Counter[str]] = defaultdict(Counter)
    graded: dict[str, list[Attempt]] = defaultdict(list)
    for attempt in attempts:
        if attempt.step in skipped:
            lost[attempt.row]["of a skipped step"] += 1
        elif not attempt.verdict.graded:
            lost[attempt.row]["not graded"] += 1
        else:
            graded[attempt.problem.id].append(attempt)
    lengths = sorted(one.tokens for found in graded.values() for one in found if one.verdict is Verdict.CORRECT)
    least = lengths[min(len(lengths) - 1, int(options.shortest * len(lengths)))] if lengths else 0
    chosen: list[tuple[Attempt, float]] = []
    for found in graded.values():
        right = [attempt for attempt in found if attempt.verdict is Verdict.CORRECT]
        rate = len(right) / len(found)
        for attempt in found:
            reason = "not right" if attempt.problem.verified else "of open problems"
            lost[attempt.row][reason] += attempt.verdict is not Verdict.CORRECT
        fit = [one for one in right if not (one.step in early and one.tokens < least)]
        single = list({one.text: one for one in reversed(fit)}.values())
        single.sort(key=lambda one: place(f"{one.problem.id}\0{one.step}\0{one.text}", options.seed))
        taken = single[: options.per_problem]
        chosen += [(attempt, rate) for attempt in taken]
        for reason, before, after in (
            ("short and early", right, fit),
            ("that repeat another", fit, single),
            ("above --per-problem", single, taken),
        ):
            for attempt in before:
                lost[attempt.row][reason] += not any(attempt is other for other in after)
    return chosen, {row: +counts for row, counts in lost.items()}


EXPLANATION = """
input: the folder of a run (its rollouts/step_N.jsonl), or a file of responses with --verdicts, what python -m verify
wrote for it (or rows that hold "response" and "verdict" themselves).
output: {"id", "problem", "completion", "language", "domain", "pass_rate"}, what cold_start.demonstrations takes.

examples:
  python -m curate harvest runs/math --skip-steps 50 --out demonstrations.jsonl
  python -m curate harvest runs/math --per-problem 2 --copies 3 --hard 0.2 --out demonstrations.jsonl
  python -m curate harvest responses.jsonl --verdicts verdicts.jsonl --out demonstrations.jsonl
"""


def _add_options(parser: argparse.ArgumentParser) -> None:
    ours = Settings()

    def number(name: str, text: str) -> None:
        value = getattr(ours, name)
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=type(value), default=value, metavar="X" if value % 1 else "N",
            help=f"{text} (default {value})",
        )  # fmt: skip

    parser.add_argument("--verdicts", type=Path, metavar="VERDICTS.jsonl", help="of python -m verify, for one file")
    number("skip_steps", "leave out so many of the first steps")
    number("early", "share of the steps that count as early")
    number("shortest", "of early steps, completions among so large a share of the shortest are left out")
    number("per_problem", "completions of a problem, at most")
    number("hard", "problems of at most this pass rate are repeated")
    number("copies", "so often")
    number("seed", "draws other completions")


def _make(options: argparse.Namespace) -> Harvest:
    chosen = Settings(**{name: getattr(options, name) for name in Settings.__struct_fields__})
    for name, least in (("skip_steps", 0), ("per_problem", 1), ("copies", 1)):
        if getattr(chosen, name) < least:
            raise ConfigError(f"--{name.replace('_', '-')} = {getattr(chosen, name)}: must be at least {least}")
    for name in ("early", "shortest", "hard"):
        if not 0 <= getattr(chosen, name) <= 1:
            raise ConfigError(f"--{name} = {getattr(chosen, name)}: must be between 0 and 1")
    if options.verdicts is not None and len(options.inputs) != 1:
        raise ConfigError("--verdicts belongs to one input file: give one, or put the verdicts into the rows")
    return Harvest(chosen, options.verdicts)


COMMAND = Command(
    "right completions of a run as demonstrations for a cold start", EXPLANATION, _add_options, _make, find_files
)
