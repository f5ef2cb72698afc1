"""What a launch goes on from: nothing begins anew over steps that are there, and no change is taken without a word."""

import io
import json
import shutil
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from shared.config import Config
from shared.errors import ConfigError
from shared.progress import Progress
from shared.settings_file import SECTIONS, SETTINGS
from tests.tables import read_table
from tests.trainer.test_checkpoint import save
from tests.trainer.test_data import LetterChat
from trainer.checkpoint import resume, writer
from trainer.checkpoint.origin import FREE, PATHS, Origin, differences, flat, is_free, origin_of
from trainer.data.data_source import PromptFormat
from trainer.data.sources import Sources
from trainer.evaluation import Evaluation, EvaluationRecord, read_evaluations
from trainer.objectives.objective import Objective
from trainer.objectives.registry import objective_of
from trainer.objectives.tables import nested


def sources_of(given: Path) -> Sources:
    """The model folder and data files in this folder."""
    files = [given / f"{name}.jsonl" for name in ("train", "validation", "demonstrations")]
    return Sources(given / "model", *files, None)


class Folder:
    """A run with three checkpoints, and what it was made from."""

    def __init__(self, tmp_path: Path):
        self.tmp_path, self.sources = tmp_path, sources_of(tmp_path / "given")
        model = self.sources.model_dir
        model.mkdir(parents=True)
        (model / "config.json").write_text('{"model_type": "llama"}')
        (model / "tokenizer.json").write_text('{"vocab": {}}')
        save_file({"weight": torch.arange(1 << 20, dtype=torch.float32)}, model / "model.safetensors")
        for name in ("train", "validation", "demonstrations"):
            (tmp_path / "given" / f"{name}.jsonl").write_text(f'{{"problem": "{name}", "answer": "1"}}\n')
        self.config = self.settings()
        self.run_dir, self.checkpoints = self.config.run_dir, self.config.run_dir / "checkpoints"
        self.save_all()

    def save_all(self) -> None:
        for version in (0, 1, 2):
            folder = save(self.run_dir, version)
            manifest = msgspec.json.decode((folder / "manifest.json").read_bytes(), type=writer.Manifest)
            shutil.move(folder, partial := folder.with_suffix(".partial"))
            del manifest.files["checksums.msgpack"], manifest.files["origin.json"]
            writer.finish(partial, version, manifest.files, {}, self.origin(self.config), 1.5, 9)
        (self.run_dir / "metrics.jsonl").write_text('{"step": 2, "kind": "train", "loss": 1.0}\n')

    def settings(self, **sections: dict[str, Any]) -> Config:
        table = {"data": {}, "model": {}, **sections, "runs_dir": str(self.tmp_path), "name": "run"}
        table["data"] = {**table["data"], "train": str(self.sources.train)}
        table["model"] = {**table["model"], "path": str(self.sources.model_dir)}
        return Config.model_validate(table)

    def origin(self, config: Config) -> Origin:
        prompts = PromptFormat(LetterChat(), config.data)
        return origin_of(config, self.sources, prompts)

    def go_on(self, *arguments: str, **sections: dict[str, Any]) -> tuple[str, str]:
        """(checkpoint gone on from, all that was said) with these settings."""
        stream, config = io.StringIO(), self.settings(**sections)
        search = resume.find(config, self.origin(config), arguments, Progress(stream))
        return search.folder.name if search else "", " ".join(stream.getvalue().split())

    def launches(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / "launches.jsonl").read_text().splitlines()]


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def test_nothing_changed_nothing_told(folder):
    clip = objective_of(folder.config).in_force["clip_high"]  # written out as its paper has it: no change
    name, text = folder.go_on("run.toml", objective={"clip_high": clip})
    assert name == "step_2" and "changed" not in text
    (launch,) = folder.launches()
    assert launch["outcome"] == "resumed" and launch["version"] == 2 and launch["arguments"] == ["run.toml"]
    assert launch["pid"] and launch["host"] and launch["changed"] == launch["skipped"] == []


def only_the_beginning(folder: Folder) -> None:
    """Leave the run with its step_0 alone, and an evaluation of it."""
    for version in (1, 2):
        shutil.rmtree(folder.checkpoints / f"step_{version}")
    (folder.run_dir / "metrics.jsonl").write_text('{"step": 0, "kind": "evaluation"}\n')
    record = EvaluationRecord(
        0, 1.0, Evaluation(4, 0.5, 0.1, None, temperature=1.0, format=None, reward=0.5, tokens=1.0)
    )
    (folder.run_dir / "evaluations.jsonl").write_bytes(msgspec.json.encode(record) + b"\n")


