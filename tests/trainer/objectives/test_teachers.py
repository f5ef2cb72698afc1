"""A teacher behind an API: its log-probs are those of our own decoder on the same weights, from either server; and what
does not fit is told."""

import asyncio
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.servers import NAME, OURS, THEIRS, Running, theirs
from examples.quickstart.prepare import Options, make_tiny_model
from shared.chat import Chat
from shared.chat_endpoint import CONCURRENT
from shared.errors import ConfigError, NonFinite, RunError
from tests.model_folder import load_model
from tests.packed import pack_from
from tests.serve.command import QUESTION, Command
from tests.serving import reply as answer
from tests.serving import serving
from tests.tables import read_table
from trainer.objectives import teachers
from trainer.objectives.registry import read_objective
from trainer.objectives.teachers import Teacher

PROMPT, COMPLETION = [5, 6, 7], [9, 8]


def ask(url: str, work: Callable[[Teacher], Any], deadline_s: float = 30, **settings: str) -> Any:
    """What comes of work with a teacher at that address."""
    teacher = {"kind": "served", "url": url, "model": NAME, **settings}
    served = read_objective({"name": "distill", "teacher": teacher})

    async def whole() -> Any:
        teacher = Teacher(served.teacher, deadline_s)
        try:
            return await work(teacher)
        finally:
            await teacher.close()

    return asyncio.run(whole())


@pytest.mark.soak  # in make test: what such servers send, word for word, and scores of our own engine
@pytest.mark.timeout(540)
@pytest.mark.parametrize("kind", [OURS, THEIRS])
def test_scores_of_a_real_server_are_those_of_our_decoder_and_what_it_cannot_do_is_told(kind, tmp_path):
    """The quickstart's model with random matrices, large enough that its distributions are far from uniform."""
    model, log = tmp_path / "model", tmp_path / "log"
    make_tiny_model(model, Options(), 0)
    generator, tensors = torch.Generator().manual_seed(1), load_file(model / "model.safetensors")
    for tensor in tensors.values():
        if tensor.dim() == 2:
            tensor.normal_(std=0.3, generator=generator)
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    chat, decoder = Chat(model), load_model(model)
    context, prompt = decoder.config.max_positions, chat.render(QUESTION, "")

    def draw(tokens: int) -> list[int]:
        return torch.randint(len(chat.tokenizer), (tokens,), generator=generator).tolist()

    cases = [(prompt, draw(20)), (prompt, [*draw(3), chat.eos_id]), (draw(1), draw(1)), (prompt, []),
             (prompt, draw(context - 1 - len(prompt)))]  # fmt: skip

    async def work(teacher: Teacher) -> tuple[str, list[list[float]]]:
        line = await teacher.start([prompt, draw(8)], chat.tokenizer.decode, context - 1)
        return line, await asyncio.gather(*(teacher.score(*case) for case in cases))

    if kind == OURS:
        server: Any = Command(model, log, name=NAME)
    else:
        server = Running(THEIRS, [*theirs(model, 4), "--dtype", "float32"], log)
        server.wait()
    try:
        url = f"http://127.0.0.1:{server.port}/v1"
        line, scores = ask(url, work)
        with pytest.raises(ConfigError, match=f"context of {context} .* at most {context - 1}"):
            ask(url, lambda teacher: teacher.start([PROMPT], chat.tokenizer.decode, context))
        with pytest.raises(ConfigError, match="objective.teacher.model .* another tokenizer"):
            ask(url, lambda teacher: teacher.start([PROMPT], lambda ids: "another text", 64))
        with pytest.raises(RunError, match="no log-probs of 2001 tokens: status 400"):
            ask(url, lambda teacher: teacher.score([5], [5] * 2000))
    finally:
        server.close()
    assert line == f"teacher: {NAME} at {url}, {context} tokens of context, the same tokenizer"
    for (given, completion), logprobs in zip(cases, scores, strict=True):
        with torch.no_grad():
            expected, _ = decoder(pack_from([given + completion], [len(given)]), 1.0)
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-4, rtol=0)
    assert torch.tensor(scores[-1]).std() > 1, "equal log-probs would agree by accident"


RIGHT = "right"
"""log-probs -0.5, -1, -1.5, ... of the tokens from the second on"""


