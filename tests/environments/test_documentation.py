"""The environment of the documentation works as it stands there, in a process of its own."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from environments.environment import ENVIRONMENTS, Action, load_ready
from environments.host import EnvironmentHost
from shared.environment_settings import EnvironmentSettings
from shared.sections import RewardWeights
from shared.types import Problem, Reward

PAGE = Path(__file__).resolve().parents[2] / "docs" / "environments.md"


def _known() -> list[str]:
    load_ready()
    return [name for name, known in ENVIRONMENTS.items() if Path(known.home).parent.name == "environments"]


async def no_grade(problem: Problem, text: str) -> Reward:
    raise AssertionError("not asked")


def test_the_example_of_the_page_runs(tmp_path: Path) -> None:
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[0]
    (tmp_path / "rooms.py").write_text(code, encoding="utf-8")

    async def episode(answer: str) -> float | None:
        settings = EnvironmentSettings(plugins=[str(tmp_path / "rooms.py")])
        host = EnvironmentHost(settings, RewardWeights(), no_grade)
        try:
            await host.start(["parity"])
            begun = await host.reset((0, 0), Problem("1", "?", "", environment="parity"), 5, 30)
            [message] = begun.messages
            number = int(re.findall(r"\d+", message.text)[0])
            right = "odd" if number % 2 else "even"
            said = right if answer == "right" else "maybe"
            ended = await host.step((0, 0), Action(said, said), 30)
            assert ended.done
            return ended.reward
        finally:
            await host.end()

    assert asyncio.run(episode("right")) == 1.0
    assert asyncio.run(episode("wrong")) == 0.0


@pytest.mark.parametrize("name", sorted(_known()))
def test_every_ready_environment_has_a_page_with_its_options(name: str) -> None:
    page = (PAGE.parent / "environments" / f"{name}.md").read_text(encoding="utf-8")
    assert f"environments/{name}.md" in PAGE.read_text(encoding="utf-8")
    for option in ENVIRONMENTS[name].make.Options.model_fields:
        shared = option == "result_characters" and f"`{option}`" not in page  # told by the page of all tools
        assert shared or f"`{option}`" in page, f"{name}.md does not tell the option {option}"
