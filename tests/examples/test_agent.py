"""The files of the example "agent": its demonstrations have the prompt and the calls of the agent itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from environments.environment import Observation
from examples.agent.agent import CLIENT, run, shelf
from examples.agent.prepare import prepare
from shared.chat import Chat
from shared.errors import ConfigError
from shared.sections import Data, Sft
from shared.tool_calls import result_text
from tests.environments.agents import action, agent, play
from tests.environments.servers import agents
from tests.environments.test_foreign import answer_questions
from trainer.data.data_source import PromptFormat
from trainer.data.problem_file import read_problems
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
    answer_questions(url)


@pytest.mark.slow
def test_demonstrations_are_what_the_agent_asks_and_reads(made: Path, url: str) -> None:
    [problem, *_] = read_problems(made / "train.jsonl", "data.train", environment="agent").problems
    row = json.loads((made / "demonstrations.jsonl").read_text().splitlines()[0])

    turns = [turn["content"] for turn in row["completion"]]

    async def scene() -> list[Observation]:
        async with agent(url=url) as one:
            return await play(one, [action(turns[0]), action(turns[2])], replace(problem, text=row["problem"]))

    first, second, end = asyncio.run(scene())
    assert [message.text for message in first.messages] == [row["problem"], row["system"]]
    kind = row["problem"].split()[2]
    assert second.messages[0].text == result_text(str(shelf(7)[kind])) and end.done
    prompts = PromptFormat(Chat(made / "model"), Data(system_prompt=""))
    found = load_demonstrations(made / "demonstrations.jsonl", None, Sft(), prompts, 256)
    assert found.reasoning[0].prompt == prompts.render(first.messages[0].text, also=first.messages[1].text)


def test_the_tool_counts() -> None:
    there = {"plums": 7}
    given = [{"kind": "plums"}, {"kind": "pears"}, {"kind": ["plums"]}, {}]
    assert [run(json.dumps(one), there) for one in given] == ["7", *["no such kind"] * 3]
    assert CLIENT.max_retries == 0 and all(1 <= count <= 9 for seed in range(99) for count in shelf(seed).values())


def test_the_example_has_no_options(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has none, not numbers"):
        prepare(tmp_path, {"numbers": 9}, 0)
