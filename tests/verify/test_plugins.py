"""Rewards by name: the ready ones, weights, the transform, options, and plug-in files: what they define, and those that
raise, hang, exit or are killed: the file, the line and the fault are named, and nothing else ends."""

import asyncio
import math
import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from shared.errors import ConfigError
from shared.types import Reward, Verdict
from tests.asynchronous import asynchronous
from tests.tables import read_table
from tests.verify.grading import BAD, GOOD, PROBLEM, THOUGHT, Grader, reward, rewards, settings
from verify import plugin_host, verifiers
from verify.builtin_rewards import CosineOptions, cosine_length, repeated_share
from verify.chosen_rewards import choose
from verify.plugins import log_sigmoid, register
from verify.reward import CompletionScorer
from verify.verifiers import Answer, Finding, known_domains, verifier, verifier_of

HEAD = (
    "import asyncio, os, signal, sys, threading, time\n"
    "from verify.plugins import Case, RewardOptions, reward\nfrom verify.verifiers import Answer, verifier\n\n"
)


def plugin(folder: Path, body: str) -> str:
    path = folder / "mine.py"
    path.write_text(f"{HEAD}{body}\n")
    return str(path)


def test_cosine_length():
    """And values of 2502.03373: right 2 to 1, wrong -10 to 0; a quarter of the way is 0.8536 of the short end."""
    for tokens, right, wrong in ((0, 1.0, -1.0), (50, 0.75, -0.5), (99, 0.5, 0.0), (100, -1, -1), (5000, -1, -1)):
        assert cosine_length(tokens, 100, True, CosineOptions()) == pytest.approx(right, abs=1e-3)
        assert cosine_length(tokens, 100, False, CosineOptions()) == pytest.approx(wrong, abs=1e-3)
    paper = CosineOptions(right=(2, 1), wrong=(-10, 0))
    assert cosine_length(25, 100, True, paper) == pytest.approx(1.853553)
    assert cosine_length(25, 100, False, paper) == pytest.approx(-8.535534)


def test_repetition_costs_its_share_of_the_weight():
    assert repeated_share("a b c d", 2) == repeated_share("one two", 20) == 0.0
    assert repeated_share("a b a b a b", 2) == repeated_share("我们我们我们", 2) == pytest.approx(1 - 2 / 5)
    assert repeated_share("wait " * 101, 2) == pytest.approx(0.99)
    loop = GOOD.replace("</think>", " Tom has apples and buys more of them every day." * 40 + "</think>")
    costs = [reward(text, extra={"repetition": 0.05}).extra["repetition"] for text in (loop, GOOD)]
    assert -0.05 < costs[0] < -0.045 and costs[1] == 0.0


def test_log_sigmoid_transform():
    assert log_sigmoid(0.5, 0.5) == pytest.approx(-math.log(2))
    assert log_sigmoid(1e9, 0) == 0.0 and log_sigmoid(-1e9, 0) == -1e9
    chosen: dict[str, Any] = {"extra": {"tests_passed": 2.0}, "options": {"tests_passed": {"log_sigmoid": 0.5}}}
    right, wrong, broken = (reward(text, **chosen) for text in (GOOD, BAD, "broken"))
    assert right.extra["tests_passed"] == pytest.approx(2 * -math.log(1 + math.exp(-0.5)))
    assert wrong.extra["tests_passed"] == pytest.approx(2 * -math.log(1 + math.exp(0.5)))
    assert broken.total == wrong.extra["tests_passed"] < wrong.total


@pytest.mark.parametrize("row", read_table("verify/wrong_settings"), ids=lambda row: row["message"])
def test_wrong_names_options_and_judges_are_one_line_with_the_repair(row):
    with pytest.raises(ConfigError, match=row["message"]) as error:
        choose(settings(**row["reward"]))
    assert "\n" not in str(error.value)


def test_each_reward_has_options_of_its_own():
    echo = GOOD.replace("</think>", " Tom buys 3 more. Tom buys 3 more.</think>")
    four, many = (reward(echo, extra={"repetition": 1}, options={"repetition": {"words": words}}) for words in (4, 20))
    assert four.extra["repetition"] < many.extra["repetition"] == 0
    steep: dict[str, Any] = {"extra": {"cosine_length": 1.0}, "options": {"cosine_length": {"wrong": [-3, 0]}}}
    assert reward(BAD, tokens=0, **steep).extra["cosine_length"] == reward("broken", **steep).total == -3


@pytest.fixture
def restored(monkeypatch):
    """A verifier of the test's is not there after it."""
    known_domains()
    monkeypatch.setattr(verifiers, "VERIFIERS", dict(verifiers.VERIFIERS))


