"""The environment "agent" and its gateway, with real processes and sockets; the turns are scripted. Beside agents there
are strangers: other users of the machine, without a key. tests/examples/test_agent.py has a server of agents."""

import asyncio
import contextlib
import os
import resource
import signal
import ssl
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from environments.environment import Observation
from environments.gateway import client as gateway_client
from environments.gateway.client import AgentSession, open_session
from environments.gateway.connections import EPISODE_CONNECTIONS, STRANGERS
from environments.gateway.messages import AgentMessage, ChatAsked, GatewayEnded, TurnGiven
from environments.gateway.process import Gateway
from environments.gateway.wire import GatewayRefusal, read_chat, read_tokens, tokens_object
from shared.errors import ConfigError
from shared.launch.deaths import helpers
from shared.launch.sockets import refused
from tests.environments.agents import PROBLEM, action, agent, play, program
from tests.tables import read_table
from verify.plugins import Failed

OPENAI = """
import json, sys
from openai import OpenAI
problem, client = json.load(sys.stdin), OpenAI()
tool = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": problem["text"]}]
def ask(**more):
    return client.chat.completions.create(model="policy", messages=messages, tools=[tool], temperature=0.3, **more)
choice = ask().choices[0]
assert choice.finish_reason == "tool_calls"
messages.append(choice.message)
for call in reversed(choice.message.tool_calls):
    numbers = json.loads(call.function.arguments)
    messages.append({"role": "tool", "tool_call_id": call.id, "content": str(numbers["a"] + numbers["b"])})
messages += [ask().choices[0].message, {"role": "user", "content": "No."}]
chunks = list(ask(stream=True))
assert chunks[-1].choices[0].finish_reason == "stop"
answer = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
print("noise"); print(json.dumps({"reward": float(answer == "Fünf"), "solved": True}))
"""
PLAIN = """
import json, os, sys, time, urllib.error, urllib.request
problem, url, key = json.load(sys.stdin), os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
x = {"role": "user", "content": "x"}
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
TOKENS = """
url = url.removesuffix("/v1")
ids = [3, 4, 5]
for more in ([6, 7], []):
    answer = post("/inference/v1/generate", {"token_ids": ids, "sampling_params": {"logprobs": 1}, "model": "m"})
    [choice] = answer["choices"]
    assert [token["token_id"] for token in choice["logprobs"]["content"]] == choice["token_ids"], answer
    ids += choice["token_ids"] + more
