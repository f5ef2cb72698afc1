"""The script of [prepare]: run once into a folder that is whole or absent, refused when made from other settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shared.config import Config
from shared.errors import ConfigError, DataError
from shared.progress import Progress
from trainer.data.sources import prepare

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


def config(script: Path, count: int = 3, **changes: Any) -> Config:
    table = {"runs_dir": str(script.parent), "prepare": {"script": str(script), "options": {"count": count}}}
    return Config.model_validate({**table, **changes})


def run(settings: Config) -> Path:
    prepare(settings, Progress())
    return settings.run_dir / "made"


def test_the_script_is_told_its_options_and_the_seed(script: Path) -> None:
    made = run(config(script, seed=7))
    assert (made / "train.jsonl").read_text() == "3 7" and (made / "model" / "config.json").is_file()


def test_paths_that_begin_with_made_are_of_the_run(script: Path) -> None:
    settings = config(script)
    assert settings.locate("made/train.jsonl") == str(run(settings) / "train.jsonl")
    assert settings.locate("data/made/train.jsonl") == "data/made/train.jsonl" and settings.locate("") == ""


def test_a_second_launch_does_not_run_it_again(script: Path) -> None:
    made = run(config(script))
    (made / "train.jsonl").write_text("kept")
    assert (run(config(script)) / "train.jsonl").read_text() == "kept"


def test_without_a_script_nothing_is_made(script: Path) -> None:
    assert not run(config(script, prepare={"options": {"count": 3}})).exists()


@pytest.mark.parametrize(
    ("changes", "told"),
    [({"seed": 1}, "seed changed"), ({"count": 4}, "prepare.options.count changed")],
    ids=["seed", "options"],
)
def test_a_folder_made_from_other_settings_is_refused(script: Path, changes: dict[str, Any], told: str) -> None:
    run(config(script))
    with pytest.raises(ConfigError, match=rf"made with other settings \({told}\): give this run another name"):
        run(config(script, **changes))


def test_a_folder_made_by_another_script_is_refused(script: Path) -> None:
    run(config(script))
    script.write_text(f"{SCRIPT}\n# changed")
    with pytest.raises(ConfigError, match="prepare.script changed"):
        run(config(script))


def test_a_script_that_fails_half_way_leaves_no_folder_and_may_begin_again(script: Path) -> None:
    script.write_text(SCRIPT + "    raise RuntimeError('half way')\n")
    with pytest.raises(ConfigError, match=r"prepare.script: .*mine.py fails with RuntimeError: half way in line 6"):
        run(config(script))
    script.write_text(SCRIPT)
    assert (run(config(script)) / "train.jsonl").is_file()


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
        run(config(script))


def test_a_script_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"prepare.script = '.*none.py': there is no such file"):
        run(config(tmp_path / "none.py"))


def test_a_folder_that_cannot_be_written_is_named(script: Path) -> None:
    (script.parent / "run").write_text("a file in the way")
    with pytest.raises(DataError, match="runs_dir"):
        run(config(script))
