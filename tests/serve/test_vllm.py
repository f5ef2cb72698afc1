"""The command with a real model in a real vLLM engine, and real clients."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from serve.letter_mask import LetterMask, MaskRequest, scripts_of
from shared.reasoning_tags import TEXT
from tests.evaluation.conftest import evaluate, records, write_rows
from tests.serve.command import QUESTION, Command, answers, check_sigterm, untrained_model
from tests.serve.conftest import eventually
from tests.serve.test_clients import run
from tests.serve.test_vllm_engine import broken_at

pytestmark = [pytest.mark.slow, pytest.mark.timeout(540)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model before any training: its texts mean nothing, its tokens are tokens."""
    return untrained_model(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def command(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    """A server for all tests of this file."""
    running = Command(model, tmp_path_factory.mktemp("serve") / "log")
    try:
        yield running
        check_sigterm(running)  # here, since tests run in any order and this one is the server's last
    finally:
        running.close()


@pytest.fixture
def client(command: Command) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{command.url}/v1", api_key="none", max_retries=0, timeout=60) as found:
        yield found


def test_the_openai_client_gets_the_same_streamed_and_whole(client: openai.OpenAI) -> None:
    ask = {"model": "tiny", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**ask)  # type: ignore[call-overload]
    stream = client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})  # type: ignore[call-overload]
    chunks = list(stream)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    reasoning = "".join(getattr(choice.delta, "reasoning", "") or "" for chunk in chunks for choice in chunk.choices)
    message = whole.choices[0].message
    assert text == message.content and reasoning == (message.reasoning or "")
    assert whole.choices[0].finish_reason == "length" and whole.usage.completion_tokens == 24
    assert chunks[-1].usage == whole.usage
    assert whole.model_extra["reasoning_language"]["requested"] == "en"


@pytest.mark.soak  # in make test: tests/serve/test_clients.py
def test_litellm_gets_the_same_streamed_and_whole(command: Command) -> None:
    found = run("openai2", "litellm_client", command.url)["found"]
    for one in found.values():
        assert one["text"].strip()[:20] == one["streamed_text"].strip()[:20] != ""


def test_log_probs_are_of_the_sampled_tokens(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": QUESTION}], max_tokens=5, logprobs=True, top_logprobs=3,
        temperature=0, n=2, extra_body={"reasoning_format": "inline"},
    )  # fmt: skip
    assert len(found.choices) == 2
    for choice in found.choices:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        tokens = choice.logprobs.content
        assert len(tokens) == 5 and all(token.logprob <= 0 and len(token.top_logprobs) == 3 for token in tokens)
        assert all(token.logprob == token.top_logprobs[0].logprob for token in tokens), "greedy"


def test_one_seed_draws_one_answer(client: openai.OpenAI) -> None:
    def draw(seed: int) -> str | None:
        found = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": QUESTION}], max_tokens=16, seed=seed, temperature=1,
        )  # fmt: skip
        return found.choices[0].message.content

    assert draw(1) == draw(1) != draw(2)


def test_errors_are_those_that_the_client_knows(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match='no model "other"'):
        client.chat.completions.create(model="other", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError, match="shorten it"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "apples " * 4000}])


