"""The environment "agent" and its gateway, with the real client of OpenAI in real processes; the turns are scripted."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest

from environments.agent import Agent
from environments.environment import OPTIONS, Observation
from environments.gateway import client
from environments.gateway.client import open_session
from environments.gateway.messages import AgentMessage, ChatAsked, GatewayEnded, TurnGiven
from environments.gateway.process import Gateway
from environments.gateway.wire import GatewayRefusal, read_chat, read_tokens, tokens_object
from shared.errors import ConfigError
from shared.launch.deaths import helpers
from tests.environments.agents import PROBLEM, action, agent, play, program
from verify.plugins import Failed, checked_options

START = """
import json, sys
from openai import OpenAI
problem, client = json.load(sys.stdin), OpenAI()
def ask(messages, **more):
    return client.chat.completions.create(model="policy", messages=messages, **more).choices[0]
"""
PLAIN = """
import json, os, sys, urllib.error, urllib.request
problem, url, key = json.load(sys.stdin), os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
def post(path, body, key=key, timeout=60):
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    asked = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    try:
        return json.load(urllib.request.urlopen(asked, timeout=timeout))
    except urllib.error.HTTPError as error:
        sys.exit(f"{error.code} {error.read().decode()}")
def ask(messages, key=key, timeout=60, **more):
    return post("/chat/completions", {"messages": messages, **more}, key, timeout)["choices"][0]["message"]["content"]
"""
"""the same without OpenAI's client, which takes seconds to load"""
CORRECTS = (
    START
    + """
messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": problem["text"]}]
for _ in range(3):
    said = ask(messages, temperature=0.3).message
    if said.content == problem["answer"]:
        break
    messages += [said.model_dump(), {"role": "user", "content": "No."}]
print("noise"); print(json.dumps({"reward": float(said.content == problem["answer"]), "solved": True}))
"""
)
TOOLS = (
    START
    + """
tool = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
messages = [{"role": "user", "content": problem["text"]}]
while (choice := ask(messages, tools=[tool])).finish_reason == "tool_calls":
    messages.append(choice.message)
    for call in reversed(choice.message.tool_calls):
        numbers = json.loads(call.function.arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(numbers["a"] + numbers["b"])})
print(json.dumps({"reward": float(choice.message.content == "5")}))
"""
)


def texts(seen: Observation) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in seen.messages]


def run(folder: Path, text: str, turns: list[str], **options: Any) -> list[Observation]:
    async def scene() -> list[Observation]:
        async with agent(command=program(folder, text), **options) as one:
            return await play(one, [action(turn) for turn in turns])

    return asyncio.run(scene())


def test_an_agent_talks_and_tells_its_reward(tmp_path: Path) -> None:
    first, second, end = run(tmp_path, CORRECTS, ["<think>\nhm\n</think>\n4", "5"])
    assert texts(first) == [("system", "Be short."), ("user", "2 + 3 = ?")] and not first.done
    assert texts(second) == [("user", "No.")] and second.reward is None and not second.done
    assert (end.reward, end.done, end.solved, end.messages) == (1.0, True, True, [])


def test_an_agent_calls_tools_and_reads_their_results_in_the_order_of_the_calls(tmp_path: Path) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"b": %d, "a": 2}}\n</tool_call>'
    first, second, end = run(tmp_path, TOOLS, [f"So:\n{call % 3}\n{call % 4}", "5"])
    assert [role for role, _ in texts(first)] == ["user", "system"]
    told = texts(first)[1][1]
    assert '{"name": "add", "description": "Adds.", "parameters": {"type": "object"}}' in told and "<tool_call>" in told
    results = "<tool_response>\n5\n</tool_response>\n<tool_response>\n6\n</tool_response>"
    assert texts(second) == [("user", results)]
    assert end.reward == 1.0 and end.done and end.solved is None


def test_a_stream_is_answered_in_events(tmp_path: Path) -> None:
    text = START + (
        "stream = client.chat.completions.create(model='m', messages=[{'role': 'user', 'content': 'x'}], stream=True)\n"
        "chunks = list(stream)\n"
        "said = ''.join(c.choices[0].delta.content or '' for c in chunks)\n"
        "assert chunks[-1].choices[0].finish_reason == 'stop'\n"
        "print(json.dumps({'reward': len(said)}))\n"
    )
    assert run(tmp_path, text, ["<think>a</think>Ünd"])[-1].reward == 3.0


