"""The environment "feedback" with real tests in a sandbox: the failing test is told until the program is right."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from environments.environment import Action, Observation, made
from environments.feedback import Feedback
from shared.sections import RewardWeights
from shared.types import Problem, Reward
from tests.environments.test_tools import PROBLEM, no_grade
from verify.plugins import Failed
from verify.reward import score

TESTS = [{"input": "2\n", "output": "4\n"}, {"input": "3\n", "output": "6\n"}]
DOUBLE = Problem("d", "Print twice the number.", "", domain="code", tests=TESTS)
WRONG, RIGHT = "print(4)", "print(2 * int(input()))"


async def grade(problem: Problem, text: str) -> Reward:
    return await asyncio.to_thread(score, problem, text)


def completion(program: str) -> Action:
    response = f"This program does it.\n\n```python\n{program}\n```"
    return Action(f"<think>\nI double it.\n</think>\n{response}", response)


def play(problem: Problem, *programs: str, grade: Any = grade, **options: Any) -> list[Observation]:
    async def run() -> list[Observation]:
        one = made(Feedback, "feedback", options, grade, RewardWeights())
        await one.reset(problem, 0)
        return [await one.step(completion(program)) for program in programs]

    return asyncio.run(run())


def test_the_failing_test_is_told_until_the_program_is_right() -> None:
    first, second, last = play(DOUBLE, WRONG, "print(1 / 0)", RIGHT, attempts=4)
    [message] = first.messages
    assert message.role == "user" and message.text.startswith("a test failed: printed '4\\n'")
    assert message.text.endswith("Repair the program, and write the whole of it again.") and not first.done
    assert "exit status 1" in second.messages[0].text and second.info == {"right": 0.0}
    assert last.done and not last.messages and last.info == {"right": 1.0} and Feedback.verified


def test_the_last_attempt_is_graded_by_the_verifier_alone() -> None:
    first, last = play(DOUBLE, WRONG, WRONG, attempts=2, instruction="No: {message}")
    assert first.messages[0].text.startswith("No: a test failed") and last.done and not last.info


def test_other_domains_are_refused_since_a_message_names_the_answer() -> None:
    with pytest.raises(Failed, match='domain "code", not math'):
        play(PROBLEM, "3", grade=no_grade)
