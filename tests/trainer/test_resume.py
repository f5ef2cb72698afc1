"""What a launch goes on from: nothing begins anew over steps that are there, and no change is taken without a word."""

from __future__ import annotations

import io
import json
import shutil
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
from tests.trainer.test_checkpoint import save
from tests.trainer.test_data import LetterChat
from trainer.checkpoint import resume, writer
from trainer.checkpoint.origin import FREE, PATHS, Origin, differences, flat, is_free, origin_of
from trainer.data.data_source import PromptFormat
from trainer.data.sources import Sources
from trainer.objectives.objective import Objective
from trainer.objectives.registry import objective_of
from trainer.objectives.tables import nested


def make_sources(folder: Path) -> Sources:
    """A model folder and data files."""
    model = folder / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text('{"model_type": "llama"}')
    (model / "tokenizer.json").write_text('{"vocab": {}}')
    save_file({"weight": torch.arange(1 << 20, dtype=torch.float32)}, model / "model.safetensors")
    for name in ("train", "validation", "demonstrations"):
        (folder / f"{name}.jsonl").write_text(f'{{"problem": "{name}", "answer": "1"}}\n')
    return Sources(
        model, folder / "train.jsonl", folder / "validation.jsonl", folder / "demonstrations.jsonl", None
    )  # fmt: skip


def make_config(runs_dir: Path, sources: Sources, **settings: Any) -> Config:
    table: dict[str, Any] = {"runs_dir": str(runs_dir), "name": "run", "data": {}, "model": {}}
    for key, value in settings.items():
        section, _, name = key.partition("__")
        table.setdefault(section, {})[name] = value
    table["data"]["train"] = str(sources.train)
    table["model"]["path"] = str(sources.model_dir)
    return Config.model_validate(table)


class Folder:
    """A run with three checkpoints, and what it was made from."""

    def __init__(self, tmp_path: Path):
        self.tmp_path, self.sources = tmp_path, make_sources(tmp_path / "given")
        self.config = make_config(tmp_path, self.sources)
        self.run_dir = self.config.run_dir
        for version in (0, 1, 2):
            folder = save(self.run_dir, version)
            manifest = msgspec.json.decode((folder / "manifest.json").read_bytes(), type=writer.Manifest)
            shutil.move(folder, partial := folder.with_suffix(".partial"))
            del manifest.files["checksums.msgpack"], manifest.files["origin.json"]
            writer.finish(partial, version, manifest.files, {}, self.origin(self.config), 1.5, 9)
        (self.run_dir / "metrics.jsonl").write_text('{"step": 2, "kind": "train", "loss": 1.0}\n')

    def origin(self, config: Config) -> Origin:
        prompts = PromptFormat(LetterChat(), config.data)  # type: ignore[arg-type]
        return origin_of(config, self.sources, prompts)

    def go_on(self, *arguments: str, **settings: Any) -> tuple[str, str]:
        """(checkpoint gone on from, all that was said) with these settings."""
        told = io.StringIO()
        config = make_config(self.tmp_path, self.sources, **settings)
        found = resume.find(config, self.origin(config), arguments, Progress(told))
        return found.folder.name if found else "", " ".join(told.getvalue().split())

    def launches(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / "launches.jsonl").read_text().splitlines()]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_nothing_changed_nothing_told(folder: Folder):
    name, told = folder.go_on("run.toml")
    assert name == "step_2" and "changed" not in told
    (launch,) = folder.launches()
    assert launch["outcome"] == "resumed" and launch["version"] == 2 and launch["arguments"] == ["run.toml"]
    assert launch["pid"] and launch["host"] and launch["changed"] == launch["skipped"] == []


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"optimiser__learning_rate": 0.1}, "optimiser.learning_rate: 1e-06 -> 0.1"),
        ({"data__system_prompt": "Be brief."}, 'data.system_prompt: "magistral" -> "Be brief."'),
        ({"objective__name": "grpo"}, 'objective.name: "magistral" -> "grpo"'),
    ],
)
def test_a_setting_that_changes_a_step_is_refused_unless_accepted(folder: Folder, settings: dict[str, Any], told: str):
    with pytest.raises(ConfigError) as raised:
        folder.go_on(**settings)
    text = str(raised.value)
    assert told in text and "step_2" in text and "--name" in text and "--accept-changes" in text, text
    assert raised.value.exit_code == 2
    name, said = folder.go_on("--accept-changes", **settings)
    assert name == "step_2" and told in said and "accepted" in said
    assert [launch["outcome"] for launch in folder.launches()] == ["refused", "resumed with accepted changes"]
    assert all(any(told in change for change in launch["changed"]) for launch in folder.launches())


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"checkpoint__every": 3}, "checkpoint.every: 10 -> 3"),
        ({"sft__batch": 4}, "sft.batch: 64 -> 4"),
        ({"optimiser__micro_batch_tokens": 64}, "optimiser.micro_batch_tokens"),
    ],
)
def test_what_may_always_change_is_told_and_gone_on_with(folder: Folder, settings: dict[str, Any], told: str):
    name, said = folder.go_on(**settings)
    assert name == "step_2" and f"changed: {told}" in said


