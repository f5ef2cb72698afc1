"""Rows of .json, .csv, .tsv and .parquet files, packed or not, are the rows of JSON lines; other files are named."""

from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path

import pytest

from shared.errors import DataError
from shared.jsonl import read_rows, spread
from shared.row_files import plain

ROWS = [{"problem": 'Say "a, b"\nor c; is it 1?', "answer": "1"}, {"problem": "2?", "answer": "2"}]
CSV = 'problem,answer\r\n"Say ""a, b""\nor c; is it 1?",1\r\n2?,2\r\n'


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS)),
        ("a.json", json.dumps(ROWS, indent=2)),
        ("A.JSON", json.dumps({"version": 1, "data": ROWS})),
        ("lines.json", "".join(json.dumps(row) + "\n" for row in ROWS)),
        ("a.csv", CSV),
        ("marked.csv", "\ufeff" + CSV),
        ("semicolons.csv", 'problem;answer\n"Say ""a, b""\nor c; is it 1?";1\n2?;2\n'),
        ("a.tsv", 'problem\tanswer\n"Say ""a, b""\nor c; is it 1?"\t1\n\n2?\t2\n'),
    ],
)
def test_each_form_has_the_same_rows(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_bytes(text.encode())
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(text.encode()))
    for path in (tmp_path / name, tmp_path / f"{name}.gz"):
        assert [row.fields for row in read_rows(path)] == ROWS


def test_lines_and_rows_are_numbered_and_empty_cells_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('problem,answer,pass_rate\n"1\n?",1,\n2?,2,0.5\n')
    rows = list(read_rows(path, "data.train"))
    assert [(row.number, row.where) for row in rows] == [(2, f"data.train: {path}:2"), (4, f"data.train: {path}:4")]
    assert [row.fields.get("pass_rate") for row in rows] == [None, "0.5"]
    path = tmp_path / "one.json"
    path.write_text(json.dumps({"problem": "1?", "tests": [{"input": "1", "output": "1"}]}))
    assert [row.number for row in read_rows(path)] == [1], "an object that is a row"


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.json", b'[{"problem": "1?"}', r"a\.json is not JSON \(.* at line 1, column 19\): repair the file"),
        (
            "a.json",
            b'{"train": [{"problem": "1"}], "test": [{"problem": "2"}]}',
            r"several lists of rows \(train, test\)",
        ),
        ("a.json", b'{"problem": ["1", "2"], "answer": ["1", "2"]}', r'columns, not rows.*orient="records"'),
        ("a.json", b'{"problem": {"0": "1"}, "answer": {"0": "1"}}', "columns, not rows"),
        ("a.json", b"3", "holds no rows"),
        ("a.json", b"[1]", r"a\.json:1 is not a JSON object"),
        ("a.json", b"[" * 100_000, "not JSON that can be read"),
        ("a.jsonl", b'[\n{"problem": "1?"}\n]', r"holds a JSON list: let its name end in \.json"),
        ("a.csv", b"a,b\n1,2,3\n", r"a\.csv:2 has 3 cells, and the first line names 2 columns"),
        ("a.csv", b"a,a\n1,2\n", "has the column 'a' twice"),
        ("a.csv", b'a,b\n1,"2\n', r"a\.csv:2 is no row of a table"),
        ("a.csv", b"a,b\n\xff,2\n", r"a\.csv is not UTF-8 \(byte 4\)"),
        ("a.xlsx", b"PK", r"files that end in \.xlsx are not read: write the rows as \.jsonl, \.json, \.csv"),
        ("a.jsonl.zst", b"", r"files that end in \.zst are not read"),
        ("a.json.gz", b"[]", "cannot be read: Not a gzipped file"),
        ("a.parquet", b"PAR1", "cannot be read|pyarrow is not installed"),
    ],
)
def test_a_file_that_is_not_read_is_named_with_the_repair(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=message):
        list(read_rows(tmp_path / name))


def test_faults_of_a_table_are_all_told(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("problem,answer\n1,2,3\n1?,1\n1,2,3\n")
    faults: list[str] = []
    assert len(list(read_rows(tmp_path / "a.csv", "data.train", faults))) == 1 and len(faults) == 2


def test_items_are_spread_over_a_mixed_file() -> None:
    assert spread(range(100), 8) == [0, 12, 25, 37, 50, 62, 75, 87]
    assert spread([1, 2, 3], 200) == [1, 2, 3]


def test_bytes_are_the_text_that_they_are() -> None:
    assert plain("año".encode()) == "año" and plain(b"\x89PNG\xff") is None and plain(Path("a")) == "a"


@pytest.mark.skipif(not importlib.util.find_spec("pyarrow"), reason="pyarrow is not installed")
@pytest.mark.slow
def test_text_that_polars_stores_as_bytes_is_text(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.Table.from_pylist([{"problem": "¿3?".encode(), "answer": b"3", "pass_rate": float("nan")}])
    parquet.write_table(table, tmp_path / "a.parquet")
    [row] = read_rows(tmp_path / "a.parquet")
    assert (row.fields["problem"], row.fields["answer"]) == ("¿3?", "3")
