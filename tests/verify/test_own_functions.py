"""Rewards that a program has as functions: TRL's signature, and functions of this process: what they raise, and that
one which hangs is not waited for."""

import asyncio
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared.errors import ConfigError
from shared.types import Problem, Reward, Verdict
from tests.asynchronous import asynchronous
from tests.verify.grading import GOOD, PROBLEM, Grader, settings
from verify import plugins
from verify.chosen_rewards import choose
from verify.plugins import ByColumns, Case, registered, reward
from verify.reward import CompletionScorer

TALK = [{"role": "user", "content": "2+3?"}]


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    choose(settings(extra={"repetition": 0.1}))  # loads those that come with the project
    monkeypatch.setattr(plugins, "REWARDS", plugins.REWARDS.copy())
    monkeypatch.setattr("verify.chosen_rewards.REWARDS", plugins.REWARDS)


def case(**columns: Any) -> Case:
    problem = msgspec.structs.replace(PROBLEM, columns=columns)
    return Case(problem, "5+3", "8", "8", 3, Verdict.CORRECT, 1.0, settings(), 0, "<think>5+3</think>8", [7, 8, 2])


def score(function: Callable[..., Any], times: int = 1, problem: Problem = PROBLEM, **changes: Any) -> list[Reward]:
    """Rewards of completions, scored one after the other in one event loop."""
    name = registered(function)

    async def work() -> list[Reward]:
        scorer = CompletionScorer(settings(extra={name: 1.0}, **changes), Grader())
        return [await scorer.score(problem, GOOD, 50, token_ids=[7, 8, 2]) for _ in range(times)]

    return asyncio.run(work())


def test_a_function_with_trl_s_signature_gets_lists_of_texts_or_messages_and_the_columns_of_the_row():
    def everything(**given: Any) -> list[float]:
        seen.append(given)
        return [0.25]

    def chosen(completions, solution, level="easy"):
        seen.append((completions, solution, level))
        return [1]

    seen: list[Any] = []
    text = "<think>5+3</think>8"

    def both(prompts, completions, **given):
        return everything(prompts=prompts, completions=completions, **given)

    assert ByColumns("f", both)(case(answer="8", level=3)) == 0.25
    assert seen.pop() == {
        "prompts": [PROBLEM.text], "completions": [text], "completion_ids": [[7, 8, 2]], "answer": ["8"], "level": [3],
    }  # fmt: skip
    ByColumns("f", both)(case(prompt=TALK))
    assert (given := seen.pop())["prompts"] == [TALK] and "prompt" not in given
    assert given["completions"] == [[{"role": "assistant", "content": text}]]
    columns = ByColumns("f", chosen)
    assert columns.columns == {"prompt": "", "solution": "f", "level": ""}
    assert columns(case(solution="8", other=1)) == 1.0 and seen.pop() == ([text], ["8"], "easy")
    assert columns(case(level="hard")) == 1.0 and seen.pop() == ([text], [None], ["hard"])


@pytest.mark.parametrize(("returned", "value"), [([None], 0.0), ([True], 1.0), ((-0.5,), -0.5)])
def test_none_counts_nothing_as_in_trl(returned, value):
    assert ByColumns("f", lambda completions: returned)(case()) == value


@pytest.mark.parametrize("returned", [[], [1, 2], 0.5, None, ["x"]])
def test_what_is_no_list_with_a_number_for_each_completion_is_refused(returned):
    with pytest.raises(TypeError, match=re.escape(f"returned {returned!r}, not a list with a number or None")):
        ByColumns("f", lambda completions: returned)(case())


def test_functions_of_this_process_add_to_the_reward_by_their_name():
    def brief(case: Case) -> float:
        return 0.5 if case.text == GOOD and list(case.token_ids) == [7, 8, 2] else 0.0

    async def level(completions, level):
        await asyncio.sleep(0)
        return [0.25 * level[0]]

    [first] = score(brief)
    assert first.extra == {"brief": 0.5} and first.total == pytest.approx(1.6)
    [second] = score(level, problem=msgspec.structs.replace(PROBLEM, columns={"level": 3}))
    assert second.extra == {"level": 0.75}