def test_a_setting_that_is_written_out_as_its_paper_has_it_is_no_change(folder: Folder):
    clip = objective_of(folder.config).in_force["clip_high"]
    assert "changed" not in folder.go_on(objective__clip_high=clip)[1]


def test_data_and_model_count_by_their_content(folder: Folder):
    moved = folder.tmp_path / "moved"
    shutil.move(folder.tmp_path / "given", moved)
    given = {"model_dir": moved / "model"} | {
        name: moved / f"{name}.jsonl" for name in ("train", "validation", "demonstrations")
    }
    folder.sources = Sources(**given, general=None)
    name, told = folder.go_on()
    assert name == "step_2" and told.count("(the same content)") == 2, "at another place, told and no more"
    changes = {
        "data.train": (moved / "train.jsonl", '{"problem": "other", "answer": "1"}\n'),
        "tokenizer.json": (moved / "model" / "tokenizer.json", '{"vocab": {"a": 1}}'),
        "config.json": (moved / "model" / "config.json", '{"model_type": "qwen3"}'),
    }
    for part, (path, text) in changes.items():
        before = path.read_text()
        path.write_text(text)
        with pytest.raises(ConfigError, match=f"(?s){part}.*->"):
            folder.go_on()
        path.write_text(before)
    save_file({"weight": torch.ones(1 << 20)}, moved / "model" / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.path.*model\.safetensors: .* -> "):
        folder.go_on()
    assert folder.go_on("--accept-changes")[0] == "step_2"


def test_a_script_counts_by_its_content_and_its_options_by_their_values(folder: Folder):
    def origin(script: Path, content: str, count: int = 3) -> Origin:
        script.write_text(content)
        given = {"prepare__script": str(script), "prepare__options": {"count": count}}
        return folder.origin(make_config(folder.tmp_path, folder.sources, **given))

    one, other = folder.tmp_path / "one.py", folder.tmp_path / "other.py"
    before = origin(one, "a = 1\n")
    ((moved, counts),) = differences(before, origin(other, "a = 1\n"))
    assert moved.startswith("prepare.script: ") and moved.endswith("(the same content)") and not counts
    ((changed, counts),) = differences(before, origin(one, "a = 2\n"))
    assert changed.startswith("prepare.script = ") and counts
    ((changed, counts),) = differences(before, origin(one, "a = 1\n", count=4))
    assert changed == 'prepare.options: {"count" = 3} -> {"count" = 4}' and counts


def test_other_validation_problems_and_demonstrations_of_a_past_sft_may_be(folder: Folder):
    for name in ("validation", "demonstrations"):
        (folder.tmp_path / "given" / f"{name}.jsonl").write_text("{}\n{}\n")
    name, told = folder.go_on()
    assert name == "step_2" and "changed: data.validation" in told and "changed: sft.demonstrations" in told
    assert not is_free("sft.demonstrations", "sft") and is_free("sft.steps", "sft")


def test_steps_without_a_checkpoint_are_an_error_and_nothing_is_touched(folder: Folder):
    for path in (folder.run_dir / "checkpoints").glob("step_*/manifest.json"):
        path.unlink()
    before = sorted(folder.run_dir.rglob("*"))
    with pytest.raises(ConfigError) as raised:
        folder.go_on()
    text = str(raised.value)
    assert "metrics up to step 2, 3 checkpoints" in text and "manifest.json is missing" in text
    assert "restore" in text and "--name" in text and raised.value.exit_code == 2
    assert sorted(folder.run_dir.rglob("*")) == sorted([*before, folder.run_dir / "launches.jsonl"])
    shutil.rmtree(folder.run_dir / "checkpoints")
    with pytest.raises(ConfigError, match="metrics up to step 2, but no checkpoint"):
        folder.go_on("--accept-changes")
    (folder.run_dir / "metrics.jsonl").write_text('{"step": 3, "kind": "sft"}\n')
    assert folder.go_on()[0] == "", "only SFT, which begins anew"


def test_an_older_format_alone_is_refused_in_one_line(folder: Folder):
    for path in (folder.run_dir / "checkpoints").glob("step_*/manifest.json"):
        path.write_text(json.dumps({"version": 2, "files": {}, "ledger_sha256": "", "format": 1}))
    with pytest.raises(ConfigError, match="written by an older version of Maestrale.*--name") as raised:
        folder.go_on()
    assert "\n" not in str(raised.value)


def test_damaged_ones_are_set_aside_once_an_earlier_one_is_taken(folder: Folder):
    (folder.run_dir / "checkpoints" / "step_2" / "origin.json").write_bytes(b"{}")
    name, told = folder.go_on()
    assert name == "step_1" and "step_2: origin.json has 2 bytes" in told and "going on from step_1" in told
    names = sorted(path.name for path in (folder.run_dir / "checkpoints").iterdir())
    assert names == ["step_0", "step_1", "step_2.damaged"]
    name, told = folder.go_on()
    assert name == "step_1" and "step_2" not in told
    assert folder.launches()[0]["skipped"]


def test_the_lists_of_settings_name_settings_and_a_new_one_counts():
    known = SETTINGS.keys() | {f"objective.{name}" for name in nested(Objective)}
    assert set(PATHS) <= known and set(FREE) <= known | SECTIONS
    counting = {setting for setting in SETTINGS if not is_free(setting, "rl")}
    assert counting >= {"seed", "mode", "model.dtype", "rollout.max_async_level", "rollout.group_size", "stages"}
    assert counting >= {"optimiser.weight_decay", "data.order", "data.templates", "reward.correctness"}
    assert counting.isdisjoint({"placement.trainers", "deadlines.step_s", "evaluate.samples"})
    then, now = Origin({}, {}), Origin({"mode": "rl", "seed": 7, "model.dtype": "bfloat16"}, {})
    assert [one.text for one in differences(then, now)] == ["seed: 0 -> 7"], "newer than the checkpoint: its default"


SERVED = {"kind": "served", "url": "http://a/v1", "model": "m"}


@pytest.mark.parametrize(
    ("before", "after", "texts"),
    [
        ({}, {"kl": {"weight": 0.1}}, ["objective.kl.weight: not set -> 0.1"]),
        ({"kl": {"weight": 0.1}}, {}, ["objective.kl.weight: 0.1 -> not set"]),
        ({}, {"advantage": {"kind": "leave_one_out"}}, ['objective.advantage.kind: "mean" -> "leave_one_out"']),
        ({}, {"advantage": {"kind": "mean"}}, []),
        ({"teacher": SERVED}, {"teacher": {**SERVED, "model": "n"}}, ['objective.teacher.model: "m" -> "n"']),
        ({"teacher": SERVED}, {"teacher": {**SERVED, "key_variable": "KEY"}}, []),
    ],
    ids=str,
)
def test_tables_of_the_objective_are_compared_setting_by_setting(
    before: dict[str, Any], after: dict[str, Any], texts: list[str]
):
    then, now = (Origin(flat(Config.model_validate({"objective": given})), {}) for given in (before, after))
    changes = [change.text for change in differences(then, now) if change.counts]
    assert set(texts) <= set(changes) and bool(texts) == bool(changes)


def test_a_checkpoint_from_before_the_tables_is_refused_in_one_line():
    """Its objective cannot be compared; the rest of its settings is."""
    now = flat(Config())
    then = Origin({**now, "objective.kl": 0.0, "objective.kl_gradient": None, "objective.scale": "minibatch"}, {})
    (change,) = differences(then, Origin(now, {}))
    assert change.counts and change.text.startswith("[objective] had no tables")
