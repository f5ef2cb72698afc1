"""The LLM judge against a real HTTP server: scores, retries, failures, deadlines, what it is shown."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from shared.errors import ConfigError
from shared.sections import RewardWeights
from shared.types import Problem, Reward, Verdict
from tests.serving import reply as answer
from tests.serving import serving
from verify.chosen_rewards import choose
from verify.judge_replies import parse_choice, parse_score
from verify.reward import CompletionScorer

PROBLEM = Problem("1", "Tom has 5 apples. Tom buys 3 more. How many apples does Tom have now?", "8")
GOOD = "<think>Secret thoughts: 5+3=8.</think>The answer is \\boxed{8}."


class Right:
    async def check(self, ground_truth: str, answer: str) -> Verdict:
        return Verdict.CORRECT


class Api(ThreadingHTTPServer):
    """Answers with `replies` in turn (the last again and again): a text, a status, raw bytes, or a wait in seconds."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.replies: list[Any] = ["fine\nSCORE: 7"]
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.busy = self.busiest = 0
        self.lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    server: Api

    def log_message(self, *_: object) -> None: ...

    def do_POST(self) -> None:
        api = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with api.lock:
            api.requests.append({"path": self.path, **body})
            api.headers.append(dict(self.headers))
            reply = api.replies.pop(0) if len(api.replies) > 1 else api.replies[0]
            api.busy += 1
            api.busiest = max(api.busiest, api.busy)
        if isinstance(reply, float):
            time.sleep(reply)
            reply = "SCORE: 1"
        status = reply if isinstance(reply, int) else 200
        data = (
            reply if isinstance(reply, bytes) else json.dumps({"choices": [{"message": {"content": reply}}]}).encode()
        )
        with api.lock:
            api.busy -= 1
        try:
            answer(self, status, data)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client gave up, as some tests want


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    monkeypatch.setenv("NO_PROXY", "*")
    server = Api()
    with serving(server):
        yield server


def settings(api: Api | None, **judge: Any) -> RewardWeights:
    url = f"http://127.0.0.1:{api.server_port}/v1" if api else "http://127.0.0.1:9/v1"
    table = {"url": url, "model": "grader", "deadline_s": 20, **judge}
    return RewardWeights.model_validate(
        {"length_max": 100, "overlong_buffer": 20, "extra": {"llm_judge": 0.5}, "judge": table}
    )


def reward(chosen: RewardWeights, count: int = 1) -> list[Reward]:
    async def work() -> list[Reward]:
        scorer = CompletionScorer(chosen, Right())
        return await asyncio.gather(*(scorer.score(PROBLEM, GOOD, 10) for _ in range(count)))

    return asyncio.run(work())


def test_score_is_weighed_and_thoughts_stay_private(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "s3cret")
    found = reward(settings(api, key_variable="MY_KEY", instructions="Look at the style.", max_tokens=99))[0]
    assert found.extra == {"llm_judge": pytest.approx(0.35)}
    assert found.total == pytest.approx(0.1 + 0.9 + 0.1 + 0.35)
    sent = api.requests[0]
    assert (sent["path"], sent["model"], sent["temperature"]) == ("/v1/chat/completions", "grader", 0)
    assert sent["max_tokens"] == 99
    text = json.dumps(sent["messages"])
    assert "Look at the style." in text and "The answer is" in text and PROBLEM.text in text
    assert "Secret thoughts" not in text
    assert api.headers[0]["Authorization"] == "Bearer s3cret"
    reward(settings(api))
    assert "Authorization" not in api.headers[1]


@pytest.mark.parametrize(
    "first", [500, 429, "no number here", b"not json", b"{}", b'{"choices": [5]}', b"x" * (2 << 20)]
)
def test_failed_attempt_is_repeated(api: Api, first: Any) -> None:
    api.replies = [first, "SCORE: 10"]
    found = reward(settings(api))[0]
    assert found.verdict is Verdict.CORRECT and found.extra == {"llm_judge": 0.5}
    assert len(api.requests) == 2


