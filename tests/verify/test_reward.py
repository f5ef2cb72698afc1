"""What a reward records and asks (test_reward_table.py: its parts), and the guard against a failing verifier."""

from __future__ import annotations

import asyncio
import itertools
import threading

import msgspec
import pytest

from shared.errors import ConfigError, RunError
from shared.sections import RewardWeights
from shared.types import Problem, Reward, Verdict
from verify.language import Consistency, consistency
from verify.math.plain import decide
from verify.reward import CompletionScorer
from verify.scorer import FailureWindow

WEIGHTS = RewardWeights(length_max=100, overlong_buffer=20)
PROBLEM = Problem("1", "Tom has 5 apples. Tom buys 3 more. How many apples does Tom have now?", "8")
GOOD = "<think>Tom starts with 5 and buys 3 more: 5+3=8.</think>The answer is \\boxed{8}."


class Fast:
    """A grader without processes, or one that always answers the same."""

    def __init__(self, fixed: Verdict | None = None) -> None:
        self.fixed = fixed
        self.asked = 0

    async def check(self, ground_truth: str, answer: str) -> Verdict:
        self.asked += 1
        return self.fixed or decide(ground_truth, answer) or Verdict.UNVERIFIABLE


def reward(response: str, tokens: int = 10, problem: Problem = PROBLEM, fixed: Verdict | None = None) -> Reward:
    return asyncio.run(CompletionScorer(WEIGHTS, Fast(fixed)).score(problem, response, tokens))


EN, FR = ("Tom starts with 5 and buys 3 more: 5+3=8.", "Tom commence avec 5 et il en achète 3 : 5+3=8.")


def test_the_language_that_a_row_asks_for_is_the_one_that_is_paid() -> None:
    asked = msgspec.structs.replace(PROBLEM, reasoning_language="fr")
    french, english = f"<think>{FR}</think>La réponse est \\boxed{{8}}.", GOOD
    assert reward(french, problem=asked).language == reward(english).language == WEIGHTS.language
    assert reward(english, problem=asked).language == reward(french).language == 0
    assert reward(english, problem=asked).consistent is False and "expected fr" in reward(english, problem=asked).reason


def test_record_says_what_was_found() -> None:
    found = reward(GOOD)
    assert (found.verdict, found.answer, found.consistent) == (Verdict.CORRECT, "8", True)
    assert found.languages[:2] == ("en", "en")
    broken = reward("The answer is \\boxed{8}.")
    assert (broken.verdict, broken.answer, broken.consistent) == (Verdict.NO_ANSWER, None, None)
    assert "does not start with <think>" in broken.reason


@pytest.mark.parametrize("verdict", [Verdict.TIMEOUT, Verdict.CRASH, Verdict.UNVERIFIABLE])
def test_failure_of_the_verifier_is_not_a_grade(verdict: Verdict) -> None:
    found = reward(GOOD, fixed=verdict)
    assert found.verdict is verdict and not found.verdict.graded
    assert found.correctness == 0.0


def test_broken_format_asks_no_verifier() -> None:
    grader = Fast()
    asyncio.run(CompletionScorer(WEIGHTS, grader).score(PROBLEM, "8", 10))
    assert grader.asked == 0


def test_unresolved_length_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match="reward.length_max"):
        asyncio.run(CompletionScorer(RewardWeights(), Fast()).score(PROBLEM, GOOD, 10))


def test_every_combination_of_components_adds_up() -> None:
    for right, french, tokens in itertools.product((True, False), (True, False), (10, 90, 100)):
        found = reward(f"<think>{FR if french else EN}</think>The answer is \\boxed{{{8 if right else 9}}}.", tokens)
        expected = 0.1 + 0.9 * right + 0.1 * (not french) - {10: 0.0, 90: 0.05, 100: 0.1}[tokens]
        assert found.total == pytest.approx(expected)


def test_window_stops_at_too_many_failures_and_names_the_setting() -> None:
    window = FailureWindow(0.05, size=400)
    for index in range(199):
        window.add(Verdict.TIMEOUT if index % 2 else Verdict.CORRECT)
    with pytest.raises(RunError, match=r"timeout 99.*reward\.max_failure_share = 0\.05"):
        window.add(Verdict.WRONG)


def test_window_forgives_few_failures_and_forgets_old_ones() -> None:
    window = FailureWindow(0.05, size=200)
    for index in range(1000):
        window.add(Verdict.CRASH if index % 20 == 0 else Verdict.WRONG)
    assert window.counts["crash"] == 10 and window.counts["wrong"] == 190
    assert window.share == pytest.approx(0.05)
    with pytest.raises(RunError):
        for _ in range(2):
            window.add(Verdict.UNVERIFIABLE)


def test_the_language_of_a_long_response_is_detected_outside_of_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    in_loop = []

    def noted(*parts: str, **options: object) -> Consistency:
        in_loop.append(threading.current_thread() is threading.main_thread())
        return consistency(*parts, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("verify.reward.consistency", noted)
    long = GOOD.replace("</think>", " We count them again and again, one after the other." * 1_000 + "</think>")
    assert reward(GOOD).total == reward(long).total == pytest.approx(1.1)
    assert in_loop == [True, False]
