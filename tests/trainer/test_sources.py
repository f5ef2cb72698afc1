"""What a run needs is set; a teacher's folder against the policy's: the same token ids, and no fewer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from shared.config import Config
from shared.errors import ConfigError, DataError, ModelError
from shared.model import hf
from tests.families import config_of
from tests.trainer.test_dry_run import SMOLLM2
from trainer.check.plan import model_shape
from trainer.data.sources import check_tokenizers, check_vocabulary, gather_sources
from trainer.settings import load


def make(folder: Path, tokens: str, rows: int = 8) -> Path:
    folder.mkdir()
    vocabulary = {token: number for number, token in enumerate(tokens)}
    Tokenizer(models.WordLevel(vocabulary, unk_token=tokens[0])).save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({**SMOLLM2, "vocab_size": rows}))
    return folder


def test_equal_tokens_pass_also_with_more_rows_of_padding(tmp_path: Path) -> None:
    check_tokenizers(make(tmp_path / "policy", "abc"), make(tmp_path / "teacher", "abc", rows=16))


@pytest.mark.parametrize(
    ("tokens", "message"), [("acb", "2 tokens differ, for example 'b'"), ("abcd", "1 tokens differ, for example 'd'")]
)
def test_other_tokens_are_counted_and_one_is_named(tmp_path: Path, tokens: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        check_tokenizers(make(tmp_path / "policy", "abc"), make(tmp_path / "teacher", tokens))


def test_a_teacher_that_knows_fewer_ids_than_the_policy_may_sample_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="teacher has 4 rows of token ids, .*policy has 8"):
        check_tokenizers(make(tmp_path / "policy", "abc"), make(tmp_path / "teacher", "abc", rows=4))


def test_a_tokenizer_with_more_tokens_than_the_model_has_rows_is_refused(tmp_path: Path) -> None:
    check_vocabulary(make(tmp_path / "whole", "abc", rows=3))
    with pytest.raises(ModelError, match=r"tokenizer\.json has tokens up to id 3, config\.json has vocab_size = 3"):
        check_vocabulary(make(tmp_path / "short", "abcd", rows=3))


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    teacher = make(tmp_path / "teacher", "abc")
    (teacher / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"teacher has no tokenizer\.json"):
        check_tokenizers(make(tmp_path / "policy", "abc"), teacher)


def test_a_teacher_that_is_not_there_names_its_own_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "check_trainable", lambda *_: None)  # the folder holds no weights
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"problem": "1+1?", "answer": "2"}\n')
    model = make(tmp_path / "policy", "abc")
    config = Config.model_validate(
        {
            "model": {"path": str(model)},
            "data": {"train": str(rows), "validation": ""},
            "objective": {
                "name": "distill",
                "teacher": {"kind": "local", "path": str(tmp_path / "absent" / "teacher" / "x")},
            },
        }
    )
    with pytest.raises(ModelError, match=r"objective\.teacher\.path = '.*absent"):
        gather_sources(config)
    demonstrations = tmp_path / "demonstrations.jsonl"
    demonstrations.write_text('{"problem": "1+1?", "response": "2"}\n')
    imitating = {"mode": "sft", "sft": {"steps": 1, "demonstrations": str(demonstrations)}}
    only = Config.model_validate(config.model_dump() | imitating)
    assert gather_sources(only).teacher_dir is None, "imitation has no teacher"


def test_a_launch_without_model_and_problems_is_told_what_to_set(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("")
    with pytest.raises(ConfigError) as caught:
        load(str(path), [])
    assert str(caught.value).splitlines() == [
        f"{path}: model.path is not set: name a folder or a Hugging Face model, e.g. --model.path=Qwen/Qwen3-0.6B",
        f"{path}: data.train is not set: name a JSONL file of problems, e.g. --data.train=problems.jsonl",
    ]


def test_a_made_file_that_is_not_there_is_named_by_its_place(tmp_path: Path) -> None:
    config = Config.model_validate({"runs_dir": str(tmp_path), "data": {"train": "made/train.jsonl"}})
    with pytest.raises(DataError, match=rf"data.train = '{tmp_path}/run/made/train.jsonl': there is no such file"):
        gather_sources(config)


def table_of(family: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings with a model's folder of this family, which holds no weights, and a problem."""
    monkeypatch.setattr(hf, "check_trainable", lambda *_: None)
    rows = folder / "rows.jsonl"
    rows.write_text('{"problem": "1+1?", "answer": "2"}\n')
    model = make(folder / "policy", "abc")
    (model / "config.json").write_text(json.dumps(config_of(family)))
    return {"model": {"path": str(model)}, "data": {"train": str(rows), "validation": ""}}


def test_a_model_whose_engines_cannot_take_new_weights_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = table_of("gpt-oss", tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match='mode = "rl": vLLM keeps the experts of gpt-oss in another layout'):
        gather_sources(Config.model_validate(table))


def test_adapters_of_a_model_that_also_sees_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = table_of("mistral3", tmp_path, monkeypatch)
    assert gather_sources(Config.model_validate(table)).model_dir == Path(table["model"]["path"])
    with pytest.raises(
        ConfigError, match=r"lora\.rank = 8: adapters of vision-language models .*: set lora\.rank to 0"
    ):
        gather_sources(Config.model_validate(table | {"lora": {"rank": 8}}))


def test_adapters_of_layers_that_the_model_lacks_are_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = table_of("qwen3 moe", tmp_path, monkeypatch)
    for targets, fits in ((["all-linear", "experts"], True), (["expert"], False)):
        config = Config.model_validate(table | {"lora": {"rank": 8, "targets": targets}})
        for check in (gather_sources, model_shape):
            if fits:
                check(config)
                continue
            with pytest.raises(ConfigError, match=r'lora\.targets: "expert" names no layer'):
                check(config)