@pytest.mark.slow
@pytest.mark.usefixtures("restored")
def test_the_manuals_reward_and_verifier_run(tmp_path, root):
    """The ten lines of docs/rewards.md, as they stand there."""
    manual = (root / "docs" / "rewards.md").read_text(encoding="utf-8")
    tables = {}
    for name in ("example", "verifier"):
        code, toml = re.findall(rf"```(?:python|toml) {name}\n(.*?)```", manual, re.DOTALL)
        assert len(code.strip().splitlines()) <= 10
        tables[name] = tomllib.loads(toml)["reward"]
        [file] = tables[name]["plugins"]
        (tmp_path / file).write_text(code)
        tables[name]["plugins"] = [str(tmp_path / file)]
    short, long = (reward(GOOD + more, **tables["example"]) for more in ("", " And so on." * 200))
    assert (short.extra, long.extra) == ({"summary_is_short": pytest.approx(0.1)}, {"summary_is_short": 0.0})
    choose(settings(**tables["verifier"]))
    days = [f"{THOUGHT}{day}" for day in (r"\boxed{2024-02-29}", r"\boxed{2024-03-01}", r"\boxed{tomorrow}", "?")]
    result = rewards({"domain": "dates", "answer": "2024-02-29"}, days, **tables["verifier"])
    assert [(each.verdict, each.correctness, each.share) for each in result[:2]] == [
        ("correct", 0.9, 1),
        ("wrong", 0, 0),
    ]
    assert [each.verdict for each in result[2:]] == ["wrong", "no answer"]


@pytest.mark.slow
def test_a_reward_of_the_users_own_has_options(tmp_path):
    mine = plugin(
        tmp_path,
        'class Mine(RewardOptions):\n    share: float = 0.5\n\n@reward("mine", options=Mine)\n'
        "def mine(case: Case, options: Mine) -> float:\n    return options.share",
    )
    chosen: dict[str, Any] = {"extra": {"mine": 2.0}, "plugins": [mine]}
    assert reward(GOOD, **chosen, options={"mine": {"share": 0.25}}).extra["mine"] == 0.5
    with pytest.raises(ConfigError, match=r"^reward\.options\.mine\.shar: .* mine has log_sigmoid, sh"):
        choose(settings(**chosen, options={"mine": {"shar": 0.25}}))


@pytest.mark.usefixtures("restored")
def test_what_a_verifier_may_return():
    """True, a share and a finding; a share is only right when it is 1. Numbers outside of [0, 1] are an error."""
    late = Finding(Verdict.TIMEOUT, 0.0, "late")
    returned: Any = None

    @verifier("mine")
    def mine(answer: Answer) -> Any:
        return returned

    for value, result in ((True, ("correct", 1)), (False, ("wrong", 0)), (0.5, ("wrong", 0.5)), (late, late[:2])):
        returned = value
        assert asyncio.run(verifier_of("mine").verify(Answer(PROBLEM, "8"), {}))[:2] == result
    returned = 2.0
    with pytest.raises(ValueError, match="not a share"):
        asyncio.run(verifier_of("mine").verify(Answer(PROBLEM, "8"), {}))
    with pytest.raises(ConfigError, match="the domain 'math' has a verifier already"):
        verifier("math")(mine)
    with pytest.raises(ConfigError, match="Magistral's own"):
        register("format", lambda _: lambda case: 0.0, lowest=lambda _: 0.0)


