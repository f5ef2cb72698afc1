"""The checker under hostile load: right verdicts, deadlines, crashes, nothing left behind; and its process alone."""

import asyncio
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from shared.child_process import Child
from shared.errors import RunError
from shared.types import Verdict
from tests.asynchronous import asynchronous
from tests.verify.hostile import hostile, written
from tests.verify.quick_start import QuickStart
from verify import answer_checker
from verify.answer_checker import AnswerChecker, check_answer
from verify.checker_process import CheckerProcess

pytestmark = pytest.mark.slow
TERMS = itertools.count(1000)
SLOW_PAIR = ("x^2+1", "\\int_0^1 e^{x^{x^x}} dx")
"""SymPy works on this for minutes"""
HANGS_S = 60.0
"""deadline of tests in which none is missed, on a busy machine either"""


def children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


async def settle(checker: AnswerChecker) -> None:
    """Wait until a worker answers, with a new pair each time: none is in memory."""
    while (verdict := await checker.check(f"x+{(term := next(TERMS))}", f"{term}+x")) is Verdict.TIMEOUT:
        pass
    assert verdict is Verdict.CORRECT


@pytest.fixture(scope="module")
def shared():
    """A checker of one worker, whose many processes start quickly, and the loop that it lives in."""
    with asyncio.Runner() as runner, pytest.MonkeyPatch.context() as patch:
        checker = AnswerChecker(1, HANGS_S)
        patch.setattr(answer_checker, "CheckerProcess", QuickStart)
        runner.run(checker.start())
        patch.undo()
        yield runner, checker
        runner.run(checker.close())