def test_the_reward_comes_by_http_or_from_the_verifier(tmp_path: Path) -> None:
    ask = PLAIN + "ask([{'role': 'user', 'content': problem['text']}])\n"
    post = "import time\npost('/reward', {'reward': 0.25, 'solved': False})\ntime.sleep(600)\n"
    end = run(tmp_path, ask + post, ["5"])[-1]
    assert (end.reward, end.solved, end.done) == (0.25, False, True)
    end = run(tmp_path, ask, ["so 5"], reward="verifier")[-1]
    assert (end.reward, end.solved, end.done) == (1.0, True, True)


@pytest.mark.parametrize(
    ("rest", "reason"),
    [
        ("sys.exit('no idea')", "exit code 1: no idea"),
        ("import os; os.kill(os.getpid(), 15)", r"was killed by signal 15 \(SIGTERM\)$"),
        ("pass", "ended before it had asked"),
        ("ask([{'role': 'user', 'content': 'x'}])", "without a reward: let it print"),
        ("ask([{'role': 'user', 'content': 'x'}]); print('{\"reward\": \"high\"}')", "'high', which is no number"),
        ("ask([{'role': 'user', 'content': 'x'}], n=2)", "n is not supported.*one answer"),
        ("ask([{'role': 'assistant', 'content': 'x'}])", r"role assistant \(messages\[0\]\)"),
        (
            "a = ask([{'role': 'user', 'content': 'x'}])\n"
            "ask([{'role': 'user', 'content': 'x'}, {'role': 'assistant', 'content': a + '!'}, "
            "{'role': 'user', 'content': 'y'}])",
            r"changed its history: messages\[1\], assistant: '5', became assistant: '5!'",
        ),
        ("for _ in range(2): ask([{'role': 'user', 'content': 'x'}])", r"messages\[1\], assistant: '5', is missing"),
        (
            "ask([{'role': 'user', 'content': 'x'}], key='sk-other')",
            "401.*no key of an episode",
        ),
        (
            "ask([{'role': 'user', 'content': 'x'}], timeout=0.3)",
            "exit code 1: TimeoutError",
        ),
    ],
)
def test_what_fails_costs_the_episode_with_a_reason(tmp_path: Path, rest: str, reason: str) -> None:
    async def scene() -> None:
        async with agent(command=program(tmp_path, PLAIN + rest)) as one:
            async with asyncio.timeout(150):
                await one.reset(PROBLEM, 7)
                if "timeout=0.3" in rest:
                    assert one.running
                    await asyncio.wait([one.running])
                for _ in range(2):
                    await one.step(action("5"))

    with pytest.raises(Failed, match=reason):
        asyncio.run(scene())


def test_an_agent_that_runs_out_of_memory_is_told_as_such(tmp_path: Path) -> None:
    """In a memory control group of its own, where this user may make one."""
    group = Path("/sys/fs/cgroup/memory", f"test-{os.getpid()}")
    if not group.parent.is_dir():
        group = Path("/sys/fs/cgroup", group.name)
    try:
        group.mkdir()
        limit = next(path for name in ("limit_in_bytes", "max") if (path := group / f"memory.{name}").exists())
        limit.write_text(str(64 << 20))
    except (OSError, StopIteration):
        pytest.skip("no memory control group can be made here")
    text = f"import os; open('{group}/cgroup.procs', 'w').write(str(os.getpid())); block = bytearray(256 << 20)"

    async def scene() -> None:
        async with agent(command=program(tmp_path, text)) as one:
            await one.reset(PROBLEM, 7)

    try:
        with pytest.raises(Failed, match=r"SIGKILL.*memory killer has ended a.*lower the memory that it needs"):
            asyncio.run(scene())
    finally:
        group.rmdir()


def test_closing_an_episode_refuses_its_request_and_ends_the_agent(tmp_path: Path) -> None:
    text = PLAIN + (
        "try:\n    ask([{'role': 'user', 'content': 'x'}])\n"
        f"except SystemExit as error:\n    open({str(tmp_path / 'error')!r}, 'w').write(str(error))\n"
        "import time; time.sleep(600)\n"
    )

    async def scene() -> None:
        async with agent(command=program(tmp_path, text)) as one:
            await play(one, [])
            assert one.session
            one.session.close("the turn was cut")
            while not (tmp_path / "error").is_file() or not (tmp_path / "error").read_text():
                await asyncio.sleep(0.05)
            task = one.running
        assert task and task.cancelled()

    asyncio.run(scene())
    assert "409" in (tmp_path / "error").read_text() and "the turn was cut" in (tmp_path / "error").read_text()


