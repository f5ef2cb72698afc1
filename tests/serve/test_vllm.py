"""The command with a real model in a real vLLM engine, and real clients."""

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from tests.serve.command import QUESTION, Command, check_sigterm, untrained_model
from tests.serve.conftest import eventually
from tests.serve.test_vllm_engine import broken_at

pytestmark = [pytest.mark.slow, pytest.mark.timeout(540)]

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """A server of an untrained model whose context has room for the signatures of tools."""
    folder = untrained_model(tmp_path_factory.mktemp("runs"), max_position_embeddings=1024)
    running = Command(folder, tmp_path_factory.mktemp("serve") / "log", settings=["--max-sequences", "16"])
    try:
        yield running
        check_sigterm(running)  # here, since tests run in any order and this one is the server's last
    finally:
        running.close()


@pytest.fixture
def client(command):
    with openai.OpenAI(base_url=f"{command.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        yield client


def figure(command: Command, name: str) -> float:
    """A figure of /metrics, 0 where it is not there yet."""
    lines = command.client.get("/metrics").text.splitlines()
    return next((float(line.split()[1]) for line in lines if line.startswith(f"maestrale_{name} ")), 0.0)


def test_the_openai_client_gets_the_same_streamed_and_whole(command, client):
    ask: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    reasoning = "".join(getattr(choice.delta, "reasoning", "") or "" for chunk in chunks for choice in chunk.choices)
    message = whole.choices[0].message
    assert text == message.content and reasoning == (message.reasoning or "")
    assert whole.choices[0].finish_reason == "length" and whole.usage.completion_tokens == 24
    assert chunks[-1].usage == whole.usage
    assert whole.model_extra["reasoning_language"]["requested"] == "en"
    assert whole.usage.prompt_tokens < 40, "no system prompt, as it was trained"
    assert command.client.get("/version").json()["weights"] == "run, step 0"


def test_a_raw_prompt_is_sampled_on(command, client):
    ask: dict[str, Any] = {"model": "tiny", "prompt": QUESTION, "max_tokens": 12, "temperature": 0, "logprobs": 2}
    whole = client.completions.create(**ask)
    chunks = list(client.completions.create(**ask, stream=True))
    choice = whole.choices[0]
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) == whole.usage.completion_tokens == 12
    ids = command.client.post("/tokenize", json={"prompt": QUESTION}).json()["tokens"]
    echoed = client.completions.create(**{**ask, "prompt": ids, "echo": True}).choices[0]
    assert echoed.text == QUESTION + choice.text and len(echoed.logprobs.tokens) == len(ids) + 12
    assert echoed.logprobs.top_logprobs[0] is echoed.logprobs.token_logprobs[0] is None
    rest = zip(echoed.logprobs.token_logprobs[1:], echoed.logprobs.top_logprobs[1:], strict=True)
    best = "each token is told with the best"
    assert all(logprob in top.values() and 2 <= len(top) <= 3 for logprob, top in rest), best


def test_constrain_keeps_foreign_words_out_of_the_reasoning(command):
    """Through both APIs, whole and streamed. A form of the answer begins the reasoning, which this model never ends."""
    form, ask = {"type": "json_object"}, {"reasoning_language": "ru", "temperature": 1, "seed": 1}
    chat = {"messages": MESSAGES, "max_tokens": 90, "response_format": form, **ask}
    response = {"input": QUESTION, "max_output_tokens": 90, "text": {"format": form}, **ask}

    def post(path: str, **body: Any) -> httpx.Response:
        reply = command.client.post(path, json={**body, "reasoning_language_enforcement": enforcement})
        assert reply.is_success, reply.text
        return reply

    def events(path: str, **body: Any) -> list[Any]:
        lines = post(path, **body, stream=True).text.splitlines()
        return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]

    for enforcement in ("constrain", "prompt"):
        pieces = [
            [choice["message"]["reasoning"] for choice in post(CHAT, **chat).json()["choices"]],
            [choice["delta"].get("reasoning") or "" for event in events(CHAT, **chat) for choice in event["choices"]],
            [piece["text"] for piece in post("/v1/responses", **response).json()["output"][0]["content"]],
            [event["delta"] for event in events("/v1/responses", **response)
             if event["type"] == "response.reasoning_text.delta"],
        ]  # fmt: skip
        texts = ["".join(parts) for parts in pieces]
        broken = [broken_at("ru", text.rstrip("\ufffd")) for text in texts]
        assert all(texts) and [place is None for place in broken] == [enforcement == "constrain"] * 4, (texts, broken)


