"""Rows of .jsonl and .jsonl.gz files, every line checked, and the problem that a row holds.

What it does not: draw problems (trainer/data.py), grade responses (verify). Who calls this: both, cold start, serve.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from shared.errors import DataError
from shared.types import Problem

Item = TypeVar("Item")


class Row(NamedTuple):
    """One line."""

    where: str
    """setting, file and line, to begin an error with"""
    number: int
    """of the line, counted from 1"""
    fields: dict[str, Any]


def read_rows(path: Path, setting: str = "") -> Iterator[Row]:
    """Yield the rows of a file, blank lines left out. Raises DataError with setting, file, line number and repair."""
    named = f"{setting}: " if setting else ""
    if not path.is_file():
        raise DataError(f"{setting} = '{path}': there is no such file" if setting else f"{path}: there is no such file")
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    where = f"{named}{path}:{number}"
                    yield Row(where, number, _parse(line, where))
    except (OSError, EOFError) as error:
        raise DataError(f"{named}{path} cannot be read: {error}") from error


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8 (byte {error.start}): save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where} is not JSON ({error.msg} at column {error.colno}): repair or delete the line"
        ) from error
    except RecursionError as error:
        raise DataError(f"{where} is nested too deeply for JSON: repair or delete the line") from error
    if not isinstance(row, dict):
        raise DataError(f"{where} is not a JSON object: write one object a line")
    return row


def text_of(row: Mapping[str, Any], key: str, where: str) -> str:
    """A required, non-empty text of a row (numbers are taken as their text)."""
    value = row.get(key)
    if not isinstance(value, str | int | float) or isinstance(value, bool) or not str(value).strip():
        raise DataError(f"{where} lacks '{key}': every line needs it as a non-empty string")
    return str(value)


def problem_of(row: Mapping[str, Any], where: str) -> Problem:
    """The problem of {"problem", "answer" or "tests", "id"?, "language"?, "domain"?, "source"?, "pass_rate"?}.

    domain "code" needs "tests" (their shape is checked by `verify.code.exam.read_tests`), every other one "answer":
    "open" too, whose answer is learned from (any text) and never compared. Raises DataError.
    """
    domain = str(row.get("domain", "math"))
    if domain == "code" and not row.get("tests"):
        raise DataError(f"{where} lacks 'tests': a row with domain \"code\" needs them to grade programs")
    pass_rate = row.get("pass_rate")
    if pass_rate is not None and not (isinstance(pass_rate, int | float) and 0 <= pass_rate <= 1):
        raise DataError(f"{where}: pass_rate = {pass_rate!r} must be a number between 0 and 1")
    return Problem(
        id=str(row.get("id", where)),
        text=text_of(row, "problem", where),
        answer="" if domain == "code" else text_of(row, "answer", where),
        language=str(row.get("language", "en")),
        domain=domain,
        source=str(row.get("source", "")),
        tests=row["tests"] if domain == "code" else None,
        pass_rate=None if pass_rate is None else float(pass_rate),
    )


def spread(items: Sequence[Item], count: int) -> list[Item]:
    """At most `count` items, evenly over the whole file, so that every set of a mixed file is among them."""
    step = max(len(items) / count, 1.0)
    return [items[int(i * step)] for i in range(min(count, len(items)))]
