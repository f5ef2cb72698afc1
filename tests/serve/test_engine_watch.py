"""An engine that stands still is killed; one that answers, ends steps, computes or loads is not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from serve import engine_deaths
from serve.engine import Delta, EngineDied
from serve.engine_deaths import QUIET_S, STEP_S, EngineWatch
from tests.serve.conftest import Serve, eventually


class Process:
    """As multiprocessing has them."""

    pid, killed, exitcode = 0, False, None

    def kill(self) -> None:
        self.killed = True


def after(
    seconds: int, monkeypatch: pytest.MonkeyPatch, processor: Callable[[int], float], answers_every: int = 0
) -> str:
    """Why the engine counts as frozen after so many looks, one a second."""
    watch = EngineWatch()
    for second in range(1, seconds + 1):
        monkeypatch.setattr(engine_deaths, "processor_s", lambda _, now=second: processor(now))
        watch.look(bool(answers_every) and second % answers_every == 0, [])
    return watch.frozen


def test_an_engine_that_neither_answers_nor_computes_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    assert after(round(QUIET_S) - 1, monkeypatch, lambda now: 7.0) == ""
    assert after(round(QUIET_S), monkeypatch, lambda now: 7.0) == "has neither answered nor computed for 20 s"
    assert after(900, monkeypatch, lambda now: 7.0, answers_every=19) == "", "between two steps"
    assert after(20, monkeypatch, lambda now: 0.01 * now) != "", "threads that only wait take some time, too"


def test_a_long_step_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the prefill of a long prompt does."""
    assert after(round(STEP_S) - 1, monkeypatch, lambda now: 0.1 * now) == ""
    assert after(round(STEP_S), monkeypatch, lambda now: float(now)) == "has ended no step for 600 s"


def test_what_loads_or_ends_steps_may_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_deaths, "processor_s", lambda _: 7.0)
    watch = EngineWatch()
    with watch.loading():
        for _ in range(900):
            watch.look(False, [])
    for _ in range(900):
        watch.moved = True
        watch.look(False, [])
    assert watch.frozen == ""


def test_only_the_engine_that_stands_still_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_deaths, "LOOK_EVERY_S", 1 / 256)
    monkeypatch.setattr(engine_deaths, "QUIET_S", 20 / 256)
    monkeypatch.setattr(engine_deaths, "processor_s", lambda _: 7.0)

    async def play() -> None:
        answers, still, sound = 0, Process(), Process()

        async def answer() -> None:
            nonlocal answers
            answers += 1
            if answers % 2:
                raise RuntimeError("not now")

        watches = [EngineWatch(), EngineWatch()]
        watches[0].start(asyncio.Event().wait, [still])  # type: ignore[list-item]
        watches[1].start(answer, [sound])  # type: ignore[list-item]
        while not still.killed:
            await asyncio.sleep(0)
        assert not sound.killed and answers > 10
        for watch in watches:
            await watch.end()

    asyncio.run(play())


def test_the_end_of_a_process_is_told_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kills = iter([3, 4])
    monkeypatch.setattr(engine_deaths.deaths, "memory_kills", lambda: next(kills))

    async def play() -> None:
        watch, dead, living = EngineWatch(), Process(), Process()
        dead.exitcode = -9  # type: ignore[assignment]
        watch.start(asyncio.Event().wait, [dead, living])  # type: ignore[list-item]
        await watch.end()
        await watch.end()

    asyncio.run(play())
    [line] = caplog.messages
    assert line.startswith("the engine's process was killed by signal 9 (SIGKILL). The kernel's out-of-memory killer")
    assert line.endswith("lower cache_bytes or max_sequences")


def test_a_request_of_a_frozen_engine_gets_an_error_and_the_next_one_an_answer(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scripted engine that hangs; the test with a real one that is stopped is in test_vllm.py."""
    served = serve("4")
    engine, watch, go = served.engine, EngineWatch(), threading.Event()
    start, sound = engine.start, engine.generate

    async def hang(*_: Any) -> AsyncGenerator[Delta, None]:
        process.kill = lambda: setattr(engine, "dead", True)  # type: ignore[method-assign]
        watch.start(asyncio.Event().wait, [process])  # type: ignore[list-item]
        while not engine.dead:
            await asyncio.sleep(0)
        raise EngineDied
        yield  # it is a generator

    async def start_later() -> None:
        await asyncio.to_thread(go.wait, 60)
        await watch.end()
        engine.generate = sound  # type: ignore[method-assign]
        await start()

    process = Process()
    monkeypatch.setattr(engine_deaths, "LOOK_EVERY_S", 1 / 256)
    monkeypatch.setattr(engine_deaths, "QUIET_S", 20 / 256)
    engine.generate, engine.start = hang, start_later  # type: ignore[method-assign, assignment]
    reply = served.ask()
    assert reply.status_code == 503 and reply.headers["retry-after"] and reply.json()["error"]["code"]
    eventually(lambda: served.client.get("/ready").status_code == 503)
    go.set()
    eventually(lambda: served.server.restarts == 1 and served.client.get("/ready").is_success)
    assert served.ask().is_success