def test_a_server_of_agents_is_asked(tmp_path: Path) -> None:
    """A small server, which runs each agent with plain httpx."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        asked = json.loads(await reader.readexactly(size))
        headers = {"Authorization": f"Bearer {asked['api_key']}"}
        async with httpx.AsyncClient(base_url=asked["base_url"], headers=headers) as client:
            body = {"messages": [{"role": "user", "content": asked["problem"]["text"]}]}
            reply = await client.post("chat/completions", json=body)
        right = reply.json()["choices"][0]["message"]["content"] == asked["problem"]["answer"]
        told = json.dumps({"reward": float(right)}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(told), told))
        await writer.drain()
        writer.close()

    async def scene() -> list[Observation]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server, agent(url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/") as one:
            return await play(one, [action("5")])

    assert asyncio.run(scene())[-1].reward == 1.0


def test_a_key_is_known_before_its_agent_begins() -> None:
    """A request that overtakes its key, as on a busy machine, would be refused as a stranger's."""

    async def scene() -> None:
        pid = (await open_session("127.0.0.1")).gateway.child.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            opening = asyncio.create_task(open_session("127.0.0.1"))
            done, _ = await asyncio.wait({opening}, timeout=0.5)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert not done, "the gateway does not know it yet"
        assert (await asyncio.wait_for(opening, 30)).events.empty()

    asyncio.run(scene())


def test_episodes_load_no_certificates_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes 50 ms, in which nothing else goes on: with hundreds of episodes a step, as long as the step."""
    loaded = []
    whole = ssl.create_default_context
    monkeypatch.setattr(ssl, "create_default_context", lambda *given, **more: loaded.append(1) or whole(*given, **more))

    async def scene() -> None:
        for _ in range(3):
            async with agent(url="http://127.0.0.1:9/") as one:
                with pytest.raises(Failed, match="did not answer: ConnectError"):
                    await one.reset(PROBLEM, 7)

    asyncio.run(scene())
    assert len(loaded) <= 1


def test_the_gateway_refuses_strangers_and_large_bodies_and_two_requests_at_once() -> None:
    async def scene() -> None:
        session = await open_session("127.0.0.1")
        headers = {"Authorization": f"Bearer {session.key}"}
        ask = {"messages": [{"role": "user", "content": "x"}]}
        async with httpx.AsyncClient(base_url=session.gateway.url, headers=headers, timeout=30) as client:
            for wrong in ("", "Bearer x", f"Basic {session.key}"):
                refused = await client.post("/v1/chat/completions", json=ask, headers={"Authorization": wrong})
                assert refused.status_code == 401 and refused.headers["x-should-retry"] == "false"
            large = await client.post("/v1/chat/completions", content=b"[" * (9 << 20))
            assert large.status_code == 413
            assert (await client.post("/v1/chat/completions", content=b"[" * 100_000)).status_code == 400
            assert (await client.get("/v1/nothing")).json()["error"]["type"] == "not_found_error"
            assert (await client.post("/v1/reward", json={"reward": "much"})).status_code == 400
            first = asyncio.create_task(client.post("/v1/chat/completions", json=ask))
            told = await session.events.get()
            assert isinstance(told, ChatAsked) and told.messages == [AgentMessage("user", "x")]
            second = await client.post("/v1/chat/completions", json=ask)
            assert second.status_code == 400 and "one after the other" in second.json()["error"]["message"]
            session.gateway.post(Gateway.give, TurnGiven(session.key, told.number - 1, "of another request"))
            session.gateway.post(Gateway.give, TurnGiven(session.key, told.number, "hello"))
            assert (await first).json()["choices"][0]["message"] == {"role": "assistant", "content": "hello"}

    asyncio.run(scene())


def test_a_gateway_that_dies_or_freezes_costs_the_episodes_under_way_and_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        text = "right = ask([{'role': 'user', 'content': 'x'}]) == '5'; print(json.dumps({'reward': float(right)}))"
        command = program(tmp_path, PLAIN + text)
        async with agent(command=command) as one, agent(command=command) as two:
            await play(one, [])
            assert one.session
            os.kill(one.session.gateway.child.pid, signal.SIGKILL)
            with pytest.raises(Failed, match="process has ended|exit code"):
                await one.step(action("5"))
            assert (await play(two, [action("5")]))[-1].reward == 1.0
            assert two.session
            os.kill(two.session.gateway.child.pid, signal.SIGSTOP)
            monkeypatch.setattr(client, "ANSWER_S", 0.5)
            assert isinstance((await open_session("127.0.0.1")).events.get_nowait(), GatewayEnded), "it answers nothing"
            monkeypatch.setattr(client, "ANSWER_S", 30.0)
            assert (await open_session("127.0.0.1")).events.empty()
        killed, frozen = helpers.news()
        assert killed.startswith("the gateway for agents was killed by signal 9 (SIGKILL) (1 so far)")
        assert frozen.startswith("the gateway for agents gave no answer for 0.5 s: killed (1 so far)")

    monkeypatch.setattr(helpers, "_ends", {})
    asyncio.run(scene())


def test_an_address_where_nothing_can_listen_is_told() -> None:
    with pytest.raises(ConfigError, match=r"environment.options.agent.address = '192.0.2.1'"):
        asyncio.run(open_session("192.0.2.1"))


def test_options_are_checked() -> None:
    for options, reason in (({}, "either command or url"), ({"url": "http://x", "address": "::"}, "one interface")):
        with pytest.raises(ConfigError, match=reason):
            checked_options(OPTIONS, "agent", Agent.Options, options)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2), ("stop", "x"), ("logprobs", True), ("response_format", {"type": "json_object"}),
        ("tool_choice", "required"), ("tool_choice", {"type": "function"}), ("messages", []), ("messages", "x"),
        ("messages", [{"role": "user", "content": [{"type": "image_url"}]}]), ("tools", [{"type": "code"}]),
    ],
)  # fmt: skip
def test_a_chat_that_asks_for_what_is_not_there_is_refused_by_name(field: str, value: Any) -> None:
    good: dict[str, Any] = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "n": 1}
    good |= {"temperature": 0.1, "max_tokens": 3, "seed": 1, "stop": None, "response_format": {"type": "text"}}
    assert read_chat(good).messages == [AgentMessage("user", "a")]
    with pytest.raises(GatewayRefusal, match=field):
        read_chat({**good, field: value})


@pytest.mark.parametrize(
    "wrong", [{"token_ids": []}, {"token_ids": [-1]}, {"sampling_params": {"n": 2}}, {"stream": True}]
)
def test_token_requests_are_refused_by_name(wrong: dict[str, Any]) -> None:
    good = {"token_ids": [1], "sampling_params": {"temperature": 1.0, "logprobs": 1, "stop_token_ids": [2]}}
    assert read_tokens(good).token_ids == [1]
    with pytest.raises(GatewayRefusal, match="token_ids|n is|stream"):
        read_tokens({**good, **wrong})


TOKENS = (
    PLAIN
    + """