print(json.dumps({"reward": sum(ids)}))
"""
WRONG = {
    "sys.exit('no idea')": "exit code 1: no idea",
    "os.kill(os.getpid(), 15)": r"was killed by signal 15 \(SIGTERM\)$",
    "pass": "ended before it had asked",
    "ask([x])": "without a reward: let it print",
    'ask([x]); print(\'{"reward": "high"}\')': "'high', which is no number",
    "ask([x], n=2)": "n is not supported.*one answer",
    "ask([{'role': 'assistant', 'content': 'x'}])": r"role assistant \(messages\[0\]\)",
    "a = ask([x]); ask([x, {'role': 'assistant', 'content': a + '!'}, x])": (
        r"changed its history: messages\[1\], assistant: '5', became assistant: '5!'"
    ),
    "ask([x]); ask([x])": r"messages\[1\], assistant: '5', is missing",
    "ask([x], key='sk-other')": "401.*no key of an episode",
    "ask([x], timeout=0.3)": "exit code 1: TimeoutError",
}
ASK = {"messages": [{"role": "user", "content": "x"}]}
DEADLINE_S = 150
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def texts(seen: Observation) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in seen.messages]


async def run(folder: Path, text: str, *turns: Any, **options: Any) -> list[Observation]:
    async with agent(command=program(folder, text), **options) as episode:
        return await play(episode, [action(turn) if isinstance(turn, str) else turn for turn in turns])


async def test_an_agent_of_openai_s_client_talks_calls_tools_streams_and_tells_its_reward(tmp_path):
    """It reads the results of its calls in their order, whatever the order in which it sends them."""
    call = '<tool_call>\n{"name": "add", "arguments": {"b": %d, "a": 2}}\n</tool_call>'
    turns = f"So:\n{call % 3}\n{call % 4}", "<think>\nhm\n</think>\n4", "<think>a</think>Fünf"
    first, second, third, end = await run(tmp_path, OPENAI, *turns)
    *prompt, (role, words) = texts(first)
    assert prompt == [("system", "Be short."), ("user", "2 + 3 = ?")] and role == "system" and "<tool_call>" in words
    assert '{"name": "add", "description": "Adds.", "parameters": {"type": "object"}}' in words
    results = "<tool_response>\n5\n</tool_response>\n<tool_response>\n6\n</tool_response>"
    assert texts(second) == [("user", results)] and second.reward is None
    assert texts(third) == [("user", "No.")] and not third.done
    assert (end.reward, end.done, end.solved, end.messages) == (1.0, True, True, [])


async def test_the_reward_comes_by_http_or_from_the_verifier(tmp_path):
    post = "ask([x]); post('/reward', {'reward': 0.25, 'solved': False}); time.sleep(600)"
    end = (await run(tmp_path, PLAIN + post, "5"))[-1]
    assert (end.reward, end.solved, end.done) == (0.25, False, True)
    end = (await run(tmp_path, PLAIN + "ask([x])", "so 5", reward="verifier"))[-1]
    assert (end.reward, end.solved, end.done) == (1.0, True, True)


async def test_what_fails_costs_the_episode_with_a_reason(tmp_path):
    async def fail(rest: str, reason: str, folder: Path) -> None:
        folder.mkdir()
        async with agent(command=program(folder, PLAIN + rest)) as episode:
            with pytest.raises(Failed, match=reason):
                await episode.reset(PROBLEM, 7)
                if "timeout" in rest:
                    assert episode.running
                    await asyncio.wait([episode.running])
                for _ in range(2):
                    await episode.step(action("5"))

    await asyncio.gather(*(fail(*row, tmp_path / str(number)) for number, row in enumerate(WRONG.items())))


async def test_an_agent_that_runs_out_of_memory_is_told_as_such(tmp_path):
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
    try:
        with pytest.raises(Failed, match=r"SIGKILL.*memory killer has ended a.*lower the memory that it needs"):
            await run(tmp_path, text)
    finally:
        group.rmdir()


async def test_closing_an_episode_refuses_its_request_and_ends_the_agent(tmp_path):
    file = tmp_path / "error"
    text = f"try: ask([x])\nexcept SystemExit as error: open({str(file)!r}, 'w').write(str(error))\ntime.sleep(600)"
    async with agent(command=program(tmp_path, PLAIN + text)) as episode:
        await play(episode, [])
        assert episode.session
        episode.session.close("the turn was cut")
        while not file.is_file() or not file.read_text():
            await asyncio.sleep(0.05)
        task = episode.running
    assert task and task.cancelled()
    assert "409" in file.read_text() and "the turn was cut" in file.read_text()


async def test_an_episode_that_is_given_up_while_its_agent_works_leaves_no_task_behind(tmp_path):
    async with agent(command=program(tmp_path, PLAIN + "ask([x]); time.sleep(600)")) as episode:
        await play(episode, [])
        step = asyncio.create_task(episode.step(action("a")))
        await asyncio.sleep(0.2)
        step.cancel()
        await asyncio.gather(step, return_exceptions=True)
    waiting = [task for task in asyncio.all_tasks() if "Queue.get" in repr(task.get_coro())]
    assert not waiting, "asyncio says of such a task that it was destroyed but is pending"


async def test_a_client_that_speaks_tokens_gets_what_was_sampled(tmp_path):
    turns = action("a", [10, 1], [-0.5, -0.25]), action("b", [11, 1], [-1.0, -2.0])
    first, second, end = await run(tmp_path, PLAIN + TOKENS, *turns)
    assert first.token_ids == [3, 4, 5] and second.token_ids == [6, 7]
    assert end.done and end.reward == 3 + 4 + 5 + 10 + 1 + 6 + 7 + 11 + 1 and end.solved is None
    changed = TOKENS.replace('choice["token_ids"] + more', "[10, 2] + more")
    with pytest.raises(Failed, match=r"do not begin with the 5 of the episode, from token_ids\[4\] on"):
        await run(tmp_path, PLAIN + changed, *turns)


@pytest.mark.slow
def test_the_response_is_one_of_vllm():
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateTokensResponse

    given = TurnGiven("key", 1, token_ids=[10, 1], logprobs=[-0.5, -0.25])
    response = tokens_object({"request_id": "r", "model": "m", "created": 1}, 3, given)
    [choice] = GenerateTokensResponse.model_validate(response).choices
    assert choice.token_ids == [10, 1] and choice.logprobs is not None and choice.logprobs.content is not None
    assert [(token.token_id, token.logprob) for token in choice.logprobs.content] == [(10, -0.5), (1, -0.25)]


async def test_a_key_is_known_before_its_agent_begins():
    """A request that overtakes its key, as on a busy machine, would be refused as a stranger's."""
    pid = (await open_session("127.0.0.1")).gateway.child.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        opening = asyncio.create_task(open_session("127.0.0.1"))
        done, _ = await asyncio.wait({opening}, timeout=0.5)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert not done, "the gateway does not know it yet"
    assert (await opening).events.empty()


