"""The quickstart's files: complete, disjoint, made once, refused when made from other settings."""

import json
from pathlib import Path

import pytest

from shared.chat import Chat
from shared.config import Config, Data, Evaluate, Sft, Stories
from shared.errors import ConfigError, DataError
from trainer.data import PromptFormat, load_problems
from trainer.quickstart import DEMONSTRATIONS_PER_PROBLEM, Quickstart, prepare
from trainer.sft import load_demonstrations


def config(runs_dir: Path, **changes: object) -> Config:
    settings = {"stories": Stories(problems=60), "evaluate": Evaluate(problems=21), **changes}
    return Config(runs_dir=str(runs_dir), name="run", **settings)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def made(runs_dir: Path) -> Quickstart:
    return prepare(config(runs_dir))


def files(folder: Path) -> dict[str, tuple[int, bytes]]:
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in paths}


def test_problems_and_demonstrations_load(made: Quickstart) -> None:
    train, validation = load_problems(made.train, "data.train"), load_problems(made.validation, "data.validation")
    assert (len(train), len(validation)) == (60, 21)
    assert not {problem.text for problem in train} & {problem.text for problem in validation}
    assert len({problem.id for problem in train + validation}) == 81
    assert {problem.language for problem in validation} == set(Stories().languages)
    demonstrations = load_demonstrations(
        made.demonstrations, None, Sft(), PromptFormat(Chat(made.model), Data(system_prompt="")), 512
    )
    assert len(demonstrations.reasoning) == 60 * DEMONSTRATIONS_PER_PROBLEM


def test_a_second_call_changes_nothing(made: Quickstart, runs_dir: Path) -> None:
    before = files(made.train.parent)
    assert prepare(config(runs_dir)) == made
    assert files(made.train.parent) == before


def test_what_is_missing_is_made_again_and_equal(made: Quickstart, runs_dir: Path) -> None:
    before = {path: path.read_bytes() for path in (made.train, made.demonstrations, made.model / "config.json")}
    for path in before:
        path.unlink()
    prepare(config(runs_dir))
    assert {path: path.read_bytes() for path in before} == before


def test_other_settings_do_not_mix_with_these_files(made: Quickstart, runs_dir: Path) -> None:
    with pytest.raises(ConfigError, match="seed changed"):
        prepare(config(runs_dir, seed=5))


def test_validation_problems_are_the_same_for_every_seed(made: Quickstart, tmp_path: Path) -> None:
    other = prepare(config(tmp_path, seed=1))
    assert other.validation.read_bytes() == made.validation.read_bytes()
    assert other.train.read_bytes() != made.train.read_bytes()


def test_an_unknown_language_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="xx; known are en, fr"):
        prepare(config(tmp_path, stories=Stories(languages=["en", "xx"])))


def test_too_many_problems_name_the_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="stories.problems = 20000"):
        prepare(config(tmp_path, stories=Stories(problems=20_000, languages=["en"], operations=(1, 1))))


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file in the way")
    with pytest.raises(DataError, match="runs_dir"):
        prepare(config(tmp_path))


def test_rows_follow_the_data_schema(made: Quickstart) -> None:
    row = json.loads(made.train.read_text(encoding="utf-8").splitlines()[0])
    assert set(row) == {"id", "problem", "answer", "language", "domain", "source"}
