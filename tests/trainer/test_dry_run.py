"""`--dry-run`: placement, derived numbers and memory, by hand for a model of known size."""

import json
from operator import itemgetter
from types import SimpleNamespace

import pytest
import torch

from shared import settings_file
from shared.config import Config
from shared.errors import ModelError
from tests.shared.test_turns import chat_of
from tests.tables import read_table
from trainer.__main__ import main
from trainer.check.plan import derived_lines, memory_lines, model_shape, placement_lines, plan_text
from trainer.check.remarks import remark_lines
from trainer.memory import size

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152, "hidden_size": 576,
    "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192,
}  # fmt: skip
LINES = {"placement": placement_lines, "derived": derived_lines, "memory": memory_lines, "remarks": remark_lines}


@pytest.mark.parametrize("row", read_table("trainer/plans"), ids=itemgetter("name"))
def test_what_a_plan_says(tmp_path, monkeypatch, row):
    """On a machine with so many cards of 24 GiB. MODEL: a folder of 134,515,008 parameters."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: row.get("cards", 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=24 << 30))
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    config = Config.model_validate_json(json.dumps(row["settings"]).replace("MODEL", str(tmp_path)))
    shape = [model_shape(config) if config.model.path else None] if row["of"] in ("memory", "remarks") else []
    text = " ".join(" ".join(LINES[row["of"]](config, *shape)).split())
    assert text == row.get("is", text)
    assert [part for part in row.get("has", []) if part not in text] == [], text
    assert [part for part in row.get("lacks", []) if part in text] == [], text


def test_a_folder_that_is_no_model_is_refused(tmp_path):
    assert model_shape(Config.model_validate({"model": {"path": "owner/name"}})) is None
    with pytest.raises(ModelError, match=r"config\.json"):
        plan_text(Config.model_validate({"model": {"path": str(tmp_path)}}))


def test_the_printed_settings_can_be_used_as_a_file_and_stages_are_told(tmp_path):
    chat_of(tmp_path, "ours")
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    first = {"name": "short", "until_step": 5, "until": "accuracy > 0.9"}
    stages = [first, {"name": "long", "rollout": {"max_async_level": 1}}]
    given = Config.model_validate({"seed": 5, "model": {"path": str(tmp_path)}, "stages": stages})
    text = plan_text(given)
    assert "until step 5 or accuracy > 0.9" in text and "async level 1; until the end" in text
    (tmp_path / "printed.toml").write_text(text.partition("tells all)\n")[2])
    assert settings_file.load(tmp_path / "printed.toml") == given


def test_settings_come_from_the_environment(tmp_path, monkeypatch, capsys):
    path = tmp_path / "run.toml"
    made = 'model.path = "made/model"\ndata.train = "made/train.jsonl"\n'
    path.write_text(f'seed = 1\n{made}prepare.script = "examples/quickstart/prepare.py"\n')
    monkeypatch.setenv("MAESTRALE_TRAIN_SEED", "2")
    monkeypatch.setenv("MAESTRALE_TRAIN_OBJECTIVE__KL__WEIGHT", "0.5")
    assert main([str(path), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "\nseed = 2\n" in printed and '\nkl = {"weight" = 0.5}\n' in printed
    monkeypatch.setenv("MAESTRALE_TRAIN_OBJECTIVE__KLL", "0.5")
    assert main([str(path), "--dry-run"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: MAESTRALE_TRAIN_OBJECTIVE__KLL: unknown setting objective.kll"), message


def test_sizes_for_people():
    sizes = {2048: "2 KiB", 1.5 * 2**20: "1.5 MiB", 340 * 2**20: "340 MiB", 2**30: "1.0 GiB", 3 * 2**40: "3.0 TiB"}
    assert [size(number) for number in sizes] == list(sizes.values())
