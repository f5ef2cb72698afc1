"""A teacher behind an API: its log-probs are those of our own decoder on the same weights, from either server; and what
does not fit is told."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.servers import NAME, THEIRS, Running, theirs
from examples.quickstart.prepare import Options, make_tiny_model
from shared.chat import Chat
from shared.chat_endpoint import CONCURRENT
from shared.errors import ConfigError, NonFinite, RunError
from tests.model_folder import load_model
from tests.packed import pack_from
from tests.serve.command import QUESTION, Command
from tests.serving import reply as answer
from tests.serving import serving
from trainer.objectives import teachers
from trainer.objectives.objective import ServedTeacher
from trainer.objectives.registry import read_objective
from trainer.objectives.teachers import Teacher

OURS = "python -m serve"
PROMPT, COMPLETION = [5, 6, 7], [9, 8]


def ask(url: str, work: Callable[[Teacher], Any], model: str = NAME, deadline_s: float = 30, **settings: str) -> Any:
    """What comes of work with a teacher at that address."""
    teacher_settings = {"kind": "served", "url": url, "model": model, **settings}
    objective = read_objective({"name": "distill", "teacher": teacher_settings})
    assert isinstance(objective.teacher, ServedTeacher)
    served = objective.teacher

    async def whole() -> Any:
        teacher = Teacher(served, deadline_s)
        try:
            return await work(teacher)
        finally:
            await teacher.close()

    return asyncio.run(whole())


# ---- real servers ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model with random matrices, large enough that its distributions are far from uniform."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny_model(folder, Options(), 0)
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(folder / "model.safetensors")
    for tensor in tensors.values():
        if tensor.dim() == 2:
            tensor.normal_(std=0.3, generator=generator)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module", params=[OURS, pytest.param(THEIRS, marks=pytest.mark.soak)])
def real(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of either server with that model."""
    log = tmp_path_factory.mktemp("server") / "log"
    if request.param == OURS:
        ours = Command(model, log, name=NAME)
        yield f"{ours.url}/v1"
        ours.close()
        return
    running = Running(THEIRS, [*theirs(model, 4), "--dtype", "float32"], log)
    running.wait()
    yield f"http://127.0.0.1:{running.port}/v1"
    running.close()


@pytest.mark.slow
@pytest.mark.timeout(540)
def test_scores_are_those_of_our_decoder(real: str, model: Path) -> None:
    chat, decoder = Chat(model), load_model(model)
    context = decoder.config.max_positions
    prompt = chat.render(QUESTION, "")
    generator = torch.Generator().manual_seed(2)

    def draw(tokens: int) -> list[int]:
        return torch.randint(len(chat.tokenizer), (tokens,), generator=generator).tolist()

    cases = [(prompt, draw(20)), (prompt, [*draw(3), chat.eos_id]), (draw(1), draw(1)), (prompt, [])]
    cases.append((prompt, draw(context - 1 - len(prompt))))

    async def work(teacher: Teacher) -> tuple[str, list[list[float]]]:
        told = await teacher.start([prompt, draw(8)], chat.tokenizer.decode, context - 1)
        return told, await asyncio.gather(*(teacher.score(*case) for case in cases))

    told, scores = ask(real, work)
    assert told == f"teacher: {NAME} at {real}, {context} tokens of context, the same tokenizer"
    for (given, completion), found in zip(cases, scores, strict=True):
        with torch.no_grad():
            expected, _ = decoder(pack_from([given + completion], [len(given)]), 1.0)
        torch.testing.assert_close(torch.tensor(found), expected, atol=1e-4, rtol=0)
    assert torch.tensor(scores[-1]).std() > 1, "equal log-probs would agree by accident"


@pytest.mark.slow
@pytest.mark.timeout(540)
def test_what_a_real_server_cannot_do_is_told(real: str, model: Path) -> None:
    decode, context = Chat(model).tokenizer.decode, load_model(model).config.max_positions
    with pytest.raises(ConfigError, match=f"context of {context} .* at most {context - 1}"):
        ask(real, lambda teacher: teacher.start([PROMPT], decode, context))
    with pytest.raises(ConfigError, match="objective.teacher.model .* another tokenizer"):
        ask(real, lambda teacher: teacher.start([PROMPT], lambda ids: "another text", 64))
    with pytest.raises(RunError, match="no log-probs of 2001 tokens: status 400"):
        ask(real, lambda teacher: teacher.score([5], [5] * 2000))


# ---- a scripted one --------------------------------------------------------------------------------------------------


