r"""What a completion is paid: the paper's reward on hand-written completions, counted out by hand, open problems, and
the guard against a verifier that fails.

A row of rewards.jsonl says what the paper gives: format 0.1 (0 and nothing else when broken), correctness 0.9, length 0
to -0.1 over the last 20 of 100 tokens, language 0.1. Source: Magistral (2506.10910), section 2.2.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import msgspec
import pytest

from shared.config import Config
from shared.errors import ConfigError, RunError
from shared.metrics import METRICS
from shared.sections import RewardWeights
from shared.types import Problem, Reward, Verdict
from tests.tables import read_table
from tests.verify.grading import BAD, GOOD, PROBLEM, Grader, reward, settings
from verify.language import Consistency, consistency
from verify.reward import CompletionScorer, length_penalty, score
from verify.scorer import FailureWindow
from verify.verifiers import read_problem

ICE = {"problem": "Why does ice float on water?", "answer": "Because it is less dense than water.", "domain": "open"}
FLOATS = "<think>Ice is made of water, but it takes more room.</think>Water grows: \\boxed{\\text{it is lighter}}."
POMMES = "Tom a 5 pommes. Il achète 3 pommes de plus. Combien de pommes a-t-il ?"
FRENCH = "<think>Tom commence avec 5 et il en achète 3 : 5+3=8.</think>La réponse est \\boxed{8}."
PROBLEMS = {
    "apples": Problem("a", "Tom has 5 apples. Tom buys 3 more. How many apples does Tom have now?", "8"),
    "pommes": Problem("f", POMMES, "8", language="fr"),
    "quotient": Problem("q", "What is one half of one half? Give the answer as a fraction.", "\\frac{1}{4}"),
    "double": Problem("c", "Write a program that reads a whole number and prints its double.", "", domain="code"),
    "ice": read_problem(ICE, "row"),
}
EMPTY = ("empty box", "empty reasoning")
"""for which nothing is paid by default (`reward.refuse`): the format counts as broken"""


@pytest.mark.parametrize("row", read_table("verify/rewards"), ids=lambda row: row["name"])
def test_reward_is_the_papers_and_by_default_only_empty_boxes_and_thoughts_differ(row: dict[str, Any]) -> None:
    for changes, parts in (({"refuse": []}, row["parts"]), ({}, [0] * 4 if row["name"] in EMPTY else row["parts"])):
        problem, opened, grader = PROBLEMS[row.get("problem", "apples")], row.get("opened", False), Grader()
        found = reward(row["response"], problem, row.get("tokens", 50), opened=opened, grader=grader, **changes)
        assert [found.format, found.correctness, found.length, found.language] == pytest.approx(parts), found
        assert found.total == pytest.approx(sum(parts)) and found.extra == {}
        assert found.verdict == row.get("verdict", found.verdict) and found.verdict.graded
        assert not grader.asked or problem.verified and found.format > 0


@pytest.mark.parametrize(
    ("tokens", "penalty"),
    [
        (0, 0),
        (31_999, 0),
        (32_000, 0),
        (34_000, -0.025),
        (36_000, -0.05),
        (40_000, -0.1),
        (40_001, -0.1),
        (10**9, -0.1),
    ],
)
def test_length_penalty_by_hand(tokens: int, penalty: float) -> None:
    assert length_penalty(tokens, 40_000, 8_000) == pytest.approx(penalty, abs=1e-12)
    assert length_penalty(tokens, 40_000, 8_000, weight=0.5) == pytest.approx(5 * penalty, abs=1e-12)


def test_impossible_limits_name_the_settings() -> None:
    for longest, buffer in ((0, 32), (16, 32), (100, 0)):
        with pytest.raises(ConfigError, match=r"reward\.overlong_buffer.*reward\.length_max"):
            length_penalty(10, longest, buffer)
    with pytest.raises(ConfigError, match=r"reward\.length_max"):
        asyncio.run(CompletionScorer(RewardWeights(), Grader()).score(PROBLEM, GOOD, 10))


def test_the_language_that_a_row_asks_for_is_the_one_that_is_paid() -> None:
    asked = msgspec.structs.replace(PROBLEM, reasoning_language="fr")
    assert [reward(text, problem).language for text in (GOOD, FRENCH) for problem in (PROBLEM, asked)] == [
        0.1,
        0,
        0,
        0.1,
    ]
    english = reward(GOOD, asked)
    assert english.consistent is False and "expected fr" in english.reason


def test_record_says_what_was_found() -> None:
    found = reward(GOOD)
    assert (found.verdict, found.answer, found.consistent, found.languages) == ("correct", "8", True, ("en",) * 3)
    broken = reward("The answer is \\boxed{8}.")
    assert (broken.verdict, broken.answer, broken.consistent) == (Verdict.NO_ANSWER, None, None)
    assert "does not start with <think>" in broken.reason


@pytest.mark.parametrize("verdict", [Verdict.TIMEOUT, Verdict.CRASH, Verdict.UNVERIFIABLE])
def test_failure_of_the_verifier_is_not_a_grade(verdict: Verdict) -> None:
    found = reward(GOOD, grader=Grader(verdict))
    assert (found.verdict, found.verdict.graded, found.correctness) == (verdict, False, 0.0)


def test_code_without_a_code_verifier_is_not_graded() -> None:
    text = "<think>We print one.</think>\n```py\nprint(1)\n```"
    found = asyncio.run(CompletionScorer(settings(), Grader()).score(PROBLEMS["double"], text, 5))
    assert found.verdict is Verdict.UNVERIFIABLE and "no sandbox" in found.reason


def test_undetermined_language_earns_what_the_setting_says() -> None:
    wordless, half = (f"<think>$5+3=8$</think>{answer}\\boxed{{8}}" for answer in ("", "The answer is "))
    for mode, earned in (("neutral", [0, 0.1, 0.1]), ("nothing", [0, 0, 0.1]), ("bonus", [0.1, 0.1, 0.1])):
        options = {"language": {"undetermined": mode}}
        assert [reward(text, options=options).language for text in (wordless, half, GOOD)] == earned


def test_the_language_of_a_long_response_is_detected_outside_of_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    in_loop = []

    def noted(*parts: str, **options: Any) -> Consistency:
        in_loop.append(threading.current_thread() is threading.main_thread())
        return consistency(*parts, **options)

    monkeypatch.setattr("verify.reward.consistency", noted)
    long = GOOD.replace("</think>", " We count them again and again, one after the other." * 1_000 + "</think>")
    assert reward(GOOD).total == reward(long).total == pytest.approx(1.1)
    assert in_loop == [True, False]


def test_blocking_score_takes_rows_and_settings_and_any_thread() -> None:
    assert score({"problem": PROBLEM.text, "answer": 8}, GOOD).total == pytest.approx(1.1)
    config = Config.model_validate({"rollout": {"max_completion_tokens": 100}, "reward": {"overlong_buffer": 20}})
    assert score(PROBLEM, GOOD, config, tokens=90).total == pytest.approx(1.05)
    assert score(PROBLEM, GOOD.removeprefix("<think>"), config, opened=True).total == pytest.approx(1.1)
    assert score(ICE, FLOATS).verdict is Verdict.OPEN

    async def inside_a_loop() -> Reward:
        return score(PROBLEM, BAD, settings())

    assert asyncio.run(inside_a_loop()).total == pytest.approx(0.2)


def test_an_open_problem_is_neither_right_nor_wrong() -> None:
    found = reward(FLOATS, ICE, extra={"tests_passed": 1.0, "cosine_length": 1.0, "repetition": 1.0})
    assert found.extra == {"tests_passed": 0.0, "cosine_length": 0.0, "repetition": 0.0} and found.share is None
    assert (
        found.verdict is Verdict.OPEN and found.total == pytest.approx(0.2) and "no verifier is asked" in found.reason
    )
    assert PROBLEM.verified and not PROBLEMS["ice"].verified


def test_window_forgives_few_failures_forgets_old_ones_and_stops_at_too_many() -> None:
    window = FailureWindow(0.05, size=200)
    for verdict in [Verdict.OPEN] * 200 + [Verdict.CRASH, *[Verdict.WRONG] * 19] * 50:
        window.add(verdict)
    assert window.counts["crash"] == 10 and window.counts["wrong"] == 190 and window.share == pytest.approx(0.05)
    with pytest.raises(RunError):
        for _ in range(2):
            window.add(Verdict.UNVERIFIABLE)
    window = FailureWindow(0.05, size=400)
    for index in range(199):
        window.add(Verdict.TIMEOUT if index % 2 else Verdict.CORRECT)
    with pytest.raises(RunError, match=r"timeout 99.*reward\.max_failure_share = 0\.05"):
        window.add(Verdict.WRONG)


def test_every_verdict_has_a_metric() -> None:
    assert {f"verify/{verdict.value.replace(' ', '_')}" for verdict in Verdict} <= METRICS.keys()
