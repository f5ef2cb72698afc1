"""The random models of the speed benchmarks: names, sizes, files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.llama import SMOLLM2_135M, Shape, random_weights, write_model, write_tokenizer
from shared.chat import Chat

SMALL = Shape(hidden=16, layers=2, heads=2, kv_heads=1, inner=24, vocabulary=32)


def test_a_model_of_smollm2s_shape_has_its_134_million_parameters() -> None:
    head = 49152 * 576
    layer = 2 * 576 * 576 + 2 * 192 * 576 + 3 * 1536 * 576 + 2 * 576
    assert SMOLLM2_135M.parameters == head + 30 * layer + 576 == 134_515_008


def test_the_folder_holds_the_master_weights_in_bfloat16(tmp_path: Path) -> None:
    write_model(tmp_path, SMALL)
    stored, masters = load_file(tmp_path / "model.safetensors"), random_weights(SMALL)
    assert stored.keys() == masters.keys()
    assert all(torch.equal(stored[name], masters[name].detach().to(torch.bfloat16)) for name in masters)
    assert json.loads((tmp_path / "config.json").read_text())["hidden_size"] == 16


@pytest.mark.slow
def test_every_id_that_can_be_sampled_has_a_text(tmp_path: Path) -> None:
    shape = SMALL._replace(vocabulary=2000)
    write_model(tmp_path, shape)
    write_tokenizer(tmp_path, shape)
    chat = Chat(tmp_path)
    assert chat.decode([1999]) and len(chat.tokenizer) == 2000 and chat.eos_id == shape.config()["eos_token_id"]


@pytest.mark.parametrize("hidden", [16, 32])
def test_heads_share_the_width(hidden: int) -> None:
    shapes = dict(SMALL._replace(hidden=hidden).tensors())
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == (hidden // 2, hidden)