def test_a_run_without_a_step_begins_anew_with_repaired_settings(folder):
    """A first proof of weights failed, a setting was repaired: its step_0 holds only what the run began with."""
    folder.sources = replace(folder.sources, demonstrations=None)
    shutil.rmtree(folder.run_dir)
    folder.save_all()
    only_the_beginning(folder)
    assert folder.go_on()[0] == "step_0", "nothing changed: it goes on"
    name, text = folder.go_on(optimiser={"compute_dtype": "float32"})
    assert name == "" and 'compute_dtype: "bfloat16" -> "float32"' in text and "begins anew" in text
    assert not list(folder.checkpoints.iterdir()) and read_evaluations(folder.run_dir) == []
    assert [launch["outcome"] for launch in folder.launches()] == ["resumed", "began"]
    shutil.rmtree(folder.run_dir)
    folder.save_all()
    only_the_beginning(folder)
    (folder.run_dir / "metrics.jsonl").write_text('{"step": 1, "kind": "train"}\n')
    with pytest.raises(ConfigError, match="compute_dtype"):
        folder.go_on(optimiser={"compute_dtype": "float32"})


def test_what_was_imitated_is_kept_where_only_the_steps_after_it_change(folder):
    imitated = {"steps": 9, "demonstrations": str(folder.sources.demonstrations)}
    folder.config = folder.settings(sft=imitated)
    shutil.rmtree(folder.run_dir)
    folder.save_all()
    only_the_beginning(folder)
    name, text = folder.go_on(optimiser={"compute_dtype": "float32"}, model={"dtype": "float32"}, sft=imitated)
    assert name == "step_0" and text.count("changed: ") == 2
    with pytest.raises(ConfigError, match="system_prompt"):
        folder.go_on(data={"system_prompt": "Be brief."}, sft=imitated)
    assert folder.checkpoints.joinpath("step_0").is_dir()


@pytest.mark.parametrize(("section", "setting", "change"), [
    ("optimiser", {"learning_rate": 0.1}, "optimiser.learning_rate: 1e-06 -> 0.1"),
    ("data", {"system_prompt": "Be brief."}, 'data.system_prompt: "magistral" -> "Be brief."'),
    ("objective", {"name": "grpo"}, 'objective.name: "magistral" -> "grpo"'),
])  # fmt: skip
def test_a_setting_of_a_step_is_refused_unless_accepted(folder, section, setting, change):
    with pytest.raises(ConfigError) as raised:
        folder.go_on(**{section: setting})
    text = str(raised.value)
    assert all(part in text for part in (change, "step_2", "--name", "--accept-changes")), text
    assert raised.value.exit_code == 2
    name, text = folder.go_on("--accept-changes", **{section: setting})
    assert name == "step_2" and change in text and "accepted" in text
    assert [launch["outcome"] for launch in folder.launches()] == ["refused", "resumed with accepted changes"]
    assert all(any(change in line for line in launch["changed"]) for launch in folder.launches())


def test_what_may_always_change_is_told_and_gone_on_with(folder):
    for name in ("validation", "demonstrations"):
        (folder.tmp_path / "given" / f"{name}.jsonl").write_text("{}\n{}\n")
    free = {"checkpoint": {"every": 3}, "sft": {"batch": 4}, "optimiser": {"micro_batch_tokens": 64}}
    name, text = folder.go_on(**free)
    for change in ("checkpoint.every: 10 -> 3", "sft.batch: 64 -> 4", "optimiser.micro_batch_tokens",
                   "data.validation", "sft.demonstrations"):  # fmt: skip
        assert f"changed: {change}" in text
    assert name == "step_2"
    assert not is_free("sft.demonstrations", "sft") and is_free("sft.steps", "sft")


