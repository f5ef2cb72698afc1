"""From sampled tokens to a reward: templates that open the thought, control tokens, extra rewards, wrong names."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from shared.config import Config
from shared.errors import RunError
from shared.types import Completion, Problem, Reward, Verdict
from verify.plugins import REWARDS, Case, Registered
from verify.scorer import RewardScorer

PROBLEM = Problem("1", "Tom has 5 apples. Tom buys 3 more. How many apples does Tom have now?", "8")
VOCABULARY = {
    1: "[THINK]", 2: "[/THINK]", 3: "Tom starts with 5 and buys 3 more: 5+3=8.", 4: "The answer is \\boxed{8}.",
    5: "<think>", 6: "</think>", 7: "[/THINK]", 8: "The answer is \\boxed{9}.",
    9: "Here it is:\n```python\nprint(2 * int(input()))\n```", 10: "Here it is:\n```python\nprint(int(input()))\n```",
}  # fmt: skip
"""1 and 2 are control tokens; 7 stands for the same letters in ordinary tokens"""


class Tokens:
    """What RewardScorer uses of a Chat."""

    def __init__(self, think_prefix: str = "", control: bool = False):
        self.think_prefix, self.think_ids = think_prefix, (1, 2) if control else None

    def encode(self, text: str) -> list[int]:
        assert text == "[THINK][/THINK]"
        return [1, 2]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(VOCABULARY[number] for number in ids)


def judge(ids: list[int], chat: Tokens, problem: Problem = PROBLEM, **reward: object) -> tuple[Reward, str]:
    table = {"rollout": {"max_completion_tokens": 10}, "reward": {"overlong_buffer": 5, **reward}}

    async def work() -> tuple[Reward, str]:
        scorer = RewardScorer(SimpleNamespace(now=Config.model_validate(table)), chat)  # type: ignore[arg-type]
        try:
            return await scorer.score(problem, Completion(0, 0, 0, token_ids=ids))
        finally:
            await scorer.close()

    return asyncio.run(work())


@pytest.mark.parametrize(
    ("ids", "chat", "total"),
    [
        ([5, 3, 6, 4], Tokens(), 1.1),
        ([3, 6, 4], Tokens("<think>\n"), 1.1),
        ([5, 3, 6, 4], Tokens("<think>\n"), 0.0),
        ([3, 6, 4], Tokens(), 0.0),
        ([1, 3, 2, 4], Tokens(control=True), 1.1),
        ([1, 3, 2, 8], Tokens(control=True), 0.2),
        ([3, 2, 4], Tokens("[THINK]", control=True), 1.1),
        ([1, 3, 2, 4], Tokens("[THINK]", control=True), 0.0),
        ([1, 3, 7, 4], Tokens(control=True), 0.0),
        ([5, 3, 6, 4], Tokens(control=True), 1.1),
        ([3, 6, 4], Tokens("<think>\n", control=True), 1.1),
        ([5, 3, 6] + [3] * 4 + [4], Tokens(), 1.04),
        ([4], Tokens("<think>\n\n</think>\n\n"), 1.0),
        ([5, 3, 6, 4], Tokens("<think>\n\n</think>\n\n"), 0.0),
        ([4], Tokens("[THINK][/THINK]", control=True), 1.0),
        ([1, 3, 2, 4], Tokens("[THINK][/THINK]", control=True), 0.0),
    ],
)
def test_reward_of_sampled_tokens(ids: list[int], chat: Tokens, total: float) -> None:
    reward, text = judge(ids, chat)
    assert reward.total == pytest.approx(total), reward
    assert text == chat.think_prefix + chat.decode(ids)


def test_a_length_penalty_that_is_off_needs_no_limits() -> None:
    """The buffer's default is longer than so short a completion may be."""
    reward, _ = judge([5, 3, 6, 4], Tokens(), length=0, overlong_buffer=32)
    assert (reward.total, reward.length) == (pytest.approx(1.1), 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(("program", "verdict", "share"), [(9, Verdict.CORRECT, 1.0), (10, Verdict.WRONG, 0.5)])
def test_programs_are_run_in_training(program: int, verdict: Verdict, share: float) -> None:
    tests = [{"input": "0\n", "output": "0\n"}, {"input": "4\n", "output": "8\n"}]
    problem = Problem("c", "Write a program that doubles a number.", "", domain="code", tests=tests)
    reward, _ = judge([5, 3, 6, program], Tokens(), problem)
    assert (reward.verdict, reward.share) == (verdict, share), reward.reason


@pytest.mark.slow
def test_isolation_is_told_only_where_there_are_programs() -> None:
    async def told(domain: str) -> str:
        scorer = RewardScorer(SimpleNamespace(now=Config()), Tokens())  # type: ignore[arg-type]
        try:
            tests = [{"input": "", "output": "8"}]
            return await scorer.start([Problem("1", "Say 8.", "8", domain=domain, tests=tests)])
        finally:
            await scorer.close()

    assert asyncio.run(told("math")) == ""
    assert asyncio.run(told("code")).startswith("sandbox: ")


def test_extra_rewards_reach_the_run() -> None:
    reward, _ = judge([5, 3, 6, 4], Tokens(), extra={"cosine_length": 0.5})
    assert reward.verdict is Verdict.CORRECT
    assert reward.extra["cosine_length"] == pytest.approx(0.5 * (0.5 + 0.25 * (1 + 0.309017)))
    assert reward.total == pytest.approx(1.1 + reward.extra["cosine_length"])


def test_failures_are_told_once_with_their_rate_and_end_the_run_above_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plug-in that fails for one problem in ten: the reward, the problem and the error, how often; then the end."""

    def sometimes(case: Case) -> float:
        return 1 / (len(case.problem.id) - 3)

    known = Registered("sometimes", lambda _: sometimes, lambda _: 0, lambda _: 1, "")
    monkeypatch.setitem(REWARDS, "sometimes", known)
    table = {"rollout": {"max_completion_tokens": 10}, "reward": {"overlong_buffer": 5, "extra": {"sometimes": 0.1}}}

    async def work() -> None:
        scorer = RewardScorer(SimpleNamespace(now=Config.model_validate(table)), Tokens())  # type: ignore[arg-type]

        async def score(name: str) -> None:
            problem = Problem(name, PROBLEM.text, PROBLEM.answer)
            await scorer.score(problem, Completion(0, 0, 0, token_ids=[5, 3, 6, 4]))

        for name in ("good", "bad", "good"):
            await score(name)
        (line,) = scorer.news()
        assert line.startswith("not graded and not trained on: 1 of 3 completions (33.3%) are crash, reward sometimes")
        assert "(first: problem 'bad': reward sometimes: ZeroDivisionError" in line
        await score("bad")
        assert scorer.news() == [], "told again when it is ten times as frequent"
        for _ in range(8):
            await score("bad")
        assert "10 of 12 completions" in scorer.news()[0]
        with pytest.raises(RunError, match=r"max_failure_share.*of 200 completions.*first: problem 'bad': reward"):
            for number in range(200):
                await score("good" if number % 8 else "bad")

    asyncio.run(work())
