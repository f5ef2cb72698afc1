"""Rows of files that are no JSON lines: .json (a list, or an object that holds one), .csv, .tsv and .parquet."""

from __future__ import annotations

import csv
import gzip
import importlib
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shared.errors import DataError, NotInstalled
from shared.json_reader import parse_json

Found = Iterator[tuple[int, Any]]
"""number of the line (of the row in .json and .parquet), counted from 1, and its content"""
READ = ".jsonl, .json, .csv or .tsv (each also with .gz after it), or .parquet"
OTHERS = (
    ".arrow", ".feather", ".xlsx", ".xls", ".ods", ".zip", ".zst", ".bz2", ".xz", ".pkl", ".pickle", ".tar", ".npy",
)  # fmt: skip
"""endings of files that hold rows in other forms"""
COLUMNS_OF_LISTS = ("tests", "test_list", "messages", "conversations", "conversation", "completion", "prompt")
"""lists that belong to one row"""


def form_of(path: Path) -> str:
    """The ending that says how the file holds its rows, without .gz; ".jsonl" where it says nothing."""
    name = path.with_suffix("") if path.suffix == ".gz" else path
    return name.suffix.lower() if name.suffix.lower() in (*FORMS, *OTHERS) else ".jsonl"


def open_rows(path: Path) -> Any:
    """The bytes of a file, unpacked where its name ends in .gz."""
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def plain(value: Any) -> Any:
    """A cell that JSON cannot hold: bytes as the UTF-8 that they are, else null; other values as their text."""
    if isinstance(value, bytes | bytearray | memoryview):
        try:
            return bytes(value).decode("utf-8")
        except UnicodeDecodeError:
            return None
    return str(value)


def _text(path: Path, where: str) -> str:
    with open_rows(path) as stream:
        data: bytes = stream.read()
    try:
        return data.decode("utf-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8 (byte {error.start}): save the file as UTF-8") from error


def _json(path: Path, where: str) -> Found:
    text = _text(path, where)
    try:
        value = parse_json(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and text.lstrip().startswith("{"):  # JSON lines under another name
            for number, line in enumerate(text.split("\n"), 1):
                if line.strip():
                    yield number, line.encode()
            return
        at = f"({error.msg} at line {error.lineno}, column {error.colno})"
        fault = f"not JSON {at}" if error.doc else f"not JSON that can be read ({error.msg})"
        raise DataError(f"{where} is {fault}: repair the file") from error
    yield from enumerate(_listed(value, where), 1)


def _listed(value: Any, where: str) -> list[Any]:
    """The list of rows of a JSON file: the value itself, or the only list in it. Raises DataError."""
    if isinstance(value, list):
        return value
    if not isinstance(value, dict):
        raise DataError(f"{where} holds no rows: write a list of JSON objects")
    lists = [
        key
        for key, cell in value.items()
        if isinstance(cell, list) and cell and isinstance(cell[0], dict) and key not in COLUMNS_OF_LISTS
    ]
    if len(lists) == 1:
        return list(value[lists[0]])
    if len(lists) > 1:
        raise DataError(f"{where} holds several lists of rows ({', '.join(lists)}): write each into a file of its own")
    columns = [cell for cell in value.values() if isinstance(cell, list | dict)]
    if len(value) > 1 and len(columns) == len(value):
        raise DataError(f'{where} holds columns, not rows: write one object a row (pandas: orient="records")')
    return [value]


def _table(delimiter: str) -> Callable[[Path, str], Found]:
    def read(path: Path, where: str) -> Found:
        text = _text(path, where)
        head = text.partition("\n")[0]
        between = ";" if delimiter == "," and ";" in head and "," not in head else delimiter
        csv.field_size_limit(64 << 20)
        rows = csv.reader(io.StringIO(text, newline=""), delimiter=between, strict=True)
        names, line = list[str](), 0
        try:
            for cells in rows:
                number, line = line + 1, rows.line_num
                if not names:
                    names = _header(cells, where)
                elif len(cells) > len(names):
                    wrong = f"{where}:{number} has {len(cells)} cells, and the first line names {len(names)} columns"
                    yield number, DataError(f"{wrong}: put cells with a {between!r} into quotes")
                elif any(cells):
                    yield number, {name: cell for name, cell in zip(names, cells, strict=False) if cell}
        except csv.Error as error:
            raise DataError(f"{where}:{rows.line_num} is no row of a table ({error}): repair the file") from error

    return read


def _header(cells: list[str], where: str) -> list[str]:
    names = [cell.strip() for cell in cells]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{where} has the column '{twice}' twice: give each its own name in the first line")
    return names


def _parquet(path: Path, where: str) -> Found:
    try:
        arrow, parquet = (importlib.import_module(name) for name in ("pyarrow", "pyarrow.parquet"))
    except ImportError as error:
        raise NotInstalled("datasets", f"{where}: ") from error
    try:
        number = 0
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    cells = {key: cell for key, cell in row.items() if cell is not None}
                    yield number, json.loads(json.dumps(cells, default=plain))
    except arrow.ArrowException as error:
        raise DataError(f"{where} cannot be read: {error}") from error


FORMS: dict[str, Callable[[Path, str], Found]] = {
    ".json": _json,
    ".csv": _table(","),
    ".tsv": _table("\t"),
    ".parquet": _parquet,
}
"""ending -> what yields the rows: JSON objects, lines of JSON as bytes, or the DataError of a row"""
