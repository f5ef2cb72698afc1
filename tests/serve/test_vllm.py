"""The command with a real model in a real vLLM engine, and real clients."""

import asyncio
import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import httpx
import openai
import pytest
from uvicorn.importer import import_from_string

from rollout.vllm_config import read_stop_tokens
from serve.engine import SamplingParameters
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
    assert whole.model_extra["reasoning_language"]["source"] == "off", "its card: no system prompt, no requests"
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


@pytest.mark.soak  # in make test: the mask itself in test_vllm_engine.py
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


@pytest.mark.soak  # in make test: test_engine_deaths.py
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
    assert must["finish_reason"] == "tool_calls" and must["message"]["reasoning"] is None
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
        assert post(**form(**schema)).status_code == 400
        reply = post(**call(act), max_tokens=40)
        assert reply.status_code == 400 if schema is both else reply.json()["choices"][0]["finish_reason"] == "length"
    no_token = {"response_format": {"type": "json_object"}, "thinking_token_budget": 0, "allowed_token_ids": [40]}
    reply = post(**no_token, temperature=0)
    assert reply.status_code == 400, "constraints that leave no token are an error and no wait"
    assert post().is_success and command.status("/ready") == 200, "the engine is none the worse"


def test_uvicorn_gets_a_server_with_settings_of_the_environment_and_of_a_file(command, tmp_path, monkeypatch):
    (tmp_path / "serve.toml").write_text('name = "of a file"\n')
    monkeypatch.setenv("MAESTRALE_MODEL", str(command.model))
    monkeypatch.setenv("MAESTRALE_CONFIG", str(tmp_path / "serve.toml"))
    server = import_from_string("serve.app:app").state.server
    assert (server.name, server.settings.model) == ("of a file", str(command.model))


# ---- what each accepted parameter of sampling does, by its effect: the texts mean nothing, so whatever is seen comes
# from the parameter. test_parameters.py: which ones there are.


class Asked:
    """A completion and its tokens."""

    def __init__(self, command: Command, **body: Any):
        values = {"prompt": QUESTION, "max_tokens": 16, "temperature": 0, **body}
        reply = command.client.post("/v1/completions", json=values)
        assert reply.is_success, reply.text
        choice = reply.json()["choices"][0]
        self.text, self.finish, self.stop = choice["text"], choice["finish_reason"], choice["stop_reason"]
        self.count = reply.json()["usage"]["completion_tokens"]


def ids(command: Command, text: str) -> list[int]:
    tokens: list[int] = command.client.post("/tokenize", json={"prompt": text}).json()["tokens"]
    return tokens


@pytest.fixture(scope="module")
def letters(command):
    """Ids of Q, Z and X, three tokens that are letters, far apart."""
    return [ids(command, letter)[-1] for letter in "QZX"]


def test_greedy_is_what_narrow_sampling_draws(command):
    greedy = Asked(command).text
    assert Asked(command, temperature=2, top_k=1).text == greedy != Asked(command, temperature=2, seed=1).text
    assert Asked(command, temperature=2, top_p=1e-6).text == greedy
    assert Asked(command, temperature=2, min_p=1.0).text == greedy
    assert Asked(command, temperature=2, seed=5).text == Asked(command, temperature=2, seed=5).text
    assert Asked(command, max_tokens=3).count == 3


def test_letters_can_be_favoured_and_forbidden(command, letters):
    first, second, third = letters
    assert Asked(command, logit_bias={str(first): 100}).text == "Q" * 16
    assert set(Asked(command, allowed_token_ids=letters, temperature=2, seed=1).text) <= set("QZX")
    assert set(Asked(command, allowed_token_ids=[first, third], logit_bias={str(first): -100}).text) == {"X"}
    favoured = {"allowed_token_ids": [first, second], "logit_bias": {str(first): 5}}
    assert set(Asked(command, **favoured).text) == {"Q"}
    assert set(Asked(command, **favoured, bad_words=["Q"]).text) == {"Z"}


