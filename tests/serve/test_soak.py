"""Many requests to a real server, half of them streams, a tenth aborted, its engine killed and frozen among them:
each is answered or gets an error of its own, and neither memory nor descriptors grow with them.

    SOAK_REQUESTS=100000 SOAK_KILLS=20 SOAK_FREEZES=5 python -m pytest --soak -n 0 -s tests/serve/test_soak.py
"""

import asyncio
import json
import os
import shutil
from collections import Counter
from typing import Any

import httpx
import psutil
import pytest

from serve.adapters import read_adapter
from serve.engine import SamplingParameters
from serve.engine_deaths import QUIET_S
from serve.vllm_engine import VllmEngine
from tests.serve.command import Command, untrained_model
from tests.serve.test_adapters import write_adapter
from tests.serve.test_vllm import CHAT, figure

REQUESTS, KILLS, FREEZES, RELOADS = (
    int(os.environ.get(f"SOAK_{name}", value))
    for name, value in (("REQUESTS", 4000), ("KILLS", 2), ("FREEZES", 1), ("RELOADS", 200))
)
CLIENTS = 40
PARTS = 20
"""figures are taken so often; the second half has no kills, so that one engine is measured: what it has after three
fifths of all requests, when its caches are full, and what at the end"""
PATIENCE_S = QUIET_S + 120
pytestmark = [pytest.mark.soak, pytest.mark.timeout(24 * 3600)]


async def ask(client: httpx.AsyncClient, number: int) -> str:
    """How a request ended: "answered", "aborted", the code of its error, or "lost". It is short, as no two are: lengths
    of prompt and response vary, most have a seed, log-probs or a stop."""
    more: list[dict[str, Any]] = [{}, {"temperature": 0}, {"seed": number}, {"logprobs": True}, {"stop": ["7"]}]
    text = f"{number} + {number % 97} = ?" + " Why?" * (number % 5)
    stream, aborts = number % 2 == 0, number % 20 in (0, 5)
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4 + number % 8, "stream": stream}
    patience_s = 0.01 if aborts and not stream else PATIENCE_S
    try:
        async with client.stream("POST", CHAT, json={**body, **more[number % 5]}, timeout=patience_s) as reply:
            if aborts and stream:
                await anext(reply.aiter_lines())
                return "aborted"
            last = (await reply.aread()).decode()
        if stream and reply.is_success:
            *_, last, done = filter(None, last.splitlines())
            if done != "data: [DONE]":
                return "lost"
        error = json.loads(last.removeprefix("data: ")).get("error")
        return str(error["code"]) if error else "answered"
    except httpx.HTTPError as error:
        return "aborted" if aborts and isinstance(error, httpx.TimeoutException) else "lost"


def sizes(command: Command) -> list[int]:
    """MiB and descriptors of the server, and those of its engine."""
    processes = psutil.Process(command.process.pid), command.engine()
    return [size for each in processes for size in (each.memory_info().rss >> 20, each.num_fds())]


async def until_ready(client: httpx.AsyncClient, ready: bool = True) -> None:
    """Wait until /ready says so. Raises TimeoutError."""
    async with asyncio.timeout(PATIENCE_S):
        while (await client.get("/ready")).is_success is not ready:
            await asyncio.sleep(0.2)


async def soak(command: Command) -> tuple[Counter[str], list[list[int]]]:
    """Outcome -> requests, and the sizes after each part."""
    ended, seen, numbers = Counter[str](), list[list[int]](), iter(range(REQUESTS))
    harms = {REQUESTS * (place + 1) // (2 * (KILLS + FREEZES + 1)): place for place in range(KILLS + FREEZES)}
    limits = httpx.Limits(max_connections=CLIENTS)
    async with httpx.AsyncClient(base_url=command.url, timeout=PATIENCE_S, limits=limits) as client:

        async def measure(number: int) -> None:
            await until_ready(client)
            seen.append(sizes(command))
            print(f"{number:>7,} requests: {seen[-1]}, {dict(ended)}", flush=True)

        async def work() -> None:
            for number in numbers:
                if number in harms:
                    await until_ready(client)
                    engine = command.engine()
                    (engine.suspend if harms[number] < FREEZES else engine.kill)()
                    await until_ready(client, False)
                ended[outcome := await ask(client, number)] += 1
                if outcome == "engine_starting":
                    await until_ready(client)
                if number % (REQUESTS // PARTS) == 0:
                    await measure(number)

        await asyncio.gather(*(work() for _ in range(CLIENTS)))
        await measure(REQUESTS)
    return ended, seen


def test_no_request_is_lost_and_nothing_grows(tmp_path):
    command = Command(untrained_model(tmp_path), tmp_path / "log", settings=["--max-sequences", "32"])
    try:
        ended, seen = asyncio.run(soak(command))
        restarts = figure(command, "engine_restarts")
    finally:
        command.close()
    assert ended["lost"] == 0 and restarts == KILLS + FREEZES, ended
    server_mib, server_files, engine_mib, engine_files = seen[PARTS * 3 // 5]
    most = (1.05 * server_mib, server_files + CLIENTS, 1.05 * engine_mib, engine_files)
    assert all(size <= bound for size, bound in zip(seen[-1], most, strict=True)), seen


def test_an_adapter_is_replaced_again_and_again_under_load(tmp_path):
    """Each completion is answered, and the engine keeps no old version, whose folder is gone as a run's old one."""
    model, newest = untrained_model(tmp_path), tmp_path / "latest"
    versions = [write_adapter(tmp_path / f"kept{seed}", model, seed=seed) for seed in range(3)]
    shutil.copytree(versions[0], newest)
    engine = VllmEngine(
        str(model), max_tokens=160, max_sequences=32, cache_bytes=16 << 20, dtype="float32",
        adapters={"poems": read_adapter(newest, model, "")},
    )  # fmt: skip
    answered, memory, over = Counter[str](), list[int](), False

    async def client(number: int) -> None:
        sampling = SamplingParameters(max_tokens=4 + number, ignore_eos=True, adapter="poems" if number % 4 else "")
        while not over:
            prompt = [5 + (answered.total() + place) % 200 for place in range(5 + number)]
            tokens = [token async for delta in engine.generate(prompt, sampling) for token in delta.token_ids]
            answered["whole" if len(tokens) == sampling.max_tokens else "short"] += 1

    async def reload() -> None:
        nonlocal over
        for number in range(RELOADS):
            folder, before = tmp_path / f"version{number}", answered.total()
            shutil.copytree(versions[number % 3], folder)
            await engine.load_adapter("poems", folder)
            while answered.total() < before + CLIENTS:
                await asyncio.sleep(0.01)
            if number:
                shutil.rmtree(tmp_path / f"version{number - 1}")
            [process] = engine.watch._processes
            memory.append(psutil.Process(process.pid).memory_info().rss >> 20)
        over = True

    async def story() -> None:
        await engine.start()
        try:
            await asyncio.gather(reload(), *(client(number) for number in range(20)))
            assert await engine.is_alive() and not engine.failover.crashes._deaths
        finally:
            await engine.stop()

    asyncio.run(story())
    print(f"{RELOADS} reloads, {dict(answered)}, engine's MiB: {memory[:: max(1, RELOADS // 10)]}")
    assert not answered["short"] and memory[-1] <= 1.05 * memory[RELOADS // 5], memory
