"""Model folders: round trip through transformers, and one clear error for everything that can be wrong with one."""

import errno
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.errors import CheckpointError, ModelError
from shared.model import hf
from shared.model.decoder import Decoder, DecoderConfig, initialise
from tests.model_folder import load_model
from tests.packed import pack_from

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.3,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
VARIANTS = {
    "llama tied": {},
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "tie_word_embeddings": False,
        "sliding_window": None,
    },
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": False},
    "qwen3 tied": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 8},
}


def make_decoder(config=CONFIG):
    decoder = Decoder(DecoderConfig.from_hf(config))
    initialise(decoder, 0)
    return decoder


@pytest.fixture
def folder(tmp_path):
    """A sound model folder."""
    hf.save_model(tmp_path / "model", CONFIG, dict(make_decoder().named_parameters()), torch.float32)
    return tmp_path / "model"


@pytest.mark.parametrize("shard_bytes", [hf.SHARD_BYTES, 4000])
@pytest.mark.parametrize("variant", VARIANTS)
def test_saved_folder_gives_equal_logits_in_transformers_and_here(tmp_path, variant, shard_bytes):
    from transformers import AutoModelForCausalLM

    config = CONFIG | VARIANTS[variant]
    decoder = make_decoder(config)
    hf.save_model(tmp_path / "m", config, decoder.named_parameters(), torch.float32, shard_bytes=shard_bytes)
    assert (tmp_path / "m" / hf.INDEX).exists() == (shard_bytes == 4000)
    tokens = [3, 1, 4, 1, 5]
    with torch.no_grad():
        expected = decoder(pack_from([tokens], [1]), output="logits")
        again = load_model(tmp_path / "m")(pack_from([tokens], [1]), output="logits")
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)(torch.tensor([tokens]))
    assert torch.equal(again, expected)
    torch.testing.assert_close(theirs.logits[0], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_saved_type_is_the_one_asked_for(tmp_path, dtype):
    config = CONFIG | {"torch_dtype": "float32"}
    hf.save_model(tmp_path / "m", config, make_decoder().named_parameters(), dtype)
    written = hf.load_config(tmp_path / "m")
    assert written["dtype"] == str(dtype).removeprefix("torch.") and "torch_dtype" not in written
    stored = load_file(tmp_path / "m" / hf.WEIGHTS)
    assert {tensor.dtype for tensor in stored.values()} == {dtype}
    loaded = load_model(tmp_path / "m")
    assert all(p.dtype == torch.float32 and p.requires_grad for p in loaded.parameters())


def test_saving_replaces_a_folder_whole_and_leaves_nothing_beside(folder):
    (folder / "stale.txt").write_text("old")
    hf.save_model(folder, CONFIG, make_decoder().named_parameters(), torch.float32)
    assert not (folder / "stale.txt").exists()
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_full_disk_leaves_the_earlier_folder_intact(folder, monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hf, "save_file", fail)
    before = (folder / hf.WEIGHTS).read_bytes()
    with pytest.raises(CheckpointError, match="No space left.*free disk space"):
        hf.save_model(folder, CONFIG, make_decoder().named_parameters(), torch.float32)
    assert (folder / hf.WEIGHTS).read_bytes() == before
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_missing_folder(tmp_path):
    with pytest.raises(ModelError, match=r"nowhere does not exist: set model\.path"):
        load_model(tmp_path / "nowhere")


def test_missing_or_broken_config(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match="config.json cannot be read"):
        load_model(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match="has no config.json"):
        load_model(folder)


def test_unsupported_architecture(folder):
    (folder / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["MambaForCausalLM"]}))
    with pytest.raises(ModelError, match="MambaForCausalLM.*supported: LlamaForCausalLM, MistralForCausalLM"):
        load_model(folder)


def test_missing_weights(folder):
    (folder / hf.WEIGHTS).unlink()
    with pytest.raises(ModelError, match="no model.safetensors"):
        load_model(folder)


@pytest.mark.parametrize("size", [0, 5, 200, -100])
def test_truncated_weights(folder, size):
    path = folder / hf.WEIGHTS
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ModelError, match="model.safetensors is truncated or damaged"):
        load_model(folder)


def test_pickle_only_folder_is_refused_unopened(folder):
    (folder / hf.WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"never opened")
    with pytest.raises(ModelError, match="pytorch_model.bin.*refused.*Convert them to safetensors"):
        load_model(folder)


def change_weights(folder, change):
    state = load_file(folder / hf.WEIGHTS)
    change(state)
    save_file(state, folder / hf.WEIGHTS)


def test_missing_tensor_is_named(folder):
    change_weights(folder, lambda state: state.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(folder)


def test_unknown_tensor_is_named_but_known_surplus_is_ignored(folder):
    surplus = {
        "lm_head.weight": torch.zeros(40, 16),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
    }
    change_weights(folder, lambda state: state.update(surplus))
    load_model(folder)
    change_weights(folder, lambda state: state.update({"visual.weight": torch.zeros(1)}))
    with pytest.raises(ModelError, match="has unknown visual.weight"):
        load_model(folder)


def test_wrong_shape_is_named(folder):
    change_weights(folder, lambda state: state.update({"model.norm.weight": torch.ones(15)}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \[15\], config\.json asks for \[16\]"):
        load_model(folder)


def test_missing_shard_is_named(tmp_path):
    hf.save_model(tmp_path / "m", CONFIG, make_decoder().named_parameters(), torch.float32, shard_bytes=4000)
    next(iter(sorted((tmp_path / "m").glob("model-00002*")))).unlink()
    with pytest.raises(ModelError, match="names model-00002.*missing"):
        load_model(tmp_path / "m")


def test_resolve_takes_folders_and_refuses_what_is_neither(tmp_path, monkeypatch):
    assert hf.resolve(str(tmp_path)) == tmp_path
    for text in ("models/not/there", "./nothing", "nothing"):
        with pytest.raises(ModelError, match="no such folder, and it is no Hub id"):
            hf.resolve(text)


def test_resolve_says_what_to_do_when_the_hub_is_out_of_reach(monkeypatch):
    import huggingface_hub

    def fail(*_, **__):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError, match=r"no route to host.*hf download owner/name.*model\.path"):
        hf.resolve("owner/name")


def test_copy_tokenizer_takes_all_it_finds_or_says_there_is_none(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    with pytest.raises(ModelError, match="has no tokenizer"):
        hf.copy_tokenizer(source, tmp_path / "target")
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("x")
    (source / "config.json").write_text("{}")
    hf.copy_tokenizer(source, tmp_path / "target")
    assert sorted(path.name for path in (tmp_path / "target").iterdir()) == ["chat_template.jinja", "tokenizer.json"]
