"""What operators see and do: request ids, the log, metrics, "answer now", newer exports while requests run."""

import json
import logging
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve.engine import SamplingParameters
from serve.keys import ApiKey, KeyFile, digest_of, write
from tests.serve.conftest import Served, eventually
from tests.serve.test_chat import QUESTION, RIGHT, WRONG, joined, second_time
from tests.serve.test_hostile import CHAT, HEALTH, MESSAGES, head, speak

CONTROL = f"{CHAT}/control"


def figure(served: Served, name: str) -> float:
    """A figure of /metrics, with its labels as they stand there."""
    text = httpx.get(f"{served.url}/metrics").text
    return next((float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name + " ")), 0.0)


def language(outcome: str, enforcement: str = "prompt", requested: str = "fr") -> str:
    """Name of a counter of responses."""
    labels = f'enforcement="{enforcement}",outcome="{outcome}",requested="{requested}"'
    return f"maestrale_reasoning_language_total{{{labels}}}"


def test_every_response_has_a_request_id(serve):
    def fail(prompt: list[int], sampling: SamplingParameters, call: int) -> str:
        raise ZeroDivisionError

    served = serve(fail)
    client = served.client

    def id_of(given: bytes) -> str:
        return client.get("/health", headers={"x-request-id": given}).headers["x-request-id"]

    for reply in (
        client.get("/health"), client.get("/nowhere"), client.put("/health"), served.ask(), served.ask(stream=True),
        client.post(CHAT, content=b"{"), client.get("/health", headers={"host": "evil.example"}),
    ):  # fmt: skip
        assert re.fullmatch(r"req_[0-9a-f]{32}", reply.headers["x-request-id"]), reply.status_code
    assert id_of(b"Trace-1.2:3_4") == "Trace-1.2:3_4"
    assert all(id_of(bad).startswith("req_") for bad in (b"x" * 129, b"", "ä".encode(), b"a,b<script>", b"a b\x7f"))
    for raw in (b"hello\r\n\r\n", HEALTH + b"X: " + b"a" * (65 << 10) + b"\r\n\r\n"):
        refusal = speak(served, raw)
        assert not refusal or b"\r\nX-Request-ID: req_" in refusal


def test_one_line_a_request(serve, caplog):
    def access() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "serve.access"]

    caplog.set_level(logging.INFO)
    assert serve("x", access_log=False).ask().is_success and not access()
    served = serve("<think>a</think>" + "b" * 5)
    for number, stream in enumerate((False, True)):
        body = {"messages": [{"role": "user", "content": "a secret question"}], "stream": stream}
        headers = {"x-request-id": f"id-{number}", "authorization": "Bearer secret-key"}
        served.client.post(f"{CHAT}?key=secret-key", json=body, headers=headers)
    served.client.get("/now%0Ahere", headers={"x-request-id": "id-2"})
    for probe in ("/health", "/ready"):
        assert served.client.get(probe).is_success, "asked all the time, and never in the log"
    served.client.head("/version", headers={"x-request-id": "id-3"})
    eventually(lambda: len(access()) == 4)
    tokens = len(served.server.prompts.chat.encode("<think>a</think>" + "b" * 5))
    for line in access()[:2]:
        assert re.fullmatch(rf"POST {CHAT} 200 \d+ ms \d\d+\+{tokens} tokens id-[01]", line), line
    assert re.fullmatch(r"GET /now%0Ahere 404 \d+ ms 0\+0 tokens id-2", access()[2])
    assert re.fullmatch(r"HEAD /version 200 \d+ ms 0\+0 tokens id-3", access()[3])
    assert not any("secret" in record.getMessage() for record in caplog.records if record.name.startswith("serve"))


def test_head_is_get_without_its_body(served):
    for path in ("/", "/health", "/ready", "/version", "/v1/models", "/v1/models/tiny", "/metrics", "/docs",
                 "/openapi.json", "/nowhere", "/v1/models/other"):  # fmt: skip
        whole, top = served.client.get(path), served.client.head(path)
        assert top.status_code == whole.status_code and top.content == b""
        same = ["content-type"] if path == "/metrics" else ["content-type", "content-length"]
        assert [top.headers[name] for name in same] == [whole.headers[name] for name in same]
    reply = speak(served, head().replace(b"POST", b"HEAD", 1))
    assert reply.startswith(b"HTTP/1.1 405 ") and reply.endswith(b"\r\n\r\n")


def test_languages_are_counted_by_what_was_measured(serve):
    served = serve(lambda prompt, sampling, call: [RIGHT, WRONG, "<think>5</think>5", RIGHT][call])
    for code in ("fr", "fr", "fr", "sw"):
        served.ask(QUESTION, reasoning_language=code)
    assert [figure(served, language(outcome)) for outcome in ("match", "mismatch", "undetermined")] == [1, 1, 1]
    assert figure(served, language("mismatch", requested="other")) == 1
    served = serve(second_time, reasoning_language="fr", reasoning_language_enforcement="retry")
    served.events(QUESTION)
    assert figure(served, language("match", "retry")) == 1
    assert figure(served, 'maestrale_reasoning_language_retries_total{requested="fr"}') == 1


