"""The files of a run: what its script makes, a teacher's folder against the policy's, and models that are refused."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from shared.config import Config
from shared.errors import ConfigError, DataError, InputError, ModelError
from shared.launch import node
from shared.launch.ranks import Nodes
from shared.model import hf
from shared.model.implementation import read_shape
from shared.progress import Progress
from tests.families import config_of
from tests.trainer.test_dry_run import SMOLLM2
from trainer.__main__ import launch
from trainer.check.plan import model_shape
from trainer.data.sources import check_model, check_reach, check_tokenizers, check_vocabulary, gather_sources, prepare
from trainer.settings import load

SCRIPT = """
def prepare(folder, options, seed):
    (folder / "train.jsonl").write_text(f"{options['count']} {seed}")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
"""


def make(folder: Path, tokens: str, rows: int = 8) -> Path:
    folder.mkdir()
    vocabulary = {token: number for number, token in enumerate(tokens)}
    Tokenizer(models.WordLevel(vocabulary, unk_token=tokens[0])).save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({**SMOLLM2, "vocab_size": rows}))
    return folder


@pytest.mark.parametrize(("tokens", "rows", "message"), [
    ("acb", 8, "2 tokens differ, for example 'b'"), ("abcd", 8, "1 tokens differ, for example 'd'"),
    ("abc", 4, "teacher has 4 rows of token ids, .*policy has 8"),
])  # fmt: skip
def test_a_teacher_with_other_tokens_than_the_policy_is_refused(tmp_path, tokens, rows, message):
    policy, teacher = make(tmp_path / "policy", "abc"), make(tmp_path / "padded", "abc", rows=16)
    check_tokenizers(policy, teacher)
    with pytest.raises(ModelError, match=message):
        check_tokenizers(policy, make(tmp_path / "teacher", tokens, rows))
    (teacher / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"padded has no tokenizer\.json"):
        check_tokenizers(policy, teacher)


def test_a_tokenizer_with_more_tokens_than_the_model_has_rows_is_refused(tmp_path):
    check_vocabulary(make(tmp_path / "whole", "abc", rows=3))
    with pytest.raises(ModelError, match=r"tokenizer\.json has tokens up to id 3, config\.json has vocab_size = 3"):
        check_vocabulary(make(tmp_path / "short", "abcd", rows=3))


@pytest.mark.parametrize(("rope", "reach"), [
    ({}, 64), ({"rope_type": "linear", "factor": 4.0}, 256), ({"rope_type": "yarn", "factor": 4.0}, 64),
])  # fmt: skip
def test_more_tokens_than_the_model_has_positions_are_refused(tmp_path, rope, reach):
    """vLLM would, when an engine starts; by then problems were read and trainers loaded."""
    shape = read_shape({**SMOLLM2, "max_position_embeddings": 64, **({"rope_scaling": rope} if rope else {})})
    check_reach(shape, reach, tmp_path)
    with pytest.raises(ConfigError, match=rf"model\.max_tokens = {reach + 1}, but .* has {reach} positions"):
        check_reach(shape, reach + 1, tmp_path)


@pytest.mark.parametrize(("model", "compute", "others", "refused"), [
    ("float32", "bfloat16", {}, True), ("float32", "float32", {}, False), ("bfloat16", "bfloat16", {}, False),
    ("float32", "bfloat16", {"sync": {"verify": False}}, False),
])  # fmt: skip
def test_types_in_which_engine_and_trainer_cannot_agree_are_refused(
    tmp_path, monkeypatch, model, compute, others, refused
):
    """The first proof would: 1.8e-2 nats on a processor with bfloat16 units, where 1e-4 are allowed."""
    monkeypatch.setattr(hf, "check_trainable", lambda *_: None)
    folder = make(tmp_path / "model", "abc", rows=3)
    given = {"model": {"path": str(folder), "dtype": model}, "optimiser": {"compute_dtype": compute}, **others}
    with pytest.raises(ConfigError, match="give both the same type") if refused else nullcontext():
        check_model(Config.model_validate(given), folder)


def test_a_launch_without_model_and_problems_is_told_what_to_set(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("")
    with pytest.raises(ConfigError) as error:
        load(str(path), [])
    assert str(error.value).splitlines() == [
        f"{path}: model.path is not set: name a folder or a Hugging Face model, e.g. --model.path=Qwen/Qwen3-0.6B",
        f"{path}: data.train is not set: name a JSONL file of problems, e.g. --data.train=problems.jsonl",
    ]


@pytest.mark.parametrize(("train", "model", "message"), [
    ("row.jsonl", "gone", r"data.train = 'row.jsonl': there is no such file; did you mean rows.jsonl\?"),
    ("wrong.jsonl", "gone", "wrong.jsonl:1 lacks 'problem': it has 'query', 'target'"),
    ("rows.jsonl", "gone", "model.path = 'gone': there is no such folder"),
])  # fmt: skip
def test_what_is_known_without_ranks_is_told_before_they_start(tmp_path, monkeypatch, train, model, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(node, "run_ranks", lambda *_: pytest.fail("ranks were started"))
    (tmp_path / "rows.jsonl").write_text('{"problem": "1+1?", "answer": "2"}\n')
    (tmp_path / "wrong.jsonl").write_text('{"query": "1+1?", "target": "2"}\n')
    config = Config.model_validate({"data": {"train": train}, "model": {"path": model}})
    with pytest.raises(InputError, match=message):
        launch(config, ["mine.toml"], Nodes(1, 0, "127.0.0.1", 29500))


def test_a_made_file_that_is_not_there_is_named_by_its_place(tmp_path):
    config = Config.model_validate({"runs_dir": str(tmp_path), "data": {"train": "made/train.jsonl"}})
    with pytest.raises(DataError, match=rf"data.train = '{tmp_path}/run/made/train.jsonl': there is no such file"):
        gather_sources(config)


def table_of(family: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings with a model's folder of this family, which holds no weights, and a problem."""
    monkeypatch.setattr(hf, "check_trainable", lambda *_: None)
    rows = folder / "rows.jsonl"
    rows.write_text('{"problem": "1+1?", "answer": "2"}\n')
    model = make(folder / "policy", "abc")
    if family:
        (model / "config.json").write_text(json.dumps(config_of(family)))
    return {"model": {"path": str(model)}, "data": {"train": str(rows), "validation": ""}}


