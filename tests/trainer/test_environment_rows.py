"""What `--dry-run`, `check` and the start of a launch say of environments, before anything is trained."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from shared.config import Config
from shared.errors import ConfigError, DataError, ModelError
from tests.shared.test_turns import chat_of
from trainer.check.command import data_and_model
from trainer.check.finding import CheckFinding
from trainer.check.inspection import inspect
from trainer.check.plan import plan_text
from trainer.data.environment_rows import (
    EnvironmentRow,
    environment_lines,
    environment_rows,
    room_lines,
    start_episodes,
)
from trainer.data.problem_file import read_problems

PLUGIN = """
from environments.environment import Environment, environment

@environment("parity")
class Parity(Environment):
    pass
"""


def settings(folder: Path, *environments: str | None, **sections: Any) -> Config:
    """Settings with a row of data for each of the environments, None for one without."""
    rows = [{"problem": "?" * number, "answer": "1"} | ({"environment": name} if name else {})
            for number, name in enumerate(environments, 1)]  # fmt: skip
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return Config.model_validate(
        {
            "data": {"train": str(folder / "rows.jsonl")},
            "model": {"path": "made/x"},
            "prepare": {"script": "examples/quickstart/prepare.py"},
            "runs_dir": str(folder / "runs"),
        }
        | sections
    )


def rows_of(config: Config) -> list[EnvironmentRow]:
    """The rows of the data that have an environment. Raises what a launch would be refused for."""
    found = inspect(config)
    found.raise_first()
    return found.environments


def environments_of(config: Config) -> list[CheckFinding]:
    """What `check` says of environments."""
    return [finding for finding in data_and_model(config, None) if finding.name == "environments"]


def test_environments_and_their_problems_are_told(tmp_path: Path) -> None:
    config = settings(tmp_path, "guess", "guess", None, "retry", environment={"max_turns": 3, "turn_tokens": 9})
    lines = list(environment_lines(config, rows_of(config)))
    assert lines[0].split(maxsplit=1) == ["guess", "2 problems of data.train"]
    assert lines[1].split(maxsplit=1) == ["retry", "1 problems of data.train"]
    assert "at most 3 turns of 9 tokens" in lines[2] and len(lines) == 3
    named = settings(tmp_path, "guess", None, environment={"name": "retry"})
    assert [line.split()[1] for line in environment_lines(named, rows_of(named))][:2] == ["1", "1"]


def test_data_without_environments_is_planned_as_before(tmp_path: Path) -> None:
    config = settings(tmp_path, None)
    assert rows_of(config) == [] and "\nenvironments\n" not in plan_text(config)
    assert list(environments_of(config)) == [] and list(room_lines(config, [])) == []
    assert rows_of(settings(tmp_path, data={"train": "made/not_yet.jsonl"})) == [] == environment_rows([])


@pytest.mark.parametrize("ask", [rows_of, plan_text])
def test_an_unknown_environment_is_told_with_its_line_and_the_nearest_name(tmp_path: Path, ask: Any) -> None:
    with pytest.raises(
        DataError, match=r"data\.train: .*rows\.jsonl:2: there is no environment 'gues'; did you mean guess\?"
    ):
        ask(settings(tmp_path, "guess", "gues", "retry"))
    with pytest.raises(DataError, match=r"2 rows name environments that are not there:\n.*jsonl:1.*\n.*jsonl:3"):
        ask(settings(tmp_path, "gues", "guess", "xyzzy"))
    with pytest.raises(ConfigError, match=r"environment\.name: there is no environment 'gues'"):
        ask(settings(tmp_path, None, environment={"name": "gues"}))
    with pytest.raises(ConfigError, match=r"environment\.options\.gues: there is no environment"):
        ask(settings(tmp_path, "guess", environment={"options": {"gues": {}}}))


def test_environments_of_plug_in_files_are_known(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN)
    plugins = {"plugins": [str(tmp_path / "mine.py")]}
    config = settings(tmp_path, "parity", environment=plugins)
    assert [finding.status for finding in environments_of(config)] == ["OK"]
    with pytest.raises(DataError, match=r"jsonl:2: there is no environment 'parrity'; did you mean parity\?"):
        rows_of(settings(tmp_path, "parity", "parrity", environment=plugins))


def test_check_fails_for_environments_that_are_not_there(tmp_path: Path) -> None:
    [finding] = environments_of(settings(tmp_path, "gues"))
    assert finding.status == "FAIL" and "rows.jsonl:1" in finding.text and finding.step
    [finding] = environments_of(settings(tmp_path, "guess"))
    assert (finding.status, finding.text) == ("OK", "guess 1 problems of data.train")


WANTING = [
    ("search", {"corpus": "nowhere.jsonl"}, r"environment\.options\.search\.corpus = 'nowhere\.jsonl': there is no"),
    ("search", {"corpus": "ROWS"}, r"environment\.options\.search\.corpus: .*rows\.jsonl:1 lacks 'text'"),
    ("mcp", {"command": "/no/such/server"}, r"environment\.options\.mcp\.command = .*cannot be used.*by hand"),
    ("mcp", {"url": "http://127.0.0.1:9/mcp"}, r"environment\.options\.mcp\.url = .*cannot be used"),
]


@pytest.mark.parametrize(("name", "options", "words"), WANTING)
def test_a_corpus_or_a_server_that_is_not_there_is_told_before_a_run(
    tmp_path: Path, name: str, options: dict[str, str], words: str
) -> None:
    given = {key: value.replace("ROWS", str(tmp_path / "rows.jsonl")) for key, value in options.items()}
    config = settings(tmp_path, name, environment={"options": {name: given}})
    with pytest.raises((ConfigError, DataError), match=words):
        plan_text(config)
    [finding] = environments_of(config)
    assert finding.status == "FAIL" and re.search(words, finding.text)


def test_a_launch_names_file_and_line_too(tmp_path: Path) -> None:
    from environments.host import EnvironmentHost

    config = settings(tmp_path, "guess", "gues")

    class Episodes:
        settings, host = config.environment, EnvironmentHost(config.environment, config.reward, None)  # type: ignore[arg-type]

        async def start(self, problems: Any) -> None:
            await self.host.start(sorted({problem.environment for problem in problems}))

    file = read_problems(tmp_path / "rows.jsonl", "data.train")
    with pytest.raises(DataError, match=r"data\.train: .*rows\.jsonl:2: there is no environment 'gues'"):
        asyncio.run(start_episodes(Episodes(), [file], file.problems))


def test_the_longest_episode_is_compared_with_what_the_model_takes(tmp_path: Path) -> None:
    """ours: <|user|>..<|assistant|> is 2 tokens around a text, and between turns too; "???" has 3 tokens."""
    chat_of(tmp_path, "ours")

    def lines(max_tokens: int) -> list[str]:
        limits = {"max_turns": 4, "observation_tokens": 10}
        data = {"train": str(tmp_path / "rows.jsonl"), "system_prompt": ""}
        model, rollout = {"path": str(tmp_path), "max_tokens": max_tokens}, {"max_completion_tokens": 40}
        named = ["guess"] * 3
        config = settings(tmp_path, *named, environment=limits, data=data, model=model, rollout=rollout)
        return list(room_lines(config, rows_of(config)))

    [line] = lines(81)
    assert line.endswith("81 = 5 of the longest prompt + 40 sampled + 3 answers of 12, 2 of them the chat template's")
    assert len(lines(80)) == 2 and "model.max_tokens = 80 holds fewer" in lines(80)[1]


def test_a_template_that_rewrites_its_history_is_told_before_a_launch(tmp_path: Path) -> None:
    chat_of(tmp_path, "qwen3")
    config = settings(tmp_path, "guess", model={"path": str(tmp_path)})
    with pytest.raises(ModelError, match="rewrites its history"):
        list(room_lines(config, rows_of(config)))
