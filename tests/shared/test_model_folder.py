"""A folder that cannot be trained is refused by its headers, before anything is allocated."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared.errors import ModelError
from shared.model import hf
from tests.model_folder import load_model
from tests.shared.test_hf import CONFIG, make_decoder

NORM = "model.norm.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound model folder."""
    hf.save_model(tmp_path / "model", CONFIG, dict(make_decoder().named_parameters()), torch.float32)
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 10**9}, r"hidden_size = 1000000000 .*at most"),
        ({"num_hidden_layers": 10**6}, r"num_hidden_layers = 1000000 .*at most"),
        ({"vocab_size": 10**12}, r"vocab_size = 1000000000000 .*at most"),
        ({"intermediate_size": -24}, r"intermediate_size = -24 .*at least 1"),
        ({"num_attention_heads": 0}, r"num_attention_heads = 0 .*at least 1"),
        ({"hidden_size": 16.5}, r"hidden_size = 16\.5 .*whole number"),
        ({"head_dim": -8}, r"head_dim = -8 .*at least 1"),
        ({"rms_norm_eps": float("nan")}, r"rms_norm_eps = nan"),
        ({"hidden_size": 10**400}, r"no number where one is needed"),
        ({"rms_norm_eps": 10**400}, r"no number where one is needed"),
        ({"model_type": {"a": 1}}, r"is no name of a model"),
        ({"architectures": [["LlamaForCausalLM"]]}, r"is no name of a model"),
        ({"num_hidden_layers": 3}, r"lacks model\.layers\.2\."),
        ({"num_hidden_layers": 1}, r"has unknown model\.layers\.1\."),
        ({"vocab_size": 41}, r"embed_tokens\.weight has shape \[40, 16\], config\.json asks for \[41, 16\]"),
        ({"tie_word_embeddings": False}, r"lacks lm_head\.weight"),
    ],
)
def test_a_config_that_the_weights_do_not_fit_is_refused(folder: Path, change: dict[str, Any], message: str):
    (folder / "config.json").write_text(json.dumps(CONFIG | change))
    with pytest.raises(ModelError, match=message):
        hf.check_trainable(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: {**state, NORM: state[NORM].long()}, rf"{NORM} is of type I64"),
        (lambda state: {**state, NORM: state[NORM].to(torch.float8_e4m3fn)}, rf"{NORM} is of type F8_E4M3"),
        (lambda state: {**state, NORM: state[NORM].bool()}, rf"{NORM} is of type BOOL"),
        (lambda state: {**state, NORM: torch.ones(15)}, rf"{NORM} has shape \[15\]"),
        (lambda state: {**state, "visual.weight": torch.ones(1)}, r"has unknown visual\.weight"),
    ],
)
def test_weights_of_another_type_or_shape_are_refused(
    folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], message: str
):
    save_file(change(load_file(folder / hf.WEIGHTS)), folder / hf.WEIGHTS)
    with pytest.raises(ModelError, match=message):
        hf.check_trainable(folder)
    with pytest.raises(ModelError, match=message):
        load_model(folder)


def test_a_header_that_promises_a_terabyte_is_refused_unread(folder: Path):
    header = json.dumps({NORM: {"dtype": "F32", "shape": [1 << 38], "data_offsets": [0, 1 << 40]}}).encode()
    (folder / hf.WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelError, match=r"model\.safetensors is truncated or damaged"):
        hf.check_trainable(folder)


def test_sound_folders_pass_in_every_type(folder: Path, tmp_path: Path):
    hf.check_trainable(folder)
    for dtype in (torch.bfloat16, torch.float16):
        hf.save_model(tmp_path / "other", CONFIG, make_decoder().named_parameters(), dtype, shard_bytes=4000)
        hf.check_trainable(tmp_path / "other")
