"""JSON of others: whatever is wrong with it, it is one kind of error."""

import json
from pathlib import Path

import msgspec
import pytest

from shared.errors import CheckpointError, DataError, ModelError
from shared.json_reader import decode_json, parse_json
from shared.jsonl import read_rows as rows_of_data
from shared.metrics import read_rows
from shared.model.folder import load_config, read_json, token_ids
from shared.model.model_card import CARD, read_card
from trainer.checkpoint.origin import Origin
from trainer.checkpoint.reader import decode
from trainer.evaluation import read_evaluations

UNREADABLE = {
    "deep list": b"[" * 200_000, "deep object": b'{"a":' * 200_000, "long number": b"1" * 5000, "text": b"\xff",
    "cut": b"{",
}  # fmt: skip


class Record(msgspec.Struct):
    x: int = 0


@pytest.mark.parametrize("name", UNREADABLE)
def test_files_of_others_are_refused_or_their_lines_are_left_out(tmp_path: Path, name: str) -> None:
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
        list(rows_of_data(tmp_path / "metrics.jsonl"))
    assert read_rows(tmp_path / "metrics.jsonl") == [] == read_evaluations(tmp_path)


@pytest.mark.parametrize("value", ["1" * 400, "-1", "NaN", "Infinity", '"x"', "[[1]]", "{}", "[1, null]", "1.5"])
def test_token_ids_are_whole_numbers(tmp_path: Path, value: str) -> None:
    path = tmp_path / "generation_config.json"
    path.write_text(f'{{"eos_token_id": {value}}}')
    with pytest.raises(ModelError, match="generation_config.json: eos_token_id = .* is no token id"):
        token_ids(path, "eos_token_id")
    path.write_text('{"eos_token_id": [2, 7], "pad_token_id": 0}')
    assert [token_ids(path, f"{name}_token_id") for name in ("eos", "pad", "bos")] == [[2, 7], [0], []]