def with_checker(test: Callable[[AnswerChecker], Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Decorator: run a test with the shared checker, whose worker is ready; its limits are afterwards as before."""

    def run(shared: tuple[asyncio.Runner, AnswerChecker]) -> None:
        runner, checker = shared
        limits = {name: getattr(checker, name) for name in ("deadline_s", "max_requests", "max_rss_bytes")}
        runner.run(settle(checker))
        checker.counts = dict.fromkeys(checker.counts, 0)
        try:
            runner.run(test(checker))
        finally:
            vars(checker).update(limits)

    return run


@with_checker
async def test_verdicts_repeated_pairs_and_given_up_requests(checker):
    for ground_truth, answer, verdict in (
        ("5", "5.0", Verdict.CORRECT), ("\\sqrt{8}", "2\\sqrt{2}", Verdict.CORRECT),
        ("\\sqrt{8}", "3\\sqrt{2}", Verdict.WRONG), ("\\foo{x}{", "3x", Verdict.UNVERIFIABLE),
    ):  # fmt: skip
        assert await checker.check(ground_truth, answer) is verdict
    before = checker.counts["asked"]
    verdicts = await asyncio.gather(*(checker.check("x^2+x", "x(x+1)") for _ in range(16)))
    assert {*verdicts, await checker.check("x^2+x", "x(x+1)")} == {Verdict.CORRECT}
    assert checker.counts["asked"] == before + 1, "the same pair is asked once"
    assert checker.counts["crashes"] == checker.counts["timeouts"] == 0
    checker.deadline_s = 1.0
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(checker.check(*SLOW_PAIR), 0.2)
    checker.deadline_s = HANGS_S
    await settle(checker)


@with_checker
async def test_stopped_worker_is_killed_at_the_deadline(checker):
    checker.deadline_s, [victim] = 1.0, checker.pids
    os.kill(victim, signal.SIGSTOP)
    assert await checker.check("x+2", "2+x") is Verdict.TIMEOUT
    assert victim not in checker.pids
    checker.deadline_s = HANGS_S
    assert await checker.check("x+2", "2+x") is Verdict.CORRECT, "a timeout is no verdict, so it is not kept"
    assert not psutil.pid_exists(victim)


@with_checker
async def test_request_of_a_killed_worker_is_answered_by_a_fresh_one_and_an_idle_one_costs_none(checker):
    [victim], served = checker.pids, checker._workers[0].served
    os.kill(victim, signal.SIGSTOP)
    task = asyncio.ensure_future(checker.check("x+3", "3+x"))
    while checker._workers[0].served == served:
        await asyncio.sleep(0.01)
    os.kill(victim, signal.SIGKILL)
    assert await task is Verdict.CORRECT and checker.counts["crashes"] == 1 and victim not in checker.pids
    os.kill(checker.pids[0], signal.SIGKILL)
    while checker.pids:
        await asyncio.sleep(0.01)
    await settle(checker)
    assert checker.counts["crashes"] == 1 and checker.counts["started"] == 2


@with_checker
async def test_second_crash_is_the_verdict(checker):
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


@with_checker
async def test_worker_is_recycled_after_so_many_requests_or_bytes(checker):
    for times, limits in enumerate(({"max_requests": 1}, {"max_rss_bytes": 1, "max_requests": 9}), 1):
        vars(checker).update(limits)
        await settle(checker)
        assert checker.counts["recycled"] == times


@pytest.mark.usefixtures("quick_checkers")
@asynchronous
async def test_hostile_answers_are_answered_and_the_loop_goes_on_while_a_verdict_times_out():
    """Each within the deadline, the workers alive, memory flat."""
    async with AnswerChecker(workers=2, deadline_s=1.0) as checker:
        slow = asyncio.ensure_future(checker.check(*SLOW_PAIR))
        await settle(checker)
        assert await slow is Verdict.TIMEOUT
        checker.deadline_s = answer_checker.DEADLINE_S
        before = psutil.Process().memory_info().rss
        pairs = [(truth, answer, False) for answer in written("worker") for truth in ("7", "x^2+1")]
        for ground_truth, answer, maybe in [*pairs, *((*pair, True) for pair in hostile(400))]:
            verdict = await asyncio.wait_for(checker.check(ground_truth, answer), 120)
            assert verdict is not Verdict.CORRECT or (maybe and len(answer) < 40), answer[:60]
            assert verdict is not Verdict.UNVERIFIABLE, answer[:60]
        for _ in range(2):
            await settle(checker)
        assert psutil.Process().memory_info().rss - before < 64 << 20
        assert all(psutil.Process(pid).memory_info().rss < 400 << 20 for pid in checker.pids)


@pytest.mark.usefixtures("quick_checkers")
def test_blocking_entry_works_from_other_threads(monkeypatch):
    monkeypatch.setattr(answer_checker, "BLOCKING_DEADLINE_S", 120.0)  # on a busy machine an easy sum may take seconds
    monkeypatch.setattr(answer_checker, "_background", None)
    pairs = [("\\sqrt{8}", "2\\sqrt{2}"), ("\\sqrt{8}", "\\sqrt{7}"), ("7", "9**9**9**9")]
    with ThreadPoolExecutor(3) as threads:
        verdicts = [*threads.map(lambda pair: check_answer(*pair), pairs)]
    answer_checker._background.close()
    assert verdicts == [Verdict.CORRECT, Verdict.WRONG, Verdict.WRONG]


@pytest.mark.usefixtures("quick_checkers")
def test_close_during_a_request_ends_everything():
    before, descriptors = children(), len(os.listdir("/proc/self/fd"))

    async def work() -> None:
        checker = AnswerChecker(workers=1, deadline_s=3600)
        await checker.start()
        await settle(checker)
        task = asyncio.ensure_future(checker.check(*SLOW_PAIR))
        await asyncio.sleep(0)
        await checker.close()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(RunError, match="start"):
            await checker.check("x+2", "2+x")

    asyncio.run(work())
    assert children() <= before and len(os.listdir("/proc/self/fd")) <= descriptors


@asynchronous
async def test_workers_that_cannot_start_are_one_clear_error(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    async with AnswerChecker(workers=1) as checker:
        with pytest.raises(RunError, match="do not start"):
            await checker.check("x+2", "2+x")


def test_the_process_alone_compares_and_has_loaded_sympy_before():
    """The deadline begins at the request: an import that falls into it makes the first integrals time out."""
    pairs = [("\\sqrt{8}", "2\\sqrt{2}", Verdict.CORRECT), ("x", "y", Verdict.WRONG), ("x", "\\frac{1}", Verdict.WRONG),
             ("\\foo{", "x", Verdict.UNVERIFIABLE), ("(", "x", Verdict.UNVERIFIABLE)]  # fmt: skip
    calculus = [
        ("\\frac{1}{3}", "\\int_0^1 x^2 dx"), ("\\frac{n(n+1)}{2}", "\\sum_{k=1}^{n} k"),
        ("1", "\\lim_{x\\to 0} \\frac{\\sin x}{x}"),
    ]  # fmt: skip

    async def work() -> float:
        child = Child(CheckerProcess, "a verifier process", "", supervise=False)
        first = await child.start()
        assert first.verdict is Verdict.CORRECT and 10 << 20 < first.rss_bytes < 1 << 30
        for ground_truth, answer, verdict in pairs:
            assert (await child.call(CheckerProcess.compare, ground_truth, answer)).verdict is verdict
        process = psutil.Process(child.pid)
        before = sum(process.cpu_times()[:2])
        for ground_truth, answer in calculus:
            assert (await child.call(CheckerProcess.compare, ground_truth, answer)).verdict is Verdict.CORRECT
        used = sum(process.cpu_times()[:2]) - before
        await child.end()
        return used

    assert asyncio.run(work()) < 0.5, "SymPy was loaded within three short questions"


LIMITED = "from verify.checker_process import limit_memory\nlimit_memory()\nbytearray(3 << 30)"
LIGHT = """import sys, verify.reward, verify.answer_checker, verify.language
verify.language.detect('How many apples are there?'); verify.answer_checker.decide('1', '2')
sys.exit(str({'torch', 'sympy', 'vllm', 'transformers'} & set(sys.modules) or ''))"""
NO_TORCH = "import sys, verify.checker_process, verify.math.algebra; sys.exit(str({'torch'} & set(sys.modules) or ''))"


@pytest.mark.parametrize(("program", "error"), [(LIMITED, "MemoryError"), (LIGHT, ""), (NO_TORCH, "")])
def test_memory_is_limited_and_neither_torch_nor_the_callers_sympy_are_imported(root, program, error):
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True)
    assert done.stderr.strip()[-11:] == error


def test_other_parent_than_announced_ends_it_at_once(root):
    name = "verify.checker_process:CheckerProcess"
    command = [sys.executable, "-m", "shared.served", name, str(os.getppid()), "2"]
    done = subprocess.run(command, cwd=root, input=b"", capture_output=True, timeout=50)
    assert done.returncode == 1 and done.stdout == b""