def test_a_teacher_that_is_not_there_names_its_own_setting(tmp_path, monkeypatch):
    teacher = {"kind": "local", "path": str(tmp_path / "absent" / "teacher" / "x")}
    table = table_of("", tmp_path, monkeypatch) | {"objective": {"name": "distill", "teacher": teacher}}
    with pytest.raises(ModelError, match=r"objective\.teacher\.path = '.*absent"):
        gather_sources(Config.model_validate(table))
    demonstrations = tmp_path / "demonstrations.jsonl"
    demonstrations.write_text('{"problem": "1+1?", "response": "2"}\n')
    imitating = {"mode": "sft", "sft": {"steps": 1, "demonstrations": str(demonstrations)}}
    assert gather_sources(Config.model_validate(table | imitating)).teacher_dir is None, "imitation has no teacher"


@pytest.mark.parametrize(("family", "lora", "message"), [
    ("gpt-oss", {}, 'mode = "rl": vLLM keeps the experts of gpt-oss in another layout'), ("mistral3", {}, ""),
    ("mistral3", {"rank": 8}, r"lora\.rank = 8: adapters of vision-language models .*: set lora\.rank to 0"),
    ("qwen3 moe", {"rank": 8, "targets": ["all-linear", "experts"]}, ""),
    ("qwen3 moe", {"rank": 8, "targets": ["expert"]}, r'lora\.targets: "expert" names no layer'),
])  # fmt: skip
def test_a_model_that_cannot_be_trained_so_is_refused_before_anything_is_loaded(
    tmp_path, monkeypatch, family, lora, message
):
    config = Config.model_validate({**table_of(family, tmp_path, monkeypatch), "lora": lora})
    if not message:
        assert gather_sources(config).model_dir == Path(config.model.path) and model_shape(config)
        return
    for check in (gather_sources, model_shape) if "targets" in lora else (gather_sources,):
        with pytest.raises(ConfigError, match=message):
            check(config)


@pytest.fixture
def script(tmp_path):
    """The script of [prepare]: run once into a folder that is whole or absent."""
    path = tmp_path / "mine.py"
    path.write_text(SCRIPT)
    return path


def run(script: Path, count: int = 3, **changes: Any) -> Config:
    table = {"runs_dir": str(script.parent), "prepare": {"script": str(script), "options": {"count": count}}}
    config = Config.model_validate({**table, **changes})
    prepare(config, Progress())
    return config


def test_the_script_runs_once_with_its_options_and_the_seed(script):
    config = run(script, seed=7)
    made = config.run_dir / "made"
    assert (made / "train.jsonl").read_text() == "3 7" and (made / "model" / "config.json").is_file()
    assert config.locate("made/train.jsonl") == str(made / "train.jsonl"), "a path of the run"
    assert config.locate("data/made/train.jsonl") == "data/made/train.jsonl" and config.locate("") == ""
    (made / "train.jsonl").write_text("kept")
    run(script, seed=7)
    assert (made / "train.jsonl").read_text() == "kept"
    assert not (run(script, prepare={}, name="other").run_dir / "made").exists(), "without a script nothing is made"


@pytest.mark.parametrize(
    ("changes", "remark", "setting"),
    [({"seed": 1}, "", "seed"), ({"count": 4}, "", "prepare.options.count"), ({}, "# changed", "prepare.script")],
)
def test_a_folder_made_from_something_else_is_refused(script, changes, remark, setting):
    run(script)
    script.write_text(SCRIPT + remark)
    with pytest.raises(ConfigError, match=rf"made with other settings \({setting} changed\)"):
        run(script, **changes)


@pytest.mark.parametrize(("text", "message"), [
    (f"{SCRIPT}    raise RuntimeError('half way')", r"prepare.script: .*mine.py fails with RuntimeError: half way"),
    ("import nothing_like_it", "fails with ModuleNotFoundError: .* in line 1"),
    ("x = 1", r"has no function prepare\(folder, options, seed\)"),
    ("def prepare(folder): pass", "fails with TypeError"),
    (None, r"prepare.script = '.*mine.py': there is no such file"),
])  # fmt: skip
def test_a_script_that_fails_is_told_leaves_no_folder_and_may_begin_again(script, text, message):
    script.unlink() if text is None else script.write_text(text)
    with pytest.raises(ConfigError, match=message):
        run(script)
    script.write_text(SCRIPT)
    assert (run(script).run_dir / "made" / "train.jsonl").is_file()


def test_a_folder_that_cannot_be_written_is_named(script):
    (script.parent / "run").write_text("a file in the way")
    with pytest.raises(DataError, match="runs_dir"):
        run(script)
