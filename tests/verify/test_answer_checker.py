"""The checker under hostile load: right verdicts, deadlines, crashes, nothing left behind."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from shared.errors import RunError
from shared.types import Verdict
from tests.verify.hostile import written
from verify.answer_checker import AnswerChecker, check_answer

pytestmark = pytest.mark.slow

TERMS = itertools.count(1000)
ROOT = Path(__file__).resolve().parents[2]
SLOW_PAIR = ("x^2+1", "\\int_0^1 e^{x^{x^x}} dx")
"""SymPy works on this for minutes"""
HANGS_S = 60.0
"""deadline of tests in which none is missed, on a busy machine either"""


def children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


async def settle(checker: AnswerChecker) -> None:
    """Wait until a worker answers, with a new pair each time: none is in memory."""
    verdict = Verdict.TIMEOUT
    while verdict is Verdict.TIMEOUT:
        verdict = await checker.check(f"x+{(term := next(TERMS))}", f"{term}+x")
    assert verdict is Verdict.CORRECT


def with_checker(workers: int = 1, deadline_s: float = HANGS_S, **limits: int) -> Callable[..., Callable[[], None]]:
    """Decorator: run a test with a checker of which a worker is ready."""

    def decorate(test: Callable[[AnswerChecker], Awaitable[None]]) -> Callable[[], None]:
        async def use() -> None:
            async with AnswerChecker(workers, deadline_s, **limits) as checker:
                await settle(checker)
                await test(checker)

        return lambda: asyncio.run(use())

    return decorate


@pytest.fixture(scope="module")
def background(unhurried: None) -> None:
    """The blocking checker lives as long as the process: start it before counting children."""
    assert check_answer("\\sqrt{2}x", "x\\sqrt{2}") is Verdict.CORRECT


@pytest.mark.usefixtures("background")
def test_verdicts_leave_no_process_or_descriptor() -> None:
    @with_checker(workers=2)
    async def use(checker: AnswerChecker) -> None:
        assert await checker.check("5", "5.0") is Verdict.CORRECT
        assert await checker.check("\\sqrt{8}", "2\\sqrt{2}") is Verdict.CORRECT
        assert await checker.check("\\sqrt{8}", "3\\sqrt{2}") is Verdict.WRONG
        assert await checker.check("\\foo{x}{", "3x") is Verdict.UNVERIFIABLE
        assert checker.counts["crashes"] == checker.counts["timeouts"] == 0

    use()  # whatever is opened once stays open from here
    before, descriptors = children(), len(os.listdir("/proc/self/fd"))
    use()
    assert children() == before and len(os.listdir("/proc/self/fd")) == descriptors


@with_checker(deadline_s=1.0)
async def test_hostile_answers_are_answered(checker: AnswerChecker) -> None:
    for answer in written("worker"):
        for ground_truth in ("7", "x^2+1"):
            verdict = await asyncio.wait_for(checker.check(ground_truth, answer), 120)
            assert verdict in (Verdict.WRONG, Verdict.TIMEOUT, Verdict.CRASH), answer[:40]
            await settle(checker)


@pytest.mark.usefixtures("background")
def test_blocking_entry_works_from_other_threads() -> None:
    verdicts: dict[str, Verdict] = {}
    pairs = {"right": ("\\sqrt{8}", "2\\sqrt{2}"), "wrong": ("\\sqrt{8}", "\\sqrt{7}"), "hostile": ("7", "9**9**9**9")}

    def check(name: str) -> None:
        verdicts[name] = check_answer(*pairs[name])

    threads = [threading.Thread(target=check, args=(name,)) for name in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verdicts == {"right": Verdict.CORRECT, "wrong": Verdict.WRONG, "hostile": Verdict.WRONG}


@with_checker(workers=2, deadline_s=5.0)
async def test_loop_goes_on_while_a_verdict_times_out(checker: AnswerChecker) -> None:
    slow = asyncio.ensure_future(checker.check(*SLOW_PAIR))
    await settle(checker)
    assert not slow.done() and await slow is Verdict.TIMEOUT


@with_checker(deadline_s=1.0)
async def test_stopped_worker_is_killed_at_the_deadline(checker: AnswerChecker) -> None:
    victim = checker.pids[0]
    os.kill(victim, signal.SIGSTOP)
    assert await checker.check("x+2", "2+x") is Verdict.TIMEOUT
    assert victim not in checker.pids
    again = [await checker.check("x+2", "2+x") for _ in range(5)]  # no verdict, so none is kept
    assert Verdict.CORRECT in again and not psutil.pid_exists(victim)


@with_checker()
async def test_request_of_a_killed_worker_is_answered_by_a_fresh_one(checker: AnswerChecker) -> None:
    victim = checker.pids[0]
    os.kill(victim, signal.SIGSTOP)
    task = asyncio.ensure_future(checker.check("x+2", "2+x"))
    while checker._workers[0].served < 2:
        await asyncio.sleep(0.01)
    os.kill(victim, signal.SIGKILL)
    assert await task is Verdict.CORRECT
    assert checker.counts["crashes"] == 1 and victim not in checker.pids


@with_checker()
async def test_second_crash_is_the_verdict(checker: AnswerChecker) -> None:
    async def murder() -> None:
        while True:
            for worker in checker._workers:
                if worker.served > 0 and worker.child.alive:
                    worker.served = 0
                    os.kill(worker.child.pid, signal.SIGKILL)
            await asyncio.sleep(0.01)

    checker._workers[0].served = 0
    murderer = asyncio.ensure_future(murder())
    assert await checker.check(*SLOW_PAIR) is Verdict.CRASH
    murderer.cancel()
    assert checker.counts["crashes"] == 2
    await settle(checker)


@with_checker()
async def test_worker_killed_while_idle_costs_no_verdict(checker: AnswerChecker) -> None:
    os.kill(checker.pids[0], signal.SIGKILL)
    while checker.pids:
        await asyncio.sleep(0.01)
    await settle(checker)
    assert checker.counts["crashes"] == 0 and checker.counts["started"] == 2


@pytest.mark.parametrize("limits", [{"max_requests": 2}, {"max_rss_bytes": 1}], ids=str)
def test_worker_is_recycled_after_so_many_requests_or_bytes(limits: dict[str, Any]) -> None:
    @with_checker(**limits)
    async def use(checker: AnswerChecker) -> None:
        for k in range(2, 5):
            assert await checker.check("x+1", f"x+{k}") is Verdict.WRONG
        assert checker.counts["recycled"] >= 1

    use()


@with_checker(workers=2)
async def test_same_pair_is_asked_once(checker: AnswerChecker) -> None:
    before = checker.counts["asked"]
    verdicts = await asyncio.gather(*(checker.check("x^2+x", "x(x+1)") for _ in range(16)))
    assert {*verdicts, await checker.check("x^2+x", "x(x+1)")} == {Verdict.CORRECT}
    assert checker.counts["asked"] == before + 1


@with_checker()
async def test_cancelled_request_does_not_lose_the_worker(checker: AnswerChecker) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(checker.check(*SLOW_PAIR), 0.2)
    await settle(checker)


@pytest.mark.usefixtures("background")
def test_close_during_a_request_ends_everything() -> None:
    before = children()

    async def use() -> None:
        checker = AnswerChecker(workers=2, deadline_s=3600)
        await checker.start()
        await settle(checker)
        task = asyncio.ensure_future(checker.check(*SLOW_PAIR))
        await asyncio.sleep(0)
        await checker.close()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(RunError, match="start"):
            await checker.check("x+2", "2+x")

    asyncio.run(use())
    assert children() == before


def test_workers_that_cannot_start_are_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")

    async def use() -> None:
        async with AnswerChecker(workers=1) as checker:
            with pytest.raises(RunError, match="do not start"):
                await checker.check("x+2", "2+x")

    asyncio.run(use())


@pytest.mark.parametrize(
    ("use", "unwanted"),
    [
        (
            "import verify.reward, verify.answer_checker, verify.language; "
            "verify.language.detect('How many apples are there?'); verify.answer_checker.decide('1', '2')",
            {"torch", "sympy", "vllm", "transformers"},
        ),
        ("import verify.checker_process, verify.math.algebra", {"torch"}),
    ],
)
def test_room_imports_no_torch_and_the_caller_no_sympy(use: str, unwanted: set[str]) -> None:
    program = f"import sys; {use}; sys.exit(str({unwanted} & set(sys.modules) or ''))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.strip() == ""
