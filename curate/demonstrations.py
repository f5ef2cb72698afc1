"""The stage `demonstrations`: right completions of a run, or of a graded file, to imitate.

Source: Magistral (2506.10910), SFT of Small, which prints no numbers: the defaults are ours.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from pydantic import Field
from pydantic.dataclasses import dataclass

from curate.stage import CurationStage, Fields, Kept, Rate, Rejected, Show, random_order
from shared.errors import ConfigError, DataError
from shared.json_reader import decode_json
from shared.jsonl import Row
from shared.types import Group, Problem, Verdict
from verify.records import Record, fingerprint
from verify.verifiers import read_problem, without_environment

_STEP = re.compile(r"step_(\d+)\.jsonl$")
WHAT = "python -m curate demonstrations imitates"
"""for the error about rows with an environment, whose words a model must not imitate"""


class GradedCompletion(NamedTuple):
    """One graded completion."""

    row: int
    """index of the input row that holds it"""
    problem: Problem
    text: str
    tokens: int
    """length of the completion; if unknown, a quarter of its characters"""
    verdict: Verdict
    step: int
    """step of the run, 0 for files"""


@dataclass
class DemonstrationsStage(CurationStage):
    """Select right completions of a run as demonstrations for SFT.

    input: the folder of a run (its rollouts/step_N.jsonl), or a file of responses with --verdicts, what python -m
    verify wrote for it (or rows that hold "response" and "verdict" themselves).
    output: {"id", "problem", "completion", "language", "domain", "pass_rate"}, what sft.demonstrations takes.
      only right ones, the same text once per problem
      not of the first --skip-steps steps; not short and early: in the first --early of the steps and shorter than
          --shortest of all right completions
      at most --per-problem per problem, drawn with a seed
      --copies times each, for problems whose pass rate is at most --hard
    pass rate: right completions of the problem by its graded ones, over all steps that are not skipped. A run keeps the
    groups that it trained: those that were all right or all wrong are not among them, so its rates are nearer to one
    half.

    with --start: instead problems for data.train, each with a "prefix", so large a share of a right completion's
    reasoning, from which the policy goes on.

    examples:
      python -m curate demonstrations runs/math --start 0.5 --out starts.jsonl
      python -m curate demonstrations runs/math --skip-steps 50 --out demonstrations.jsonl
      python -m curate demonstrations runs/math --per-problem 2 --copies 3 --hard 0.2 --out demonstrations.jsonl
      python -m curate demonstrations responses.jsonl --verdicts verdicts.jsonl --out demonstrations.jsonl
    """

    name = "demonstrations"
    skip_steps: int = Field(default=0, ge=0, description="leave out so many of the first steps")
    early: Rate = Field(default=0.3, description="share of the steps that count as early")
    shortest: Rate = Field(
        default=0.25, description="share of the shortest completions of early steps that is left out"
    )
    per_problem: int = Field(default=4, ge=1, description="completions of a problem, at most")
    hard: Rate = Field(default=0.25, description="problems of at most this pass rate are repeated")
    copies: int = Field(default=2, ge=1, description="so often")
    start: Rate = Field(
        default=0.0, description="write problems that begin with this share of the reasoning; 0: demonstrations"
    )
    seed: int = Field(default=0, description="draws other completions")
    verdicts: Path | None = Field(default=None, description="verdicts of python -m verify, for one file")

    def find(self, inputs: Sequence[Path]) -> list[Path]:
        """Replace each folder of a run by its rollouts/step_N.jsonl, in the order of the steps.

        Raises DataError for another folder, ConfigError for several files with --verdicts.
        """
        paths: list[Path] = []
        for path in inputs:
            files = [file for file in (path / "rollouts").glob("step_*.jsonl") if _STEP.search(file.name)]
            if path.is_dir() and not files:
                raise DataError(f"{path} is no folder of a run: there is no rollouts/step_1.jsonl in it")
            paths += sorted(files, key=lambda file: _step(file.name)) if path.is_dir() else [path]
        if self.verdicts is not None and len(inputs) != 1:
            raise ConfigError("--verdicts belongs to one input file: give one, or put the verdicts into the rows")
        return paths

    async def prepare(self, rows: Sequence[Row], show: Show) -> None:
        """Read all completions and choose. Raises DataError for rows that hold none."""
        records = {} if self.verdicts is None else _read_verdicts(self.verdicts)
        completions: list[GradedCompletion] = []
        for index, row in enumerate(rows):
            completions += _read_row(index, row, records)
            if index % 100 == 0:
                await show(index, len(rows))
        chosen, lost = self.choose(completions)
        by_row: dict[int, list[Fields]] = defaultdict(list)
        ids = set[str]()
        for completion, rate in chosen:
            problem = completion.problem
            shown = {
                "id": problem.id, "problem": problem.text, "completion": completion.text,
                "language": problem.language, "domain": problem.domain, "pass_rate": rate,
            }  # fmt: skip
            if problem.reasoning_language:
                shown["reasoning_language"] = problem.reasoning_language
            if self.start:
                starts = [row for row in start_of(completion, self.start) if row["id"] not in ids]
                by_row[completion.row] += starts
                ids |= {str(row["id"]) for row in starts}
            else:
                by_row[completion.row] += [shown] * (self.copies if rate <= self.hard else 1)
        for index in range(len(rows)):
            counts = {f"completions {reason}": count for reason, count in lost.get(index, Counter()).items()}
            if by_row.get(index):
                counts["demonstrations"] = len(by_row[index])
                self.decisions.append(Kept(by_row[index], counts))
            else:
                self.decisions.append(Rejected("no completion to imitate", ", ".join(counts), counts))

    def choose(
        self, completions: Sequence[GradedCompletion]
    ) -> tuple[list[tuple[GradedCompletion, float]], dict[int, Counter[str]]]:
        """Return the chosen completions with their problems' pass rates and, for each row, why others were not."""
        steps = sorted({completion.step for completion in completions})
        skipped = set(steps[: self.skip_steps]) if steps != [0] else set()
        left = [step for step in steps if step not in skipped]
        early = set(left[: round(self.early * len(left))]) if left != [0] else set()
        lost: dict[int, Counter[str]] = defaultdict(Counter)
        graded: dict[str, list[GradedCompletion]] = defaultdict(list)
        for completion in completions:
            if completion.step in skipped:
                lost[completion.row]["of a skipped step"] += 1
            elif not completion.verdict.graded:
                lost[completion.row]["not graded"] += 1
            else:
                graded[completion.problem.id].append(completion)
        lengths = sorted(one.tokens for group in graded.values() for one in group if one.verdict is Verdict.CORRECT)
        least = lengths[min(len(lengths) - 1, int(self.shortest * len(lengths)))] if lengths else 0
        chosen: list[tuple[GradedCompletion, float]] = []
        for group in graded.values():
            right = [one for one in group if one.verdict is Verdict.CORRECT]
            fit = [one for one in right if not (one.step in early and one.tokens < least)]
            single = list({one.text: one for one in reversed(fit)}.values())
            single.sort(key=lambda each: random_order(f"{each.problem.id}\0{each.step}\0{each.text}", self.seed))
            taken = single[: self.per_problem]
            chosen += [(one, len(right) / len(group)) for one in taken]
            for reason, before, after in (
                ("not right" if group[0].problem.verified else "of open problems", group, right),
                ("short and early", right, fit),
                ("that repeat another", fit, single),
                ("above --per-problem", single, taken),
            ):
                kept = set(map(id, after))
                for completion in before:
                    lost[completion.row][reason] += id(completion) not in kept
        return chosen, {row: +counts for row, counts in lost.items()}


