"""The files of the example "agent": its demonstrations have the prompt and the calls of the agent itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from environments.environment import Observation
from examples.agent.agent import CLIENT, compare
from examples.agent.prepare import prepare
from shared.chat import Chat
from shared.errors import ConfigError
from shared.sections import Data, Sft
from tests.environments.agents import action, agent, play
from tests.environments.servers import agents
from tests.environments.test_foreign import play_games
from trainer.data import PromptFormat, load_problems
from trainer.sft import load_demonstrations


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    prepare(folder, {}, 0)
    return folder


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with agents("agent.py") as address:
        yield address


@pytest.mark.slow
def test_an_agent_of_openai_s_package_plays(url: str) -> None:
    play_games(url)


@pytest.mark.slow
def test_demonstrations_are_what_the_agent_asks_and_reads(made: Path, url: str) -> None:
    [problem, *_] = load_problems(made / "train.jsonl", "data.train", "agent")
    row = json.loads((made / "demonstrations.jsonl").read_text().splitlines()[0])

    async def scene() -> list[Observation]:
        async with agent(url=url) as one:
            return await play(one, [action(row["completion"])], problem)

    first, second = asyncio.run(scene())
    assert [message.text for message in first.messages] == [row["problem"], row["system"]]
    number = json.loads(row["completion"].split("\n")[1])["arguments"]
    assert second.done is (compare(json.dumps(number), 6) == "right")
    prompts = PromptFormat(Chat(made / "model"), Data(system_prompt=""))
    found = load_demonstrations(made / "demonstrations.jsonl", None, Sft(), prompts, 256)
    assert found.reasoning[0].prompt == prompts.render(first.messages[0].text, also=first.messages[1].text)


def test_the_tool_says_what_to_do() -> None:
    said = [compare(json.dumps({"number": number}), 6) for number in (5, 7, 6, "6")]
    assert said == ["higher", "lower", "right", "no number"] and compare("{}", 6) == "no number"
    assert CLIENT.max_retries == 0


def test_the_example_has_no_options(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has none, not numbers"):
        prepare(tmp_path, {"numbers": 9}, 0)