def test_constraints_that_leave_no_token_are_an_error_and_no_wait(command: Command) -> None:
    body = {
        "messages": [{"role": "user", "content": QUESTION}], "response_format": {"type": "json_object"},
        "thinking_token_budget": 0, "allowed_token_ids": [40], "temperature": 0,
    }  # fmt: skip
    reply = httpx.post(f"{command.url}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 400, reply.text
    assert httpx.get(f"{command.url}/ready", timeout=10).is_success


@pytest.mark.parametrize("code", ["ru", "zh"])
def test_constrain_keeps_foreign_words_out_of_the_reasoning(command: Command, code: str) -> None:
    """Through both APIs, whole and streamed. A form of the answer begins the reasoning, which this model never ends."""
    mask = LetterMask(MaskRequest(sorted(scripts_of(code)), TEXT, [], [], [], True, True))
    ask = {"reasoning_language": code, "temperature": 1, "seed": 1}
    chat = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 90, "n": 2, **ask,
            "response_format": {"type": "json_object"}}  # fmt: skip
    responses = {"input": QUESTION, "max_output_tokens": 90, **ask, "text": {"format": {"type": "json_object"}}}

    def reasoning_of(enforcement: str) -> list[str]:
        extra = {"reasoning_language_enforcement": enforcement}
        client, url = command.client, "/v1/chat/completions"
        texts = [choice["message"]["reasoning"] for choice in client.post(url, json=chat | extra).json()["choices"]]
        streamed = ["", ""]
        for event in events_of(client.post(url, json=chat | extra | {"stream": True})):
            for choice in event["choices"]:
                streamed[choice["index"]] += choice["delta"].get("reasoning") or ""
        items = client.post("/v1/responses", json=responses | extra).json()["output"]
        texts += streamed + ["".join(piece["text"] for piece in items[0]["content"])]
        deltas = events_of(client.post("/v1/responses", json=responses | extra | {"stream": True}))
        return [*texts, "".join(each["delta"] for each in deltas if each["type"] == "response.reasoning_text.delta")]

    for enforcement in ("constrain", "prompt"):
        texts = reasoning_of(enforcement)
        assert len(texts) == 6 and all(texts), texts
        broken = [broken_at(mask, text.rstrip("\ufffd")) for text in texts]
        assert [place is None for place in broken] == [enforcement == "constrain"] * 6, (enforcement, broken)


