"""A child process: whatever it does, its caller learns how it ended, and nothing of it is left."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest

from shared.child_process import Child, ChildLate, ChildLost
from shared.errors import ConfigError, RunError
from shared.launch import deaths
from tests.shared import child_classes
from tests.shared.child_classes import Async, Plain, Said


@asynccontextmanager
async def started(**options: Any) -> AsyncIterator[Child]:
    child = Child(Async, "the child", "another takes its place", **options)
    await child.start()
    try:
        yield child
    finally:
        await child.end()


def run(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(work())


@pytest.fixture(autouse=True)
def news(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """The lines about ends of processes that came since the last call."""
    monkeypatch.setattr(deaths.helpers, "_ends", {})
    return deaths.helpers.news


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_calls_are_answered_in_any_order_and_events_come_before_the_answer(news: Any) -> None:
    heard: list[Any] = []

    async def work() -> None:
        async with started(on_event=heard.append) as child:
            slow = asyncio.create_task(child.call(Async.wait, 0.5))
            assert await asyncio.gather(*(child.call(Async.square, number) for number in range(50))) == [
                number * number for number in range(50)
            ]
            await child.call(Async.speak, "hello")
            assert heard == [Said("hello")] and not slow.done()
            assert await slow == "waited"

    run(work)
    assert news() == [], "it was ended on purpose"


def test_calls_without_async_run_one_after_the_other(capfd: pytest.CaptureFixture[str]) -> None:
    async def work() -> None:
        child = Child(Plain, "the child", "another takes its place", supervise=False)
        await child.start()
        assert await asyncio.gather(*(child.call(Plain.count) for _ in range(5))) == [1, 2, 3, 4, 5]
        await child.end()

    run(work)
    assert capfd.readouterr() == ("", "")


def test_what_it_prints_goes_to_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    async def work() -> None:
        async with started():
            pass

    run(work)
    assert capfd.readouterr() == ("", "printed\n")


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("refuse", ConfigError, "^the file is wrong$"),
        ("raise", RunError, "the child failed: KeyError: 'nothing'"),
        ("exit", ChildLost, "ended with exit code 7"),
        ("hang", ChildLate, "no answer after 4 s"),
    ],
)
def test_a_start_that_fails_raises_and_is_not_reported_again(
    fault: str, error: type[Exception], message: str, news: Any
) -> None:
    async def work() -> None:
        child = Child(Async, "the child", "another takes its place")
        with pytest.raises(error, match=message):
            await child.start(fault, deadline_s=4.0)
        assert not child.alive
        await child.start()
        assert await child.call(Async.square, 3) == 9
        await child.end()

    run(work)
    assert news() == []


@pytest.mark.parametrize(
    ("method", "arguments", "how"),
    [
        (Async.leave, [-9], "was killed by signal 9 (SIGKILL)"),
        (Async.leave, [-11], "was killed by signal 11 (SIGSEGV)"),
        (Async.leave, [3], "ended with exit code 3"),
        (Async.flood, [], "was killed by signal 9 (SIGKILL)"),
        (Async.lie, [], "was killed by signal 9 (SIGKILL)"),
        (Async.babble, [], "was killed by signal 9 (SIGKILL)"),
    ],
)
def test_an_end_is_raised_and_reported_once_and_the_process_can_be_started_again(
    method: Callable[..., Any], arguments: list[Any], how: str, news: Any
) -> None:
    async def work() -> None:
        async with started() as child:
            others = [asyncio.create_task(child.call(Async.wait, 60.0)) for _ in range(3)]
            await child.call(Async.square, 1)  # the others have begun
            with pytest.raises(ChildLost, match=re.escape(how)) as lost:
                await child.call(method, *arguments)
            assert lost.value.begun
            for other in others:
                with pytest.raises(ChildLost):
                    await other
            with pytest.raises(ChildLost, match=re.escape(how)) as late:
                await child.call(Async.square, 2)
            assert not late.value.begun
            await child.start()
            assert await child.call(Async.square, 4) == 16 and child.generation == 2

    run(work)
    [line] = news()
    assert line.startswith(f"the child {how}") and line.endswith("(1 so far): another takes its place")


def test_an_error_of_a_call_costs_that_call_only() -> None:
    async def work() -> None:
        async with started() as child:
            with pytest.raises(RunError, match="the child failed: ValueError: it went wrong"):
                await child.call(Async.fail)
            assert await child.call(Async.square, 5) == 25

    run(work)


def test_a_missed_deadline_kills_it_and_names_the_line(news: Any) -> None:
    async def work() -> None:
        async with started(files=[child_classes.__file__]) as child:
            waiting = asyncio.create_task(child.call(Async.wait, 60.0))
            await child.call(Async.square, 1)
            with pytest.raises(ChildLate, match=r"no answer after 0\.5 s") as late:
                await child.call(Async.block, 60.0, deadline_s=0.5)
            assert re.fullmatch(rf"{re.escape(child_classes.__file__)}:\d+ in block", late.value.line)
            with pytest.raises(ChildLost, match=r"gave no answer for 0\.5 s: killed"):
                await waiting

    run(work)
    assert news() == ["the child gave no answer for 0.5 s: killed (1 so far): another takes its place"]


def test_calls_that_had_not_begun_say_so_and_their_deadline_counts_from_their_turn() -> None:
    async def work() -> None:
        async with started() as child:
            blocking = asyncio.create_task(child.call(Async.block, 1.0, silence_s=30.0))
            await asyncio.sleep(0.2)
            assert await child.call(Async.wait, 0.1, deadline_s=0.8, silence_s=30.0) == "waited"
            assert await blocking == "blocked"
            blocking = asyncio.create_task(child.call(Async.block, 60.0, silence_s=30.0))
            await asyncio.sleep(0.2)
            behind = asyncio.create_task(child.call(Async.square, 2, silence_s=30.0))
            await asyncio.sleep(0.2)
            os.killpg(child.pid, signal.SIGKILL)
            for task, begun in ((blocking, True), (behind, False)):
                with pytest.raises(ChildLost) as lost:
                    await task
                assert lost.value.begun is begun

    run(work)


def test_a_silent_process_is_killed_while_a_call_waits_for_its_turn(news: Any) -> None:
    async def work() -> None:
        async with started() as child:
            os.kill(psutil.Process(child.pid).children(recursive=True)[-1].pid, signal.SIGSTOP)
            with pytest.raises(ChildLost, match="was silent for 1 s: killed"):
                await child.call(Async.square, 2, silence_s=1.0)

    run(work)
    assert len(news()) == 1


def test_a_call_that_is_given_up_takes_nothing_with_it() -> None:
    async def work() -> None:
        async with started() as child:
            task = asyncio.create_task(child.call(Async.wait, 0.3))
            await asyncio.sleep(0.1)
            task.cancel()
            assert await child.call(Async.wait, 0.5) == "waited" and child.alive

    run(work)


def test_what_it_has_started_ends_with_it() -> None:
    async def work() -> int:
        async with started() as child:
            pid = int(await child.call(Async.grandchild))
            assert not gone(pid)
            return pid

    pid = run(work)
    wait_until(lambda: gone(pid))


@pytest.mark.parametrize("supervise", [True, False])
def test_it_ends_with_its_caller(supervise: bool) -> None:
    program = f"""
        import asyncio
        from shared.child_process import Child
        from tests.shared.child_classes import Async
        async def main():
            child = Child(Async, "the child", "", supervise={supervise})
            print(await child.start(), flush=True)
            await child.call(Async.wait, 60.0)
        asyncio.run(main())
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as parent:
        assert parent.stdout
        pid = int(parent.stdout.readline())
        assert not gone(pid)
        parent.kill()
    wait_until(lambda: gone(pid))


def test_it_ends_with_the_event_loop_of_its_caller() -> None:
    async def work() -> int:
        child = Child(Async, "the child", "another takes its place")
        return int(await child.start())

    pid = run(work)
    wait_until(lambda: gone(pid))
    assert deaths.helpers.news() == []
