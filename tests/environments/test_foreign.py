"""Other people's programs, unmodified, in the environments that are made for them: they get scripted turns.
tests/examples/test_agent.py has one of the openai package, tests/system/test_agents.py has them in launches."""

import json
import re
from typing import Any

import pytest

from environments.environment import Environment, Observation, made
from environments.mcp_tools import Mcp
from environments.openenv import OpenEnv
from shared.sections import RewardWeights
from shared.tool_calls import call_text
from shared.types import Problem
from tests.environments.agents import action, agent, grade, play
from tests.environments.servers import HUB, agents, openenv, python, verifiers_agents

pytestmark = [pytest.mark.slow, pytest.mark.timeout(540)]

QUESTION = Problem("p", "How many plums are there?", "plums", environment="agent")
"""with seed 7, which `play` gives, there are 6 apples, 3 lemons and 7 plums"""


def call(kind: Any) -> str:
    return call_text("count", json.dumps({"kind": kind}))


async def ask(url: str, problem: Problem, *turns: str) -> list[Observation]:
    async with agent(url=url) as episode:
        return await play(episode, [action(turn) for turn in turns], problem)


async def act(kind: type[Environment], options: dict[str, Any], *turns: str) -> list[Observation]:
    environment = made(kind, "foreign", options, grade, RewardWeights())
    try:
        seen = [await environment.reset(Problem("p", "Find the number.", "5"), 7)]
        return [*seen, *[await environment.step(action(turn)) for turn in turns]]
    finally:
        await environment.close()


def texts(seen: list[Observation]) -> list[str]:
    return ["\n".join(message.text for message in one.messages if message.role != "system") for one in seen]


async def answer_questions(url: str) -> None:
    """Right after two calls, wrong, without a call, and calls without end."""
    told = "<tool_response>\n{}\n</tool_response>".format
    seen = await ask(url, QUESTION, f"{call('lemons')}\n{call('apples')}", call("plums"), "7")
    assert '"name": "count"' in seen[0].messages[1].text and seen[0].messages[0].text == QUESTION.text
    assert texts(seen)[1:3] == [f"{told(3)}\n{told(6)}", told(7)] and seen[-1].done and seen[-1].reward == 1.0
    seen = await ask(url, QUESTION, call("pears"), "6")
    assert "no such kind" in texts(seen)[1] and seen[-1].done and seen[-1].reward == 0.0
    assert (await ask(url, QUESTION, "7"))[-1].reward == 1.0


async def test_an_agent_of_langgraph_plays():
    with agents("langgraph_agent.py", python("agents", "langgraph", "langchain_openai")) as url:
        await answer_questions(url)


@pytest.mark.parametrize("environment", ["verifiers", "verifiers4"])
async def test_environments_of_verifiers(tmp_path, environment):
    with verifiers_agents(tmp_path, environment) as url:
        rows = (tmp_path / HUB["reverse-text"] / "train.jsonl").read_text().splitlines()
        await reverse_text(url, json.loads(rows[3])["prompt"])
        await alphabet_sort(url)


async def reverse_text(url: str, row: str) -> None:
    for answer, least, most in ((row[::-1], 1.0, 1.0), (row[::-1] + " e", 0.5, 0.95)):
        seen = await ask(url, Problem("p", "reverse-text 3", ""), f"<reversed_text>{answer}</reversed_text>")
        assert [message.role for message in seen[0].messages] == ["system", "user"]
        assert texts(seen)[0] == row and seen[-1].done and least <= (seen[-1].reward or 0) <= most


async def alphabet_sort(url: str) -> None:
    problem = Problem("p", "alphabet-sort 0", "")
    first, second, _ = texts(await ask(url, problem, "nothing", "nothing"))
    before, new = (text.split(" name: ")[1].split()[0] for text in (first, second))
    place = 1 if "LAST" in first else 0
    names = sorted([before, new], key=lambda name: re.findall("[A-Z][a-z]+", name)[place])
    both = "\n".join(f"{name} // new name!" if name == new else name for name in names)
    form = "<{0}>\n{1}\n</{0}>".format
    seen = await ask(url, problem, form("alphabetical_sorted", before), form("combined_alphabetical_sorted", both))
    assert seen[-1].done and seen[-1].reward == 1.0


async def test_a_server_of_openenv():
    with openenv() as url:
        seen = await act(OpenEnv, {"url": url, "action": "guess", "observation": "hint"}, "3", "7", "6")
    assert texts(seen) == ["Find the number.\n\nfrom 1 to 8", "higher", "lower", "right"]
    assert [one.reward for one in seen] == [None, 0.0, 0.0, 1.0] and [one.done for one in seen].index(True) == 3


async def test_the_clock_of_mcp_s_reference_servers():
    command = f"{python('agents', 'mcp_server_time')} -m mcp_server_time --local-timezone UTC"
    asked = {"source_timezone": "UTC", "time": "03:00", "target_timezone": "Asia/Tokyo"}
    calls = [call_text("convert_time", json.dumps({**asked, **more})) for more in ({}, {"target_timezone": "Mars"})]
    seen = await act(Mcp, {"command": command}, "\n".join(calls), "12")
    right, wrong = (message.text for message in seen[1].messages)
    assert "T12:00:00+09:00" in right and wrong.startswith("Error: ") and "Mars" in wrong
    assert seen[1].info == {"tool_calls": 2.0, "failed_calls": 1.0} and seen[-1].done
