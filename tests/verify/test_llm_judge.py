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
from tests.tables import read_table
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


@pytest.mark.parametrize("row", read_table("verify/judge_replies"), ids=lambda row: row["reply"])
def test_a_reply_is_read_as_a_person_reads_it(row: dict[str, Any]) -> None:
    parse = parse_score if row["asked"] == "score" else parse_choice
    assert parse(row["reply"]) == (None if row["value"] is None else pytest.approx(row["value"]))


def test_judge_needs_address_model_and_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    for judge, name in (({"url": ""}, "judge.url"), ({"model": ""}, "judge.model")):
        with pytest.raises(ConfigError, match=name):
            choose(settings(None, **judge))
    with pytest.raises(ConfigError, match="NO_SUCH_KEY"):
        choose(settings(None, key_variable="NO_SUCH_KEY"))
