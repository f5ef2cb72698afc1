"""The file of an ablation, its runs and their order, their progress, failures and times of launches.

Real launches are in tests/system/test_ablate.py.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lab.ablate.__main__ import main
from lab.ablate.ablation import read
from lab.ablate.runner import TIMES, last_error, note_time, run_all, wall_s
from lab.ablate.runs import AblationRun, check_folder, chosen, plan
from shared import settings_file
from shared.errors import ConfigError
from tests.lab.ablate.conftest import TEXT

ROOT = Path(__file__).resolve().parents[3]
SHIPPED = sorted((ROOT / "configs" / "ablations").glob("*.toml"))
WITH_START = TEXT.replace("[variants.base]", "[start]\n\n[variants.base]")
CLIP = "--objective.clip_high=0.2"
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


def mistakes(tmp_path: Path, *changes: tuple[str, str]) -> list[str]:
    """The lines of the error of TEXT after replacements."""
    text = TEXT
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        read(path)
    lines = str(raised.value).splitlines()
    assert all(line.startswith(f"{path}: ") for line in lines)
    return [line.removeprefix(f"{path}: ") for line in lines]


@pytest.mark.parametrize(("old", "new", "line"), [
    ('label = "clip', 'lable = "clip', "unknown key variants.base.lable; did you mean label?"),
    ('about = "Two clips"', "", "about is missing"), ('config = "run.toml"', "", "config is missing"),
    ("seeds = [0, 1, 2]", 'seeds = "0"', 'seeds = "0": must be a valid list'),
    ("seeds = [0, 1, 2]", "seeds = [1, 1]", "seeds = [1, 1]: each once, and none below 0"),
    ("[variants.symmetric]", '[variants."sym metric"]', "variants.sym metric: a name is of small letters"),
    ("[variants.symmetric]", "[variants.start]", "variants.start: a name is of small letters"),
    ('than = "symmetric"', 'than = "symetric"', 'than = "symetric" is not a variant; did you mean symmetric?'),
    ('than = "symmetric"', "", "claims 1: compares base with itself: give `than`, or another `than_over`"),
    ('than = "symmetric"', 'than_over = "last 2 steps"', "claims 1: compares base with itself"),
    ('metric = "entropy"', 'metric = "entropie"', 'metric "entropie" is not one of shared/metrics.py'),
    ('metric = "entropy"', 'metric = "evaluation/accuracy/fr"', 'metric "evaluation/accuracy/fr" is not one of'),
    ('relation = "above"', 'relation = "over"', "claims.1.relation = \"over\": must be 'above', 'below'"),
    ('over = "last 2 steps"', 'over = "last two"', 'over = "last two": must be "start", "end", "all steps"'),
    ('over = "last 2 steps"', 'over = "steps 9 to 3"', 'over = "steps 9 to 3": must be'),
    ('says = "Higher entropy"', 'says = "x"\nmargin = "a lot"', 'margin = "a lot": a number, or a share such as'),
    ('says = "Higher entropy"', 'says = "x"\nmargin = [1]', "claims.1.margin = [1]: must be"),
    ('says = "Higher entropy"', 'says = "x"\neach = "language"', "is there for evaluation/accuracy and"),
    ('variants = ["base"]', 'variants = ["bas"]', 'panels 2: "bas" is not a variant; did you mean base?'),
    ("[variants.base]", "[[variants]]", "variants = "),
])  # fmt: skip
def test_every_mistake_is_one_line_with_file_and_key(tmp_path, old, new, line):
    changes = [(old, new)]
    if old == "[variants.base]":  # TOML does not let one name be a list and a table
        changes += [("[variants.symmetric]\nsettings", "settings")]
    assert any(line in mistake for mistake in mistakes(tmp_path, *changes))


def test_all_mistakes_are_shown_at_once_and_a_file_that_cannot_be_read_is_named(tmp_path):
    lines = mistakes(tmp_path, ('"entropy"\nrelation', '"entropi"\nrelation'), ('than = "symmetric"', 'than = "other"'))
    assert len(lines) == 3 and "entropi" in lines[2] and all("other" in line for line in lines[:2])
    with pytest.raises(ConfigError, match="no such settings file"):
        read(tmp_path / "none.toml")
    (tmp_path / "broken.toml").write_text("about = ")
    with pytest.raises(ConfigError, match="broken.toml: not valid TOML"):
        read(tmp_path / "broken.toml")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_files_that_are_shipped_can_be_run(path, tmp_path, monkeypatch):
    """Every variant resolves, changes something, and no two are the same run."""
    monkeypatch.chdir(ROOT)
    ablation = read(path)
    launches = plan(ablation, path, tmp_path, ablation.seeds)
    runs = [launch for launch in launches if launch.variant and launch.seed == ablation.seeds[0]]
    assert len(runs) == len(ablation.variants) >= 2 and len(ablation.seeds) >= 3
    assert len({launch.config.model_copy(update={"name": ""}).model_dump_json() for launch in runs}) == len(runs)
    assert ablation.claims and (ablation.start is None or all(launch.config.sft.steps == 0 for launch in runs))


def test_there_is_a_file_for_every_knob():
    text = "".join(path.read_text() for path in SHIPPED)
    knobs = ["objective.clip_high=", "objective.kl.weight=", "kl.gradient=", "reward.extra=", "optimiser.minibatches=",
             "filter_groups_by=", "advantage.scale=", "entropy_bonus=", "rollout.max_async_level=",
             "objective.loss_aggregation=", "reward.length=", "reward.language=", "data.domains="]  # fmt: skip
    assert not [knob for knob in knobs if knob not in text]


def finish(launch: AblationRun) -> None:
    """The export that says that a launch has ended."""
    export = launch.run_dir / "hf" / f"step_{launch.config.last_version}"
    export.mkdir(parents=True)
    (launch.run_dir / "latest").symlink_to(export.relative_to(launch.run_dir))


def names(launches: list[AblationRun]) -> list[str]:
    return [launch.run_dir.name for launch in launches]


def test_runs_go_seed_by_seed_and_differ_only_in_their_setting(launches):
    assert names(launches) == ["base-0", "symmetric-0", "base-1", "symmetric-1", "base-2", "symmetric-2"]
    base, symmetric = launches[:2]
    assert symmetric.config.objective["clip_high"] == 0.2 and symmetric.config.steps == 4
    same = {"name": "base-0", "objective": base.config.objective}
    assert symmetric.config.model_copy(update=same) == base.config
    assert launches[4].config.seed == 2 and launches[4].config.run_dir == Path("runs/clips/base-2")


@pytest.mark.parametrize(("per_seed", "starts"), [(False, ["start"]), (True, ["start-0", "start-1", "start-2"])])
def test_runs_begin_from_the_export_and_the_problems_of_the_start(file, per_seed, starts):
    Path("run.toml").write_text(MADE)
    file.write_text(WITH_START.replace("[start]", f"[start]\nper_seed = {str(per_seed).lower()}"))
    launches = plan(read(file), file, Path("runs"), [0, 1, 2])
    assert [name for name in names(launches) if name.startswith("start")] == starts
    assert names(launches)[0] == starts[0] and launches[0].config.steps == 0 and launches[0].config.sft.steps == 9
    last = launches[-1]
    assert last.start is not None and last.start.run_dir.name == starts[-1]
    made, config = last.start.run_dir / "made", last.config
    assert config.model.path == str(last.start.run_dir / "latest") and config.sft.steps == 0
    assert not config.prepare.script, "the start has run it"
    assert (config.data.train, config.data.validation) == (str(made / "train.jsonl"), str(made / "validation.jsonl"))
    assert last.start.config.seed == (2 if per_seed else 0)
    Path("run.toml").write_text('[data]\ntrain = "mine.jsonl"\nvalidation = ""\n')
    data = plan(read(file), file, Path("runs"), [0])[1].config.data
    assert (data.train, data.validation) == ("mine.jsonl", ""), "a start leaves your own problems alone"


@pytest.mark.parametrize(("setting", "with_start", "words"), [
    ("--objective.clip_hig=0.2", False, "clips.toml: variants.symmetric: --objective.clip_hig: unknown setting"),
    ("--reward.extra.nonsense=1", False, "variants.symmetric: .*nonsense"),
    ("--prepare.options.count=4", True, r"variants.symmetric: [\w.]+ has no effect on a run that begins from"),
    ("--sft.learning_rate=1e-3", True, r"variants.symmetric: [\w.]+ has no effect on a run that begins from"),
])  # fmt: skip
def test_settings_that_cannot_be_name_their_variant_before_anything_starts(file, setting, with_start, words):
    Path("run.toml").write_text(MADE)
    file.write_text(TEXT.replace(CLIP, setting))
    if with_start:
        assert len(plan(read(file), file, Path("runs"), [0])) == 2, "without a start it is a setting like others"
        file.write_text(WITH_START.replace(CLIP, setting))
    with pytest.raises(ConfigError, match=words):
        plan(read(file), file, Path("runs"), [0])


def test_a_run_is_finished_when_its_last_version_is_exported(launches, write_run):
    launch = launches[0]
    assert not launch.finished and launch.progress == "step 0/4"
    write_run(launch, {"reward/mean": [0.1] * 4}, {"de": 0.5})
    assert launch.finished and launch.progress == "step 4/4"
    (launch.run_dir / "latest").unlink()
    (launch.run_dir / "latest").symlink_to("hf/step_3")
    assert not launch.finished, "that is the export of an earlier version"


def test_progress_counts_the_sft_until_the_first_step_is_trained(launches):
    config = launches[0].config
    cold = config.model_copy(update={"sft": config.sft.model_copy(update={"steps": 9})})
    launch = replace(launches[0], config=cold)
    launch.run_dir.mkdir(parents=True)
    assert launch.progress == "SFT step 0/9"
    for text, progress in (('{"step": 7, "kind": "sft"}\n', "SFT step 7/9"),
                           ('{"step": 9, "kind": "sft"}\n{"step": 2, "kind": "train"}\n', "step 2/4")):  # fmt: skip
        (launch.run_dir / "metrics.jsonl").write_text(text)
        assert launch.progress == progress


def test_a_folder_of_other_settings_is_refused_not_reused(ablation, file, launches):
    settings_file.write(launches[1].config, launches[1].run_dir / "config.toml")
    check_folder(launches[1])
    with pytest.raises(ConfigError, match=r"symmetric-0 was made with other settings \(steps = 4, now 9\): delete"):
        plan(ablation, file, Path("runs"), [0], ["--steps=9"])


def test_runs_go_on_from_their_start_alone(file, tmp_path):
    """Its folder may be named in another way; other problems are another run; a start that is made again is another."""
    Path("run.toml").write_text(MADE)
    file.write_text(WITH_START.replace(CLIP, "--data.train=one.jsonl"))
    start, launch, other = plan(read(file), file, Path("runs"), [0])
    settings_file.write(launch.config, launch.run_dir / "config.toml")
    with pytest.raises(ConfigError, match="base-0 began from a start that is not there any more .*delete it too"):
        plan(read(file), file, Path("runs"), [0])
    finish(start)
    check_folder(plan(read(file), file, tmp_path / "runs", [0])[1])
    settings_file.write(other.config, other.run_dir / "config.toml")
    assert len(plan(read(file), file, Path("runs"), [0])) == 3
    file.write_text(WITH_START.replace(CLIP, "--data.train=two.jsonl"))
    with pytest.raises(ConfigError, match=r'symmetric-0 was made with other settings \(data.train = "one.jsonl", now'):
        plan(read(file), file, Path("runs"), [0])


def test_only_names_variants_of_any_file_and_takes_their_start_along(ablation, file):
    assert chosen(None, {file: ablation}) == {"base", "symmetric"} and chosen(["base"], {file: ablation}) == {"base"}
    with pytest.raises(ConfigError, match="--only bace: no such variant; did you mean base"):
        chosen(["bace"], {file: ablation})
    file.write_text(WITH_START)
    launches = plan(read(file), file, Path("runs"), [0])
    assert [launch.serves & {"base"} for launch in launches] == [{"base"}, {"base"}, set()]


def test_the_list_shows_states_and_commands_and_wrong_input_is_one_line_a_mistake(file, launches, write_run, capsys):
    write_run(launches[0], {"reward/mean": [0.1] * 4}, {"de": 0.5})
    assert main([str(file), "--list", "--runs-dir=runs", "--seeds", "0", "--only", "base"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "clips: clip-higher, seed 0: finished" and len(shown) == 2
    assert shown[1].endswith("python -m trainer run.toml --steps=4 --seed=0 --name=base-0 --runs_dir=runs/clips")
    Path("other").mkdir()
    Path("other/clips.toml").write_text(TEXT)
    assert main([str(file), "other/clips.toml", "none.toml"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and "another file has the name clips too" in lines[0] and "none.toml" in lines[1]


def test_finished_runs_are_not_started_again(finished, capsys):
    assert run_all(finished) == {} and "6 of 6 runs are finished already" in capsys.readouterr().err
    assert not (finished[0].run_dir.parent / TIMES).exists()


def test_a_run_whose_start_is_not_there_is_not_tried(file):
    file.write_text(WITH_START)
    runs = plan(read(file), file, Path("runs"), [0])[1:]
    assert set(run_all(runs).values()) == {"its start is not there (runs/clips/start)"}
    assert not Path("runs").exists()


def test_times_of_launches_add_up_by_run_and_the_last_error_is_what_a_launch_said(tmp_path):
    assert wall_s(tmp_path) == 0
    for name, seconds, code in (("base-0", 50.04, 130), ("base-0", 10.0, 0), ("base-1", 5.0, 1)):
        note_time(tmp_path / name, seconds, code)
    assert wall_s(tmp_path) == 65.0 and wall_s(tmp_path, "base-0") == 60.0
    log = tmp_path / "x.log"
    for text, error in (("step 1\nerror: the disk is full\nTraceback of torchrun\n\n", "error: the disk is full"),
                        ("step 1\nKilled\n\n", "Killed"), ("", "it printed nothing")):  # fmt: skip
        log.write_text(text)
        assert last_error(log) == error


def test_a_failure_is_shown_with_its_run_and_the_others_go_on(launches, tmp_path, monkeypatch, capsys):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho step 1\necho error: it broke\nexit 3\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    failures = run_all(launches[:2])
    assert list(failures) == [Path("runs/clips/base-0"), Path("runs/clips/symmetric-0")]
    why = "exit code 3; error: it broke (all it printed: runs/clips/base-0.log)"
    assert failures[Path("runs/clips/base-0")] == why
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["[1/2] clips: clip-higher, seed 0", f"    failed: {why}"] and len(lines) == 4
    assert [json.loads(line)["code"] for line in Path("runs/clips", TIMES).read_text().splitlines()] == [3, 3]
