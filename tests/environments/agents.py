"""A run's side of the environment "agent" for tests, and agents that are real programs."""

import asyncio
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from environments.agent import Agent, AgentOptions
from environments.environment import Action, Observation
from shared.types import Problem, Reward, Verdict

PROBLEM = Problem("p1", "2 + 3 = ?", "5", environment="agent")
DEADLINE_S = 150.0


async def grade(problem: Problem, text: str) -> Reward:
    """The answer is right where it ends the text."""
    right = text.strip().endswith(problem.answer)
    return Reward(0.1 + 0.9 * right, 0.1, 0.9 * right, 0, 0, Verdict.CORRECT if right else Verdict.WRONG)


def action(text: str, token_ids: Sequence[int] = (), logprobs: Sequence[float] = ()) -> Action:
    response = text.rpartition("</think>")[2].strip()
    return Action(text, response, list(token_ids), list(logprobs))


@asynccontextmanager
async def agent(**options: Any) -> AsyncGenerator[Agent, None]:
    one = Agent()
    one.options, one.grade = AgentOptions.model_validate(options), grade
    try:
        yield one
    finally:
        await one.close()


async def play(one: Agent, turns: Sequence[Action], problem: Problem = PROBLEM) -> list[Observation]:
    """The observations of an episode with these turns, the first one that of `reset`."""
    async with asyncio.timeout(DEADLINE_S):
        seen = [await one.reset(problem, 7)]
        for turn in turns:
            seen.append(await one.step(turn))
    return seen


def program(folder: Path, text: str) -> str:
    path = folder / "agent.py"
    path.write_text(text)
    return f"{sys.executable} {path}"