def test_requests_tokens_and_places_are_counted(serve):
    served = serve(RIGHT)
    usage = served.ask().json()["usage"]
    served.client.get("/nowhere/42")
    thinking = usage["completion_tokens_details"]["reasoning_tokens"]
    for name, value in (
        ('tokens_total{kind="prompt"}', usage["prompt_tokens"]), ('tokens_total{kind="reasoning"}', thinking),
        ('tokens_total{kind="answer"}', usage["completion_tokens"] - thinking), ("completions_under_way", 0),
        (f'requests_total{{key="",route="{CHAT}",status="200"}}', 1), ("ready", 1),
        ('requests_total{key="",route="none",status="404"}', 1), (f'request_seconds_count{{route="{CHAT}"}}', 1),
    ):  # fmt: skip
        assert figure(served, f"maestrale_{name}") == value, name


def begun_or_more(prompt: list[int], sampling: SamplingParameters, call: int) -> str:
    """Reasoning that would never end; and the answer, once it was ended."""
    return "<think>" + "and then " * 300 if call == 0 else "Five."


def test_answer_now_ends_the_reasoning_for_its_own_client(serve, tmp_path):
    write(tmp_path / "keys.json", KeyFile(keys=[ApiKey(name=name, sha256=digest_of(name * 20)) for name in "ab"]))
    served = serve(begun_or_more, token_s=0.005, keys=str(tmp_path / "keys.json"))
    ours, others = ({"Authorization": f"Bearer {name * 20}"} for name in "ab")

    def end(headers: dict[str, str], action: str = "reasoning_end") -> httpx.Response:
        body = {"id": events[0]["id"], "action": action}
        return httpx.post(f"{served.url}{CONTROL}", json=body, headers=headers)

    events: list[dict[str, Any]] = []
    body = {"messages": MESSAGES, "stream": True}
    with served.client.stream("POST", CHAT, json=body, headers=ours) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line.removeprefix("data: ")))
                if len(events) == 5:
                    assert end(others).status_code == 404
                    assert end(ours).json() == {"ended": 1}
    reasoning = joined(events, "reasoning")
    assert reasoning.strip().endswith("I've thought about this long enough; I'll answer now.")
    assert reasoning.count("and then") < 300 and joined(events, "content") == "Five."
    assert end(ours).status_code == 404, "it has ended"
    assert end(ours, "y").status_code == 400 and served.server.live == {}


def test_log_probs_are_told_in_streams(serve):
    served = serve("<think>a b</think>c d", logprob=-0.5)
    whole = served.ask(logprobs=True).json()["choices"][0]["logprobs"]["content"]
    streamed = [token for event in served.events(logprobs=True) for choice in event["choices"]
            for token in (choice["logprobs"] or {"content": []})["content"]]  # fmt: skip
    assert streamed == whole and "".join(token["token"] for token in streamed) == "<think>a b</think>c d"


@pytest.fixture
def steps(model_folder, tmp_path, monkeypatch):
    """Exports of a model; the link "latest" beside them, which servers look at often, leads to the first."""
    monkeypatch.setattr("serve.follow.AGAIN_S", 0.01)
    monkeypatch.setattr("serve.follow.FOLLOW_EVERY_S", 0.01)
    steps = [Path(shutil.copytree(model_folder, tmp_path / f"step_{number}")) for number in (1, 2, 3)]
    move(tmp_path / "latest", steps[0])
    return steps


def move(link: Path, target: Path) -> None:
    """Let a link lead elsewhere, as an export does."""
    beside = link.with_suffix(".new")
    beside.symlink_to(target)
    beside.replace(link)


def test_a_newer_export_is_taken_while_it_serves(serve, steps, caplog):
    (steps[2] / "config.json").write_text('{"max_position_embeddings": 99, "eos_token_id": 1}')
    latest = steps[0].with_name("latest")
    served = serve(RIGHT, model=str(latest), follow=True)
    replies: list[int] = []
    stop = threading.Event()

    def keep_asking() -> None:
        while not stop.is_set():
            replies.append(httpx.post(f"{served.url}{CHAT}", json={"messages": MESSAGES}, timeout=60).status_code)

    asking = threading.Thread(target=keep_asking)
    asking.start()
    try:
        move(latest, steps[1])
        eventually(lambda: served.client.get("/version").json()["weights"] == str(steps[1]))
        move(latest, steps[2])
        eventually(lambda: "another model" in caplog.text)
        assert served.client.get("/version").json()["weights"] == str(steps[1]), "another context"
        assert figure(served, "maestrale_reloads") == 1
    finally:
        stop.set()
        asking.join()
    assert replies and set(replies) == {200}


def count_looks(link: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Grows with each look at where a link leads."""
    looks, resolve = list[Path](), Path.resolve

    def note(path: Path, strict: bool = False) -> Path:
        if path == link:
            looks.append(path)
        return resolve(path, strict)

    monkeypatch.setattr(Path, "resolve", note)
    return looks


def test_an_export_that_cannot_be_loaded_is_tried_once(serve, steps, monkeypatch):
    latest = steps[0].with_name("latest")
    served = serve(RIGHT, model=str(latest), follow=True)
    served.engine.unloadable.add(steps[1])
    move(latest, steps[1])
    eventually(lambda: figure(served, "maestrale_engine_restarts") == 1 and served.server.ready)
    looks = count_looks(latest, monkeypatch)
    eventually(lambda: len(looks) > 20)
    assert served.engine.tries == [steps[1]] and figure(served, "maestrale_engine_restarts") == 1
    move(latest, steps[2])
    eventually(lambda: served.client.get("/version").json()["weights"] == str(steps[2]))
