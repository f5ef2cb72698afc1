"""The files of a run: what its script makes, a teacher's folder against the policy's, and models that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from shared.config import Config
from shared.errors import ConfigError, DataError, ModelError
from shared.model import hf
from shared.progress import Progress
from tests.families import config_of
from tests.trainer.test_dry_run import SMOLLM2
from trainer.check.plan import model_shape
from trainer.data.sources import check_tokenizers, check_vocabulary, gather_sources, prepare
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


# ---- the script of [prepare]: run once into a folder that is whole or absent ----

SCRIPT = """
def prepare(folder, options, seed):
    (folder / "train.jsonl").write_text(f"{options['count']} {seed}")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SCRIPT)
    return path


def with_script(script: Path, count: int = 3, **changes: Any) -> Config:
    table = {"runs_dir": str(script.parent), "prepare": {"script": str(script), "options": {"count": count}}}
    return Config.model_validate({**table, **changes})


def run(settings: Config) -> Path:
    prepare(settings, Progress())
    return settings.run_dir / "made"


def test_the_script_is_told_its_options_and_the_seed(script: Path) -> None:
    made = run(with_script(script, seed=7))
    assert (made / "train.jsonl").read_text() == "3 7" and (made / "model" / "config.json").is_file()


def test_paths_that_begin_with_made_are_of_the_run(script: Path) -> None:
    settings = with_script(script)
    assert settings.locate("made/train.jsonl") == str(run(settings) / "train.jsonl")
    assert settings.locate("data/made/train.jsonl") == "data/made/train.jsonl" and settings.locate("") == ""


def test_a_second_launch_does_not_run_it_again(script: Path) -> None:
    made = run(with_script(script))
    (made / "train.jsonl").write_text("kept")
    assert (run(with_script(script)) / "train.jsonl").read_text() == "kept"


def test_without_a_script_nothing_is_made(script: Path) -> None:
    assert not run(with_script(script, prepare={"options": {"count": 3}})).exists()


@pytest.mark.parametrize(
    ("changes", "remark", "setting"),
    [({"seed": 1}, "", "seed"), ({"count": 4}, "", "prepare.options.count"), ({}, "# changed", "prepare.script")],
)
def test_a_folder_made_from_something_else_is_refused(
    script: Path, changes: dict[str, Any], remark: str, setting: str
) -> None:
    run(with_script(script))
    script.write_text(SCRIPT + remark)
    with pytest.raises(ConfigError, match=rf"made with other settings \({setting} changed\)"):
        run(with_script(script, **changes))


def test_a_script_that_fails_half_way_leaves_no_folder_and_may_begin_again(script: Path) -> None:
    script.write_text(SCRIPT + "    raise RuntimeError('half way')\n")
    with pytest.raises(ConfigError, match=r"prepare.script: .*mine.py fails with RuntimeError: half way in line 6"):
        run(with_script(script))
    script.write_text(SCRIPT)
    assert (run(with_script(script)) / "train.jsonl").is_file()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import nothing_like_it", "fails with ModuleNotFoundError: .* in line 1"),
        ("x = 1", r"has no function prepare\(folder, options, seed\)"),
        ("def prepare(folder): pass", "fails with TypeError"),
    ],
)
def test_a_script_that_cannot_be_used_is_told(script: Path, text: str, message: str) -> None:
    script.write_text(text)
    with pytest.raises(ConfigError, match=message):
        run(with_script(script))


def test_a_script_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"prepare.script = '.*none.py': there is no such file"):
        run(with_script(tmp_path / "none.py"))


def test_a_folder_that_cannot_be_written_is_named(script: Path) -> None:
    (script.parent / "run").write_text("a file in the way")
    with pytest.raises(DataError, match="runs_dir"):
        run(with_script(script))
