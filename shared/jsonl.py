"""Reads rows of files, checks every one, and makes the problem that a row holds.

Unknown keys are ignored, since data sets bring columns of their own; one that is spelt almost like a key
that the row lacks is an error, because the row would silently mean something else without it.
"""

from __future__ import annotations

import codecs
import contextlib
import difflib
import functools
import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from shared.errors import DataError
from shared.json_reader import DEEP, parse_json
from shared.row_files import FORMS, OTHERS, READ, form_of, open_rows
from shared.types import Problem
from shared.user_file import missing

Item = TypeVar("Item")

MAX_ROW_BYTES = 64 << 20
"""a longer line is an error: the tests of a programming problem may take some megabytes, no row takes more"""
KEYS = (
    "problem", "answer", "tests", "domain", "language", "pass_rate", "environment", "checker", "answer_form", "prefix",
    "reasoning_language",
)  # fmt: skip
"""keys of a problem that change what it means; "id" and "source" only name it"""
FIELDS = (*KEYS, "id", "source", "solution", "completion", "system")
"""fields for which data.columns may name a column"""
ANSWER_FORMS = ("box", "code block", "response")
"""where a row may say that its answer is given"""
ALIKE = 0.8
"""share of letters (difflib) from which an unknown key is a misspelt one"""
close_matches = functools.lru_cache(256)(difflib.get_close_matches)  # the next row has the same keys
ALIASES = {"lang": "language"}
"""other names that are not spelt alike"""
LIKELY = {
    "problem": (
        "question", "problem", "prompt", "query", "instruction", "input", "task", "statement", "text", "message",
    ),
    "answer": ("answer", "solution", "target", "label", "gold", "truth", "output", "result", "response", "reply"),
}  # fmt: skip
"""field of ours -> words in the names of columns that may hold it, the likeliest first"""
SHOWN = 5
"""faults of a file and of one kind that an error lists; the others are counted"""
MOST_KINDS = 10
"""kinds of faults that it lists"""


class Row(NamedTuple):
    """One line of a file."""

    where: str
    """setting, file and line, to begin an error with"""
    number: int
    """number of the line, counted from 1"""
    fields: dict[str, Any]


def read_rows(path: Path, setting: str = "", faults: list[str] | None = None) -> Iterator[Row]:
    """Yield the rows of a file, blank lines left out; a UTF-8 byte order mark before the first one is no part of it.

    Raises DataError with setting, file, line number and repair; but lines that are no rows go to `faults`, where given.
    """
    named = f"{setting}: " if setting else ""
    if not path.is_file():
        raise DataError(f"{setting} = '{path}': {missing(path)}" if setting else f"{path}: {missing(path)}")
    file, form = f"{named}{path}", form_of(path)
    if form in OTHERS:
        raise DataError(f"{file}: files that end in {form} are not read: write the rows as {READ}")
    try:
        for number, row in FORMS.get(form, _lines)(path, file):
            where = f"{file}:{number}"
            try:
                if isinstance(row, DataError):
                    raise row
                yield Row(where, number, _parse(row, where) if isinstance(row, bytes) else _object(row, where))
            except DataError as error:
                if faults is None:
                    raise
                faults.append(str(error))
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file} cannot be read: {error}") from error