def start_of(completion: GradedCompletion, share: float) -> list[Fields]:
    """The problem of a right completion with so large a share of its reasoning as prefix, up to a blank; [] where that
    is nothing."""
    text, problem = completion.text, completion.problem
    ends = [end for close in ("</think>", "[/THINK]") if (end := text.find(close)) >= 0]
    cut = int(share * min(ends, default=len(text)))
    prefix = text[: max(text.rfind(" ", 0, cut + 1), text.rfind("\n", 0, cut + 1), 0)]
    if not prefix.strip():
        return []
    fields = msgspec.to_builtins(problem)
    row = {
        name: value for name, value in fields.items() if name not in ("hidden", "text") and value not in ("", None, {})
    }
    name = hashlib.blake2b(prefix.encode(), digest_size=6).hexdigest()
    return [{**row, "id": f"{problem.id}@{share:g}/{name}", "problem": problem.text, "prefix": prefix}]


def _step(name: str) -> int:
    """Return the step of a file of rollouts; 0 for another file."""
    match = _STEP.search(name)
    return int(match.group(1)) if match else 0


def _read_row(index: int, row: Row, records: dict[int, Record]) -> list[GradedCompletion]:
    """Read the completions of one row. Raises DataError."""
    fields = row.fields
    if "prompt" in fields and "completions" in fields:
        return _read_group(index, row)
    response = fields.get("response")
    if not isinstance(response, str):
        raise DataError(f"{row.where}: neither a group of a run (rollouts/step_N.jsonl) nor a row with 'response'")
    inner = fields["problem"] if isinstance(fields.get("problem"), dict) else fields
    problem = without_environment(read_problem(inner, row.where), row.where, WHAT)
    if records:
        record = records.get(row.number)
        if record is None or record.row != fingerprint(json.dumps(fields)):
            raise DataError(f"{row.where}: --verdicts has none for this line: grade this file with python -m verify")
        verdict = record.reward.verdict
    else:
        reward = fields.get("reward")
        verdict_name = reward.get("verdict") if isinstance(reward, dict) else fields.get("verdict")
        try:
            verdict = Verdict(str(verdict_name))
        except ValueError as error:
            raise DataError(f"{row.where}: no verdict: give --verdicts VERDICTS.jsonl of python -m verify") from error
    tokens = fields.get("tokens")
    length = tokens if isinstance(tokens, int) and not isinstance(tokens, bool) else len(response) // 4
    return [GradedCompletion(index, problem, response, length, verdict, 0)]


def _read_group(index: int, row: Row) -> list[GradedCompletion]:
    """Read the completions of a row that is a group of a run."""
    try:
        group = msgspec.convert(row.fields, Group)
    except msgspec.ValidationError as error:
        raise DataError(f"{row.where} is no group of a run ({error})") from error
    problem = without_environment(group.prompt.problem, row.where, WHAT)
    step = _step(row.where.rpartition(":")[0])
    return [
        GradedCompletion(index, problem, text, len(completion.token_ids), reward.verdict, step)
        for completion, reward, text in zip(group.completions, group.rewards, group.texts, strict=True)
        if reward is not None and text
    ]


def _read_verdicts(path: Path) -> dict[int, Record]:
    """Read the verdicts of a file, by input line. Raises DataError."""
    records = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            record = decode_json(line, Record)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DataError(f"{path}:{number} is no verdict of python -m verify ({error})") from error
        records[record.line] = record
    if not records:
        raise DataError(f"{path} holds no verdicts: grade the input with python -m verify")
    return records
