"""A child process: whatever it does, its caller learns how it ended, and nothing of it is left."""

import asyncio
import os
import re
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest

from shared.child_process import Child, ChildLate, ChildLost
from shared.errors import ConfigError, RunError
from shared.launch import deaths
from tests.asynchronous import asynchronous
from tests.process import started as started_program
from tests.process import until
from tests.shared import child_classes
from tests.shared.child_classes import Async, Plain, Said


def made(kind: Any = Async, **options: Any) -> Child:
    return Child(kind, "the child", "another takes its place", **options)


@asynccontextmanager
async def started(kind: Any = Async, **options: Any) -> AsyncIterator[Child]:
    child = made(kind, **options)
    await child.start()
    try:
        yield child
    finally:
        await child.end()


@pytest.fixture(autouse=True)
def news(monkeypatch):
    """The lines about ends of processes that came since the last call."""
    monkeypatch.setattr(deaths.helpers, "_ends", {})
    return deaths.helpers.news


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@asynchronous
async def test_calls_are_answered_in_any_order_and_events_come_before_the_answer(news, capfd):
    heard: list[Any] = []
    async with started(on_event=heard.append) as child:
        slow = asyncio.create_task(child.call(Async.wait, 0.5))
        squares = [child.call(Async.square, number) for number in range(50)]
        assert await asyncio.gather(*squares) == [number * number for number in range(50)]
        await child.call(Async.speak, "hello")
        assert heard == [Said("hello")]
        with pytest.raises(RunError, match="the child failed: ValueError: it went wrong"):
            await child.call(Async.harm, "fail")
        given_up = asyncio.create_task(child.call(Async.wait, 0.1))
        await child.call(Async.square, 1)  # it has begun
        given_up.cancel()
        assert await slow == await child.call(Async.wait, 0.2) == "waited" and child.alive, "these cost one call each"
    assert news() == [], "it was ended on purpose"
    assert capfd.readouterr() == ("", "printed\n")


@asynchronous
async def test_calls_without_async_run_one_after_the_other(capfd):
    async with started(Plain, supervise=False) as child:
        assert await asyncio.gather(*(child.call(Plain.count) for _ in range(5))) == [1, 2, 3, 4, 5]
        with pytest.raises(ChildLost) as lost:
            await child.call(Plain.leave)
        assert lost.value.begun, "it does not say when a call begins"
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("fault", "error", "message"), [
    ("refuse", ConfigError, "^the file is wrong$"), ("raise", RunError, "the child failed: KeyError: 'nothing'"),
    ("exit", ChildLost, "ended with exit code 7"), ("hang", ChildLate, "no answer after 0.7 s"),
])  # fmt: skip
@asynchronous
async def test_a_start_that_fails_raises_and_is_not_reported_again(fault, error, message, news):
    child = made()
    with pytest.raises(error, match=message):
        await child.start(fault, deadline_s=0.7 if fault == "hang" else None)
    assert not child.alive
    await child.start()
    assert await child.call(Async.square, 3) == 9
    await child.end()
    assert news() == []


@pytest.mark.parametrize(("method", "argument", "how"), [
    (Async.leave, -11, "was killed by signal 11 (SIGSEGV)"), (Async.leave, 3, "ended with exit code 3"),
    *((Async.harm, kind, "was killed by signal 9 (SIGKILL)") for kind in ("flood", "lie", "babble")),
])  # fmt: skip
@asynchronous
async def test_an_end_is_raised_and_reported_once_and_the_process_can_be_started_again(method, argument, how, news):
    async with started() as child:
        others = [asyncio.create_task(child.call(Async.wait, 600.0)) for _ in range(3)]
        await child.call(Async.square, 1)  # the others have begun
        with pytest.raises(ChildLost, match=re.escape(how)) as lost:
            await child.call(method, argument)
        assert lost.value.begun
        assert all(isinstance(end, ChildLost) for end in await asyncio.gather(*others, return_exceptions=True))
        with pytest.raises(ChildLost, match=re.escape(how)) as late:
            await child.call(Async.square, 2)
        assert not late.value.begun
        await child.start()
        assert await child.call(Async.square, 4) == 16 and child.generation == 2
    [line] = news()
    assert line.startswith(f"the child {how}") and line.endswith("(1 so far): another takes its place")


@asynchronous
async def test_a_missed_deadline_kills_it_and_names_the_line(news):
    async with started(files=[child_classes.__file__]) as child:
        waiting = asyncio.create_task(child.call(Async.wait, 600.0))
        await child.call(Async.square, 1)
        with pytest.raises(ChildLate, match=r"no answer after 0\.5 s") as late:
            await child.call(Async.block, 600.0, deadline_s=0.5)
        assert re.fullmatch(rf"{re.escape(child_classes.__file__)}:\d+ in block", late.value.line)
        with pytest.raises(ChildLost, match=r"gave no answer for 0\.5 s: killed"):
            await waiting
    assert news() == ["the child gave no answer for 0.5 s: killed (1 so far): another takes its place"]


@asynchronous
async def test_calls_that_had_not_begun_say_so_and_their_deadline_counts_from_their_turn():
    async with started() as child:
        blocking = asyncio.create_task(child.call(Async.block, 2.0, silence_s=200.0))
        await asyncio.sleep(0)  # it is sent
        assert await child.call(Async.wait, 0.0, deadline_s=1.5, silence_s=200.0) == "waited"
        assert await blocking == "blocked"
        blocking = asyncio.create_task(child.call(Async.block, 600.0, silence_s=200.0))
        await asyncio.sleep(0)
        behind = asyncio.create_task(child.call(Async.square, 2, silence_s=200.0))
        sent = child.heard
        while child.heard == sent:  # the first says that it has begun
            await asyncio.sleep(0.01)
        os.killpg(child.pid, signal.SIGKILL)
        lost = await asyncio.gather(blocking, behind, return_exceptions=True)
        assert [isinstance(end, ChildLost) and end.begun for end in lost] == [True, False]


@asynchronous
async def test_a_silent_process_is_killed_while_a_call_waits_for_its_turn_and_one_that_is_heard_is_not(news):
    async with started() as child:
        psutil.Process(child.pid).children(recursive=True)[-1].suspend()
        waiting = asyncio.create_task(child.call(Async.square, 2, silence_s=1.0))
        for _ in range(30):
            child.heard = time.monotonic()
            await asyncio.sleep(0.05)
        assert not waiting.done()
        with pytest.raises(ChildLost, match="was silent for 1 s: killed"):
            await waiting
    assert len(news()) == 1


CALLER = """
import asyncio, sys
from shared.child_process import Child
from tests.shared.child_classes import Async
async def main():
    child = Child(Async, "the child", "", supervise=sys.argv[1] == "True")
    print(await child.start(), flush=True)
    await child.call(Async.wait, 600.0)
asyncio.run(main())
"""


@pytest.mark.parametrize("supervise", [True, False])
def test_it_ends_with_its_caller(supervise):
    with started_program(CALLER, supervise, stderr=subprocess.DEVNULL) as parent:
        pid = int(parent.stdout.readline())
        assert not gone(pid)
        parent.kill()
    until(lambda: gone(pid))


def test_it_ends_with_the_event_loop_of_its_caller_and_what_it_has_started_with_it(news):
    async def start_both() -> list[int]:
        child = made()
        return [await child.start(), await child.call(Async.grandchild)]

    pids = asyncio.run(start_both())
    until(lambda: all(map(gone, pids)))
    assert news() == []