def _lines(path: Path, file: str) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, with their numbers. Raises DataError for one that says that all are wrong."""
    with open_rows(path) as stream:
        for number, line in enumerate(iter(lambda: stream.readline(MAX_ROW_BYTES + 1), b""), 1):
            where = f"{file}:{number}"
            if len(line) > MAX_ROW_BYTES:
                raise DataError(f"{where} is longer than {MAX_ROW_BYTES >> 20} MiB: write one row a line")
            if number == 1:
                line = _without_mark(line, where)
                if line.lstrip().startswith(b"["):
                    raise DataError(f"{file} holds a JSON list: let its name end in .json, or write one row a line")
            if line.strip():
                yield number, line


def all_faults(faults: Sequence[str], what: str) -> str:
    """Faults of a file as the text of one error: the first ones of each kind, the most frequent kind first, and how
    many more there are."""
    if len(faults) == 1:
        return faults[0]
    if len(faults) > SHOWN and len({_without_place(fault) for fault in faults}) == 1:
        return f"{what} {faults[0]} (the same in all of them)"
    kinds: dict[str, list[str]] = {}
    for fault in faults:
        kinds.setdefault(_kind_of(fault) if len(faults) > SHOWN else "", []).append(fault)
    for alike in sorted(kinds.values(), key=len, reverse=True)[:MOST_KINDS]:
        what += "".join(f"\n  {fault}" for fault in alike[:SHOWN])
        if len(alike) > SHOWN:
            what += f"\n  ... and {len(alike) - SHOWN:,} more{' like these' if len(kinds) > 1 else ''}"
    more = len(kinds) - MOST_KINDS
    return f"{what}\n  ... and {more:,} more kinds of faults" if more > 0 else what


def _without_place(fault: str) -> str:
    return re.sub(r"^.*?:\d+(?=\D)", "", fault)


def _kind_of(fault: str) -> str:
    """The words of a fault without its place and without what the row has."""
    words = re.sub(r"'[^']*'|\"[^\"]*\"", "", _without_place(fault))
    return re.split("[:;(]", re.sub(r"\d+", "", words.lstrip(": ")), maxsplit=1)[0]


def _without_mark(line: bytes, where: str) -> bytes:
    if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError(f"{where} is UTF-16 (it begins with a byte order mark): save the file as UTF-8")
    return line.removeprefix(codecs.BOM_UTF8)


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = parse_json(line.decode("utf-8").rstrip())  # else a fault at its end were one of the next line
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8 (byte {error.start}): save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        fault = (
            f"not JSON ({error.msg} at column {error.colno})"
            if error.doc
            else f"not JSON that can be read ({error.msg})"
        )
        fault = f"{DEEP} for JSON" if error.msg == DEEP else fault
        raise DataError(f"{where} is {fault}: repair or delete the line") from error
    return _object(row, where)


def _object(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DataError(f"{where} is not a JSON object: write one object a row")
    return row


def text_of(row: Mapping[str, Any], key: str, where: str, default: str | None = None) -> str:
    """Return a text of a row (numbers as their text). Raises DataError for another type, NaN, and lone surrogates.

    A missing, empty or null one is an error, or `default` where that is given.
    """
    value = row.get(key)
    if default is not None and isinstance(value, float) and math.isnan(value):  # what pandas has for a missing cell
        return default
    if value is None or (isinstance(value, str) and not value.strip()):
        if default is not None:
            return default
        raise DataError(f"{where} lacks '{key}': every line needs it as a non-empty string{_hint(row, key)}")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(f"{where}: '{key}' is {_kind(value)}, not text or a number: write its value as a string")
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError(f"{where}: '{key}' is {value}, not a value: write it as a string, or delete the line")
    text = str(value)
    check_text(text, key, where)
    return text


def check_text(text: str, key: str, where: str) -> None:
    """Raise DataError if the text holds half a character (a lone surrogate), which nothing can encode."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = ord(text[error.start])
        raise DataError(
            f"{where}: '{key}' holds half a character (the lone surrogate \\u{half:04x} at character "
            f"{error.start + 1}): write the whole character, or delete it"
        ) from error


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "an object" if isinstance(value, dict) else "a list"


def _hint(row: Mapping[str, Any], key: str) -> str:
    if near := [name for name in row if meant_by(name, row) == key]:
        return f"; it has '{near[0]}': is that meant?"
    if key == "answer" and row.get("tests"):
        return '; it has tests: programming problems need "domain": "code"'
    shown = f"; it has {', '.join(map(repr, list(row)[:8]))}" if row else ""
    if key == "answer" and row.get("solution"):
        return f"{shown}, and its 'solution' ends neither in a line '#### ANSWER' nor in \\boxed{{ANSWER}}"
    return f"{shown}. {proposal(row)}" if key in LIKELY and row else shown


