"""The environments "retry" and "feedback", which give a policy further attempts, with the real verifier and sandbox."""

import asyncio
from typing import Any

import pytest

from environments.environment import Action, Environment, Observation, made
from environments.feedback import Feedback
from environments.retry import Retry
from shared.sections import RewardWeights
from shared.types import Problem, Reward, Verdict
from tests.environments.test_tools import PROBLEM, no_grade
from verify.plugins import Failed
from verify.reward import score

PRODUCT = Problem("p", "What is 17 * 23?", "391")
TESTS = [{"input": "2\n", "output": "4\n"}, {"input": "3\n", "output": "6\n"}]
DOUBLE = Problem("d", "Print twice the number.", "", domain="code", tests=TESTS)
WRONG, RIGHT = "print(4)", "print(2 * int(input()))"


async def grade(problem: Problem, text: str) -> Reward:
    return await asyncio.to_thread(score, problem, text)


async def no_verdict(problem: Problem, text: str) -> Reward:
    return Reward(0.0, 0.0, 0.0, 0.0, 0.0, Verdict.TIMEOUT, reason="the checker hung")


async def play(
    kind: type[Environment], problem: Problem, *turns: Action, grade: Any = grade, **options: object
) -> list[Observation]:
    environment = made(kind, "attempts", dict(options), grade, RewardWeights())
    await environment.reset(problem, 0)
    return [await environment.step(turn) for turn in turns]


def answer(number: int) -> Action:
    text = rf"<think>Seventeen times twenty is 340, and 51 more.</think>It is \boxed{{{number}}}."
    return Action(text, text)


def completion(program: str) -> Action:
    response = f"This program does it.\n\n```python\n{program}\n```"
    return Action(f"<think>\nI double it.\n</think>\n{response}", response)


@pytest.mark.parametrize(
    ("first", "second", "rewards", "made"),
    [
        (391, 391, (1.0, 1.0), (0, 0)),  # SCoRe, section 5: r1, r2 + alpha (r2 - r1)
        (390, 391, (0.0, 2.0), (1, 0)),
        (391, 390, (1.0, -1.0), (0, 1)),
        (390, 390, (0.0, 0.0), (0, 0)),
    ],
)
async def test_progress_is_paid_and_told(first, second, rewards, made):
    played, two = await play(Retry, PRODUCT, answer(first), answer(second))
    assert (played.reward, two.reward) == rewards and not played.done and two.done
    assert played.messages[0].text.startswith("There might be an error in the solution above") and not played.info
    r1, r2 = float(first == 391), float(second == 391)
    change = {"made_right": made[0], "made_wrong": made[1], "progress": r2 - r1}
    assert two.solved == bool(r2) and two.info == {"first_right": r1, "second_right": r2, **change}


async def test_weights_and_words_of_retry_can_be_chosen():
    options = {"alpha": 0.5, "first": 0.25, "instruction": "Look again."}
    played, two = await play(Retry, PRODUCT, answer(391), answer(390), **options)
    assert (played.reward, two.reward, played.messages[0].text) == (0.25, -0.5, "Look again.")


async def test_an_answer_without_a_verdict_ends_the_episode_ungraded():
    with pytest.raises(Failed, match="the checker hung"):
        await play(Retry, PRODUCT, answer(391), grade=no_verdict)


async def test_the_failing_test_is_told_until_the_program_is_right():
    first, second, last = await play(Feedback, DOUBLE, *map(completion, (WRONG, "print(1 / 0)", RIGHT)), attempts=4)
    [message] = first.messages
    assert message.role == "user" and message.text.startswith("a test failed: printed '4\\n'")
    assert message.text.endswith("Repair the program, and write the whole of it again.") and not first.done
    assert "exit status 1" in second.messages[0].text and second.info == {"right": 0.0}
    assert last.done and not last.messages and last.info == {"right": 1.0} and Feedback.verified


async def test_the_last_attempt_is_graded_by_the_verifier_alone():
    turns = [completion(WRONG)] * 2
    first, last = await play(Feedback, DOUBLE, *turns, attempts=2, instruction="No: {message}")
    assert first.messages[0].text.startswith("No: a test failed") and last.done and not last.info


async def test_feedback_on_other_domains_is_refused_since_a_message_names_the_answer():
    with pytest.raises(Failed, match='domain "code", not math'):
        await play(Feedback, PROBLEM, completion("3"), grade=no_grade)