async def test_episodes_load_no_certificates_again(monkeypatch):
    """That takes 50 ms, in which nothing else goes on: with hundreds of episodes a step, as long as the step."""
    loaded = []
    whole = ssl.create_default_context
    monkeypatch.setattr(ssl, "create_default_context", lambda *given, **more: loaded.append(1) or whole(*given, **more))
    for _ in range(3):
        async with agent(url="http://127.0.0.1:9/") as episode:
            with pytest.raises(Failed, match="did not answer: ConnectError"):
                await episode.reset(PROBLEM, 7)
    assert len(loaded) <= 1


async def test_a_gateway_that_dies_or_freezes_costs_the_episodes_under_way_and_is_started_again(tmp_path, monkeypatch):
    monkeypatch.setattr(helpers, "_ends", {})
    command = program(tmp_path, PLAIN + "print(json.dumps({'reward': float(ask([x]) == '5')}))")
    async with agent(command=command) as first, agent(command=command) as second:
        await play(first, [])
        assert first.session
        os.kill(first.session.gateway.child.pid, signal.SIGKILL)
        with pytest.raises(Failed, match="process has ended|exit code"):
            await first.step(action("5"))
        assert (await play(second, [action("5")]))[-1].reward == 1.0
        assert second.session
        os.kill(second.session.gateway.child.pid, signal.SIGSTOP)
        monkeypatch.setattr(gateway_client, "ANSWER_S", 0.5)
        assert isinstance((await open_session("127.0.0.1")).events.get_nowait(), GatewayEnded), "it answers nothing"
        monkeypatch.setattr(gateway_client, "ANSWER_S", 30.0)
        assert (await open_session("127.0.0.1")).events.empty()
    killed, frozen = helpers.news()
    assert killed.startswith("the gateway for agents was killed by signal 9 (SIGKILL) (1 so far)")
    assert frozen.startswith("the gateway for agents gave no answer for 0.5 s: killed (1 so far)")


async def test_an_address_where_nothing_can_listen_is_told():
    with pytest.raises(ConfigError, match=r"environment.options.agent.address = '192.0.2.1'"):
        await open_session("192.0.2.1")


CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "n": 1, "temperature": 0.1,
    "max_tokens": 3, "seed": 1, "stop": None, "response_format": {"type": "text"},
}  # fmt: skip
GENERATE = {"token_ids": [1], "sampling_params": {"temperature": 1.0, "logprobs": 1, "stop_token_ids": [2]}}


@pytest.mark.parametrize("row", read_table("environments/refused_requests"), ids=str)
def test_what_asks_for_what_is_not_there_is_refused_by_name(row):
    assert read_chat(CHAT).messages == [AgentMessage("user", "a")] and read_tokens(GENERATE).token_ids == [1]
    read, good = (read_chat, CHAT) if row["of"] == "chat" else (read_tokens, GENERATE)
    with pytest.raises(GatewayRefusal, match=row["named"]):
        read({**good, row["field"]: row["value"]})


async def connect(session: AgentSession) -> Stream:
    return await asyncio.open_connection("127.0.0.1", int(session.gateway.url.rpartition(":")[2]))


async def answer(session: AgentSession, client: httpx.AsyncClient, during: Callable[[], Any] | None = None) -> str:
    """What an agent is given for its request, while something else happens."""
    asking = asyncio.create_task(client.post("/v1/chat/completions", json=ASK))
    event = await session.events.get()
    assert isinstance(event, ChatAsked) and event.messages == [AgentMessage("user", "x")]
    if during:
        await during()
    session.gateway.post(Gateway.give, TurnGiven(session.key, event.number - 1, "of another request"))
    session.gateway.post(Gateway.give, TurnGiven(session.key, event.number, "hello"))
    reply = await asking
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["message"]["content"])


@contextlib.asynccontextmanager
async def episode() -> AsyncGenerator[tuple[AgentSession, httpx.AsyncClient], None]:
    session = await open_session("127.0.0.1")
    headers = {"Authorization": f"Bearer {session.key}"}
    async with httpx.AsyncClient(base_url=session.gateway.url, headers=headers, timeout=DEADLINE_S) as client:
        yield session, client
    session.close("the end")


async def reply_to(session: AgentSession, *parts: bytes) -> bytes:
    """What a connection answers until it is closed; b"" for a reset."""
    reader, writer = await connect(session)
    with contextlib.suppress(ConnectionError):
        for data in parts:
            writer.write(data)
            await writer.drain()
        return await reader.read()
    return b""