class Api(ThreadingHTTPServer):
    """A server whose replies to /v1/completions are `replies` in turn, the last again and again: a status, a text,
    None for a connection that breaks, prompt_logprobs, a whole body, or RIGHT."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"
        self.replies: list[Any] = [RIGHT]
        self.models: list[Any] = [{"id": NAME}]
        self.text: str | None = "text"
        """of whatever is to be decoded; None: it has no such path"""
        self.requests: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.busy = self.busiest = 0
        self.gate, self.lock = threading.Event(), threading.Lock()
        """replies wait for the gate, or for as many requests as may come at a time"""
        self.gate.set()


def next_of(replies: list[Any]) -> Any:
    return replies.pop(0) if len(replies) > 1 else replies[0]


class Handler(BaseHTTPRequestHandler):
    server: Api

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        reply = next_of(self.server.models) if self.path == "/v1/models" else 404
        self.tell(reply if isinstance(reply, int) else {"data": [reply]})

    def do_POST(self) -> None:
        api, body = self.server, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/completions":
            return self.tell(404 if api.text is None or self.path != "/detokenize" else {"prompt": api.text})
        with api.lock:
            api.requests.append(body)
            api.keys.add(self.headers.get("Authorization"))
            reply = next_of(api.replies)
            api.busy += 1
            api.busiest = max(api.busiest, api.busy)
            if api.busy == CONCURRENT:
                api.gate.set()
        api.gate.wait(60)
        with api.lock:
            api.busy -= 1
        if reply == RIGHT:
            reply = [
                None,
                *({str(token): {"logprob": -place / 2}} for place, token in enumerate(body["prompt"][1:], 1)),
            ]
        if reply is None:
            self.close_connection = True
        else:
            self.tell({"choices": [{"text": "", "prompt_logprobs": reply}]} if isinstance(reply, list) else reply)
        return None

    def tell(self, reply: Any) -> None:
        """Answer with a status, a text or JSON."""
        data = reply if isinstance(reply, str) else json.dumps(reply)
        answer(self, reply if isinstance(reply, int) else 200, data.encode())


@pytest.fixture
def api(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr(teachers, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(teachers, "MOST_PAUSE_S", 0.1)
    server = Api()
    with serving(server):
        yield server


def score(api: Api, deadline_s: float = 30) -> Any:
    return ask(api.url, lambda teacher: teacher.score(PROMPT, COMPLETION), deadline_s=deadline_s)


def start(api: Api, **settings: str) -> Any:
    return ask(**{"url": api.url, "work": lambda teacher: teacher.start([PROMPT], lambda ids: "text", 64), **settings})


def test_the_tokens_are_sent_as_they_are_and_those_of_the_completion_come_back(api):
    assert score(api) == [-1.5, -2.0]
    body = {"model": NAME, "prompt": [5, 6, 7, 9, 8], "prompt_logprobs": 0, "max_tokens": 1, "temperature": 1.0}
    assert api.requests == [body]


def test_a_busy_server_and_a_broken_connection_are_tried_again_until_the_deadline(api):
    api.replies = [503, None, 429, 502, RIGHT]
    assert score(api) == [-1.5, -2.0] and len(api.requests) == 5
    api.replies = [503]
    with pytest.raises(RunError, match="objective.teacher.url = .*not answer for 0.5 s, at last with status 503"):
        score(api, deadline_s=0.5)


def test_a_failure_is_tried_again_once_the_server_has_answered_as_it_must(api):
    """vLLM says 500 while its engine dies, and somebody may start it again; before, it is a server that cannot."""

    async def work(teacher: Teacher) -> list[float]:
        await teacher.start([PROMPT], lambda ids: "text", 64)
        return await teacher.score(PROMPT, COMPLETION)

    api.replies = [RIGHT, 500, 500, RIGHT]
    assert ask(api.url, work) == [-1.5, -2.0] and len(api.requests) == 4
    api.replies = [500]
    with pytest.raises(ConfigError, match=r"objective\.teacher\.url = .*status 500"):
        start(api)
    assert len(api.requests) == 5


@pytest.mark.parametrize("row", read_table("trainer/objectives/teachers"), ids=lambda row: row["case"])
def test_a_server_that_cannot_be_the_teacher_and_what_is_no_log_prob_of_the_tokens_are_told(api, row):
    """At the start, where a setting is missing too, or when a completion is scored, which ends the run."""
    for name, value in row.get("api", {}).items():
        setattr(api, name, value)
    error = {"ConfigError": ConfigError, "RunError": RunError, "NonFinite": NonFinite}[row["error"]]
    with pytest.raises(error, match=row["named"]) as raised:
        score(api) if row["call"] == "score" else start(api, **row.get("settings", {}))
    assert raised.type is error and "objective.teacher." in str(raised.value)
    assert row["call"] == "start" or len(api.requests) == 1


def test_a_server_that_tells_no_context_and_does_not_decode_and_one_that_is_still_loading(api):
    api.models = [503, {"id": NAME, "max_model_len": 65}]
    assert "65 tokens of context, the same tokenizer" in start(api)
    api.text, api.models = None, [{"id": NAME}]
    line = "context unknown, tokenizer not compared, as the server has no /detokenize"
    assert start(api) == f"teacher: {NAME} at {api.url}, {line}"
    assert [body["prompt"] for body in api.requests] == [PROMPT] * 2


def test_nobody_there_is_told_at_once():
    free = Api()
    free.server_close()
    with pytest.raises(ConfigError, match="objective.teacher.url = .*ConnectError.*start that server"):
        start(free)


def test_the_key_goes_into_the_header_and_requests_at_a_time_are_bounded(api, monkeypatch):
    monkeypatch.setenv("KEY_OF_THE_TEACHER", "secret")

    async def work(teacher: Teacher) -> list[list[float]]:
        return await asyncio.gather(*(teacher.score(PROMPT, COMPLETION) for _ in range(3 * CONCURRENT)))

    api.gate.clear()
    assert ask(api.url, work, key_variable="KEY_OF_THE_TEACHER") == [[-1.5, -2.0]] * 3 * CONCURRENT
    assert api.busiest == CONCURRENT and api.keys == {"Bearer secret"}
