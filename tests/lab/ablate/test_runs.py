"""Which runs an ablation has, in which order, and how far a folder says that each is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lab.ablate.__main__ import main
from lab.ablate.ablation import Ablation, read
from lab.ablate.runs import AblationRun, check_folder, chosen, plan
from shared import settings_file
from shared.errors import ConfigError
from tests.lab.ablate.conftest import TEXT, Write

MADE = """
[prepare]
script = "mine.py"
options = { count = 3 }
[data]
train = "made/train.jsonl"
validation = "made/validation.jsonl"
[sft]
demonstrations = "made/demonstrations.jsonl"
steps = 9
"""


def finish(launch: AblationRun) -> None:
    """The export that says that a launch has ended."""
    export = launch.run_dir / "hf" / f"step_{launch.config.last_version}"
    export.mkdir(parents=True)
    (launch.run_dir / "latest").symlink_to(export.relative_to(launch.run_dir))


def names(launches: list[AblationRun]) -> list[str]:
    return [launch.run_dir.name for launch in launches]


def test_runs_go_seed_by_seed_and_differ_only_in_their_setting(launches: list[AblationRun]) -> None:
    assert names(launches) == ["base-0", "symmetric-0", "base-1", "symmetric-1", "base-2", "symmetric-2"]
    base, symmetric = launches[:2]
    assert symmetric.config.objective["clip_high"] == 0.2 and symmetric.config.steps == 4
    same = {"name": "base-0", "objective": base.config.objective}
    assert symmetric.config.model_copy(update=same) == base.config
    assert launches[4].config.seed == 2 and launches[4].config.run_dir == Path("runs/clips/base-2")


@pytest.mark.parametrize(("per_seed", "starts"), [(False, ["start"]), (True, ["start-0", "start-1", "start-2"])])
def test_runs_begin_from_the_export_and_the_problems_of_the_start(
    file: Path, per_seed: bool, starts: list[str]
) -> None:
    Path("run.toml").write_text(MADE)
    text = TEXT.replace("[variants.base]", f"[start]\nper_seed = {str(per_seed).lower()}\n\n[variants.base]")
    file.write_text(text)
    launches = plan(read(file), file, Path("runs"), [0, 1, 2])
    assert [name for name in names(launches) if name.startswith("start")] == starts
    assert names(launches)[0] == starts[0] and launches[0].config.steps == 0
    assert launches[0].config.sft.steps == 9
    last = launches[-1]
    assert last.start is not None and last.start.run_dir.name == starts[-1]
    made, config = last.start.run_dir / "made", last.config
    assert config.model.path == str(last.start.run_dir / "latest") and config.sft.steps == 0
    assert not config.prepare.script, "the start has run it"
    assert (config.data.train, config.data.validation) == (str(made / "train.jsonl"), str(made / "validation.jsonl"))
    assert last.start.config.seed == (2 if per_seed else 0)


def test_a_start_leaves_the_users_own_problems_alone(file: Path) -> None:
    Path("run.toml").write_text('[data]\ntrain = "mine.jsonl"\nvalidation = ""\n')
    file.write_text(TEXT.replace("[variants.base]", "[start]\n\n[variants.base]"))
    data = plan(read(file), file, Path("runs"), [0])[1].config.data
    assert (data.train, data.validation) == ("mine.jsonl", "")


def test_settings_that_cannot_be_are_told_with_the_variant_before_anything_starts(file: Path) -> None:
    file.write_text(TEXT.replace("objective.clip_high=0.2", "objective.clip_hig=0.2"))
    with pytest.raises(ConfigError, match="clips.toml: variants.symmetric: --objective.clip_hig: unknown setting"):
        plan(read(file), file, Path("runs"), [0])
    file.write_text(TEXT.replace("--objective.clip_high=0.2", "--reward.extra.nonsense=1"))
    with pytest.raises(ConfigError, match="variants.symmetric: .*nonsense"):
        plan(read(file), file, Path("runs"), [0])


def test_a_run_is_finished_when_its_last_version_is_exported(launches: list[AblationRun], write_run: Write) -> None:
    launch = launches[0]
    assert not launch.finished and launch.progress == "step 0/4"
    write_run(launch, {"reward/mean": [0.1] * 4}, {"de": 0.5})
    assert launch.finished and launch.progress == "step 4/4"
    (launch.run_dir / "latest").unlink()
    (launch.run_dir / "latest").symlink_to("hf/step_3")
    assert not launch.finished, "that is the export of an earlier version"


def test_progress_counts_the_sft_until_the_first_step_is_trained(launches: list[AblationRun]) -> None:
    config = launches[0].config
    cold = config.model_copy(update={"sft": config.sft.model_copy(update={"steps": 9})})
    launch = replace(launches[0], config=cold)
    launch.run_dir.mkdir(parents=True)
    metrics = launch.run_dir / "metrics.jsonl"
    assert launch.progress == "SFT step 0/9"
    metrics.write_text('{"step": 7, "kind": "sft"}\n')
    assert launch.progress == "SFT step 7/9"
    metrics.write_text('{"step": 9, "kind": "sft"}\n{"step": 2, "kind": "train"}\n')
    assert launch.progress == "step 2/4"


def test_a_folder_of_other_settings_is_refused_not_reused(
    ablation: Ablation, file: Path, launches: list[AblationRun]
) -> None:
    settings_file.write(launches[1].config, launches[1].run_dir / "config.toml")
    check_folder(launches[1])
    with pytest.raises(ConfigError, match=r"symmetric-0 was made with other settings \(steps = 4, now 9\): delete"):
        plan(ablation, file, Path("runs"), [0], ["--steps=9"])


def test_the_folder_of_the_start_may_be_named_in_another_way(file: Path, tmp_path: Path) -> None:
    Path("run.toml").write_text(MADE)
    file.write_text(TEXT.replace("[variants.base]", "[start]\n\n[variants.base]"))
    ablation = read(file)
    start, launch = plan(ablation, file, Path("runs"), [0])[:2]
    settings_file.write(launch.config, launch.run_dir / "config.toml")
    finish(start)
    check_folder(plan(ablation, file, tmp_path / "runs", [0])[1])


def test_other_problems_are_another_run_even_with_a_start(file: Path) -> None:
    Path("run.toml").write_text(MADE)
    text = TEXT.replace("[variants.base]", "[start]\n\n[variants.base]")
    file.write_text(text.replace("--objective.clip_high=0.2", "--data.train=one.jsonl"))
    start, _, other = plan(read(file), file, Path("runs"), [0])
    settings_file.write(other.config, other.run_dir / "config.toml")
    finish(start)
    file.write_text(text.replace("--objective.clip_high=0.2", "--data.train=two.jsonl"))
    with pytest.raises(ConfigError, match=r'symmetric-0 was made with other settings \(data.train = "one.jsonl", now'):
        plan(read(file), file, Path("runs"), [0])


def test_runs_do_not_go_on_from_a_start_that_is_made_again(file: Path) -> None:
    """Else runs of one table would begin from different weights."""
    file.write_text(TEXT.replace("[variants.base]", "[start]\n\n[variants.base]"))
    launches = plan(read(file), file, Path("runs"), [0])
    settings_file.write(launches[1].config, launches[1].run_dir / "config.toml")
    with pytest.raises(ConfigError, match="base-0 began from a start that is not there any more .*delete it too"):
        plan(read(file), file, Path("runs"), [0])
    finish(launches[0])
    assert len(plan(read(file), file, Path("runs"), [0])) == 3


@pytest.mark.parametrize("setting", ["--prepare.options.count=4", "--sft.learning_rate=1e-3"])
def test_a_variant_cannot_change_what_its_start_has_done(file: Path, setting: str) -> None:
    Path("run.toml").write_text(MADE)
    text = TEXT.replace("--objective.clip_high=0.2", setting)
    file.write_text(text)
    assert len(plan(read(file), file, Path("runs"), [0])) == 2
    file.write_text(text.replace("[variants.base]", "[start]\n\n[variants.base]"))
    with pytest.raises(ConfigError, match=r"variants.symmetric: [\w.]+ has no effect on a run that begins from"):
        plan(read(file), file, Path("runs"), [0])


def test_only_names_variants_of_any_file_and_takes_their_start_along(ablation: Ablation, file: Path) -> None:
    assert chosen(None, {file: ablation}) == {"base", "symmetric"}
    assert chosen(["base"], {file: ablation}) == {"base"}
    with pytest.raises(ConfigError, match="--only bace: no such variant; did you mean base"):
        chosen(["bace"], {file: ablation})
    file.write_text(TEXT.replace("[variants.base]", "[start]\n\n[variants.base]"))
    launches = plan(read(file), file, Path("runs"), [0])
    assert [launch.serves & {"base"} for launch in launches] == [{"base"}, {"base"}, set()]


def test_the_list_shows_states_and_commands(
    file: Path, launches: list[AblationRun], write_run: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(launches[0], {"reward/mean": [0.1] * 4}, {"de": 0.5})
    assert main([str(file), "--list", "--runs-dir=runs", "--seeds", "0", "--only", "base"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "clips: clip-higher, seed 0: finished" and len(shown) == 2
    assert shown[1].strip() == "python -m trainer run.toml --steps=4 --seed=0 --name=base-0 --runs_dir=runs/clips"


def test_wrong_input_is_one_line_a_mistake_and_exit_code_2(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("other").mkdir()
    Path("other/clips.toml").write_text(TEXT)
    assert main([str(file), "other/clips.toml", "none.toml"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and "another file has the name clips too" in lines[0] and "none.toml" in lines[1]
