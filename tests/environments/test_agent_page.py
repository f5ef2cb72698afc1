"""The agent of docs/environments/agent.md works as it stands there."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from environments.environment import Observation
from tests.environments.agents import action, agent, play, program

PAGE = Path(__file__).resolve().parents[2] / "docs" / "environments" / "agent.md"


def test_the_agent_of_the_page_runs(tmp_path: Path) -> None:
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[0]

    async def scene() -> list[Observation]:
        async with agent(command=program(tmp_path, code)) as one:
            return await play(one, [action("<think>a</think>4"), action("5")])

    first, second, end = asyncio.run(scene())
    assert [message.text for message in first.messages] == ["2 + 3 = ?"]
    assert [message.text for message in second.messages] == ["No. Try again."]
    assert (end.reward, end.solved, end.done) == (1.0, True, True)