def proposal(row: Mapping[str, Any]) -> str:
    """The repair of a row whose columns are not known: the setting, with those that may be its problem and answer."""
    chosen = dict[str, str]()
    for ours, words in LIKELY.items():
        free = [name for name in row if name not in chosen.values() and isinstance(row[name], str | int | float | list)]
        likely = next((name for word in words for name in free if word in name.casefold()), ours)
        chosen[ours] = ours if row.get(ours) else likely
    shown = ", ".join(f'{ours} = "{theirs}"' for ours, theirs in chosen.items() if ours != theirs)
    shown = shown or 'problem = "...", answer = "..."'
    return f"Rename columns, or set data.columns = {{ {shown} }}"


def meant_by(name: str, row: Mapping[str, Any]) -> str | None:
    """Return the key of a problem, which the row lacks, that an unknown one seems to mean; None if there is none.

    Example: meant_by("anwser", {"problem": "1+1?", "anwser": "2"}) == "answer"
    """
    spelt = name.casefold()
    near = [ALIASES[spelt]] if spelt in ALIASES else close_matches(spelt, KEYS, n=1, cutoff=ALIKE)
    return near[0] if near and near[0] not in row and name not in KEYS and not spelt.endswith(("_id", "_idx")) else None


def problem_of(
    row: Mapping[str, Any], where: str, ground_truth: Literal["answer", "tests"] = "answer", *, hidden: bool = False
) -> Problem:
    """Make the problem of {"problem", "answer" or "tests", "id"?, "language"?, "domain"?, "source"?,
    "pass_rate"?, "environment"?, "checker"?, "answer_form"?, "prefix"?, "reasoning_language"?}.

    ground_truth, hidden: what its verifier says, see `verify.verifiers.read_problem`. A row with tests and a checker
    may have an answer too; one of which all is the answer, compared with nothing, needs none. Raises DataError.
    """
    tested, checker = ground_truth == "tests", text_of(row, "checker", where, "")
    form: Any = text_of(row, "answer_form", where, "")
    if form not in ("", *ANSWER_FORMS):
        raise DataError(f"{where}: answer_form = '{form}' must be one of {', '.join(ANSWER_FORMS)}")
    needless = row.get("environment") or (hidden and form == "response")
    for name in row:
        if (meant := meant_by(name, row)) and not (meant == "answer" and tested):
            raise DataError(f"{where}: unknown key '{name}': is '{meant}' meant? Rename one or the other")
    domain = text_of(row, "domain", where, "math")
    if tested:
        if not row.get("tests"):
            reason = f'checker "{checker}"' if checker else f'domain "{domain}"'
            raise DataError(f"{where} lacks 'tests': a row with {reason} needs them to check answers")
        check_text(json.dumps(row["tests"], ensure_ascii=False), "tests", where)
    prefix = text_of(row, "prefix", where, "")
    if prefix and row.get("environment"):
        raise DataError(
            f"{where}: a 'prefix' begins a single completion, but the row has an environment: leave one out"
        )
    pass_rate = row.get("pass_rate")
    if isinstance(pass_rate, str):  # a cell of a .csv
        with contextlib.suppress(ValueError):
            pass_rate = float(pass_rate) if pass_rate.strip() else None
    if isinstance(pass_rate, float) and math.isnan(pass_rate):
        pass_rate = None
    known = isinstance(pass_rate, int | float) and not isinstance(pass_rate, bool) and 0 <= pass_rate <= 1
    if pass_rate is not None and not known:
        raise DataError(f"{where}: pass_rate = {pass_rate!r} must be a number between 0 and 1")
    return Problem(
        id=text_of(row, "id", where, where), text=text_of(row, "problem", where),
        answer="" if tested and not checker else text_of(row, "answer", where, "" if tested or needless else None),
        language=text_of(row, "language", where, "en"), domain=domain, source=text_of(row, "source", where, ""),
        tests=row["tests"] if tested else None, environment=text_of(row, "environment", where, ""),
        pass_rate=None if pass_rate is None else float(pass_rate), hidden=hidden, checker=checker, answer_form=form,
        prefix=prefix, reasoning_language=text_of(row, "reasoning_language", where, ""),
    )  # fmt: skip


def spread(items: Sequence[Item], count: int) -> list[Item]:
    """Return at most `count` items, evenly over the whole file, so that every set of a mixed file is among them."""
    step = max(len(items) / count, 1.0)
    return [items[int(i * step)] for i in range(min(count, len(items)))]
