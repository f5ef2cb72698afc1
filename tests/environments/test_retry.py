"""The environment "retry": both answers graded by the real verifier, rewards of SCoRe's section 5 by hand."""

from __future__ import annotations

import asyncio

import pytest

from environments.environment import Action, Observation, made
from environments.retry import Retry
from shared.sections import RewardWeights
from shared.types import Problem, Reward, Verdict
from verify.plugins import Failed
from verify.reward import score

PROBLEM = Problem("p", "What is 17 * 23?", "391")


async def grade(problem: Problem, text: str) -> Reward:
    return await asyncio.to_thread(score, problem, text)


async def no_verdict(problem: Problem, text: str) -> Reward:
    return Reward(0.0, 0.0, 0.0, 0.0, 0.0, Verdict.TIMEOUT, reason="the checker hung")


def play(*answers: str, **options: object) -> list[Observation]:
    async def run() -> list[Observation]:
        one = made(Retry, "retry", dict(options), grade, RewardWeights())
        await one.reset(PROBLEM, 0)
        return [await one.step(Action(text, text)) for text in answers]

    return asyncio.run(run())


def answer(number: int) -> str:
    return rf"<think>Seventeen times twenty is 340, and 51 more.</think>It is \boxed{{{number}}}."


@pytest.mark.parametrize(
    ("first", "second", "rewards", "made"),
    [
        (391, 391, (1.0, 1.0), (0, 0)),  # r1, r2 + alpha (r2 - r1)
        (390, 391, (0.0, 2.0), (1, 0)),
        (391, 390, (1.0, -1.0), (0, 1)),
        (390, 390, (0.0, 0.0), (0, 0)),
    ],
)
def test_progress_is_paid_and_told(
    first: int, second: int, rewards: tuple[float, float], made: tuple[int, int]
) -> None:
    one, two = play(answer(first), answer(second))
    assert (one.reward, two.reward) == rewards and not one.done and two.done
    assert one.messages[0].text.startswith("There might be an error in the solution above") and not one.info
    r1, r2, (right, wrong) = float(first == 391), float(second == 391), made
    assert two.solved == bool(r2)
    assert two.info == {
        "first_right": r1, "second_right": r2, "made_right": right, "made_wrong": wrong, "progress": r2 - r1,
    }  # fmt: skip


def test_weights_and_words_can_be_chosen() -> None:
    one, two = play(answer(391), answer(390), alpha=0.5, first=0.25, instruction="Look again.")
    assert (one.reward, two.reward, one.messages[0].text) == (0.25, -0.5, "Look again.")


def test_an_answer_without_a_verdict_ends_the_episode_ungraded() -> None:
    async def run() -> None:
        one = made(Retry, "retry", {}, no_verdict, RewardWeights())
        await one.reset(PROBLEM, 0)
        await one.step(Action("x", "x"))

    with pytest.raises(Failed, match="the checker hung"):
        asyncio.run(run())
