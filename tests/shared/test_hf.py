"""Model folders: round trip through transformers, and one clear error for everything that can be wrong with one.

refused_configs.jsonl: what in a config.json (`change` of `base`) an implementation refuses, and words of the error.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared.errors import CheckpointError, ModelError
from shared.model import hf
from shared.model.decoder import Decoder, DecoderConfig, initialise
from tests.families import config_of
from tests.model_folder import load_model
from tests.packed import pack_from

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 40, "hidden_size": 16,
    "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 64, "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "initializer_range": 0.3,
    "hidden_act": "silu", "tie_word_embeddings": True,
}  # fmt: skip
UNTIED = {"tie_word_embeddings": False}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama tied": {},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None, **UNTIED},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **UNTIED},
    "qwen3 tied": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 8},
}
NORM = "model.norm.weight"


def make_decoder(config: Mapping[str, Any] = CONFIG) -> Decoder:
    decoder = Decoder(DecoderConfig.from_hf(config))
    initialise(decoder, 0)
    return decoder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound model folder."""
    hf.save_model(tmp_path / "model", CONFIG, dict(make_decoder().named_parameters()), torch.float32)
    return tmp_path / "model"


@pytest.mark.parametrize("shard_bytes", [hf.SHARD_BYTES, 4000])
@pytest.mark.parametrize("variant", VARIANTS)
def test_saved_folder_gives_equal_logits_in_transformers_and_here(
    tmp_path: Path, variant: str, shard_bytes: int
) -> None:
    from transformers import AutoModelForCausalLM

    config, path = CONFIG | VARIANTS[variant], tmp_path / "m"
    decoder = make_decoder(config)
    hf.save_model(path, config, decoder.named_parameters(), torch.float32, shard_bytes=shard_bytes)
    assert (path / hf.INDEX).exists() == (shard_bytes == 4000)
    tokens = [3, 1, 4, 1, 5]
    with torch.no_grad():
        expected = decoder(pack_from([tokens], [1]), output="logits")
        again = load_model(path)(pack_from([tokens], [1]), output="logits")
        theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(torch.tensor([tokens]))
    assert torch.equal(again, expected)
    torch.testing.assert_close(theirs.logits[0], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_saved_type_is_the_one_asked_for(tmp_path: Path, dtype: torch.dtype) -> None:
    path = tmp_path / "m"
    hf.save_model(path, CONFIG | {"torch_dtype": "float32"}, make_decoder().named_parameters(), dtype, shard_bytes=4000)
    hf.check_trainable(path)
    written = hf.load_config(path)
    assert written["dtype"] == str(dtype).removeprefix("torch.") and "torch_dtype" not in written
    assert {tensor.dtype for file in path.glob("*.safetensors") for tensor in load_file(file).values()} == {dtype}
    assert all(p.dtype == torch.float32 and p.requires_grad for p in load_model(path).parameters())


def test_saving_replaces_a_folder_whole_and_leaves_nothing_beside(folder: Path) -> None:
    (folder / "stale.txt").write_text("old")
    hf.save_model(folder, CONFIG, make_decoder().named_parameters(), torch.float32)
    assert not (folder / "stale.txt").exists()
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_full_disk_leaves_the_earlier_folder_intact(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hf, "save_file", fail)
    before = (folder / hf.WEIGHTS).read_bytes()
    with pytest.raises(CheckpointError, match="No space left.*free disk space"):
        hf.save_model(folder, CONFIG, make_decoder().named_parameters(), torch.float32)
    assert (folder / hf.WEIGHTS).read_bytes() == before
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


REFUSED = [json.loads(line) for line in Path(__file__).with_name("refused_configs.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: f"{row['base']}-{str(row['change'])[:50]}")
def test_a_config_that_cannot_be_trained_or_that_the_weights_do_not_fit_is_refused(
    folder: Path, row: dict[str, Any]
) -> None:
    bases = {"llama": CONFIG, "nothing": {}, "mistral3": config_of("mistral3")}
    (folder / "config.json").write_text(json.dumps(bases[row["base"]] | row["change"]))
    with pytest.raises(ModelError, match=row["message"]) as error:
        hf.check_trainable(folder, row["implementation"])
    assert "\n" not in str(error.value)


def cut(size: int) -> Callable[[Path], object]:
    return lambda folder: (folder / hf.WEIGHTS).write_bytes((folder / hf.WEIGHTS).read_bytes()[:size])


def promise_a_terabyte(folder: Path) -> None:
    header = json.dumps({NORM: {"dtype": "F32", "shape": [1 << 38], "data_offsets": [0, 1 << 40]}}).encode()
    (folder / hf.WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header)


def lose_a_shard(folder: Path) -> None:
    hf.save_model(folder, CONFIG, make_decoder().named_parameters(), torch.float32, shard_bytes=4000)
    next(folder.glob("model-00002*")).unlink()


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (lambda folder: folder.rename(folder.with_name("other")), r"model does not exist: set model\.path"),
    "half a config": (lambda folder: (folder / "config.json").write_text("{"), "config.json cannot be read"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    "no weights": (lambda folder: (folder / hf.WEIGHTS).unlink(), "no model.safetensors"),
    "pickled": (
        lambda folder: (folder / hf.WEIGHTS).rename(folder / "pytorch_model.bin"),
        "pytorch_model.bin.*refused.*Convert them to safetensors",
    ),
    "a shard": (lose_a_shard, "names model-00002.*missing"),
    "a terabyte": (promise_a_terabyte, "is truncated or damaged"),
    **{f"cut at {size}": (cut(size), "model.safetensors is truncated or damaged") for size in (0, 5, 200, -100)},
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_folder_that_is_damaged_is_refused_with_the_repair(folder: Path, name: str) -> None:
    damage, message = DAMAGES[name]
    damage(folder)
    for read in (hf.check_trainable, load_model):
        with pytest.raises(ModelError, match=message):
            read(folder)


Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def without_a_tensor(state: dict[str, Tensor]) -> dict[str, Tensor]:
    del state["model.layers.1.mlp.up_proj.weight"]
    return {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: {NORM: state[NORM].long()}, rf"{NORM} is of type I64"),
        (lambda state: {NORM: state[NORM].to(torch.float8_e4m3fn)}, rf"{NORM} is of type F8_E4M3"),
        (lambda state: {NORM: state[NORM].bool()}, rf"{NORM} is of type BOOL"),
        (lambda state: {NORM: torch.ones(15)}, rf"{NORM} has shape \[15\], config\.json asks for \[16\]"),
        (lambda state: {"visual.weight": torch.ones(1)}, r"has unknown visual\.weight"),
        (without_a_tensor, r"lacks model\.layers\.1\.mlp\.up_proj"),
    ],
)
def test_weights_of_another_name_type_or_shape_are_refused(folder: Path, change: Change, message: str) -> None:
    state = load_file(folder / hf.WEIGHTS)
    save_file(state | change(state), folder / hf.WEIGHTS)
    for read in (hf.check_trainable, load_model):
        with pytest.raises(ModelError, match=message):
            read(folder)


def test_tensors_that_are_known_and_not_needed_are_left_out(folder: Path) -> None:
    surplus = {"lm_head.weight": torch.zeros(40, 16), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    save_file(load_file(folder / hf.WEIGHTS) | surplus, folder / hf.WEIGHTS)
    hf.check_trainable(folder)
    load_model(folder)


def test_resolve_takes_folders_and_says_what_to_do_about_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    assert hf.resolve(str(tmp_path)) == tmp_path
    for text in ("models/not/there", "./nothing", "nothing"):
        with pytest.raises(ModelError, match="no such folder, and it is no Hub id"):
            hf.resolve(text)
    with pytest.raises(ModelError, match=r"no route to host.*hf download owner/name.*model\.path"):
        hf.resolve("owner/name")


def test_copy_tokenizer_takes_all_it_finds_or_says_there_is_none(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    with pytest.raises(ModelError, match="has no tokenizer"):
        hf.copy_tokenizer(source, target)
    for name in ("tokenizer.json", "chat_template.jinja", "config.json"):
        (source / name).write_text("{}")
    hf.copy_tokenizer(source, target)
    assert sorted(path.name for path in target.iterdir()) == ["chat_template.jinja", "tokenizer.json"]