def right(ids: list[int]) -> list[Any]:
    """The log-probs -0.5, -1, -1.5, ... of the tokens from the second on."""
    return [None, *({str(one): {"logprob": -place / 2, "rank": 1}} for place, one in enumerate(ids[1:], 1))]


class Api(ThreadingHTTPServer):
    """A server whose replies to /v1/completions are `replies` in turn, the last again and again: a status, raw bytes,
    None for a connection that breaks, or a function from token ids to prompt_logprobs."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"
        self.replies: list[Any] = [right]
        self.models: list[Any] = [{"id": NAME}]
        self.text: str | None = "text"
        """of whatever is to be decoded; None: it has no such path"""
        self.requests: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.busy = self.busiest = 0
        self.gate = threading.Event()
        """replies wait for it, or for as many requests as may come at a time"""
        self.gate.set()
        self.lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    server: Api

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        reply = self.server.models.pop(0) if len(self.server.models) > 1 else self.server.models[0]
        known = self.path == "/v1/models" and not isinstance(reply, int)
        self.tell(200, {"data": [reply]}) if known else self.tell(reply if isinstance(reply, int) else 404, {})

    def do_POST(self) -> None:
        api = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/detokenize":
            return self.tell(404 if api.text is None else 200, {"prompt": api.text})
        assert self.path == "/v1/completions"
        with api.lock:
            api.requests.append(body)
            api.keys.add(self.headers.get("Authorization"))
            reply = api.replies.pop(0) if len(api.replies) > 1 else api.replies[0]
            api.busy += 1
            api.busiest = max(api.busiest, api.busy)
            if api.busy == CONCURRENT:
                api.gate.set()
        api.gate.wait(60)
        with api.lock:
            api.busy -= 1
        if reply is None:
            self.close_connection = True
        elif callable(reply):
            self.tell(200, {"choices": [{"text": "", "prompt_logprobs": reply(body["prompt"])}]})
        else:
            self.tell(reply, {"error": "busy"}) if isinstance(reply, int) else self.tell(200, reply)
        return None

    def tell(self, status: int, reply: Any) -> None:
        answer(self, status, reply if isinstance(reply, bytes) else json.dumps(reply).encode())


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr(teachers, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(teachers, "MOST_PAUSE_S", 0.1)
    server = Api()
    with serving(server):
        yield server


def score(api: Api, deadline_s: float = 30) -> Any:
    return ask(api.url, lambda teacher: teacher.score(PROMPT, COMPLETION), deadline_s=deadline_s)


def start(api: Api, tokens: int = 64, **settings: str) -> Any:
    return ask(api.url, lambda teacher: teacher.start([PROMPT], lambda ids: "text", tokens), **settings)


def test_the_tokens_are_sent_as_they_are_and_those_of_the_completion_come_back(api: Api) -> None:
    assert score(api) == [-1.5, -2.0]
    (sent,) = api.requests
    assert sent == {"model": NAME, "prompt": [5, 6, 7, 9, 8], "prompt_logprobs": 0, "max_tokens": 1, "temperature": 1.0}


def test_a_busy_server_and_a_broken_connection_are_tried_again(api: Api) -> None:
    api.replies = [503, None, 429, 502, right]
    assert score(api) == [-1.5, -2.0] and len(api.requests) == 5


def test_a_failure_is_tried_again_once_the_server_has_answered_as_it_must(api: Api) -> None:
    """vLLM says 500 while its engine dies, and somebody may start it again; before, it is a server that cannot."""

    async def work(teacher: Teacher) -> list[float]:
        await teacher.start([PROMPT], lambda ids: "text", 64)
        return await teacher.score(PROMPT, COMPLETION)

    api.replies = [right, 500, 500, right]
    assert ask(api.url, work) == [-1.5, -2.0] and len(api.requests) == 4
    api.replies = [500]
    with pytest.raises(ConfigError, match=r"objective\.teacher\.url = .*status 500"):
        start(api)
    assert len(api.requests) == 5


def test_a_server_that_stays_away_ends_the_run_at_the_deadline(api: Api) -> None:
    api.replies = [503]
    with pytest.raises(RunError, match="objective.teacher.url = .*not answer for 2 s, at last with status 503"):
        score(api, deadline_s=2)


@pytest.mark.parametrize(
    ("reply", "error", "told"),
    [
        (400, RunError, "status 400"),
        (401, RunError, "objective.teacher.key_variable"),
        (lambda ids: right([*ids[:4], 4]), RunError, "token 8 was sent at position 4, and a log-prob came of 4"),
        (lambda ids: [*right(ids)[:4], None], RunError, "token 8 was sent at position 4, and a log-prob came of none"),
        (lambda ids: right(ids)[:-1], RunError, "5 tokens were sent, and 4 log-probs came"),
        (lambda ids: [*right(ids)[:4], {"8": {"logprob": float("nan")}}], NonFinite, "NaN or infinite"),
        (lambda ids: [*right(ids)[:4], {"8": {"logprob": None}}], NonFinite, "of token 8 at position 4 is None"),
        (lambda ids: [*right(ids)[:4], {"8": {"logprob": -9999.0}}], NonFinite, "of token 8 at position 4 is -9999.0"),
        (lambda ids: [*right(ids)[:4], {"8": {"logprob": 3.5}}], RunError, "3.5 at position 4 is no log-prob"),
        (lambda ids: None, RunError, "no prompt_logprobs: serve it with"),
        (b'{"choices": []}', RunError, "no prompt_logprobs"),
        (b'{"choices": 3}', RunError, "cannot be read"),
        (b"<html>", RunError, "cannot be read"),
    ],
)  # fmt: skip
def test_what_is_no_log_prob_of_the_tokens_that_were_sent_ends_the_run(
    api: Api, reply: Any, error: type[RunError], told: str
) -> None:
    api.replies = [reply]
    with pytest.raises(error, match="objective.teacher.url = ") as found:
        score(api)
    assert told in str(found.value) and type(found.value) is error and len(api.requests) == 1


def test_a_server_that_tells_no_context_and_does_not_decode(api: Api) -> None:
    api.text = None
    assert start(api) == (
        f"teacher: {NAME} at {api.url}, context unknown, tokenizer not compared, as the server has no /detokenize"
    )
    assert [sent["prompt"] for sent in api.requests] == [PROMPT]


def test_a_server_that_is_still_loading_is_waited_for(api: Api) -> None:
    api.models = [503, {"id": NAME, "max_model_len": 65}]
    assert "65 tokens of context, the same tokenizer" in start(api)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"models": [404]}, "objective.teacher.url = .*status 404.*up to the API's version"),
        ({"models": [403]}, "objective.teacher.key_variable"),
        ({"models": [{"id": "other"}]}, f'objective.teacher.model = "{NAME}".* only "other"'),
        ({"models": [{}]}, "objective.teacher.url = .*cannot be"),
        ({"models": [{"id": NAME, "max_model_len": 64}]}, "context of 64 .* 64 here.* model.max_tokens to at most 63"),
        ({"replies": [lambda ids: None]}, "objective.teacher.url = .* no prompt_logprobs: serve it with"),
        ({"text": "texts"}, "objective.teacher.model .*another tokenizer.* reads 'texts' where"),
    ],
)
def test_a_server_that_cannot_be_the_teacher_is_refused_at_the_start(
    api: Api, changed: dict[str, Any], named: str
) -> None:
    for name, value in changed.items():
        setattr(api, name, value)
    with pytest.raises(ConfigError, match=named):
        start(api)


def test_nobody_there_is_told_at_once() -> None:
    free = Api()
    free.server_close()
    with pytest.raises(ConfigError, match="objective.teacher.url = .*ConnectError.*start that server"):
        start(free)


@pytest.mark.parametrize(
    ("settings", "told"),
    [({"url": ""}, "objective.teacher.url"), ({"model": ""}, "objective.teacher.model"),
     ({"key_variable": "NOT_SET_HERE"}, 'objective.teacher.key_variable = "NOT_SET_HERE"')],
)  # fmt: skip
def test_settings_that_are_missing_are_told(settings: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        ask(**{"url": "http://127.0.0.1:1/v1", "work": lambda teacher: teacher.score([1], [2]), **settings})


def test_the_key_goes_into_the_header(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_THE_TEACHER", "secret")
    start(api, key_variable="KEY_OF_THE_TEACHER")
    assert api.keys == {"Bearer secret"}


def test_requests_at_a_time_are_bounded(api: Api) -> None:
    async def work(teacher: Teacher) -> list[list[float]]:
        return await asyncio.gather(*(teacher.score(PROMPT, COMPLETION) for _ in range(3 * CONCURRENT)))

    api.gate.clear()
    assert ask(api.url, work) == [[-1.5, -2.0]] * 3 * CONCURRENT
    assert api.busiest == CONCURRENT