def test_broken_judge_is_no_grade_and_no_crash(api: Api) -> None:
    api.replies = [503]
    found = reward(settings(api))[0]
    assert found.verdict is Verdict.CRASH and "status 503" in found.reason and not found.verdict.graded
    assert len(api.requests) == 3


def test_nobody_listens() -> None:
    found = reward(settings(None))[0]
    assert found.verdict is Verdict.CRASH and "ConnectError" in found.reason


def test_late_judge_is_a_timeout(api: Api) -> None:
    api.replies = [3.0]
    assert reward(settings(api, deadline_s=0.3))[0].verdict is Verdict.TIMEOUT


def test_the_wait_for_other_questions_does_not_count(api: Api) -> None:
    """160 at once, 16 at a time: the last ones wait for longer than a question may take."""
    api.replies = [0.5]
    assert {one.verdict for one in reward(settings(api, deadline_s=4.0), count=160)} == {Verdict.CORRECT}


def test_questions_under_way_are_bounded(api: Api) -> None:
    api.replies = [0.05]
    assert len(reward(settings(api), count=40)) == 40
    assert 1 < api.busiest <= 16


SCORES = {
    0.0: ("x\nSCORE: 0.", "Score: zero", "SCORE: 0/10 (it refuses)"),
    0.25: ("SCORE: 2.5", "SCORE: 2,5", "Score: 2.50 / 10"),
    0.3: ("a\n**SCORE: 3/10**", "3/10", "**3/10**", "3 out of 10."),
    0.7: ("SCORE: 7", "Weak at the end. SCORE: 7", "SCORE: 7\n\n---", "It is right.\nSCORE: 7\n", "SCORE = 7",
        "SCORE 7"),
    0.8: (
        "Score: 8", "score: 8", "SCORE: 8 out of 10", "SCORE: 8 of 10", "SCORE：8", "SCORE：８", "`SCORE: 8`",
        "```\nSCORE: 8\n```", "```text\nSCORE: 8\n```", "**SCORE:** 8", "**SCORE: 8**", "SCORE: **8**", "__Score__: 8",
        "# SCORE: 8", "- SCORE: 8", "SCORE: 8/10", "SCORE: 8 / 10", "SCORE: 8 (good)", "SCORE: 8 (out of ten)",
        "SCORE: 8 - good", "SCORE: 8, well done", "SCORE: 8. Well done.", "SCORE: 8!", "SCORE: 8 points", "SCORE: 8分",
        "SCORE: [8]", "[SCORE: 8]", "SCORE: <8>",
        '"SCORE: 8"', '{"score": 8}', '{\n"score": 8\n}', "SCORE: $\\boxed{8}$",
        "Final score: 8", "The final score is 8.", "My score: 8", "Overall score = 8", "Score (out of 10): 8",
        "Score (0-10): 8", "| SCORE | 8 |", "SCORE: eight", "<b>SCORE: 8</b>", "SCORE -> 8", "SCORE: +8", "SCORE: 8.0",
        "SCORE: 8 because it is short", "Draft score: 5\nFinal score: 8", "SCORE: 8\nSCORE: 8",
        '{"reason": "right", "score": 8}', "SCORE:\n8", "**Score:**\n8/10", "(SCORE: 8)", "SCORE: (8)",
        "SCORE: 8 (8/10)",
        "<score>8</score>", "SCORE: 8 👍", "SCORE: 08", "Score - 8", "SCORE: 8\n</answer>", "SCORE: 8, nearly complete",
        'It says "SCORE: 10", which is a trick.\nSCORE: 8',
    ),
    1.0: ("Good.\nSCORE: 10", "SCORE: 10.0", "SCORE: 10.00/10", "Score: ten", "SCORE: 10 (perfect)"),
    None: (
        "", "seven", "8", "SCORE:", "SCORE: n", "SCORE: good", "SCORE: 10.5", "SCORE: 11", "SCORE: 100", "SCORE: -1",
        "SCORE: 1,000", "I cannot give a SCORE: 9 for this.",
        "SCORE: -3", "SCORE: - 3", "SCORE -3", "SCORE: 9.99999999", "SCORE: 7/100", "SCORE: 7 out of 100", "SCORE: 4/5",
        "SCORE: 70%", "SCORE: 7%", "SCORE: 7 / 1000", "7/100", "4/5", "SCORE: 7e1", "Score (out of 100): 7",
        "SCORE: 9\nbut I changed my mind", "SCORE: 7-8", "SCORE: 7 to 8", "SCORE: 7 or 8", "SCORE: 7 or more",
        "SCORE: 3 SCORE: 9", "SCORE: 3\nSCORE: 9", "SCORE: 3, no, SCORE: 9", "SCORE: between 7 and 8",
        'The solution says "SCORE: 10"', "The solution claims SCORE: 10", "It ends with SCORE: 10.", "> SCORE: 10",
        "The solution writes:\nSCORE: 10", "The text says:\n```\nSCORE: 10\n```", "It asks for 'SCORE: 10'.",
        "The true answer is:\n8/10", "~~SCORE: 8~~", "SCORE: 8, wait", "SCORE: not 8", "SCORE: 8²", "SCORE: 8 x 10",
        "SCORE: 8 (9/10)", "SCORE: 8 (8/100)", "SCORE: 8+", "SCORE: 8^2", "SCORE: 8/", "SCORE: 080", "SCORE:\nn",
    ),
}  # fmt: skip
CHOICES = {
    1.0: (
        "BETTER: 1", "Better: 1", "better: 1.", "BETTER: solution 1", "BETTER: Solution #1", "BETTER: the first",
        "BETTER: first one", "BETTER：1", "`BETTER: 1`", "```\nBETTER: 1\n```", "**BETTER:** 1", "**BETTER: 1**",
        "BETTER = 1",
        "BETTER: [1]", '"BETTER: 1"', '{"better": 1}', "BETTER: (1)", "BETTER: 1 (clearer)", "BETTER: one",
        "Better solution: 1",
        "The better solution is 1.", "Solution 1 is better.", "BETTER: 1 (solution 2 has a slip)", "BETTER: response 1",
        "Solution 2 is better written, but wrong. BETTER: 1", "BETTER: 1 - it is right",
        "BETTER: 1, because it is right",
        "BETTER: No. 1", "Solution 1 is better than solution 2.", "BETTER: 1st", "<better>1</better>", "BETTER:\n1",
        "Both fail.\nBETTER: 1\n",
    ),
    2.0: ("BETTER: 2", "Better: 2", "The better response: solution 2", "BETTER: second", "Answer 2 is the better one."),
    None: (
        "", "1", "BETTER: n", "BETTER: 3", "BETTER: 0", "BETTER: 12", "BETTER: 1.5", "BETTER: -1", "BETTER: 1/2",
        "BETTER: 1 or 2",
        "BETTER: 1 and 2", "BETTER: 1, 2", "BETTER: both", "BETTER: neither", "BETTER: 1 BETTER: 2",
        "BETTER: 1\nBETTER: 2",
        "BETTER: solution 1, solution 2", "BETTER: not 1", "BETTER: 1 > 2", "BETTER: 1\nor so", "not BETTER: 1",
        "> BETTER: 1",
        'Solution 2 says "BETTER: 2"', "Solution 2 writes:\nBETTER: 2", "Solution 1 is not better.", "BETTER: 1 (or 2)",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("reply", "value"), [(reply, value) for value, replies in SCORES.items() for reply in replies])
def test_a_score_is_read_as_a_person_reads_it(reply: str, value: float | None) -> None:
    assert parse_score(reply) == (pytest.approx(value) if value is not None else None)


@pytest.mark.parametrize(
    ("reply", "value"), [(reply, value) for value, replies in CHOICES.items() for reply in replies]
)
def test_a_choice_is_read_as_a_person_reads_it(reply: str, value: float | None) -> None:
    assert parse_choice(reply) == value


def test_judge_needs_address_model_and_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    for judge, name in (({"url": ""}, "judge.url"), ({"model": ""}, "judge.model")):
        with pytest.raises(ConfigError, match=name):
            choose(settings(None, **judge))
    with pytest.raises(ConfigError, match="NO_SUCH_KEY"):
        choose(settings(None, key_variable="NO_SUCH_KEY"))
