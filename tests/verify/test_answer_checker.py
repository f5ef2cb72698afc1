"""The checker under hostile load: right verdicts, deadlines, crashes, nothing left behind."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

from shared.errors import RunError
from shared.launch.deaths import helpers
from shared.types import Verdict
from tests.verify.event_loop import watched
from tests.verify.hostile import written
from verify.answer_checker import AnswerChecker, check_answer

pytestmark = pytest.mark.slow

TERMS = itertools.count(1000)
ROOT = Path(__file__).resolve().parents[2]
SLOW_PAIR = ("x^2+1", "\\int_0^1 e^{x^{x^x}} dx")
"""SymPy works on this for much longer than any deadline here"""


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


async def settle(checker: AnswerChecker) -> None:
    """Wait until a worker is ready, so that deadlines are the only clock; a new pair each time, not one from memory."""
    term = next(TERMS)
    assert await checker.check(f"x+{term}", f"{term}+x") is Verdict.CORRECT


@pytest.fixture(scope="module")
def background() -> None:
    """The blocking checker lives as long as the process: start it before counting children."""
    assert check_answer("\\sqrt{2}x", "x\\sqrt{2}") is Verdict.CORRECT


@pytest.mark.usefixtures("background")
def test_verdicts_need_no_torch_and_leave_no_process_or_descriptor() -> None:
    async def use() -> None:
        async with AnswerChecker(workers=2, deadline_s=5) as checker:
            await settle(checker)
            assert await checker.check("5", "5.0") is Verdict.CORRECT
            assert await checker.check("\\sqrt{8}", "2\\sqrt{2}") is Verdict.CORRECT
            assert await checker.check("\\sqrt{8}", "3\\sqrt{2}") is Verdict.WRONG
            assert await checker.check("\\foo{x}{", "3x") is Verdict.UNVERIFIABLE
            assert checker.counts["crashes"] == checker.counts["timeouts"] == 0

    asyncio.run(use())  # whatever is opened once stays open from here
    before, descriptors = {process.pid for process in children()}, len(os.listdir("/proc/self/fd"))
    asyncio.run(use())
    assert {process.pid for process in children()} == before
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_hostile_answers_are_answered_within_the_deadline() -> None:
    deadline_s = 1.0

    async def use() -> None:
        async with AnswerChecker(workers=1, deadline_s=deadline_s) as checker:
            await settle(checker)
            for answer in written("worker"):
                for ground_truth in ("7", "x^2+1"):
                    await settle(checker)
                    verdict = await checker.check(ground_truth, answer)
                    assert verdict in (Verdict.WRONG, Verdict.TIMEOUT, Verdict.CRASH), answer[:40]
            await settle(checker)

    asyncio.run(use())
    cheap = ["9**9**9**9", "5^(5^(5^5))", "{" * 1_000_000, "9" * 100_000, "__import__('os').system('kill -9 0')"]

    async def plain() -> list[Verdict]:
        async with AnswerChecker(workers=1, deadline_s=deadline_s) as checker:
            return [await checker.check("7", answer) for answer in cheap]

    assert asyncio.run(plain()) == [Verdict.WRONG] * len(cheap)


@pytest.mark.usefixtures("background")
def test_blocking_entry_works_from_other_threads() -> None:
    found: dict[str, Verdict] = {}
    pairs = {"right": ("\\sqrt{8}", "2\\sqrt{2}"), "wrong": ("\\sqrt{8}", "\\sqrt{7}"), "hostile": ("7", "9**9**9**9")}
    threads = [
        threading.Thread(target=lambda name=name, pair=pair: found.__setitem__(name, check_answer(*pair)))
        for name, pair in pairs.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == {"right": Verdict.CORRECT, "wrong": Verdict.WRONG, "hostile": Verdict.WRONG}


def test_loop_goes_on_while_a_verdict_times_out() -> None:
    async def use() -> None:
        async with AnswerChecker(workers=2, deadline_s=3.0) as checker:
            await asyncio.gather(*(checker.check("x+1", f"{k}+x") for k in range(2, 6)))
            async with watched() as gaps:
                verdict, other = await asyncio.gather(checker.check(*SLOW_PAIR), checker.check("x^2", "x \\cdot x"))
            assert (verdict, other) == (Verdict.TIMEOUT, Verdict.CORRECT)
            assert checker.counts["timeouts"] == 1
            assert gaps.longest_s < 2.5

    asyncio.run(use())


def test_stopped_worker_is_killed_at_the_deadline() -> None:
    async def use() -> None:
        async with AnswerChecker(workers=1, deadline_s=1.0) as checker:
            await settle(checker)
            victim = checker.pids[0]
            os.kill(victim, signal.SIGSTOP)
            assert await checker.check("x+2", "2+x") is Verdict.TIMEOUT
            assert victim not in checker.pids
            assert await checker.check("x+2", "2+x") is Verdict.CORRECT
            assert not psutil.pid_exists(victim)

    asyncio.run(use())


def test_request_of_a_killed_worker_is_answered_by_a_fresh_one() -> None:
    async def use() -> None:
        async with AnswerChecker(workers=1, deadline_s=20) as checker:
            await settle(checker)
            victim = checker.pids[0]
            os.kill(victim, signal.SIGSTOP)
            task = asyncio.ensure_future(checker.check("x+2", "2+x"))
            await asyncio.sleep(0.1)
            os.kill(victim, signal.SIGKILL)
            assert await task is Verdict.CORRECT
            assert checker.counts["crashes"] == 1 and victim not in checker.pids

    asyncio.run(use())


def test_second_crash_is_the_verdict() -> None:
    async def use() -> None:
        async with AnswerChecker(workers=1, deadline_s=20) as checker:
            await settle(checker)

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

    asyncio.run(use())


def test_worker_killed_while_idle_costs_no_verdict() -> None:
    async def use() -> None:
        async with AnswerChecker(workers=1) as checker:
            await settle(checker)
            os.kill(checker.pids[0], signal.SIGKILL)
            await asyncio.sleep(0.1)
            assert await checker.check("x+2", "2+x") is Verdict.CORRECT
            assert checker.counts["crashes"] == 0 and checker.counts["started"] == 2

    asyncio.run(use())


def test_ends_of_workers_are_told_whether_they_were_at_work_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is killed while idle, one while it works, one that is stopped; none that is stopped on purpose."""
    monkeypatch.setattr(helpers, "_ends", {})

    async def told(words: str) -> None:
        while not any(line.startswith(f"a verifier process {words}") for line in helpers.news()):
            await asyncio.sleep(0.01)

    async def use() -> None:
        async with AnswerChecker(workers=1, deadline_s=2.0) as checker:
            await settle(checker)
            os.kill(checker.pids[0], signal.SIGKILL)
            await told("was killed by signal 9 (SIGKILL) (1 so far)")
            await settle(checker)
            os.kill(checker.pids[0], signal.SIGSTOP)
            asking = asyncio.ensure_future(checker.check("x+3", "3+x"))
            await asyncio.sleep(0.1)
            os.kill(checker.pids[0], signal.SIGKILL)
            await told("was killed by signal 9 (SIGKILL) (2 so far)")
            assert await asking is Verdict.CORRECT
            os.kill(checker.pids[0], signal.SIGSTOP)
            assert await checker.check("x+4", "4+x") is Verdict.TIMEOUT
            await told("gave no answer for 2 s: killed (1 so far)")
            await settle(checker)

    asyncio.run(asyncio.wait_for(use(), 60))
    assert helpers.news() == []