@pytest.mark.slow
@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def f():\n    return 1 / 0\n\nf()", "fails with ZeroDivisionError: division by zero in line 6"),
        ("def f(:", "fails with SyntaxError"),
        ("sys.exit(3)", "fails with SystemExit: 3 in line 5"),
        ("os._exit(0)", "ended its process while loading: it ended with exit code 0"),
        (
            "while True:\n    pass",
            r"mine\.py:[56] in <module> does not come to an end: stopped after 9 s while loading",
        ),
        ('@reward("repetition")\ndef f(case): return 0', "'repetition' exists already"),
        ('@verifier("mine", needs="sandbox")\ndef f(answer): ...', "'mine' .*gives 'needs' or 'validate'"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_named(tmp_path, monkeypatch, body, message):
    monkeypatch.setattr(plugin_host, "START_S", 9.0 if "while True" in body else 60.0)
    chosen = settings(plugins=[plugin(tmp_path, body)], extra={"mine": 1})
    for _ in range(2 if "_exit" in body else 1):  # it is not kept
        with pytest.raises(ConfigError, match=message):
            choose(chosen)


@pytest.mark.slow
def test_a_call_that_fails_costs_one_completion_and_names_the_line(tmp_path):
    """The bad problem fails each time, in any event loop; the others around it, asked at the same time, are graded."""

    faults = read_table("verify/plugin_faults")

    def function(name: str, kind: str) -> str:
        chosen = (row for row in faults if ("await" in row["body"]) is (kind == "async def"))
        bad = "".join(f'    if case.problem.id == "{row["name"]}":\n        {row["body"]}\n' for row in chosen)
        return f'@reward("{name}")\n{kind} f(case: Case) -> float:\n{bad}    return 1.0\n\n'

    mine = plugin(tmp_path, function("mine", "def") + function("waits", "async def"))

    async def grade(name: str) -> list[Reward]:
        extra = {"waits" if name == "waits" else "mine": 0.5}
        scorer = CompletionScorer(settings(plugins=[mine], extra=extra, deadline_s=0.5), Grader())
        bad = msgspec.structs.replace(PROBLEM, id=name)
        return list(await asyncio.gather(*(scorer.score(each, GOOD, 50) for each in (PROBLEM, bad, PROBLEM, bad))))

    for row in faults:
        good, failed, other, again = asyncio.run(grade(row["name"]))
        assert good.extra == other.extra != {} and good.verdict is Verdict.CORRECT, row
        for bad in (failed, again):
            assert bad.verdict == row["verdict"] and not bad.verdict.graded and bad.extra == {}, row
            assert re.search(rf"reward \w+ \(.*mine\.py:\d+\): {row['reason']}", bad.reason), bad.reason


@pytest.mark.slow
@pytest.mark.usefixtures("restored")
def test_a_fault_of_a_verifier_costs_one_completion(tmp_path):
    mine = plugin(
        tmp_path,
        '@verifier("mine")\ndef f(answer: Answer) -> bool:\n    if answer.text == "5": return 1 / 0\n'
        '    return {"6": 7, "7": "yes"}.get(answer.text, True)',
    )
    choose(settings(plugins=[mine]))
    texts = [f"{THOUGHT}\\boxed{{{answer}}}" for answer in (5, 6, 7, 8)]
    *bad, good = rewards({"domain": "mine", "answer": "8"}, texts, plugins=[mine])
    assert [each.verdict for each in bad] == ["crash"] * 3 and good.verdict == "correct"
    for each, reason in zip(
        bad, (r"ZeroDivisionError: .*mine\.py:7 in f", "7, not a share", "'yes', which"), strict=True
    ):
        assert re.search(rf"verifier of mine \(.*mine\.py:5\).*{reason}", each.reason), each.reason


@pytest.mark.slow
@asynchronous
async def test_rewards_that_wait_overlap_and_the_callers_loop_goes_on(tmp_path):
    together = (
        'running, all_run = [], asyncio.Event()\n\n@reward("mine")\nasync def f(case: Case) -> float:\n'
        "    running.append(case)\n    if len(running) == 40:\n        all_run.set()\n"
        "    await all_run.wait()\n    await asyncio.sleep(0.2)\n    return 1.0"
    )
    scorer = CompletionScorer(
        settings(plugins=[plugin(tmp_path, together)], extra={"mine": 1}, deadline_s=60), Grader()
    )
    work = asyncio.gather(*(scorer.score(PROBLEM, GOOD, 50) for _ in range(40)))
    turns = 0
    while not work.done():
        await asyncio.sleep(0.01)
        turns += 1
    assert all(reward.extra == {"mine": 1.0} for reward in await work) and turns > 3, "all at once"


@pytest.mark.slow
def test_calls_that_nobody_waits_for_any_more_do_no_harm(tmp_path):
    """They are given up before they begin and while they run."""
    slow = '@reward("mine")\ndef f(case: Case) -> float:\n    time.sleep(0.3)\n    return 1.0'
    scorer = CompletionScorer(settings(plugins=[plugin(tmp_path, slow)], extra={"mine": 1.0}), Grader())

    async def grade() -> None:
        work = [asyncio.ensure_future(scorer.score(PROBLEM, GOOD, 50)) for _ in range(4)]
        await asyncio.sleep(0.1)
        for task in (work[0], work[2], work[3]):
            task.cancel()
        assert (await work[1]).extra == {"mine": 1.0}
        assert (await scorer.score(PROBLEM, GOOD, 50)).extra == {"mine": 1.0}

    asyncio.run(asyncio.wait_for(grade(), 60))


@pytest.mark.slow
def test_a_process_that_stands_still_before_a_call_begins_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(plugin_host, "SILENCE_S", 0.5)
    stops = (
        '@reward("mine")\ndef f(case: Case) -> float:\n'
        "    threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGSTOP]).start()\n    return float(os.getpid())"
    )
    chosen = settings(plugins=[plugin(tmp_path, stops)], extra={"mine": 1.0}, deadline_s=0.5)
    scorer = CompletionScorer(chosen, Grader())

    async def grade() -> list[float]:
        first = await scorer.score(PROBLEM, GOOD, 50)
        process = psutil.Process(int(first.extra["mine"]))
        while process.status() != psutil.STATUS_STOPPED:
            await asyncio.sleep(0.01)
        second = await asyncio.wait_for(scorer.score(PROBLEM, GOOD, 50), 60)
        return [first.extra["mine"], second.extra["mine"]]

    first, second = asyncio.run(grade())
    assert first != second, "another process gave the second value"


@pytest.mark.usefixtures("restored")
def test_a_file_that_registers_nothing_is_told(tmp_path):
    mine = plugin(tmp_path, "def short(case: Case) -> float:\n    return 1.0")
    with pytest.raises(ConfigError, match=r'mine\.py was read, and registers nothing: write @reward\("NAME"\)'):
        choose(settings(plugins=[mine], extra={"short": 1.0}))
