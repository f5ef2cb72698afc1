"""Judges that are measured while they judge: an honest one, one biased to the first place, a random one, a dead one, a
slow one, and hostile responses."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from shared.config import Config
from shared.errors import RunError
from shared.types import Completion, Problem, Reward, Verdict
from tests.verify.test_judges import (
    ESSAY,
    HOSTILE,
    RIGHT,
    THOUGHT,
    WRONG,
    Said,
    Server,
    asked,
    judge,
    server,
    settled,
)
from tests.verify.test_plugins import Fast, settings
from verify.reward import CompletionScorer
from verify.scorer import RewardScorer

__all__ = ["server"]
GROUPS, SIZE = 26, 4
random_judge = random.Random(3)


def honest(body: dict[str, Any]) -> str:
    solutions = asked(body)[1]
    right = ["boxed{8}" in solution for solution in solutions]
    if len(right) == 1:
        return f"SCORE: {9 if right[0] else 2}"
    return f"BETTER: {1 if right[0] or not right[1] and solutions[0] < solutions[1] else 2}"


def first(body: dict[str, Any]) -> str:
    return "BETTER: 1" if len(asked(body)[1]) == 2 else "SCORE: 9"


def drawn(body: dict[str, Any]) -> str:
    return (
        f"BETTER: {random_judge.choice((1, 2))}"
        if len(asked(body)[1]) == 2
        else f"SCORE: {random_judge.choice((2, 9))}"
    )


def measure(
    server: Server, decide: Callable[[dict[str, Any]], Any], asks: str, **fields: Any
) -> tuple[Any, list[Reward]]:
    """Let a judge grade groups of half right and half wrong responses; its script counts beside what we measure."""
    told: list[tuple[bool, list[str]]] = []

    def counting(body: dict[str, Any]) -> Any:
        reply = decide(body)
        if isinstance(reply, str):
            told.append((reply.endswith(("1", "9", "10")), asked(body)[1]))
        return reply

    server.decide = counting
    judges = {"who": judge(server, asks=asks, measured=1, **fields)}
    reward = {"judges": judges, "extra": {"who": 1.0}, "length": 0, "max_failure_share": 1, "refuse": []}
    rewards: list[Reward] = []
    scorer = None
    for index in range(GROUPS):
        problem = Problem(str(index), "How many apples has Tom, who has 5 and buys 3?", "8")
        responses = [
            f"{THOUGHT}{HOSTILE if at > 1 else ''}Try {at}. {RIGHT if at % 2 else WRONG}" for at in range(SIZE)
        ]
        if asks == "score":
            found, scorer = scored(responses, problem, index, scorer, **reward)
        else:
            found, scorer = settled(responses, problem, index, scorer, **reward)
        rewards += found
    scorer.told = told
    return scorer, rewards


def scored(responses: list[str], problem: Problem, index: int, held: Any, **reward: Any) -> Any:
    table = {"rollout": {"max_completion_tokens": 100}, "reward": reward}

    async def work() -> Any:
        scorer = held or RewardScorer(SimpleNamespace(now=Config.model_validate(table)), Said(responses))  # type: ignore[arg-type]
        scorer.chat = Said(responses)
        found = [await scorer.score(problem, Completion(index, at, 0, token_ids=[at])) for at in range(len(responses))]
        return [one for one, _ in found], scorer

    return asyncio.run(work())


@pytest.mark.parametrize(("asks", "decide"), [(a, d) for a in ("score", "pairs") for d in (honest, first, drawn)])
def test_accuracy_and_bias_are_what_the_script_did(server: Server, asks: str, decide: Any) -> None:
    scorer, rewards = measure(server, decide, asks)
    row, told = scorer.judge_metrics, scorer.told
    assert not any("TRUE ANSWER" in body["messages"][1]["content"] for body in server.seen), "it is measured"
    if asks == "score":
        right = [said == ("boxed{8}" in solutions[0]) for said, solutions in told]
        assert len(right) == GROUPS * SIZE and row["judge/who/accuracy"] == pytest.approx(
            sum(right) / len(right), abs=0.02
        )
        assert "judge/who/position_bias" not in row
        assert {honest: row["judge/who/accuracy"] == 1, first: row["judge/who/accuracy"] == 0.5}.get(decide, True)
        return
    telling = [(said, solutions) for said, solutions in told if len({"boxed{8}" in one for one in solutions}) == 2]
    right = [said == ("boxed{8}" in solutions[0]) for said, solutions in telling]
    assert len(told) == GROUPS * SIZE * 2, "each of n pairs in both orders"
    assert row["judge/who/accuracy"] == pytest.approx(sum(right) / len(right), abs=0.02)
    assert row["judge/who/position_bias"] == pytest.approx(sum(said for said, _ in told) / len(told) - 0.5, abs=0.02)
    if decide is honest:
        assert (row["judge/who/accuracy"], row["judge/who/position_bias"], row["judge/who/agreement"]) == (1, 0, 1)
        assert [one.extra["who"] for one in rewards[:SIZE]] == [0, 1, 0, 1], "no text of a response moves it"
    if decide is first:
        assert (row["judge/who/accuracy"], row["judge/who/position_bias"], row["judge/who/agreement"]) == (0.5, 0.5, 0)
        assert {one.extra["who"] for one in rewards} == {0.5}, "both orders: a place earns nothing"


@pytest.mark.parametrize(
    ("asks", "decide", "limits", "message"),
    [
        ("score", honest, {"least_accuracy": 0.9}, ""),
        ("pairs", honest, {"least_accuracy": 0.9, "most_bias": 0.1}, ""),
        ("score", first, {"least_accuracy": 0.6}, "the judge who is right on 50.0% of the last 10[0-9] answers"),
        ("score", drawn, {"least_accuracy": 0.8}, "the judge who is right on"),
        ("pairs", first, {"most_bias": 0.1}, "the judge who chose the first response in 100.0% of the last 1"),
    ],
)
def test_a_bad_judge_stops_the_run(
    server: Server, asks: str, decide: Any, limits: dict[str, float], message: str
) -> None:
    if not message:
        measure(server, decide, asks, **limits)
        return
    with pytest.raises(RunError, match=message):
        measure(server, decide, asks, **limits)


def test_a_dead_or_slow_judge_is_masked_and_counted(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    from verify import llm_judge

    monkeypatch.setattr(llm_judge, "ATTEMPTS", 1)
    monkeypatch.setitem(globals(), "GROUPS", 3)
    waited = threading.Event()
    slow = lambda _: waited.wait(2) or "SCORE: 9"  # noqa: E731
    for decide, verdict, deadline_s in ((lambda _: None, Verdict.CRASH, 60), (slow, Verdict.TIMEOUT, 0.3)):
        scorer, rewards = measure(server, decide, "score", deadline_s=deadline_s)
        assert {one.verdict for one in rewards} == {verdict} and scorer.counts == {verdict: 3 * SIZE}
        assert scorer.judge_metrics == {} and scorer.window.share == 1.0 and "reward who" in scorer.news()[0]
    waited.set()
    scorer.window.max_share, scorer.window.least = 0.05, 10
    server.decide = lambda _: None
    with pytest.raises(RunError, match="100.0% of the last 13 verdicts are no grade"):
        scored([THOUGHT + RIGHT], Problem("1", "?", "8"), 0, scorer)


def test_two_judges_agree_or_do_not(server: Server) -> None:
    server.decide = lambda body: "SCORE: 8" if "clear" in asked(body)[0] or "wide" in asked(body)[1][0] else "SCORE: 2"
    judges = {"clear": judge(server, instructions="Is it clear?"), "deep": judge(server, instructions="Is it deep?")}
    scorer = CompletionScorer(settings(judges=judges, extra={"clear": 1, "deep": 1}), Fast())

    async def work() -> None:
        for response in ("wide", "narrow", "wide", "deep"):
            await scorer.score(ESSAY, THOUGHT + response, 50)

    asyncio.run(work())
    rows = [one.measurement.metrics for one in scorer.judges]
    assert rows == [{"judge/clear/agreement": 0.5}, {"judge/deep/agreement": 0.5}]
