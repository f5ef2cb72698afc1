"""Reads graded completions: groups of a run's rollouts, or responses with verdicts of `python -m verify`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from shared.errors import DataError
from shared.jsonl import Row, problem_of
from shared.types import Group, Problem, Verdict
from verify.records import Record, fingerprint

_STEP = re.compile(r"step_(\d+)\.jsonl$")


class Attempt(NamedTuple):
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


def read_row(index: int, row: Row, records: dict[int, Record]) -> list[Attempt]:
    """Read the completions of one row. Raises DataError."""
    fields = row.fields
    if "prompt" in fields and "completions" in fields:
        return _read_group(index, row)
    response = fields.get("response")
    if not isinstance(response, str):
        raise DataError(f"{row.where}: neither a group of a run (rollouts/step_N.jsonl) nor a row with 'response'")
    inner = fields["problem"] if isinstance(fields.get("problem"), dict) else fields
    problem = problem_of(inner, row.where)
    if records:
        record = records.get(row.number)
        if record is None or record.row != fingerprint(json.dumps(fields)):
            raise DataError(f"{row.where}: --verdicts has none for this line: grade this file with python -m verify")
        verdict = record.reward.verdict
    else:
        reward = fields.get("reward")
        said = reward.get("verdict") if isinstance(reward, dict) else fields.get("verdict")
        try:
            verdict = Verdict(str(said))
        except ValueError as error:
            raise DataError(f"{row.where}: no verdict: give --verdicts VERDICTS.jsonl of python -m verify") from error
    tokens = fields.get("tokens")
    length = tokens if isinstance(tokens, int) and not isinstance(tokens, bool) else len(response) // 4
    return [Attempt(index, problem, response, length, verdict, 0)]


def _read_group(index: int, row: Row) -> list[Attempt]:
    """Read the completions of a row that is a group of a run."""
    try:
        group = msgspec.convert(row.fields, Group)
    except msgspec.ValidationError as error:
        raise DataError(f"{row.where} is no group of a run ({error})") from error
    found = _STEP.search(row.where.rpartition(":")[0])
    step = int(found.group(1)) if found else 0
    problem = group.prompt.problem
    return [
        Attempt(index, problem, text, len(completion.token_ids), reward.verdict, step)
        for completion, reward, text in zip(group.completions, group.rewards, group.texts, strict=True)
        if reward is not None and text
    ]


def read_verdicts(path: Path) -> dict[int, Record]:
    """Read the verdicts of a file, by input line. Raises DataError."""
    found = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            record = msgspec.json.decode(line, type=Record)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DataError(f"{path}:{number} is no verdict of python -m verify ({error})") from error
        found[record.line] = record
    if not found:
        raise DataError(f"{path} holds no verdicts: grade the input with python -m verify")
    return found


def find_files(inputs: Sequence[Path]) -> list[Path]:
    """Replace each folder of a run by its rollouts/step_N.jsonl, in the order of the steps. Raises DataError."""
    found: list[Path] = []
    for path in inputs:
        if not path.is_dir():
            found.append(path)
            continue
        steps = {
            int(match.group(1)): file
            for file in (path / "rollouts").glob("step_*.jsonl")
            if (match := _STEP.search(file.name))
        }
        if not steps:
            raise DataError(f"{path} is no folder of a run: there is no rollouts/step_1.jsonl in it")
        found += [steps[number] for number in sorted(steps)]
    return found
