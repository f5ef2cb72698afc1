"""The environment and the agent of the documentation work as they stand there, in processes of their own."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from environments.environment import ENVIRONMENTS, Action, Observation, load_ready
from environments.host import EnvironmentHost
from shared.environment_settings import EnvironmentSettings
from shared.sections import RewardWeights
from shared.types import Problem, Reward
from tests.environments.agents import action, agent, play, program

PAGE = Path(__file__).resolve().parents[2] / "docs" / "environments.md"


def _known() -> list[str]:
    load_ready()
    return [name for name, known in ENVIRONMENTS.items() if Path(known.home).parent.name == "environments"]


async def no_grade(problem: Problem, text: str) -> Reward:
    raise AssertionError("not asked")


def first_program(page: Path) -> str:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)[0]


def test_the_environment_of_the_page_runs(tmp_path: Path) -> None:
    (tmp_path / "rooms.py").write_text(first_program(PAGE), encoding="utf-8")

    async def episode(right: bool) -> float | None:
        settings = EnvironmentSettings(plugins=[str(tmp_path / "rooms.py")])
        host = EnvironmentHost(settings, RewardWeights(), no_grade)
        try:
            await host.start(["parity"])
            begun = await host.reset((0, 0), Problem("1", "?", "", environment="parity"), 5, 30)
            [message] = begun.messages
            number = int(re.findall(r"\d+", message.text)[0])
            said = "maybe" if not right else "odd" if number % 2 else "even"
            ended = await host.step((0, 0), Action(said, said), 30)
            assert ended.done
            return ended.reward
        finally:
            await host.end()

    assert [asyncio.run(episode(right)) for right in (True, False)] == [1.0, 0.0]


def test_the_agent_of_its_page_runs(tmp_path: Path) -> None:
    code = first_program(PAGE.parent / "environments" / "agent.md")

    async def scene() -> list[Observation]:
        async with agent(command=program(tmp_path, code)) as one:
            return await play(one, [action("<think>a</think>4"), action("5")])

    first, second, end = asyncio.run(scene())
    assert [message.text for message in first.messages] == ["2 + 3 = ?"]
    assert [message.text for message in second.messages] == ["No. Try again."]
    assert (end.reward, end.solved, end.done) == (1.0, True, True)


@pytest.mark.parametrize("name", sorted(_known()))
def test_every_ready_environment_has_a_page_with_its_options(name: str) -> None:
    page = (PAGE.parent / "environments" / f"{name}.md").read_text(encoding="utf-8")
    assert f"environments/{name}.md" in PAGE.read_text(encoding="utf-8")
    for option in ENVIRONMENTS[name].make.Options.model_fields:
        shared = option == "result_characters" and f"`{option}`" not in page  # told by the page of all tools
        assert shared or f"`{option}`" in page, f"{name}.md does not tell the option {option}"