async def test_the_gateway_refuses_strangers_and_large_bodies_and_two_requests_at_once():
    async with episode() as (session, client):

        async def ask_again() -> None:
            second = await client.post("/v1/chat/completions", json=ASK)
            assert second.status_code == 400 and "one after the other" in second.json()["error"]["message"]

        for wrong in ("", "Bearer x", "Bearer ", f"Basic {session.key}"):
            for path in ("chat/completions", "reward", "nothing"):  # before the body, and no connection is kept
                head = f"POST /v1/{path} HTTP/1.1\r\nHost: x\r\nAuthorization: {wrong}\r\nContent-Length: 5000000\r\n"
                reply = (await reply_to(session, f"{head}\r\n".encode())).lower()
                assert reply[:12] == b"http/1.1 401" and b"no key of an episode" in reply
                assert b"x-should-retry: false" in reply
        assert (await reply_to(session, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"))[:12] == b"HTTP/1.1 401"
        assert (await client.post("/v1/chat/completions", content=b"[" * (9 << 20))).status_code == 413
        assert (await client.post("/v1/chat/completions", content=b"[" * 100_000)).status_code == 400
        assert (await client.get("/v1/nothing")).json()["error"]["type"] == "not_found_error"
        assert (await client.post("/v1/reward", json={"reward": "much"})).status_code == 400
        assert await answer(session, client, ask_again) == "hello"


async def test_headers_without_end_are_cut_off_and_take_no_memory():
    begin = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
    floods = {
        "one header": [begin + b"X: ", *[b"a" * (1 << 20)] * 200],
        "headers": [begin, *[b"X-1: " + b"a" * 60_000 + b"\r\n"] * 3000],
        "small headers": [begin, *[b"ab: c\r\n" * 10_000] * 500],
        "an address": [b"GET /" + b"a" * (1 << 20), *[b"a" * (1 << 20)] * 200],
        "trailers": [begin + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", *[b"X: a\r\n" * 100_000] * 200],
        "no HTTP": [b"\x00" * (1 << 20)] * 200,
    }
    async with episode() as (session, client):
        process = psutil.Process(session.gateway.child.pid)
        assert {one.laddr.ip for one in process.net_connections() if one.status == "LISTEN"} == {"127.0.0.1"}
        before = process.memory_info().rss
        for name, flood in floods.items():
            reply = await reply_to(session, *flood)
            assert reply[:12] in (b"", b"HTTP/1.1 431", b"HTTP/1.1 400", b"HTTP/1.1 401"), name
            grown = process.memory_info().rss - before
            assert grown < 64 << 20, f"{name}: {grown >> 20} MiB"
        assert await answer(session, client) == "hello"


async def test_idle_connections_of_strangers_cost_no_agent_its_turn():
    """One agent has asked before they came, another one comes while they are there."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = STRANGERS + 1000 if hard == resource.RLIM_INFINITY else min(STRANGERS + 1000, hard - 200)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    strangers: list[Stream] = []

    async def come() -> None:
        for number in range(count):
            strangers.append(await connect(first))
            if number % 2:
                strangers[-1][1].write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: ")

    try:
        async with episode() as (first, client), episode() as (second, other):
            assert await answer(first, client, come) == "hello"
            for _ in range(3):
                assert await answer(second, other) == "hello"
            assert await answer(first, client) == "hello", "on its old connection"
            assert psutil.Process(first.gateway.child.pid).num_fds() < STRANGERS + 100
            for _, writer in strangers:
                writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_strangers_are_counted_and_late_requests_of_an_agent_are_not():
    async with episode() as (session, client):
        late = await open_session("127.0.0.1")
        late.close("it was cut")
        assert await answer(session, client) == "hello", "the gateway knows by now that the other is over"
        before = refused.total
        head = b"POST /v1/reward HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n\r\n"
        for key in (late.key.encode(), b"x", late.key.encode(), b"y"):
            assert (await reply_to(session, head % key))[:12] == b"HTTP/1.1 401"
        assert (await reply_to(session, b"GET /" + b"a" * (1 << 16)))[:12] in (b"", b"HTTP/1.1 431")
        while refused.total < before + 3:
            await asyncio.sleep(0.05)
        assert refused.total == before + 3 and "key, at the gateway" in refused.last


async def test_an_episode_has_a_few_connections_and_takes_no_other_s():
    """With bodies that never come; the oldest connections are closed for newer ones."""
    async with episode() as (greedy, _), episode() as (session, client):
        head = b"POST /v1/reward HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Length: 9\r\n\r\n"
        streams = []
        for _ in range(EPISODE_CONNECTIONS + 4):
            streams.append(await connect(greedy))
            streams[-1][1].write(head % greedy.key.encode())
        for reader, _ in streams[:4]:
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
        assert not streams[-1][0].at_eof()
        assert await answer(session, client) == "hello"
        for _, writer in streams:
            writer.close()
