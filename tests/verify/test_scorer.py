"""From sampled tokens to a reward in training: templates that open the thought, control tokens, programs, failures."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shared.errors import RunError
from shared.types import Completion, Problem, Reward, Verdict
from tests.verify.grading import PROBLEM, Tokens, scorer_of
from verify.plugins import REWARDS, Case, Registered
from verify.scorer import RewardScorer

TEXTS = {
    1: "[THINK]", 2: "[/THINK]", 3: "Tom starts with 5 and buys 3 more: 5+3=8.", 4: "The answer is \\boxed{8}.",
    5: "<think>", 6: "</think>", 7: "[/THINK]", 8: "The answer is \\boxed{9}.",
    9: "Here it is:\n```python\nprint(2 * int(input()))\n```", 10: "Here it is:\n```python\nprint(int(input()))\n```",
}  # fmt: skip
"""1 and 2 are control tokens; 7 stands for the same letters in ordinary tokens"""
DOUBLES = [{"input": "0\n", "output": "0\n"}, {"input": "4\n", "output": "8\n"}]


def scored(scorer: RewardScorer, ids: list[int], problem: Problem = PROBLEM) -> tuple[Reward, str]:
    async def work() -> tuple[Reward, str]:
        found = await scorer.score(problem, Completion(0, 0, 0, token_ids=ids))
        await scorer.close()
        return found

    return asyncio.run(work())


@pytest.mark.parametrize(
    ("ids", "prefix", "control", "total"),
    [
        ([5, 3, 6, 4], "", False, 1.1), ([3, 6, 4], "", False, 0.0),
        ([3, 6, 4], "<think>\n", False, 1.1), ([5, 3, 6, 4], "<think>\n", False, 0.0),
        ([1, 3, 2, 4], "", True, 1.1), ([1, 3, 2, 8], "", True, 0.2), ([1, 3, 7, 4], "", True, 0.0),
        ([3, 2, 4], "[THINK]", True, 1.1), ([1, 3, 2, 4], "[THINK]", True, 0.0),
        ([5, 3, 6, 4], "", True, 1.1), ([3, 6, 4], "<think>\n", True, 1.1),
        ([5, 3, 6] + [3] * 4 + [4], "", False, 1.04),
        ([4], "<think>\n\n</think>\n\n", False, 1.0), ([5, 3, 6, 4], "<think>\n\n</think>\n\n", False, 0.0),
        ([4], "[THINK][/THINK]", True, 1.0), ([1, 3, 2, 4], "[THINK][/THINK]", True, 0.0),
    ],
)  # fmt: skip
def test_reward_of_sampled_tokens(ids: list[int], prefix: str, control: bool, total: float) -> None:
    chat = Tokens(TEXTS, prefix, control)
    found, text = scored(scorer_of(chat, 10, overlong_buffer=5), ids)
    assert found.total == pytest.approx(total), found
    assert text == prefix + chat.decode(ids)


def test_extra_rewards_reach_the_run_and_a_length_penalty_that_is_off_needs_no_limits() -> None:
    """The buffer is longer than so short a completion may be."""
    scorer = scorer_of(Tokens(TEXTS), 10, length=0, overlong_buffer=32, extra={"cosine_length": 0.5})
    found, _ = scored(scorer, [5, 3, 6, 4])
    assert found.verdict is Verdict.CORRECT and found.length == 0.0
    assert found.extra["cosine_length"] == pytest.approx(0.5 * (0.5 + 0.25 * (1 + 0.309017)))
    assert found.total == pytest.approx(1.1 + found.extra["cosine_length"])


@pytest.mark.slow
def test_programs_are_run_in_training_and_their_isolation_is_told() -> None:
    problem = Problem("c", "Write a program that doubles a number.", "", domain="code", tests=DOUBLES)
    for program, verdict, share in ((9, Verdict.CORRECT, 1.0), (10, Verdict.WRONG, 0.5)):
        found, _ = scored(scorer_of(Tokens(TEXTS)), [5, 3, 6, program], problem)
        assert (found.verdict, found.share) == (verdict, share), found.reason

    async def told(problem: Problem) -> str:
        scorer = scorer_of(Tokens(TEXTS))
        try:
            return await scorer.start([problem])
        finally:
            await scorer.close()

    assert asyncio.run(told(PROBLEM)) == "" and asyncio.run(told(problem)).startswith("sandbox: ")


def test_failures_are_told_once_with_their_rate_and_end_the_run_above_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plug-in that fails for one problem in ten: the reward, the problem and the error, how often; then the end."""

    def sometimes(case: Case) -> float:
        return 1 / (len(case.problem.id) - 3)

    known = Registered("sometimes", lambda _: sometimes, lambda _: 0, lambda _: 1, "")
    monkeypatch.setitem(REWARDS, "sometimes", known)
    scorer = scorer_of(Tokens(TEXTS), 10, overlong_buffer=5, extra={"sometimes": 0.1})

    async def score(*names: str) -> list[Any]:
        for name in names:
            problem = Problem(name, PROBLEM.text, PROBLEM.answer)
            await scorer.score(problem, Completion(0, 0, 0, token_ids=[5, 3, 6, 4]))
        return scorer.news()

    async def work() -> None:
        [line] = await score("good", "bad", "good")
        assert line.startswith("not graded and not trained on: 1 of 3 completions (33.3%) are crash, reward sometimes")
        assert "(first: problem 'bad': reward sometimes: ZeroDivisionError" in line
        assert await score("bad") == [], "told again when it is ten times as frequent"
        assert "10 of 12 completions" in (await score(*["bad"] * 8))[0]
        with pytest.raises(RunError, match=r"max_failure_share.*of 200 completions.*first: problem 'bad': reward"):
            await score(*("good" if number % 8 else "bad" for number in range(200)))

    asyncio.run(work())