def events_of(reply: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream that ended as it should."""
    assert reply.is_success, reply.text
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_the_prompt_is_that_of_training(command: Command) -> None:
    assert command.client.get("/version").json()["weights"] == "run, step 0"
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 1}
    usage = command.client.post("/v1/chat/completions", json=body).json()["usage"]
    assert usage["prompt_tokens"] < 40, "no system prompt, as it was trained"


def test_an_engine_killed_under_load_is_replaced_and_nobody_notices(command: Command) -> None:
    """More requests than the engine decodes at a time: all go on in the next engine, to their end."""
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 100, "temperature": 1}
    before = engine_starts(command)

    async def ask(client: httpx.AsyncClient, stream: bool) -> str:
        reply = await client.post("/v1/chat/completions", json={**body, "stream": stream})
        if reply.status_code == 503:
            assert int(reply.headers["retry-after"]) >= 1
            return str(reply.json()["error"]["code"])
        assert reply.status_code == 200
        if not stream:
            return "whole" if reply.json()["choices"][0]["finish_reason"] in ("stop", "length") else "cut"
        lines = [line for line in reply.text.splitlines() if line]
        assert lines[-1] == "data: [DONE]"
        found = json.loads(lines[-2].removeprefix("data: "))
        return str(found["error"]["code"]) if "error" in found else "whole"

    async def load() -> list[str]:
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(base_url=command.url, timeout=60, limits=limits) as client:
            tasks = [asyncio.create_task(ask(client, bool(number % 2))) for number in range(96)]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            command.engine().kill()
            return await asyncio.gather(*tasks)

    outcomes = asyncio.run(load())
    assert set(outcomes) == {"whole"}
    eventually(lambda: command.status("/ready") == 200 and engine_starts(command) == before + 1, 200)
    assert command.client.post("/v1/chat/completions", json=body).is_success


def engine_starts(command: Command) -> int:
    """How often the engine was started again."""
    lines = command.client.get("/metrics").text.splitlines()
    return int(float(next(line.split()[1] for line in lines if line.startswith("maestrale_engine_restarts "))))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_tokens_soon(long: Command, stream: bool) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    body = {"messages": messages, "stream": stream, "temperature": 2, "thinking_token_budget": 900, "n": 8}

    def under_way() -> float:
        lines = long.client.get("/metrics").text.splitlines()
        return float(next(line.split()[1] for line in lines if line.startswith("maestrale_completions_under_way ")))

    with httpx.Client(base_url=long.url, timeout=0.3) as leaving:
        if stream:
            with leaving.stream("POST", "/v1/chat/completions", json=body) as events:
                lines = events.iter_lines()  # kept: a generator that is thrown away closes the stream
                next(lines)
                assert under_way() == 8
        else:
            with pytest.raises(httpx.ReadTimeout):
                leaving.post("/v1/chat/completions", json=body)
    eventually(lambda: under_way() == 0, 3)


@pytest.mark.parametrize("end", ["kill", "suspend"])
def test_not_ready_while_the_engine_starts(long: Command, end: str) -> None:
    """suspend: it is frozen, which is noticed after a while, and answered as its death."""
    getattr(long.engine(), end)()
    eventually(lambda: long.status("/ready") == 503, 60)
    assert long.status("/health") == 200
    reply = long.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
    if reply.status_code != 200:  # it came before the death was noticed, and the next engine has answered it
        assert reply.status_code == 503 and reply.json()["error"]["code"] == "engine_starting"
    eventually(lambda: long.status("/ready") == 200, 200)
    sockets = [one for one in long.engine().net_connections("inet") if one.laddr.port == long.port]
    assert not sockets, "the engine has inherited connections of clients, or the server's port"
    assert not list(long.temporary.glob("vllm*")), "an engine that was killed leaves files"


def test_an_evaluation_is_the_same_each_time(command: Command, tmp_path: Path) -> None:
    rows = [{"id": str(number), "problem": QUESTION.replace("3", str(number)), "answer": str(number + 2),
             "language": "en"} for number in range(3)]  # fmt: skip
    file = write_rows(tmp_path / "apples.jsonl", *rows)
    arguments = [file, "--samples", "2", "--max-tokens", "24", "--no-ask-form", "--concurrency", "1"]
    found = evaluate(f"{command.url}/v1", tmp_path / "first", *arguments)
    assert found["weights"] == "run, step 0" and found["benchmarks"]["apples"]["responses"] == 6
    assert found["benchmarks"]["apples"]["truncated"] > 0.5, "an untrained model finds no end"
    evaluate(f"{command.url}/v1", tmp_path / "second", *arguments)
    assert (tmp_path / "first" / "results.json").read_bytes() == (tmp_path / "second" / "results.json").read_bytes()
    texts = [[record["reasoning"] + record["answer"] for record in records(tmp_path / name)]
             for name in ("first", "second")]  # fmt: skip
    assert texts[0] == texts[1] and len(set(texts[0])) == 6


def test_uvicorn_serves_with_settings_of_the_environment(model: Path, tmp_path: Path) -> None:
    settings = tmp_path / "serve.toml"
    settings.write_text(f'name = "of a file"\ncache_bytes = {64 << 20}\ndtype = "float32"\n')
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd()), "MAESTRALE_MODEL": str(model),
                   "MAESTRALE_CONFIG": str(settings)}  # fmt: skip
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, "-m", "uvicorn", "serve.app:app", "--port", str(port)]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        eventually(lambda: process.poll() is not None or answers(f"http://127.0.0.1:{port}/ready"), 200)
        assert process.poll() is None, (tmp_path / "log").read_text()
        listed = httpx.get(f"http://127.0.0.1:{port}/v1/models").json()
        assert [one["id"] for one in listed["data"]] == ["of a file"]
        process.terminate()
        assert process.wait(90) in (0, -signal.SIGTERM)
    finally:
        process.kill()


def test_help_and_mistakes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        done = subprocess.run([sys.executable, "-m", "serve", *arguments], capture_output=True, text=True, timeout=150)
        return done.returncode, done.stdout + done.stderr

    code, told = run("--help")
    assert code == 0 and "reasoning-language" in told
    code, told = run("--model", str(tmp_path), "--host", "0.0.0.0")
    assert code == 2 and told.count("\n") == 1 and "serve.keys" in told
    code, told = run("--model", str(tmp_path / "none"))
    assert code == 2 and told.startswith("error: ") and "Traceback" not in told


ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {
    "type": "object", "properties": {"a": {"enum": [1, 2]}, "b": {"enum": [3]}}, "required": ["a", "b"],
    "additionalProperties": False}}}  # fmt: skip


def test_an_untrained_model_keeps_the_form_that_is_asked(long: Command) -> None:
    """Its tokens are random, so whatever has a form has it from the engine."""
    messages = [{"role": "user", "content": "Add."}]
    body = {"messages": messages, "thinking_token_budget": 8, "seed": 3, "reasoning_language": "off"}
    tools = {"tools": [ADD], "tool_choice": "required", "parallel_tool_calls": False}
    must = long.client.post("/v1/chat/completions", json={**body, **tools}).json()["choices"][0]
    (call,) = must["message"]["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    assert call["function"]["name"] == "add" and arguments["a"] in (1, 2) and arguments["b"] == 3
    assert must["finish_reason"] == "tool_calls" and must["message"]["reasoning"].endswith("I'll answer now.")
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    told = long.client.post("/v1/chat/completions", json={**body, "response_format": form}).json()["choices"][0]
    assert json.loads(told["message"]["content"])["ok"] in (True, False)
    bad = {"type": "json_schema", "json_schema": {"schema": {"type": "object", "properties": {"a": {"type": "wrong"}}}}}
    reply = long.client.post("/v1/chat/completions", json={**body, "response_format": bad})
    assert reply.status_code == 400 and "wrong" in reply.json()["error"]["message"]
    nothing = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
    calls = long.client.post("/v1/chat/completions", json={**body, **tools, "tools": [nothing]}).json()["choices"][0]
    assert [call["function"]["arguments"] for call in calls["message"]["tool_calls"]] == ["{}"]
    endless = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    both = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "patternProperties": {"^a$": {}}}
    for schema in (endless, {**both, "additionalProperties": False}):
        form = {"type": "json_schema", "json_schema": {"schema": schema}}
        assert long.client.post("/v1/chat/completions", json={**body, "response_format": form}).status_code == 400
        act = {"type": "function", "function": {"name": "act", "parameters": schema}}
        assert long.client.post("/v1/chat/completions", json={**body, **tools, "tools": [act]}).status_code == 400
    assert long.client.post("/v1/chat/completions", json=body).is_success, "the engine is none the worse"


def test_a_raw_prompt_is_sampled_on(command: Command, client: openai.OpenAI) -> None:
    ask = {"model": "tiny", "prompt": QUESTION, "max_tokens": 12, "temperature": 0, "logprobs": 2}
    whole = client.completions.create(**ask)  # type: ignore[call-overload]
    chunks = list(client.completions.create(**ask, stream=True))  # type: ignore[call-overload]
    choice = whole.choices[0]
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) == whole.usage.completion_tokens == 12
    ids = command.client.post("/tokenize", json={"prompt": QUESTION}).json()["tokens"]
    echoed = client.completions.create(**{**ask, "prompt": ids, "echo": True}).choices[0]  # type: ignore[call-overload]
    assert echoed.text == QUESTION + choice.text and len(echoed.logprobs.tokens) == len(ids) + 12
    assert echoed.logprobs.top_logprobs[0] is echoed.logprobs.token_logprobs[0] is None
    rest = zip(echoed.logprobs.token_logprobs[1:], echoed.logprobs.top_logprobs[1:], strict=True)
    assert all(logprob in top.values() and 2 <= len(top) <= 3 for logprob, top in rest), (
        "each token is told with the best"
    )


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    """A server of an untrained model whose context has room for the signatures of tools."""
    folder = untrained_model(tmp_path_factory.mktemp("long"), max_position_embeddings=1024)
    running = Command(folder, tmp_path_factory.mktemp("serve") / "log")
    yield running
    running.close()
