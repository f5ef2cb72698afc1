"""Rows of .json, .csv, .tsv and .parquet files, packed or not, are the rows of JSON lines; other files are named.
Whatever is wrong with JSON of others, it is one kind of error.

unread_files.jsonl: what is not read (halves of surrogate pairs stand for bytes that are not UTF-8), and why.
"""

import gzip
import importlib.util
import json
from pathlib import Path

import msgspec
import pytest

from shared import metrics
from shared.errors import CheckpointError, DataError, ModelError
from shared.json_reader import decode_json, parse_json
from shared.jsonl import read_rows, spread
from shared.model.folder import load_config, read_json, token_ids
from shared.model.model_card import CARD, read_card
from shared.row_files import plain
from tests.tables import read_table
from trainer.checkpoint.origin import Origin
from trainer.checkpoint.reader import decode
from trainer.evaluation import read_evaluations

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
def test_each_form_has_the_same_rows(tmp_path, name):
    (tmp_path / name).write_bytes(FORMS[name].encode())
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(FORMS[name].encode()))
    for path in (tmp_path / name, tmp_path / f"{name}.gz"):
        assert [row.fields for row in read_rows(path)] == ROWS


def test_lines_and_rows_are_numbered_and_empty_cells_are_missing(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('problem,answer,pass_rate\n"1\n?",1,\n2?,2,0.5\n')
    rows = list(read_rows(path, "data.train"))
    assert [(row.number, row.where) for row in rows] == [(2, f"data.train: {path}:2"), (4, f"data.train: {path}:4")]
    assert [row.fields.get("pass_rate") for row in rows] == [None, "0.5"]
    (tmp_path / "one.json").write_text(json.dumps({"problem": "1?", "tests": [{"input": "1", "output": "1"}]}))
    assert [row.number for row in read_rows(tmp_path / "one.json")] == [1], "an object that is a row"


@pytest.mark.parametrize("row", read_table("shared/unread_files"), ids=lambda row: row["message"][:50])
def test_a_file_that_is_not_read_is_named_with_the_repair(tmp_path, row):
    path = tmp_path / row["name"]
    path.write_bytes(row["text"].encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=row["message"]):
        list(read_rows(path))


def test_faults_of_a_table_are_all_told_and_items_are_spread_over_a_mixed_file(tmp_path):
    (tmp_path / "a.csv").write_text("problem,answer\n1,2,3\n1?,1\n1,2,3\n")
    faults: list[str] = []
    assert len(list(read_rows(tmp_path / "a.csv", "data.train", faults))) == 1 and len(faults) == 2
    assert spread(range(100), 8) == [0, 12, 25, 37, 50, 62, 75, 87] and spread([1, 2, 3], 200) == [1, 2, 3]


@pytest.mark.skipif(not importlib.util.find_spec("pyarrow"), reason="pyarrow is not installed")
@pytest.mark.slow
def test_text_that_polars_stores_as_bytes_is_text(tmp_path):
    import pyarrow
    from pyarrow import parquet

    assert plain("año".encode()) == "año" and plain(b"\x89PNG\xff") is None and plain(Path("a")) == "a"
    table = pyarrow.Table.from_pylist([{"problem": "¿3?".encode(), "answer": b"3", "pass_rate": float("nan")}])
    parquet.write_table(table, tmp_path / "a.parquet")
    [row] = read_rows(tmp_path / "a.parquet")
    assert (row.fields["problem"], row.fields["answer"]) == ("¿3?", "3")


UNREADABLE = {
    "deep list": b"[" * 200_000, "deep object": b'{"a":' * 200_000, "long number": b"1" * 5000, "text": b"\xff",
    "cut": b"{",
}  # fmt: skip


class Record(msgspec.Struct):
    x: int = 0


@pytest.mark.parametrize("name", UNREADABLE)
def test_files_of_others_are_refused_or_their_lines_are_left_out(tmp_path, name):
    data = UNREADABLE[name]
    with pytest.raises(json.JSONDecodeError):
        parse_json(data)
    for text in (data, b'{"y": ' + data):
        with pytest.raises(ValueError, match="."):
            decode_json(text, Record)
    assert parse_json(b'{"a": [1, NaN]}')["a"][0] == 1 and decode_json(b'{"x": 3, "y": [[]]}', Record) == Record(3)
    for file in ("config.json", "generation_config.json", CARD, "origin.json", "metrics.jsonl", "evaluations.jsonl"):
        (tmp_path / file).write_bytes(data + b"\n")
    for read in (load_config, read_card, lambda folder: read_json(folder / "generation_config.json")):
        with pytest.raises(ModelError, match=r"\.json (cannot be read|is damaged)"):
            read(tmp_path)
    with pytest.raises(CheckpointError, match=r"origin\.json is damaged"):
        decode(tmp_path / "origin.json", Origin)
    with pytest.raises(DataError, match=r"metrics\.jsonl(:1 is (not|nested)| holds a JSON list)"):
        list(read_rows(tmp_path / "metrics.jsonl"))
    assert metrics.read_rows(tmp_path / "metrics.jsonl") == [] == read_evaluations(tmp_path)


@pytest.mark.parametrize("value", ["1" * 400, "-1", "NaN", "Infinity", '"x"', "[[1]]", "{}", "[1, null]", "1.5"])
def test_token_ids_are_whole_numbers(tmp_path, value):
    path = tmp_path / "generation_config.json"
    path.write_text(f'{{"eos_token_id": {value}}}')
    with pytest.raises(ModelError, match="generation_config.json: eos_token_id = .* is no token id"):
        token_ids(path, "eos_token_id")
    path.write_text('{"eos_token_id": [2, 7], "pad_token_id": 0}')
    assert [token_ids(path, f"{name}_token_id") for name in ("eos", "pad", "bos")] == [[2, 7], [0], []]
