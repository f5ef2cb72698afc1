"""Settings from files and options: what is read, what is refused and in which words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.config import Config
from shared.errors import ConfigError
from shared.settings_file import BY_DESIGN, SECTIONS, SETTINGS, describe, load, to_toml, write


def file(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(folder: Path, text: str, *overrides: str, **variables: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(file(folder, text), overrides, environment=variables)
    assert caught.value.exit_code == 2
    return str(caught.value).splitlines()


def test_an_empty_file_gives_the_defaults(tmp_path: Path) -> None:
    assert load(file(tmp_path, "")) == Config()


def test_the_file_is_read_and_options_win(tmp_path: Path) -> None:
    path = file(tmp_path, "seed = 3\n[rollout]\ntemperature = 0.9\nmax_async_level = 1\n")
    config = load(path, ["--rollout.temperature=0.6", "--steps", "7", "--optimiser.activation_bytes=0"])
    assert (config.seed, config.rollout.max_async_level) == (3, 1)
    assert (config.rollout.temperature, config.steps, config.optimiser.activation_bytes) == (0.6, 7, 0)


TEXTS = ["1e-5", "007", "true", "2024-01-01", "a b", "", "[1, 2]", "x = 1\nseed = 2", 'say "hi"']


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *((f"--data.system_prompt={text}", text) for text in TEXTS),
        ('--data.train="my file.jsonl"', "my file.jsonl"),
        ("--data.pass_rate=[0.1, 1]", (0.1, 1)),
        ('--data.domains=["math"]', ["math"]),
        ("--seed=-3", -3),
    ],
)
def test_an_option_is_read_as_its_setting_wants_it(tmp_path: Path, option: str, value: Any) -> None:
    config: Any = load(file(tmp_path, ""), [option])
    for name in option[2:].partition("=")[0].split("."):
        config = getattr(config, name)
    assert config == value


def test_options_of_a_script_join_those_of_the_file(tmp_path: Path) -> None:
    path = file(tmp_path, "[prepare]\noptions = { count = 3, kinds = [2, 2] }\n")
    assert load(path, ["--prepare.options.count=4"]).prepare.options == {"count": 4, "kinds": [2, 2]}


TABLE = Path(__file__).with_name("refused_settings.jsonl").read_text(encoding="utf-8").splitlines()
"""texts of files, options, variables, and how the one line begins that refuses them; FILE: the file's path"""


@pytest.mark.parametrize("row", map(json.loads, TABLE), ids=lambda row: row["line"][:60])
def test_a_mistake_is_one_line_that_says_where_it_is_and_what_is_allowed(tmp_path: Path, row: dict[str, Any]) -> None:
    (line,) = refusal(tmp_path, row["text"], *row["options"], **row["variables"])
    assert line.startswith(row["line"].replace("FILE", str(tmp_path / "run.toml")))


@pytest.mark.parametrize("gone", BY_DESIGN)
def test_a_setting_of_other_projects_is_an_error_that_says_what_holds(tmp_path: Path, gone: str) -> None:
    section, _, name = gone.rpartition(".")
    (line,) = refusal(tmp_path, f"[{section}]\n{name} = 1\n")
    assert f"unknown setting {gone}: {BY_DESIGN[gone]}" in line


def test_all_mistakes_are_listed_at_once(tmp_path: Path) -> None:
    lines = refusal(tmp_path, "steps = -1\nbogus = 2\n[rollout]\ngroup_size = 1", "--seed=x")
    assert len(lines) == 4 and sum(line.startswith("--seed") for line in lines) == 1


