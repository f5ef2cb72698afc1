"""Secrets in addresses: every setting that takes an address refuses one, and repeats nothing of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from curate.languages import TranslateStage
from environments.agent import Agent
from environments.environment import Environment, made
from environments.openenv import OpenEnv
from shared.errors import ConfigError
from shared.named_secrets import complain_of_url
from shared.sections import RewardWeights
from shared.settings_file import load
from trainer.objectives.registry import complaints

SECRET = "https://host/v1?page=2&api_key=hush"


@pytest.mark.parametrize(
    "url",
    [
        "https://user:hush@host/v1", "https://:hush@host", "http://user:hush/hush@host:8000", "http://hushhushhushhush@host",
        "https://host/v1?key=hush", "https://host/v1?page=2&api_key=hush", "https://host/v1#access_token=hush",
        "https://host/v1?%74oken=hush", "https://host/v1;password=hush", "https://host/?X-Amz-Signature=hush",
        "https://host/v1?clientSecret=hush", "https://host/sk-hushhushhushhush/v1", "ws://host?pwd=hush",
        "host?sig=hush",
    ],
)  # fmt: skip
def test_a_secret_in_an_address_is_told_without_its_value(url: str) -> None:
    (line,) = complain_of_url("reward.judge.url", url)
    assert line.startswith("reward.judge.url holds ") and 'key_variable = "NAME"' in line and "hush" not in line


@pytest.mark.parametrize(
    "url",
    [
        "", "http://127.0.0.1:8000/v1", "http://[::1]:8000/v1", "http://user@host/v1", "http://token:8000/v1",
        "http://my-judge-of-long-answers.internal:8000/v1", "https://host/v1?api-version=2026-01-01&max_tokens=5",
        "https://host:443/models/a@b/v1", "https://host/v1?keyboard=de&monkey=a#section-2", "https://host/v1?key=",
        "https://host/eu-west-1-inference-of-judges/v1", "$JUDGE", "https://host/v1?token=$TOKEN",
    ],
)  # fmt: skip
def test_addresses_without_a_secret_are_taken(url: str) -> None:
    assert not list(complain_of_url("reward.judge.url", url))


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ("reward.judge.url", "key_variable"), ("reward.judges.clear.url", "key_variable"),
        ("reward.judges.clear.critic.url", "key_variable"), ("objective.teacher.url", "objective.teacher.key_variable"),
    ],
)  # fmt: skip
def test_settings_with_a_secret_are_refused_in_one_line(tmp_path: Path, setting: str, name: str) -> None:
    (tmp_path / "run.toml").write_text(
        '[objective]\nteacher = { kind = "served", url = "", model = "m" }\n', encoding="utf-8"
    )
    with pytest.raises(ConfigError) as refused:
        load(tmp_path / "run.toml", [f"--{setting}={SECRET}"], complaints)
    (line,) = [line for line in str(refused.value).splitlines() if "holds" in line]
    assert setting in line and f'in {name} = "NAME"' in line and "hush" not in str(refused.value)


@pytest.mark.parametrize(("kind", "name"), [(Agent, "agent"), (OpenEnv, "openenv")])
def test_environments_refuse_them_and_take_the_key_of_a_variable(
    kind: type[Environment], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match='api_key.*key_variable = "NAME"') as refused:
        made(kind, name, {"url": SECRET}, None, RewardWeights())  # type: ignore[arg-type]
    assert "hush" not in str(refused.value)
    monkeypatch.delenv("THE_KEY", raising=False)
    one = made(kind, name, {"url": "http://host", "key_variable": "THE_KEY"}, None, RewardWeights())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f'{name}.key_variable = "THE_KEY": that environment variable is not set'):
        asyncio.run(kind.check(one.options))
    monkeypatch.setenv("THE_KEY", "hush")
    assert kind._key(one.options) == {"Authorization": "Bearer hush"}  # type: ignore[attr-defined]


def test_translation_refuses_them() -> None:
    with pytest.raises(ConfigError, match="^--url holds api_key.*--key-variable") as refused:
        TranslateStage(url=SECRET, model="m", languages=["de"])
    assert "hush" not in str(refused.value)
