"""The LLM judge against a real HTTP server: scores, retries, failures, deadlines, what it is shown."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from typing import Any

import pytest

from shared.errors import ConfigError
from shared.sections import RewardWeights
from shared.types import Problem, Reward, Verdict
from tests.tables import read_table
from tests.verify.test_judges import Server, server
from verify.chosen_rewards import choose
from verify.judge_replies import parse_choice, parse_score
from verify.reward import CompletionScorer

__all__ = ["server"]
PROBLEM = Problem("1", "Tom has 5 apples. Tom buys 3 more. How many apples does Tom have now?", "8")
GOOD = "<think>Secret thoughts: 5+3=8.</think>The answer is \\boxed{8}."


class Right:
    async def check(self, ground_truth: str, answer: str) -> Verdict:
        return Verdict.CORRECT


def settings(server: Server | str, **judge: Any) -> RewardWeights:
    table = {"url": server if isinstance(server, str) else server.url, "model": "grader", "deadline_s": 20, **judge}
    return RewardWeights.model_validate(
        {"length_max": 100, "overlong_buffer": 20, "extra": {"llm_judge": 0.5}, "judge": table}
    )


def reward(chosen: RewardWeights, count: int = 1) -> list[Reward]:
    async def work() -> list[Reward]:
        scorer = CompletionScorer(chosen, Right())
        return await asyncio.gather(*(scorer.score(PROBLEM, GOOD, 10) for _ in range(count)))

    return asyncio.run(work())


def test_score_is_weighed_and_thoughts_stay_private(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "s3cret")
    scored = reward(settings(server, key_variable="MY_KEY", instructions="Look at the style.", max_tokens=99))[0]
    assert scored.extra == {"llm_judge": pytest.approx(0.35)}
    assert scored.total == pytest.approx(0.1 + 0.9 + 0.1 + 0.35)
    sent = server.seen[0]
    assert (sent["path"], sent["model"], sent["temperature"]) == ("/v1/chat/completions", "grader", 0)
    assert (sent["max_tokens"], sent["key"]) == (99, "Bearer s3cret")
    text = json.dumps(sent["messages"])
    assert "Look at the style." in text and "The answer is" in text and PROBLEM.text in text
    assert "Secret thoughts" not in text
    reward(settings(server))
    assert server.seen[1]["key"] is None


@pytest.mark.parametrize(
    "first", [500, 429, "no number here", b"not json", b"{}", b'{"choices": [5]}', b"x" * (2 << 20)]
)
def test_failed_attempt_is_repeated(server: Server, first: Any) -> None:
    replies = iter([first, "SCORE: 10"])
    server.decide = lambda _: next(replies)
    scored = reward(settings(server))[0]
    assert scored.verdict is Verdict.CORRECT and scored.extra == {"llm_judge": 0.5}
    assert len(server.seen) == 2


def test_broken_judge_is_no_grade_and_no_crash(server: Server) -> None:
    server.decide = lambda _: 503
    scored = reward(settings(server))[0]
    assert scored.verdict is Verdict.CRASH and "status 503" in scored.reason and not scored.verdict.graded
    assert len(server.seen) == 3


def test_nobody_listens() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        scored = reward(settings(f"http://127.0.0.1:{bound.getsockname()[1]}/v1"))[0]
    assert scored.verdict is Verdict.CRASH and "ConnectError" in scored.reason


def test_late_judge_is_a_timeout(server: Server) -> None:
    end = threading.Event()
    server.decide = lambda _: end.wait() and "SCORE: 1"
    try:
        assert reward(settings(server, deadline_s=0.3))[0].verdict is Verdict.TIMEOUT
    finally:
        end.set()


def test_questions_under_way_are_bounded_and_the_wait_for_others_does_not_count(server: Server) -> None:
    """160 at once, 16 at a time: the last ones wait for longer than a question may take."""
    under_way: list[int] = []
    most = [0]

    def slow(_: object) -> str:
        under_way.append(1)
        most[0] = max(most[0], len(under_way))
        time.sleep(0.5)
        under_way.pop()
        return "SCORE: 1"

    server.decide = slow
    assert {scored.verdict for scored in reward(settings(server, deadline_s=4.0), count=160)} == {Verdict.CORRECT}
    assert 1 < most[0] <= 16


@pytest.mark.parametrize("row", read_table("verify/judge_replies"), ids=lambda row: row["reply"])
def test_a_reply_is_read_as_a_person_reads_it(row: dict[str, Any]) -> None:
    parse = parse_score if row["asked"] == "score" else parse_choice
    assert parse(row["reply"]) == (None if row["value"] is None else pytest.approx(row["value"]))


def test_judge_needs_address_model_and_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    for judge, name in (({"url": ""}, "judge.url"), ({"model": ""}, "judge.model")):
        with pytest.raises(ConfigError, match=name):
            choose(settings("http://x", **judge))
    with pytest.raises(ConfigError, match="NO_SUCH_KEY"):
        choose(settings("http://x", key_variable="NO_SUCH_KEY"))
