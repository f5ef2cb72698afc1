"""Secrets in addresses (addresses.jsonl): each setting that takes an address refuses one, and repeats nothing of it."""

import asyncio

import pytest

from curate.languages import TranslateStage
from environments.agent import Agent
from environments.environment import made
from environments.openenv import OpenEnv
from shared.errors import ConfigError
from shared.named_secrets import complain_of_url
from shared.sections import RewardWeights
from shared.settings_file import load
from tests.tables import read_table
from trainer.objectives.registry import complaints

SECRET = "https://host/v1?page=2&api_key=hush"


@pytest.mark.parametrize("row", read_table("shared/addresses"), ids=lambda row: row["url"])
def test_a_secret_in_an_address_is_told_without_its_value_and_other_addresses_are_taken(row):
    lines = list(complain_of_url("reward.judge.url", row["url"]))
    assert len(lines) == row["secret"]
    for line in lines:
        assert line.startswith("reward.judge.url holds ") and 'key_variable = "NAME"' in line and "hush" not in line


@pytest.mark.parametrize(("setting", "name"), [
    ("reward.judge.url", "key_variable"), ("reward.judges.clear.url", "key_variable"),
    ("reward.judges.clear.critic.url", "key_variable"), ("objective.teacher.url", "objective.teacher.key_variable"),
])  # fmt: skip
def test_settings_with_a_secret_are_refused_in_one_line(tmp_path, setting, name):
    (tmp_path / "run.toml").write_text('[objective]\nteacher = { kind = "served", url = "", model = "m" }\n')
    with pytest.raises(ConfigError) as refused:
        load(tmp_path / "run.toml", [f"--{setting}={SECRET}"], complaints)
    (line,) = [line for line in str(refused.value).splitlines() if "holds" in line]
    assert setting in line and f'in {name} = "NAME"' in line and "hush" not in str(refused.value)


@pytest.mark.parametrize(("kind", "name"), [(Agent, "agent"), (OpenEnv, "openenv")])
def test_environments_refuse_them_and_take_the_key_of_a_variable_and_translation_refuses_them(kind, name, monkeypatch):
    with pytest.raises(ConfigError, match='api_key.*key_variable = "NAME"') as refused:
        made(kind, name, {"url": SECRET}, None, RewardWeights())
    assert "hush" not in str(refused.value)
    monkeypatch.delenv("THE_KEY", raising=False)
    options = made(kind, name, {"url": "http://host", "key_variable": "THE_KEY"}, None, RewardWeights()).options
    with pytest.raises(ConfigError, match=f'{name}.key_variable = "THE_KEY": that environment variable is not set'):
        asyncio.run(kind.check(options))
    monkeypatch.setenv("THE_KEY", "hush")
    assert kind._key(options) == {"Authorization": "Bearer hush"}
    with pytest.raises(ConfigError, match="^--url holds api_key.*--key-variable") as refused:
        TranslateStage(url=SECRET, model="m", languages=["de"])
    assert "hush" not in str(refused.value)