def test_an_engine_killed_under_load_is_replaced_and_nobody_notices(command):
    """More requests than the engine decodes at a time: all go on in the next engine, to their end."""
    body = {"messages": MESSAGES, "max_tokens": 100, "temperature": 1}
    before = figure(command, "engine_restarts")

    async def ask(client: httpx.AsyncClient, stream: bool) -> bool:
        reply = await client.post(CHAT, json={**body, "stream": stream})
        assert reply.status_code == 200, reply.text
        if not stream:
            return reply.json()["choices"][0]["finish_reason"] in ("stop", "length")
        *_, last, done = [line for line in reply.text.splitlines() if line]
        return done == "data: [DONE]" and "error" not in json.loads(last.removeprefix("data: "))

    async def load() -> list[bool]:
        async with httpx.AsyncClient(base_url=command.url, timeout=300) as client:
            tasks = [asyncio.create_task(ask(client, bool(number % 2))) for number in range(40)]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            command.engine().kill()
            while (await client.get("/ready")).is_success:
                await asyncio.sleep(0.01)
            assert (await client.get("/health")).is_success
            late = await client.post(CHAT, json=body)
            if late.status_code != 200:  # it came before the death was noticed, and the next engine has answered it
                assert late.status_code == 503 and late.json()["error"]["code"] == "engine_starting"
                assert int(late.headers["retry-after"]) >= 1
            return await asyncio.gather(*tasks)

    assert all(asyncio.run(load()))
    eventually(lambda: command.status("/ready") == 200 and figure(command, "engine_restarts") == before + 1, 200)
    assert command.client.post(CHAT, json=body).is_success
    sockets = [socket for socket in command.engine().net_connections("inet") if socket.laddr.port == command.port]
    assert not sockets, "the engine has inherited connections of clients, or the server's port"
    assert not list(command.temporary.glob("vllm*")), "an engine that was killed leaves files"


ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {
    "type": "object", "properties": {"a": {"enum": [1, 2]}, "b": {"enum": [3]}}, "required": ["a", "b"],
    "additionalProperties": False}}}  # fmt: skip


def test_an_untrained_model_keeps_the_form_that_is_asked(command):
    """Its tokens are random, so whatever has a form has it from the engine."""
    body = {"messages": [{"role": "user", "content": "Add."}], "thinking_token_budget": 8, "seed": 3,
            "reasoning_language": "off"}  # fmt: skip

    def post(**more: Any) -> httpx.Response:
        return command.client.post(CHAT, json={**body, **more})

    def form(**schema: Any) -> dict[str, Any]:
        return {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object", **schema}}}}

    def call(*tools: dict[str, Any]) -> dict[str, Any]:
        return {"tools": list(tools), "tool_choice": "required", "parallel_tool_calls": False}

    must = post(**call(ADD)).json()["choices"][0]
    [added] = must["message"]["tool_calls"]
    arguments = json.loads(added["function"]["arguments"])
    assert added["function"]["name"] == "add" and arguments["a"] in (1, 2) and arguments["b"] == 3
    assert must["finish_reason"] == "tool_calls" and must["message"]["reasoning"].endswith("I'll answer now.")
    closed = {"additionalProperties": False}
    answer = post(**form(properties={"ok": {"type": "boolean"}}, required=["ok"], **closed)).json()["choices"][0]
    assert json.loads(answer["message"]["content"])["ok"] in (True, False)
    reply = post(**form(properties={"a": {"type": "wrong"}}))
    assert reply.status_code == 400 and "wrong" in reply.json()["error"]["message"]
    now = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
    calls = post(**call(now)).json()["choices"][0]["message"]["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == ["{}"]
    endless: dict[str, Any] = {"properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    both = {"properties": {"a": {"enum": [1]}}, "required": ["a"], "patternProperties": {"^a$": {}}, **closed}
    for schema in (endless, both):
        act = {"type": "function", "function": {"name": "act", "parameters": {"type": "object", **schema}}}
        assert post(**form(**schema)).status_code == post(**call(act)).status_code == 400
    no_token = {"response_format": {"type": "json_object"}, "thinking_token_budget": 0, "allowed_token_ids": [40]}
    reply = post(**no_token, temperature=0)
    assert reply.status_code == 400, "constraints that leave no token are an error and no wait"
    assert post().is_success and command.status("/ready") == 200, "the engine is none the worse"
