"""The text part of vision-language models: trained as a model of its own, written back beside what was not trained."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.errors import ModelError
from shared.model import hf
from shared.model.config import MeasuredConfig
from shared.model.implementation import read_shape
from tests.families import VISION_LANGUAGE, classes_of, config_of, reference
from tests.model_folder import load_model
from tests.packed import pack_from

SEQUENCES, FIRSTS = [[5, 9, 33, 2, 7, 7, 60], [96, 4, 8] * 12, [5, 9, 33, 2, 11, 12]], [4, 3, 4]
NATIVE = ("mistral3", "qwen2.5-vl", "qwen3-vl")


def make_folder(folder: Path, family: str) -> Any:
    """Write a model folder as transformers does; returns the module."""
    theirs = reference(config_of(family))
    theirs.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "preprocessor_config.json").write_text('{"of": "images"}')
    return theirs


def logits_of(model: Any) -> torch.Tensor:
    """[tokens, vocab] of a module of transformers, each sequence alone, no image."""
    with torch.no_grad():
        return torch.cat([model(input_ids=torch.tensor([ids])).logits[0] for ids in SEQUENCES])


@pytest.mark.parametrize("family", VISION_LANGUAGE)
def test_the_text_part_is_trained_and_the_export_is_the_whole_model(tmp_path: Path, family: str):
    """Logits as the whole model's, within 1e-5 in float32; after a change of every trained weight the export is of the
    same class, computes the new logits, and holds what was not trained bit for bit, in the type that it had."""
    start, end = tmp_path / "start", tmp_path / "end"
    theirs = make_folder(start, family)
    torch.manual_seed(1)
    hf.check_trainable(start)
    model = load_model(start)
    assert isinstance(model.config, MeasuredConfig) == (family not in NATIVE)
    batch = pack_from(SEQUENCES, FIRSTS, share_prefixes=False)
    wanted = logits_of(theirs)
    with torch.no_grad():
        torch.testing.assert_close(model(batch, output="logits"), wanted, atol=1e-5, rtol=1e-5)
        assert wanted.std() > 0.3, "flat logits would agree by accident"
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
        changed = model(batch, output="logits")
    assert (changed - wanted).abs().max() > 0.1
    hf.save_trained(end, start, model.named_parameters(), torch.float32)
    again = classes_of(config_of(family)).from_pretrained(end, attn_implementation="eager").eval()
    assert type(again) is type(theirs)
    torch.testing.assert_close(logits_of(again), changed, atol=1e-5, rtol=1e-5)
    assert (end / "preprocessor_config.json").is_file()
    hf.save_trained(tmp_path / "half", start, model.named_parameters(), torch.bfloat16)
    before, after = load_file(start / "model.safetensors"), load_file(tmp_path / "half" / "model.safetensors")
    assert before.keys() == after.keys()
    kept = {name for name in before if before[name].dtype == after[name].dtype}
    assert all(torch.equal(before[name], after[name]) for name in kept)
    tower = {name for name in before if "vision" in name or "visual" in name or "projector" in name}
    assert tower and kept == tower | {name for name in before if name.endswith("layer_scalar")}


def test_the_flat_config_of_older_qwen_folders_means_the_same():
    config = config_of("qwen2.5-vl")
    text = config["text_config"]
    scaling = {"type": "mrope", "mrope_section": [4, 6, 6]}
    flat = {key: text[key] for key in text if key not in ("rope_parameters", "model_type", "layer_types")}
    old = flat | {"rope_theta": 1e4, "rope_scaling": scaling, "vision_config": config["vision_config"]}
    old |= {key: config[key] for key in ("model_type", "architectures", "tie_word_embeddings")}
    shape, wanted = read_shape(old), read_shape(config)
    assert shape.rope["rope_type"] == "default" and shape.rope["rope_theta"] == 1e4
    assert dataclasses.replace(shape, rope=wanted.rope) == wanted


def test_a_foreign_tensor_in_the_text_part_is_told_and_one_beside_it_is_not(tmp_path: Path):
    make_folder(tmp_path, "mistral3")
    weights = load_file(tmp_path / "model.safetensors")
    save_file({**weights, "vision_tower.more": torch.zeros(2)}, tmp_path / "model.safetensors")
    hf.check_trainable(tmp_path)
    save_file({**weights, "language_model.model.more": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"has unknown language_model\.model\.more$"):
        hf.check_trainable(tmp_path)
    del weights["language_model.model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="lacks model.norm.weight"):
        hf.check_trainable(tmp_path)