def test_data_and_model_count_by_their_content(folder):
    moved = folder.tmp_path / "moved"
    shutil.move(folder.tmp_path / "given", moved)
    folder.sources = sources_of(moved)
    name, text = folder.go_on()
    assert name == "step_2" and text.count("(the same content)") == 2, "at another place, told and no more"
    for part, text in (
        ("train.jsonl", '{"problem": "other", "answer": "1"}\n'), ("model/tokenizer.json", '{"vocab": {"a": 1}}'),
        ("model/config.json", '{"model_type": "qwen3"}'),
    ):  # fmt: skip
        before = (moved / part).read_text()
        (moved / part).write_text(text)
        name = "data.train" if part == "train.jsonl" else part.removeprefix("model/")
        with pytest.raises(ConfigError, match=f"(?s){name}.*->"):
            folder.go_on()
        (moved / part).write_text(before)
    save_file({"weight": torch.ones(1 << 20)}, moved / "model" / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.path.*model\.safetensors: .* -> "):
        folder.go_on()
    assert folder.go_on("--accept-changes")[0] == "step_2"


def test_a_script_counts_by_its_content_and_its_options_by_their_values(folder):
    def origin(name: str, content: str, count: int = 3) -> Origin:
        (folder.tmp_path / name).write_text(content)
        given = {"script": str(folder.tmp_path / name), "options": {"count": count}}
        return folder.origin(folder.settings(prepare=given))

    before = origin("one.py", "a = 1\n")
    ((moved, counts),) = differences(before, origin("other.py", "a = 1\n"))
    assert moved.startswith("prepare.script: ") and moved.endswith("(the same content)") and not counts
    ((changed, counts),) = differences(before, origin("one.py", "a = 2\n"))
    assert changed.startswith("prepare.script = ") and counts
    ((changed, counts),) = differences(before, origin("one.py", "a = 1\n", count=4))
    assert changed == 'prepare.options: {"count" = 3} -> {"count" = 4}' and counts


def test_steps_without_a_checkpoint_are_an_error_and_nothing_is_touched(folder):
    for path in folder.checkpoints.glob("step_*/manifest.json"):
        path.unlink()
    before = sorted(folder.run_dir.rglob("*"))
    with pytest.raises(ConfigError) as raised:
        folder.go_on()
    text = str(raised.value)
    assert "metrics up to step 2, 3 checkpoints" in text and "manifest.json is missing" in text
    assert "restore" in text and "--name" in text and raised.value.exit_code == 2
    assert sorted(folder.run_dir.rglob("*")) == sorted([*before, folder.run_dir / "launches.jsonl"])
    shutil.rmtree(folder.checkpoints)
    with pytest.raises(ConfigError, match="metrics up to step 2, but no checkpoint"):
        folder.go_on("--accept-changes")
    (folder.run_dir / "metrics.jsonl").write_text('{"step": 3, "kind": "sft"}\n')
    assert folder.go_on()[0] == "", "only SFT, which begins anew"


def test_an_older_format_alone_is_refused_in_one_line(folder):
    for path in folder.checkpoints.glob("step_*/manifest.json"):
        path.write_text(json.dumps({"version": 2, "files": {}, "ledger_sha256": "", "format": 1}))
    with pytest.raises(ConfigError, match=r"\A.*written by an older version of Maestrale.*--name.*\Z"):
        folder.go_on()


def test_damaged_ones_are_set_aside_once_an_earlier_one_is_taken(folder):
    (folder.checkpoints / "step_2" / "origin.json").write_bytes(b"{}")
    name, text = folder.go_on()
    assert name == "step_1" and "step_2: origin.json has 2 bytes" in text and "going on from step_1" in text
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == ["step_0", "step_1", "step_2.damaged"]
    name, text = folder.go_on()
    assert name == "step_1" and "step_2" not in text and folder.launches()[0]["skipped"]


def test_the_lists_of_settings_name_settings_and_a_new_one_counts():
    known = SETTINGS.keys() | {f"objective.{name}" for name in nested(Objective)}
    assert set(PATHS) <= known and set(FREE) <= known | SECTIONS
    counting = {setting for setting in SETTINGS if not is_free(setting, "rl")}
    assert counting >= {"seed", "mode", "model.dtype", "rollout.max_async_level", "rollout.group_size", "stages"}
    assert counting >= {"optimiser.weight_decay", "data.order", "data.templates", "reward.correctness"}
    assert counting.isdisjoint({"placement.trainers", "deadlines.step_s", "evaluate.samples"})
    then, now = Origin({}, {}), Origin({"mode": "rl", "seed": 7, "model.dtype": "bfloat16"}, {})
    assert [change.text for change in differences(then, now)] == ["seed: 0 -> 7"], "newer than the checkpoint: default"


@pytest.mark.parametrize("case", read_table("trainer/cases", of="tables"), ids=itemgetter("name"))
def test_tables_are_compared_setting_by_setting(case):
    origins = [Origin(flat(Config.model_validate({"objective": case[when]})), {}) for when in ("before", "after")]
    changes = [change.text for change in differences(*origins) if change.counts]
    assert case["change"] in changes if "change" in case else not changes


def test_a_checkpoint_from_before_the_tables_is_refused_in_one_line():
    """Its objective cannot be compared; the rest of its settings is."""
    now = flat(Config())
    then = Origin({**now, "objective.kl": 0.0, "objective.kl_gradient": None, "objective.scale": "minibatch"}, {})
    (change,) = differences(then, Origin(now, {}))
    assert change.counts and change.text.startswith("[objective] had no tables")
