"""Model folders: one clear error for everything that can be wrong with one. Round trips: test_decoder.py.

refused_configs.jsonl: what in a config.json (`change` of `base`) an implementation refuses, and words of the error.
"""

import errno
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from serve.settings import ServerSettings
from shared.config import Config
from shared.errors import CheckpointError, ModelError
from shared.model import hf
from shared.model.decoder import Decoder, DecoderConfig, initialise
from tests.families import config_of
from tests.model_folder import load_model
from tests.tables import read_table
from trainer.objectives.objective import LocalTeacher

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 40, "hidden_size": 16,
    "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 64, "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "initializer_range": 0.3,
    "hidden_act": "silu", "tie_word_embeddings": True,
}  # fmt: skip
NORM, LOST = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"


def make_decoder(config: Mapping[str, Any] = CONFIG) -> Decoder:
    decoder = Decoder(DecoderConfig.from_hf(config))
    initialise(decoder, 0)
    return decoder


def save(path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> None:
    hf.save_model(path, CONFIG | {"torch_dtype": "float32"}, make_decoder().named_parameters(), dtype, **options)


@pytest.fixture
def folder(tmp_path):
    """A sound model folder."""
    save(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_saved_type_is_the_one_asked_for(tmp_path, dtype):
    save(tmp_path / "m", dtype, shard_bytes=4000)
    hf.check_trainable(tmp_path / "m")
    written, files = hf.load_config(tmp_path / "m"), (tmp_path / "m").glob("*.safetensors")
    assert written["dtype"] == str(dtype).removeprefix("torch.") and "torch_dtype" not in written
    assert {tensor.dtype for file in files for tensor in load_file(file).values()} == {dtype}
    assert all(p.dtype == torch.float32 and p.requires_grad for p in load_model(tmp_path / "m").parameters())


def test_saving_replaces_a_folder_whole_or_leaves_the_earlier_one_and_nothing_beside(folder, monkeypatch):
    (folder / "stale.txt").write_text("old")
    save(folder)
    assert not (folder / "stale.txt").exists()
    before = (folder / hf.WEIGHTS).read_bytes()

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hf, "save_file", fail)
    with pytest.raises(CheckpointError, match="No space left.*free disk space"):
        save(folder)
    assert (folder / hf.WEIGHTS).read_bytes() == before
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


@pytest.mark.parametrize(
    "row", read_table("shared/refused_configs"), ids=lambda row: f"{row['base']}-{str(row['change'])[:50]}"
)
def test_a_config_that_cannot_be_trained_or_that_the_weights_do_not_fit_is_refused(folder, row):
    bases = {"llama": CONFIG, "nothing": {}, "mistral3": config_of("mistral3")}
    (folder / "config.json").write_text(json.dumps(bases[row["base"]] | row["change"]))
    with pytest.raises(ModelError, match=row["message"]) as error:
        hf.check_trainable(folder, row["implementation"])
    assert "\n" not in str(error.value)


HUGE = json.dumps({NORM: {"dtype": "F32", "shape": [1 << 38], "data_offsets": [0, 1 << 40]}}).encode()
DAMAGES = {
    "no folder": r"model does not exist: set model\.path",
    "half a config": "config.json cannot be read",
    "no config": "has no config.json",
    "no weights": "no model.safetensors",
    "pickled": "pytorch_model.bin.*refused.*Convert them to safetensors",
    "a shard": "names model-00002.*missing",
    **dict.fromkeys(("a terabyte", "0", "5", "200", "-100"), "model.safetensors is truncated or damaged"),
}
"""numbers: where the file of weights is cut"""


def damage(folder: Path, name: str) -> None:
    weights, config = folder / hf.WEIGHTS, folder / "config.json"
    if name == "a shard":
        save(folder, shard_bytes=4000)
        next(folder.glob("model-00002*")).unlink()
    elif lost := {"no folder": folder, "no config": config, "no weights": weights}.get(name):
        lost.rename(folder / "../other")
    elif name == "pickled":
        weights.rename(folder / "pytorch_model.bin")
    elif name == "half a config":
        config.write_text("{")
    else:
        content = len(HUGE).to_bytes(8, "little") + HUGE if name == "a terabyte" else weights.read_bytes()[: int(name)]
        weights.write_bytes(content)


@pytest.mark.parametrize("name", DAMAGES)
def test_a_folder_that_is_damaged_is_refused_with_the_repair(folder, name):
    damage(folder, name)
    for read in (hf.check_trainable, load_model):
        with pytest.raises(ModelError, match=DAMAGES[name]):
            read(folder)


@pytest.mark.parametrize(("change", "message"), [
    ({NORM: torch.ones(16, dtype=torch.int64)}, rf"{NORM} is of type I64"),
    ({NORM: torch.ones(16).to(torch.float8_e4m3fn)}, rf"{NORM} is of type F8_E4M3"),
    ({NORM: torch.ones(16, dtype=torch.bool)}, rf"{NORM} is of type BOOL"),
    ({NORM: torch.ones(15)}, rf"{NORM} has shape \[15\], config\.json asks for \[16\]"),
    ({"visual.weight": torch.ones(1)}, r"has unknown visual\.weight"),
    ({LOST: None}, r"lacks model\.layers\.1\.mlp\.up_proj"),
    ({"lm_head.weight": torch.zeros(40, 16), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}, ""),
])  # fmt: skip
def test_weights_of_another_name_type_or_shape_are_refused_and_what_is_known_and_not_needed_is_left_out(
    folder, change, message
):
    state = load_file(folder / hf.WEIGHTS) | change
    save_file({name: tensor for name, tensor in state.items() if tensor is not None}, folder / hf.WEIGHTS)
    for read in (hf.check_trainable, load_model):
        if not message:
            read(folder)
            continue
        with pytest.raises(ModelError, match=message):
            read(folder)


def test_resolve_takes_folders_and_says_what_to_do_about_the_rest(tmp_path, monkeypatch):
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


def test_copy_tokenizer_takes_all_there_is_or_says_there_is_none(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    with pytest.raises(ModelError, match="has no tokenizer"):
        hf.copy_tokenizer(source, target)
    for name in ("tokenizer.json", "chat_template.jinja", "config.json"):
        (source / name).write_text("{}")
    hf.copy_tokenizer(source, target)
    assert sorted(path.name for path in target.iterdir()) == ["chat_template.jinja", "tokenizer.json"]


def test_a_checkpoint_as_model_is_told_from_an_export(tmp_path):
    """Wherever a model is named. A folder of exports names the newest of them."""
    run = tmp_path / "run"
    step = run / "checkpoints" / "step_15"
    step.mkdir(parents=True)
    (run / "config.toml").touch()
    for path, repair in ((step, f"no model: export it first: `.*-m trainer.export {run} 15`$"),
                         (step.parent, f"export it first: `.*-m trainer.export {run}`$")):  # fmt: skip
        with pytest.raises(ModelError, match=repair):
            Config.model_validate({"model": {"path": str(path)}})
    (run / "latest").mkdir()
    (run / "hf" / "step_15").mkdir(parents=True)
    (run / "hf" / "step_15" / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=f"take {run}/latest, or export it first: `"):
        ServerSettings(model=str(step))
    with pytest.raises(ModelError, match=r"has no config\.json: .*: did you mean .*run/hf/step_15\?"):
        hf.load_config(run / "hf")
    assert hf.resolve(str(tmp_path)) == tmp_path


def test_a_runs_folder_stands_for_its_newest_export(tmp_path):
    """Wherever a model is named: by `resolve`, a run's model.path, a teacher, the server."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").touch()
    with pytest.raises(ModelError, match="run is the folder of a run that has exported no model: train it to its end"):
        Config.model_validate({"model": {"path": str(run)}})
    (run / "latest").mkdir()
    for path in (
        Config.model_validate({"model": {"path": str(run)}}).model.path, LocalTeacher(path=str(run)).path,
        ServerSettings(model=str(run)).model, str(hf.resolve(str(run))),
    ):  # fmt: skip
        assert path == str(run / "latest")
    (run / "config.json").touch()
    assert Config.model_validate({"model": {"path": str(run)}}).model.path == str(run), "a model that was trained there"
