"""Reads files of (problem, completion) and of verdicts, and checks every line, so that a stopped run can be resumed.

A line of the input is one JSON object: a problem row ("problem", "answer" or "tests", "language"?, "domain"?, "id"?)
with its "response", or {"problem": {such a row}, "response": ...}; "tokens" may give the length. A line of the output
carries the fingerprint of its input line and of the settings, so that verdicts of other input or other rewards are
never mixed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from shared.errors import DataError
from shared.json_reader import decode_json
from shared.jsonl import Row
from shared.sections import RewardWeights
from shared.types import Problem, Reward
from verify.published import problem_rows
from verify.verifiers import read_problem, verifier_of, without_environment


class Item(NamedTuple):
    """One line of the input: a problem and the completion to grade."""

    line: int
    problem: Problem
    completion: str
    tokens: int | None
    row: str
    """fingerprint of the line"""


class Record(msgspec.Struct, kw_only=True):
    """One line of the output: the verdict of one line of the input."""

    line: int
    """line of the input, counted from 1"""
    id: str
    """the problem's id"""
    domain: str
    language: str
    """the problem's language, as its row says"""
    tokens: int | None
    reward: Reward
    row: str
    """fingerprint of the input line"""
    settings: str
    """fingerprint of the rewards"""

    @property
    def verified(self) -> bool:
        """True if the completion is right or wrong; see `Problem.verified`."""
        return verifier_of(self.domain).verifies


def fingerprint(data: str) -> str:
    """Return a hash of a text, sixteen hexadecimal digits."""
    return hashlib.blake2b(data.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def settings_fingerprint(settings: RewardWeights, opened: bool) -> str:
    """Return a fingerprint of everything that may change a verdict, which excludes worker counts."""
    return fingerprint(settings.model_dump_json(exclude={"workers", "max_failure_share"}) + str(opened))


def read_items(path: Path, columns: Mapping[str, str] | None = None) -> Iterator[Item]:
    """Yield the items of a file; columns: see `verify.published.renamed`. Raises DataError with file, line number and
    repair."""
    return map(_item, problem_rows(path, columns=columns))


def _item(row: Row) -> Item:
    where, fields = row.where, row.fields
    completion, tokens = fields.get("response"), fields.get("tokens")
    if not isinstance(completion, str):
        near = [name for name in ("completion", "output", "text", "solution") if isinstance(fields.get(name), str)]
        hint = f"; is it '{near[0]}'? Rename it" if near else ""
        raise DataError(f"{where} lacks 'response': every line needs the text that is to be graded{hint}")
    if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0):
        raise DataError(f"{where}: 'tokens' is {tokens!r:.40}: it must be a whole number, the length of the response")
    inner: Any = fields["problem"] if isinstance(fields.get("problem"), dict) else fields
    problem = without_environment(read_problem(inner, where), where, "python -m verify grades")
    problem = msgspec.structs.replace(problem, columns=dict(inner))
    return Item(row.number, problem, completion, tokens, fingerprint(json.dumps(fields)))


def read_records(path: Path, settings: str) -> list[Record]:
    """Return the verdicts that an earlier run has written; a last line that was cut is removed from the file.

    Raises DataError when a line is no verdict, or was made with other rewards.
    """
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    records: list[Record] = []
    for number, line in enumerate(data[:whole].splitlines(), 1):
        try:
            records.append(decode_json(line, Record))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DataError(
                f"{path}:{number} is no verdict ({error}): give another --out, or --restart to overwrite the file"
            ) from error
        if records[-1].settings != settings:
            raise DataError(
                f"{path}:{number} was made with other rewards: give the same settings, another --out, or --restart to "
                "grade everything again"
            )
    if whole < len(data):
        with path.open("r+b") as stream:
            stream.truncate(whole)
    return records


def check_beginning(rows: list[str], records: list[Record], path: Path) -> None:
    """Raise DataError unless the records are verdicts of the first input lines, given by their fingerprints."""
    for position, record in enumerate(records):
        if position >= len(rows) or rows[position] != record.row:
            raise DataError(
                f"{path}:{position + 1} is the verdict of another input line: the input has changed; give another "
                "--out, or --restart to grade everything again"
            )


def make_record(item: Item, reward: Reward, settings: str) -> Record:
    """Make the output line of one item."""
    return Record(
        line=item.line, id=item.problem.id, domain=item.problem.domain, language=item.problem.language,
        tokens=item.tokens, reward=reward, row=item.row, settings=settings,
    )  # fmt: skip