def test_worker_is_recycled_after_so_many_requests_or_bytes() -> None:
    async def use(**limits: int) -> None:
        async with AnswerChecker(workers=1, **limits) as checker:
            for k in range(2, 5):
                assert await checker.check("x+1", f"x+{k}") is Verdict.WRONG
            assert checker.counts["recycled"] >= 1

    asyncio.run(use(max_requests=2))
    asyncio.run(use(max_rss_bytes=1))


def test_same_pair_is_asked_once() -> None:
    async def use() -> None:
        async with AnswerChecker(workers=2) as checker:
            verdicts = await asyncio.gather(*(checker.check("x^2+x", "x(x+1)") for _ in range(16)))
            assert set(verdicts) == {Verdict.CORRECT}
            assert await checker.check("x^2+x", "x(x+1)") is Verdict.CORRECT
            assert checker.counts["asked"] == 1

    asyncio.run(use())


def test_cancelled_request_does_not_lose_the_worker() -> None:
    async def use() -> None:
        async with AnswerChecker(workers=1, deadline_s=1.0) as checker:
            await settle(checker)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(checker.check(*SLOW_PAIR), 0.2)
            assert await checker.check("x+2", "2+x") is Verdict.CORRECT

    asyncio.run(use())


@pytest.mark.usefixtures("background")
def test_close_during_a_request_ends_everything() -> None:
    before = {process.pid for process in children()}

    async def use() -> None:
        checker = AnswerChecker(workers=2, deadline_s=3600)
        await checker.start()
        await settle(checker)
        task = asyncio.ensure_future(checker.check(*SLOW_PAIR))
        await asyncio.sleep(0.2)
        await checker.close()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(RunError, match="start"):
            await checker.check("x+2", "2+x")

    asyncio.run(use())
    assert {process.pid for process in children()} == before


def test_workers_that_cannot_start_are_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")

    async def use() -> None:
        async with AnswerChecker(workers=1) as checker:
            with pytest.raises(RunError, match="do not start"):
                await checker.check("x+2", "2+x")

    asyncio.run(use())


def test_workers_die_with_a_killed_parent() -> None:
    program = """
        import asyncio, sys
        from verify.answer_checker import AnswerChecker
        async def main():
            checker = AnswerChecker(workers=2, deadline_s=60)
            await checker.start()
            await asyncio.gather(checker.check("x+1", "1+x"), checker.check("x+2", "2+x"))
            task = asyncio.ensure_future(checker.check("x^2+1", "\\\\int_0^1 e^{x^{x^x}} dx"))
            await asyncio.sleep(0.3)
            print(*checker.pids, flush=True)
            await task
        asyncio.run(main())
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2 and all(psutil.pid_exists(pid) for pid in pids)
        parent.kill()
    limit = time.perf_counter() + 5
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
        assert time.perf_counter() < limit, "workers outlived their parent"
        time.sleep(0.02)


def test_room_imports_no_torch_and_the_caller_no_sympy() -> None:
    program = (
        "import sys, verify.reward, verify.answer_checker, verify.language; "
        "verify.language.detect('How many apples are there?'); verify.answer_checker.decide('1', '2'); "
        "bad = {'torch', 'sympy', 'vllm', 'transformers'} & set(sys.modules); sys.exit(str(bad) if bad else 0)"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True).returncode == 0
    program = "import sys, verify.checker_process, verify.math.algebra; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True).returncode == 0
