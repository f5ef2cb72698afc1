"""An engine that stands still is killed; one that answers, ends steps, computes or loads is not. With a real engine:
test_engine_deaths.py."""

import asyncio
from collections.abc import AsyncGenerator, Callable

import pytest

from serve import engine_deaths
from serve.engine import Delta, EngineDied, SamplingParameters
from serve.engine_deaths import QUIET_S, STEP_S, EngineFailover, EngineWatch


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


def test_an_engine_that_neither_answers_nor_computes_stands_still(monkeypatch):
    assert after(round(QUIET_S) - 1, monkeypatch, lambda now: 7.0) == ""
    assert after(round(QUIET_S), monkeypatch, lambda now: 7.0) == "has neither answered nor computed for 20 s"
    assert after(900, monkeypatch, lambda now: 7.0, answers_every=19) == "", "between two steps"
    assert after(20, monkeypatch, lambda now: 0.01 * now) != "", "threads that only wait take some time, too"
    # a long step computes, as the prefill of a long prompt does
    assert after(round(STEP_S) - 1, monkeypatch, lambda now: 0.1 * now) == ""
    assert after(round(STEP_S), monkeypatch, lambda now: float(now)) == "has ended no step for 600 s"


def test_what_loads_or_ends_steps_may_be_silent(monkeypatch):
    monkeypatch.setattr(engine_deaths, "processor_s", lambda _: 7.0)
    watch = EngineWatch()
    with watch.loading():
        for _ in range(900):
            watch.look(False, [])
    for _ in range(900):
        watch.moved = True
        watch.look(False, [])
    assert watch.frozen == ""


def test_the_end_of_a_process_is_told_with_its_reason(monkeypatch, caplog):
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


def test_a_death_that_the_engine_outlives_ends_the_request():
    engine, calm = object(), SamplingParameters(max_tokens=3, temperature=0)

    async def sample(prompt: list[int], sampling: SamplingParameters) -> AsyncGenerator[Delta, None]:
        raise EngineDied
        yield  # it is a generator

    async def ask() -> None:
        async for _ in EngineFailover(lambda: engine, sample).generate([5], calm):
            pass

    with pytest.raises(EngineDied):
        asyncio.run(asyncio.wait_for(ask(), 60))
