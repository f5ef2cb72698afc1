"""Settings from files and options: what is read, what is refused and in which words, what contradicts what.

option_values.jsonl: how an option is read. refused_settings.jsonl: texts of files, options, variables, and how the one
line begins that refuses them (FILE: the file's path). contradictions.jsonl: settings, and what the error names.
"""

from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from shared.config import Config
from shared.errors import ConfigError, python
from shared.settings_file import SECTIONS, SETTINGS, describe, load, peer_settings, to_toml, write
from tests.tables import read_table


def file(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(folder: Path, text: str, *overrides: str, **variables: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(file(folder, text), overrides, environment=variables)
    assert caught.value.exit_code == 2
    return str(caught.value).splitlines()


def test_the_file_is_read_then_variables_then_options(tmp_path):
    assert load(file(tmp_path, "")) == Config(), "an empty file gives the defaults"
    text = "seed = 1\nsteps = 1\n[rollout]\ngroup_size = 4\ntemperature = 0.5\n"
    path = file(tmp_path, text + "[prepare]\noptions = { count = 3, kinds = [2, 2] }\n")
    environment = {
        "MAESTRALE_TRAIN_SEED": "2", "MAESTRALE_TRAIN_ROLLOUT__GROUP_SIZE": "6", "MAESTRALE_TRAIN_STEPS": "2",
        "MAESTRALE_TRAIN_REWARD__SANDBOX__TEST_S": "2.5", "MAESTRALE_TRAIN_DATA__DOMAINS": '["math"]',
        "MAESTRALE_TRAIN_DATA__SYSTEM_PROMPT": "3", "MAESTRALE_ENGINE_THREADS": "1",
    }  # fmt: skip
    options = ["--steps", "3", "--optimiser.activation_bytes=0", "--prepare.options.count=4"]
    config = load(path, options, environment=environment)
    assert (config.seed, config.steps, config.rollout.group_size, config.rollout.temperature) == (2, 3, 6, 0.5)
    assert config.reward.sandbox.test_s == 2.5 and config.data.domains == ["math"] and config.data.system_prompt == "3"
    assert config.optimiser.activation_bytes == 0 and config.prepare.options == {"count": 4, "kinds": [2, 2]}
    assert load(path).seed == 1, "only who passes the environment reads it"


@pytest.mark.parametrize("row", read_table("shared/option_values"), ids=lambda row: ascii(row["option"]))
def test_an_option_is_read_as_its_setting_wants_it(tmp_path, row):
    names = row["option"][2:].partition("=")[0].split(".")
    value = reduce(getattr, names, load(file(tmp_path, ""), [row["option"]]))
    assert (list(value) if isinstance(value, tuple) else value) == row["value"]


@pytest.mark.parametrize("row", read_table("shared/refused_settings"), ids=lambda row: row["line"][:60])
def test_a_mistake_is_one_line_that_says_where_it_is_and_what_is_allowed(tmp_path, row):
    (line,) = refusal(tmp_path, row["text"], *row["options"], **row["variables"])
    for said, is_here in (("FILE", tmp_path / "run.toml"), ("PYTHON", python())):
        row["line"] = row["line"].replace(said, str(is_here))
    assert line.startswith(row["line"])


@pytest.mark.parametrize(("refused", "why"), peer_settings()["refused"].items())
def test_a_setting_that_cannot_be_here_is_an_error_that_says_what_holds(tmp_path, refused, why):
    section, _, name = refused.rpartition(".")
    (line,) = refusal(tmp_path, f"[{section}]\n{name} = 1\n")
    assert f"unknown setting {refused}: {why}. Remove it" in line


@pytest.mark.parametrize(("name", "here"), peer_settings()["settings"].items())
def test_a_setting_of_other_projects_is_told_its_name_here(tmp_path, name, here):
    (line,) = refusal(tmp_path, "", f"--{name}=1")
    assert line.endswith(f"unknown setting {name}: that is {here} here")
    words = [word.strip(",:`") for word in here.split()]
    settings = [word for word in words if "." in word and not word.startswith(("objective.", "metrics."))]
    assert set(settings) <= SETTINGS.keys() and (settings or " " in here or here in SETTINGS or "objective" in here)


def test_all_mistakes_are_listed_at_once(tmp_path):
    lines = refusal(tmp_path, "steps = -1\nbogus = 2\n[rollout]\ngroup_size = 1", "--seed=x")
    assert len(lines) == 4 and sum(line.startswith("--seed") for line in lines) == 1


@pytest.mark.parametrize("value", ["[" * 5000 + "]" * 5000, "{a=" * 5000 + "1" + "}" * 5000, "9" * 6000])
def test_a_value_that_python_cannot_read_is_named(tmp_path, value):
    assert refusal(tmp_path, f"seed = {value}")[0].startswith(f"{tmp_path / 'run.toml'}: not valid TOML: ")
    assert refusal(tmp_path, "", f"--seed={value}")[0].startswith("--seed: seed = ")


def test_a_missing_file_names_its_neighbour_and_one_of_other_bytes_and_a_folder_are_named(tmp_path):
    file(tmp_path, "")
    with pytest.raises(ConfigError, match=r"runs\.toml: there is no such settings file; did you mean .*run\.toml\?"):
        load(tmp_path / "runs.toml")
    (tmp_path / "bad.toml").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "bad.toml", tmp_path):
        with pytest.raises(ConfigError, match=path.name):
            load(path)


def test_help_shows_every_setting_with_a_meaning_and_so_does_the_written_file():
    text = describe()
    for key, field in SETTINGS.items():
        assert field.description, key
        assert (f"--{key}=" in text) == (key not in SECTIONS)
    assert "[[stages]]" in text and "\n  until_step = 0\n" in text
    written = to_toml(Config())
    assert "# completions per prompt\ngroup_size = 16\n" in written
    assert written.index("[rollout]") < written.index("[reward]")


def test_stages_and_templates_are_written_and_read_back(tmp_path):
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
TABLES = st.fixed_dictionaries({
    "name": NAME.filter(lambda name: name not in (".", "..")), "seed": st.integers(-(2**62), 2**62),
    "data": st.fixed_dictionaries({"system_prompt": TEXT}),
    "optimiser": st.fixed_dictionaries({"learning_rate": st.floats(1e-12, 1e3, exclude_min=True)}),
    "prepare": st.fixed_dictionaries({"options": st.dictionaries(st.just("operations"), st.lists(st.integers(1, 9)))}),
})  # fmt: skip


@given(TABLES)
def test_written_settings_are_read_back(tmp_path_factory, table):
    config, path = Config.model_validate(table), tmp_path_factory.getbasetemp() / "round.toml"
    write(config, path)
    assert load(path) == config


def contradictions(settings: dict[str, Any]) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        Config.model_validate(settings)
    (error,) = caught.value.errors()
    return str(error["ctx"]["error"]).splitlines()


@pytest.mark.parametrize("row", read_table("shared/contradictions"), ids=lambda row: str(row["settings"])[:60])
def test_a_contradiction_names_every_setting_of_it(row):
    (line,) = contradictions(row["settings"])
    assert all(name in line for name in row["names"])


def test_all_contradictions_come_at_once_and_settings_cannot_change_later():
    assert len(contradictions({"model": {"max_tokens": 128}, "sft": {"steps": 5}, "name": ""})) == 3
    with pytest.raises(ValidationError):
        Config().seed = 3


@pytest.mark.parametrize(("async_level", "window", "bound"), [
    (0, 0, 0), (1, 1, 1), (2, 0, 3), (2, 32, 3), (2, 33, 3), (2, 34, 4), (1, 64, 3),
])  # fmt: skip
def test_the_bound_of_staleness(async_level, window, bound):
    """async_level + ceil((W - 1) / P) for P = 32; held back, the async level."""
    rollout = {"max_async_level": async_level, "reorder_window": window}
    assert Config.model_validate({"rollout": rollout}).max_staleness == bound
    if async_level and window in (0, 32):
        assert Config.model_validate({"rollout": {**rollout, "fixed_staleness": True}}).max_staleness == async_level


def test_derived_numbers():
    deadlines = Config.model_validate({"deadlines": {"sync_s": 30}}).deadlines
    assert (deadlines.heartbeat_s, deadlines.token_s) == (15, 30), "they follow that of a weight update"
    assert (Config().deadlines.heartbeat_s, Config().deadlines.token_s) == (60, 120)
    for test_s, compile_s in ((4.0, 10.0), (0.5, 10.0), (20.0, 50.0)):
        assert Config.model_validate({"reward": {"sandbox": {"test_s": test_s}}}).reward.sandbox.compile_s == compile_s
    assert Config.model_validate({"placement": {"trainers": 2, "engines": 5}}).world_size == 8