url = url.removesuffix("/v1")
ids = [3, 4, 5]
for more in ([6, 7], []):
    found = post("/inference/v1/generate", {"token_ids": ids, "sampling_params": {"logprobs": 1}, "model": "m"})
    [choice] = found["choices"]
    assert [one["token_id"] for one in choice["logprobs"]["content"]] == choice["token_ids"], found
    ids += choice["token_ids"] + more
print(json.dumps({"reward": sum(ids)}))
"""
)


def test_a_client_that_speaks_tokens_gets_what_was_sampled(tmp_path: Path) -> None:
    async def scene(text: str) -> list[Observation]:
        async with agent(command=program(tmp_path, text)) as one:
            return await play(one, [action("a", [10, 1], [-0.5, -0.25]), action("b", [11, 1], [-1.0, -2.0])])

    first, second, end = asyncio.run(scene(TOKENS))
    assert first.token_ids == [3, 4, 5] and second.token_ids == [6, 7]
    assert end.done and end.reward == 3 + 4 + 5 + 10 + 1 + 6 + 7 + 11 + 1
    with pytest.raises(Failed, match=r"do not begin with the 5 of the episode, from token_ids\[4\] on"):
        asyncio.run(scene(TOKENS.replace('choice["token_ids"] + more', "[10, 2] + more")))


@pytest.mark.slow
def test_the_response_is_one_of_vllm() -> None:
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateTokensResponse

    turn = TurnGiven("key", 1, token_ids=[10, 1], logprobs=[-0.5, -0.25])
    head = {"request_id": "r", "model": "m", "created": 1}
    found = GenerateTokensResponse.model_validate(tokens_object(head, 3, turn))
    assert found.choices[0].token_ids == [10, 1] and found.choices[0].logprobs is not None
    told = found.choices[0].logprobs.content
    assert told is not None and [(one.token_id, one.logprob) for one in told] == [(10, -0.5), (1, -0.25)]
