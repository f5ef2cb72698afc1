"""Plug-in files that raise, hang, exit or are killed: the file, the line and the fault are named; nothing else ends."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import msgspec
import psutil
import pytest

from shared.errors import ConfigError
from shared.types import Reward, Verdict
from tests.verify.test_plugins import GOOD, PROBLEM, Fast, settings
from verify import plugin_host
from verify.chosen_rewards import choose
from verify.reward import CompletionScorer

pytestmark = pytest.mark.slow

HEAD = "import asyncio, os, sys, time\nfrom verify.plugins import Case, reward\n\n"


def write(folder: Path, body: str) -> str:
    path = folder / "mine.py"
    path.write_text(HEAD + body + "\n")
    return str(path)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def f():\n    return 1 / 0\n\nf()", "fails with ZeroDivisionError: division by zero in line 5"),
        ("def f(:", "fails with SyntaxError"),
        ("import nowhere_to_be_found", "fails with ModuleNotFoundError"),
        ("sys.exit(3)", "fails with SystemExit: 3 in line 4"),
        ("os._exit(0)", "ended its process while loading: it ended with exit code 0"),
        ("os.kill(os.getpid(), 9)", r"ended its process while loading: it was killed by signal 9 \(SIGKILL\)"),
        (
            "while True:\n    pass",
            r"mine\.py:[45] in <module> does not come to an end: stopped after 9 s while loading",
        ),
    ],
)
def test_a_file_that_cannot_be_loaded_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, message: str
) -> None:
    monkeypatch.setattr(plugin_host, "START_S", 9.0 if "while True" in body else 60.0)
    path = write(tmp_path, body)
    for _ in range(1 if "while True" in body else 2):  # it is not kept
        with pytest.raises(ConfigError, match=rf"reward\.plugins: {re.escape(str(tmp_path))}.*{message}"):
            choose(settings(plugins=[path], extra={"mine": 1}))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="other.py': there is no such file"):
        choose(settings(plugins=[str(tmp_path / "other.py")]))


@pytest.mark.parametrize(
    ("body", "verdict", "reason"),
    [
        ("return 1 / 0", Verdict.CRASH, r"ZeroDivisionError: division by zero \(.*mine\.py:\d+ in f\)"),
        ("sys.exit(3)", Verdict.CRASH, r"SystemExit: 3 \(.*mine\.py:\d+ in f\)"),
        ("os._exit(7)", Verdict.CRASH, "its process ended with exit code 7"),
        ("os.kill(os.getpid(), 9)", Verdict.CRASH, r"its process was killed by signal 9 \(SIGKILL\)"),
        ("time.sleep(60)", Verdict.TIMEOUT, r"no value after 0\.5 s, it was at .*mine\.py:\d+ in f"),
        ("await asyncio.sleep(60)", Verdict.TIMEOUT, r"no value after 0\.5 s"),
        ("return None", Verdict.CRASH, r"returned None, which is no number"),
        ("return float('nan')", Verdict.CRASH, r"returned nan, not a number"),
        ("return 'much'", Verdict.CRASH, r"returned 'much', which is no number"),
        ("return -1", Verdict.CRASH, r"returned -1(\.0)?, not a number of at least 0"),
    ],
)
def test_a_call_that_fails_costs_one_completion_and_names_the_line(
    tmp_path: Path, body: str, verdict: Verdict, reason: str
) -> None:
    """The bad problem fails each time, the others around it, asked at the same time, are graded."""
    head = f'@reward("mine")\n{"async " * ("await" in body)}def f(case: Case) -> float:\n'
    function = f'{head}    if case.problem.id == "bad":\n        {body}\n    return 1.0'
    chosen = settings(plugins=[write(tmp_path, function)], extra={"mine": 0.5}, deadline_s=0.5)
    one, bad, two = (msgspec.structs.replace(PROBLEM, id=name) for name in ("one", "bad", "two"))

    async def grade() -> list[Reward]:
        scorer = CompletionScorer(chosen, Fast())
        asked = [one, bad, two, bad]
        return list(await asyncio.gather(*(scorer.score(problem, GOOD, 50) for problem in asked)))

    for _ in range(2 if "sleep" not in body else 1):  # another event loop
        good, failed, other, again = asyncio.run(grade())
        assert good.extra == other.extra == {"mine": 0.5} and good.verdict is Verdict.CORRECT
        for found in (failed, again):
            assert found.verdict is verdict and not found.verdict.graded and found.extra == {}
            assert re.search(rf"reward mine \(.*mine\.py:\d+\): {reason}", found.reason), found.reason


def test_rewards_that_wait_overlap_and_the_callers_loop_goes_on(tmp_path: Path) -> None:
    slow = """running = most = 0
@reward("mine")
async def f(case: Case) -> float:
    global running, most
    running += 1
    most = max(running, most)
    await asyncio.sleep(0.5)
    running -= 1
    return float(most > 1)
"""
    chosen = settings(plugins=[write(tmp_path, slow)], extra={"mine": 1.0})
    scorer = CompletionScorer(chosen, Fast())

    async def grade() -> int:
        turns = 0
        work = asyncio.gather(*(scorer.score(PROBLEM, GOOD, 50) for _ in range(40)))
        while not work.done():
            await asyncio.sleep(0.01)
            turns += 1
        assert all(reward.extra == {"mine": 1.0} for reward in await work), "all at once"
        return turns

    assert asyncio.run(grade()) > 3


def test_calls_that_nobody_waits_for_any_more_do_no_harm(tmp_path: Path) -> None:
    """They are given up before they begin and while they run."""
    slow = '@reward("mine")\ndef f(case: Case) -> float:\n    time.sleep(0.5)\n    return 1.0'
    scorer = CompletionScorer(settings(plugins=[write(tmp_path, slow)], extra={"mine": 1.0}), Fast())

    async def grade() -> None:
        work = [asyncio.ensure_future(scorer.score(PROBLEM, GOOD, 50)) for _ in range(4)]
        await asyncio.sleep(0.2)
        for task in (work[0], work[2], work[3]):
            task.cancel()
        assert (await work[1]).extra == {"mine": 1.0}
        assert (await scorer.score(PROBLEM, GOOD, 50)).extra == {"mine": 1.0}

    asyncio.run(asyncio.wait_for(grade(), 60))


def test_a_process_that_stands_still_before_a_call_begins_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin_host, "SILENCE_S", 0.5)
    stops = (
        "import signal, threading\n\n"
        '@reward("mine")\ndef f(case: Case) -> float:\n'
        "    threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGSTOP]).start()\n"
        "    return float(os.getpid())"
    )
    scorer = CompletionScorer(settings(plugins=[write(tmp_path, stops)], extra={"mine": 1.0}, deadline_s=0.5), Fast())

    async def grade() -> list[float]:
        first = await scorer.score(PROBLEM, GOOD, 50)
        process = psutil.Process(int(first.extra["mine"]))
        while process.status() != psutil.STATUS_STOPPED:
            await asyncio.sleep(0.01)
        async with asyncio.timeout(60):
            second = await scorer.score(PROBLEM, GOOD, 50)
        return [first.extra["mine"], second.extra["mine"]]

    first, second = asyncio.run(grade())
    assert first != second, "another process gave the second value"
