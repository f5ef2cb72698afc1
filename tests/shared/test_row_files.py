"""Rows of .json, .csv, .tsv and .parquet files, packed or not, are the rows of JSON lines; other files are named.

unread_files.jsonl: what is not read (halves of surrogate pairs stand for bytes that are not UTF-8), and why.
"""

import gzip
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from shared.errors import DataError
from shared.jsonl import read_rows, spread
from shared.row_files import plain
from tests.tables import read_table

ROWS = [{"problem": 'Say "a, b"\nor c; is it 1?', "answer": "1"}, {"problem": "2?", "answer": "2"}]
CSV = 'problem,answer\r\n"Say ""a, b""\nor c; is it 1?",1\r\n2?,2\r\n'
FORMS = {
    "a.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS),
    "a.json": json.dumps(ROWS, indent=2),
    "A.JSON": json.dumps({"version": 1, "data": ROWS}),
    "lines.json": "".join(json.dumps(row) + "\n" for row in ROWS),
    "a.csv": CSV,
    "marked.csv": "\ufeff" + CSV,
    "semicolons.csv": 'problem;answer\n"Say ""a, b""\nor c; is it 1?";1\n2?;2\n',
    "a.tsv": 'problem\tanswer\n"Say ""a, b""\nor c; is it 1?"\t1\n\n2?\t2\n',
}


@pytest.mark.parametrize("name", FORMS)
def test_each_form_has_the_same_rows(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(FORMS[name].encode())
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(FORMS[name].encode()))
    for path in (tmp_path / name, tmp_path / f"{name}.gz"):
        assert [row.fields for row in read_rows(path)] == ROWS


def test_lines_and_rows_are_numbered_and_empty_cells_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('problem,answer,pass_rate\n"1\n?",1,\n2?,2,0.5\n')
    rows = list(read_rows(path, "data.train"))
    assert [(row.number, row.where) for row in rows] == [(2, f"data.train: {path}:2"), (4, f"data.train: {path}:4")]
    assert [row.fields.get("pass_rate") for row in rows] == [None, "0.5"]
    (tmp_path / "one.json").write_text(json.dumps({"problem": "1?", "tests": [{"input": "1", "output": "1"}]}))
    assert [row.number for row in read_rows(tmp_path / "one.json")] == [1], "an object that is a row"


@pytest.mark.parametrize("row", read_table("shared/unread_files"), ids=lambda row: row["message"][:50])
def test_a_file_that_is_not_read_is_named_with_the_repair(tmp_path: Path, row: dict[str, Any]) -> None:
    path = tmp_path / row["name"]
    path.write_bytes(row["text"].encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=row["message"]):
        list(read_rows(path))


def test_faults_of_a_table_are_all_told_and_items_are_spread_over_a_mixed_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("problem,answer\n1,2,3\n1?,1\n1,2,3\n")
    faults: list[str] = []
    assert len(list(read_rows(tmp_path / "a.csv", "data.train", faults))) == 1 and len(faults) == 2
    assert spread(range(100), 8) == [0, 12, 25, 37, 50, 62, 75, 87] and spread([1, 2, 3], 200) == [1, 2, 3]


@pytest.mark.skipif(not importlib.util.find_spec("pyarrow"), reason="pyarrow is not installed")
@pytest.mark.slow
def test_text_that_polars_stores_as_bytes_is_text(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    assert plain("año".encode()) == "año" and plain(b"\x89PNG\xff") is None and plain(Path("a")) == "a"
    table = pyarrow.Table.from_pylist([{"problem": "¿3?".encode(), "answer": b"3", "pass_rate": float("nan")}])
    parquet.write_table(table, tmp_path / "a.parquet")
    [row] = read_rows(tmp_path / "a.parquet")
    assert (row.fields["problem"], row.fields["answer"]) == ("¿3?", "3")