@pytest.mark.parametrize(("body", "reason"), [
    (lambda case: 1 / 0, r"reward f \(.*test_own_functions\.py:\d+ in <lambda>\): ZeroDivisionError: division by zero"),
    (lambda case: sys.exit(3), r"reward f: RuntimeError: it raises SystemExit\(3\)"),
    (lambda case: next(iter([])), r"reward f.*StopIteration"),
    (lambda case: "much", r"reward f: returned 'much', not a number of at least 0"),
    (lambda case: -1.0, r"returned -1\.0, not a number of at least 0 \(@reward\(\"f\", lowest=-1\) allows it\)"),
], ids=["raises", "exits", "stops", "text", "below"])  # fmt: skip
def test_what_a_function_of_this_process_does_wrong_is_named_and_its_completion_is_not_graded(body, reason):
    reward("f")(body)
    [failed] = score(body)
    assert failed.verdict is Verdict.CRASH and not failed.verdict.graded
    assert re.search(reason, failed.reason), failed.reason


def test_a_function_that_hangs_is_given_up_at_its_deadline_and_not_asked_again_before_it_comes_back():
    release = threading.Event()

    def hangs(case: Case) -> float:
        release.wait()
        return 1.0

    try:
        first, second = score(hangs, times=2, deadline_s=0.05)
    finally:
        release.set()
    assert first.reason == "reward hangs: no value after 0.05 s" and first.verdict is Verdict.TIMEOUT
    assert second.reason == "reward hangs: an earlier call has not come to an end"


@asynchronous
async def test_calls_of_one_function_do_not_overlap_and_none_is_late_for_those_before_it():
    at_once, most = 0, 0

    def slow(case: Case) -> float:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        threading.Event().wait(0.02)
        at_once -= 1
        return 1.0

    registered(slow)
    scorer = CompletionScorer(settings(extra={"slow": 1.0}, deadline_s=0.2), Grader())
    scored = await asyncio.gather(*(scorer.score(PROBLEM, GOOD, 50) for _ in range(20)))
    assert most == 1 and all(each.extra == {"slow": 1.0} for each in scored)


def test_a_decorated_function_keeps_its_name_and_a_cell_that_runs_again_takes_the_place_of_the_one_before():
    @reward("brief", lowest=-1)
    def f(case: Case) -> float:
        return -0.5

    assert registered(f) == "brief" and score(f)[0].extra == {"brief": -0.5}
    cells: list[dict[str, Any]] = []
    for number in range(2):
        cells.append({"__name__": "__main__"})
        exec(compile(f"def mine(case): return {number}", f"/tmp/cell_{number}.py", "exec"), cells[-1])
        assert registered(cells[-1]["mine"]) == "mine" and score(cells[-1]["mine"])[0].extra == {"mine": number}


def test_what_cannot_be_a_reward_is_refused_with_the_repair():
    def repetition(case: Case) -> float:
        return 1.0

    with pytest.raises(ConfigError, match="'repetition' exists already"):
        registered(repetition)
    for wrong in ("f", lambda case: 1.0, 3):
        with pytest.raises(ConfigError, match="is no function with a name: write it with def"):
            registered(wrong)


def test_the_page_s_function_with_trl_s_signature_is_one():
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(re.findall(r"```python trl\n(.*?)```", page, re.DOTALL)[0], names)
    ends = ByColumns("f", names["ends_in_answer"])
    assert registered(names["ends_in_answer"]) == "ends_in_answer"
    assert [ends(case(solution=end)) for end in ("8", "9")] == [1.0, 0.0] and ends.columns["solution"] == "f"


@pytest.mark.slow
def test_a_plug_in_file_may_hold_a_function_with_trl_s_signature(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from verify.plugins import reward\n\n\n@reward('level')\n"
        "def level(completions, level, **more):\n"
        "    return [level[0] if more['extra'] == [1] else None for _ in completions]\n\n\n"
        "@reward('wrong')\ndef wrong(completions):\n    return 1.0\n"
    )
    chosen = settings(plugins=[str(path)], extra={"level": 0.5})
    assert choose(chosen).columns == {"prompt": "", "*": "", "level": "level"}
    problem = msgspec.structs.replace(PROBLEM, columns={"level": 2, "extra": 1})

    async def work(extra: dict[str, float]) -> Reward:
        return await CompletionScorer(chosen.model_copy(update={"extra": extra}), Grader()).score(problem, GOOD, 50)

    assert asyncio.run(work({"level": 0.5})).extra == {"level": 1.0}
    failed = asyncio.run(work({"wrong": 1.0}))
    assert re.search(r"reward wrong \(.*mine\.py:\d+\): TypeError: returned 1\.0, not a list", failed.reason)