def test_a_variable_stands_between_the_file_and_the_command_line(tmp_path: Path) -> None:
    path = file(tmp_path, "seed = 1\nsteps = 1\n[rollout]\ngroup_size = 4\ntemperature = 0.5\n")
    environment = {
        "MAESTRALE_TRAIN_SEED": "2", "MAESTRALE_TRAIN_ROLLOUT__GROUP_SIZE": "6", "MAESTRALE_TRAIN_STEPS": "2",
        "MAESTRALE_TRAIN_REWARD__SANDBOX__TEST_S": "2.5", "MAESTRALE_TRAIN_DATA__DOMAINS": '["math"]',
        "MAESTRALE_TRAIN_DATA__SYSTEM_PROMPT": "3", "MAESTRALE_ENGINE_THREADS": "1",
    }  # fmt: skip
    config = load(path, ["--steps=3"], environment=environment)
    assert (config.seed, config.steps, config.rollout.group_size, config.rollout.temperature) == (2, 3, 6, 0.5)
    assert config.reward.sandbox.test_s == 2.5 and config.data.domains == ["math"] and config.data.system_prompt == "3"
    assert load(path).seed == 1, "only who passes the environment reads it"


def test_a_missing_file_names_its_neighbour(tmp_path: Path) -> None:
    file(tmp_path, "")
    with pytest.raises(ConfigError, match=r"runs\.toml: there is no such settings file; did you mean .*run\.toml\?"):
        load(tmp_path / "runs.toml")


DEEP = ["[" * 5000 + "]" * 5000, "{a=" * 5000 + "1" + "}" * 5000, "9" * 6000]
"""values that Python cannot read"""


@pytest.mark.parametrize("value", DEEP)
def test_a_value_that_python_cannot_read_is_named(tmp_path: Path, value: str) -> None:
    assert refusal(tmp_path, f"seed = {value}")[0].startswith(f"{tmp_path / 'run.toml'}: not valid TOML: ")
    assert refusal(tmp_path, "", f"--seed={value}")[0].startswith("--seed: seed = ")


def test_a_file_of_other_bytes_and_a_folder_are_named(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "bad.toml", tmp_path):
        with pytest.raises(ConfigError, match=path.name):
            load(path)


def test_help_shows_every_setting_with_a_meaning() -> None:
    text = describe()
    for key, field in SETTINGS.items():
        assert field.description, key
        assert (f"--{key}=" in text) == (key not in SECTIONS)
    assert "[[stages]]" in text and "\n  until_step = 0\n" in text


def test_stages_and_templates_are_written_and_read_back(tmp_path: Path) -> None:
    stages = [
        {"name": "a", "until": "accuracy > 0.5", "data": {"pass_rate": [0.1, 0.5]}, "rollout": {"max_async_level": 1}},
        {"name": 'b "q"', "reward": {"length": 0.05}},
    ]
    data = {"templates": {"code": '{problem}\nUse "Python".'}, "domains": ["math", "code"]}
    config, path = Config.model_validate({"stages": stages, "data": data}), tmp_path / "config.toml"
    write(config, path)
    assert load(path) == config
    on_the_line = load(path, ["--stages=[{name = 'x', rollout.max_completion_tokens = 64}]"])
    assert on_the_line.at_stage(0).rollout.max_completion_tokens == 64
    with pytest.raises(ConfigError, match="unknown setting stages.0.untill"):
        load(path, ["--stages=[{name = 'x', untill = 3}]"])


TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]))
NAME = st.text(alphabet=st.characters(exclude_characters="/\x00", exclude_categories=["Cs"]), min_size=1)


@given(
    name=NAME.filter(lambda name: name not in (".", "..")), prompt=TEXT, rate=st.floats(1e-12, 1e3, exclude_min=True),
    seed=st.integers(-(2**62), 2**62), operations=st.lists(st.integers(1, 9)),
)  # fmt: skip
def test_written_settings_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, name: str, prompt: str, rate: float, seed: int, operations: list[int]
) -> None:
    table = {"name": name, "seed": seed, "data": {"system_prompt": prompt}, "optimiser": {"learning_rate": rate},
             "prepare": {"options": {"operations": operations}}}  # fmt: skip
    config = Config.model_validate(table)
    path = tmp_path_factory.getbasetemp() / "round.toml"
    write(config, path)
    assert load(path) == config


def test_the_written_file_explains_itself() -> None:
    text = to_toml(Config())
    assert "# completions per prompt\ngroup_size = 16\n" in text
    assert text.index("[rollout]") < text.index("[reward]")