def test_penalties(command, letters):
    first, second, _ = letters
    pair: dict[str, Any] = {"allowed_token_ids": [first, second], "max_tokens": 40}
    low, high = -30.0, 30.0  # what Z needs beside Q, so that neither always wins
    for _ in range(8):
        middle = (low + high) / 2
        wins = Asked(command, **{**pair, "max_tokens": 1}, logit_bias={str(second): middle}).text == "Z"
        low, high = (low, middle) if wins else (middle, high)
    # below zero, where a repetition is multiplied with its penalty
    pair["logit_bias"] = {str(first): -20, str(second): low - 20}
    for name, apart, alike in (
        ("presence_penalty", 2, -2), ("frequency_penalty", 2, -2), ("repetition_penalty", 50, 0.02),
    ):  # fmt: skip
        texts = [Asked(command, **pair, **{name: value}).text for value in (apart, alike)]
        changes = [sum(letter != after for letter, after in pairwise(text)) for text in texts]
        assert changes[0] > changes[1], (name, texts)


def test_ends(command, letters):
    body: dict[str, Any] = {"allowed_token_ids": letters[:2], "temperature": 2, "seed": 3, "max_tokens": 60}
    free = Asked(command, **body)
    assert free.finish == "length" and free.count == 60 and "QZ" in free.text
    until = free.text.index("QZ")
    by_text = Asked(command, **body, stop="QZ")
    assert (by_text.text, by_text.finish, by_text.stop) == (free.text[:until], "stop", "QZ")
    shown = Asked(command, **body, stop="QZ", include_stop_str_in_output=True)
    assert shown.text == free.text[: until + 2] and shown.count == by_text.count == until + 2
    by_token = Asked(command, **body, stop_token_ids=letters[1:2])
    assert (by_token.text, by_token.finish, by_token.stop) == (free.text[: free.text.index("Z")], "stop", letters[1])
    bad = command.client.post("/v1/completions", json={"prompt": "x", "stop_token_ids": [10**6]})
    assert bad.status_code == 400 and bad.json()["error"]["param"] == "stop_token_ids"


def test_the_models_own_end(command):
    wish = {"logit_bias": {str(read_stop_tokens(str(command.model))[0]): 100}}
    at_once = Asked(command, **wish)
    assert (at_once.text, at_once.count, at_once.finish, at_once.stop) == ("", 1, "stop", None)
    later = Asked(command, **wish, min_tokens=5)
    assert later.count == 6 and later.finish == "stop"
    never = Asked(command, **wish, ignore_eos=True)
    assert never.count == 16 and never.finish == "length"
    shown = Asked(command, **wish, ignore_eos=True, skip_special_tokens=True)
    assert shown.text != never.text and shown.count == 16


def test_chats_and_responses_are_sampled_as_completions_are(served):
    body = {"temperature": 1.5, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": 1,
            "repetition_penalty": 2, "logit_bias": {"9": 3}, "allowed_token_ids": [9, 10], "bad_words": ["b"],
            "seed": 4, "ignore_eos": True, "min_tokens": 1}  # fmt: skip
    for path, asked in (("completions", {"prompt": "x"}), ("chat/completions", {"messages": MESSAGES}),
                        ("responses", {"input": "x"})):  # fmt: skip
        assert served.client.post(f"/v1/{path}", json={**asked, **body}).is_success
    completion, *others = [replace(sampling, max_tokens=9) for sampling in served.engine.samplings[-3:]]
    assert others == [completion] * 2 == [SamplingParameters(**{**body, "max_tokens": 9, "logit_bias": {9: 3}})] * 2


def test_a_stop_in_the_reasoning_of_a_real_engine(command, letters):
    """Reasoning and answer are forced letter by letter: Q and Z until the tag that a budget of reasoning writes."""
    first, second, _ = letters
    body = {"messages": MESSAGES, "allowed_token_ids": [*ids(command, "<think>\n"), first, second], "seed": 2,
            "temperature": 1, "thinking_token_budget": 30, "max_tokens": 90, "reasoning_language": "off",
            "logit_bias": {str(first): 4, str(second): 4}}  # fmt: skip
    reply = command.client.post("/v1/chat/completions", json={**body, "stop": ["QZ"]}).json()
    choice, usage = reply["choices"][0], reply["usage"]
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == "QZ"
    assert "QZ" not in choice["message"]["content"] and usage["completion_tokens"] < 90
