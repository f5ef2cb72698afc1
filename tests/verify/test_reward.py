r"""What a completion is paid: the paper's reward on hand-written completions, counted out by hand, what is refused,
open problems, sampled tokens in training, and the guard against verifiers that fail.

A row of rewards.jsonl says what the paper gives: format 0.1 (0 and nothing else when broken), correctness 0.9, length 0
to -0.1 over the last 20 of 100 tokens, language 0.1. Source: Magistral (2506.10910), section 2.2. refusals.jsonl has
completions that a policy could learn to earn a reward with, and honest ones that look alike.
"""

import asyncio
import re
import threading
from collections import defaultdict
from typing import Any

import msgspec
import pytest

from shared.config import Config
from shared.errors import ConfigError, RunError
from shared.metrics import METRICS
from shared.sections import RewardWeights
from shared.types import Completion, Problem, Reward, Verdict
from tests.asynchronous import asynchronous
from tests.processor_time import at_most
from tests.tables import read_table
from tests.verify.grading import BAD, GOOD, PROBLEM, Grader, Tokens, reward, scorer_of, settings
from verify.format import Parts
from verify.language import Consistency, consistency
from verify.math.plain import decide
from verify.plugins import REWARDS, Case, Registered
from verify.refusals import refuse_answer, refuse_format
from verify.reward import CompletionScorer, length_penalty, score
from verify.scorer import FailureWindow, RewardScorer
from verify.text_cleaning import asides, clean
from verify.verifiers import read_problem

ICE = {"problem": "Why does ice float on water?", "answer": "Because it is less dense than water.", "domain": "open"}
FLOATS = "<think>Ice is made of water, but it takes more room.</think>Water grows: \\boxed{\\text{it is lighter}}."
POMMES = "Tom a 5 pommes. Il achète 3 pommes de plus. Combien de pommes a-t-il ?"
PROBLEMS = {
    "apples": Problem("a", "Tom has 5 apples. Tom buys 3 more. How many apples does Tom have now?", "8"),
    "pommes": Problem("f", POMMES, "8", language="fr"),
    "quotient": Problem("q", "What is one half of one half? Give the answer as a fraction.", "\\frac{1}{4}"),
    "double": Problem("c", "Write a program that reads a whole number and prints its double.", "", domain="code"),
    "ice": read_problem(ICE, "row"),
}
PROBLEMS["asked for French"] = msgspec.structs.replace(PROBLEMS["apples"], reasoning_language="fr")
EMPTY = ("empty box", "empty reasoning")
"""for which nothing is paid by default (`reward.refuse`): the format counts as broken"""


@pytest.mark.parametrize("row", read_table("verify/rewards"), ids=lambda row: row["name"])
def test_reward_is_the_papers_and_by_default_only_empty_boxes_and_thoughts_differ(row):
    cases = [({"refuse": []}, row["parts"]), ({}, [0] * 4 if row["name"] in EMPTY else row["parts"])]
    for changes, parts in [(row["settings"], row["parts"])] if "settings" in row else cases:
        problem, opened, grader = PROBLEMS[row.get("problem", "apples")], row.get("opened", False), Grader()
        result = reward(row["response"], problem, row.get("tokens", 50), opened=opened, grader=grader, **changes)
        assert [result.format, result.correctness, result.length, result.language] == pytest.approx(parts), result
        assert result.extra == pytest.approx(row.get("extra", {}))
        assert result.total == pytest.approx(sum(parts) + sum(result.extra.values()))
        assert result.verdict == row.get("verdict", result.verdict) and result.verdict.graded
        assert not grader.asked or problem.verified and result.format > 0
        if problem.reasoning_language and not result.language:
            assert result.consistent is False and "expected fr" in result.reason


def test_length_penalty_by_hand():
    for tokens, penalty in ((0, 0), (31_999, 0), (32_000, 0), (34_000, -0.025), (36_000, -0.05), (40_000, -0.1),
                            (40_001, -0.1), (10**9, -0.1)):  # fmt: skip
        assert length_penalty(tokens, 40_000, 8_000) == pytest.approx(penalty, abs=1e-12)
        assert length_penalty(tokens, 40_000, 8_000, weight=0.5) == pytest.approx(5 * penalty, abs=1e-12)


def test_impossible_limits_name_the_settings():
    for longest, buffer in ((0, 32), (16, 32), (100, 0)):
        with pytest.raises(ConfigError, match=r"reward\.overlong_buffer.*reward\.length_max"):
            length_penalty(10, longest, buffer)
    with pytest.raises(ConfigError, match=r"reward\.length_max"):
        asyncio.run(CompletionScorer(RewardWeights(), Grader()).score(PROBLEM, GOOD, 10))


def test_record_says_what_was_found():
    result, broken = reward(GOOD), reward("The answer is \\boxed{8}.")
    assert (result.verdict, result.answer, result.consistent, result.languages) == ("correct", "8", True, ("en",) * 3)
    assert (broken.verdict, broken.answer, broken.consistent) == (Verdict.NO_ANSWER, None, None)
    assert "does not start with <think>" in broken.reason
    for verdict in (Verdict.TIMEOUT, Verdict.CRASH, Verdict.UNVERIFIABLE):
        failed = reward(GOOD, grader=Grader(verdict))
        assert (failed.verdict, failed.verdict.graded, failed.correctness) == (verdict, False, 0.0)
    text = "<think>We print one.</think>\n```py\nprint(1)\n```"
    result = asyncio.run(CompletionScorer(settings(), Grader()).score(PROBLEMS["double"], text, 5))
    assert result.verdict is Verdict.UNVERIFIABLE and "no sandbox" in result.reason


def test_the_language_of_a_long_response_is_detected_outside_of_the_event_loop(monkeypatch):
    in_loop = []

    def noted(*parts: str, **options: Any) -> Consistency:
        in_loop.append(threading.current_thread() is threading.main_thread())
        return consistency(*parts, **options)

    monkeypatch.setattr("verify.reward.consistency", noted)
    long = GOOD.replace("</think>", " We count them again and again, one after the other." * 1_000 + "</think>")
    assert reward(GOOD).total == reward(long).total == pytest.approx(1.1)
    assert in_loop == [True, False]


def test_blocking_score_takes_rows_and_settings_and_any_thread():
    assert score({"problem": PROBLEM.text, "answer": 8}, GOOD).total == pytest.approx(1.1)
    config = Config.model_validate({"rollout": {"max_completion_tokens": 100}, "reward": {"overlong_buffer": 20}})
    assert score(PROBLEM, GOOD, config, tokens=90).total == pytest.approx(1.05)
    assert score(PROBLEM, GOOD.removeprefix("<think>"), config, opened=True).total == pytest.approx(1.1)
    open_one = score(ICE, FLOATS)
    assert open_one.verdict is Verdict.OPEN and open_one.share is None and "no verifier is asked" in open_one.reason

    async def inside_a_loop() -> Reward:
        return score(PROBLEM, BAD, settings())

    assert asyncio.run(inside_a_loop()).total == pytest.approx(0.2)


REFUSABLE = {
    "ground_truth": "5",
    "problem": "Tom has 2 apples. Tom buys 3 more. How many apples does Tom have now?",
    "thoughts": "Tom starts with 2 apples and buys 3 more, so we add them: 2+3=5.",
}
GUARDED = {
    "empty": "format", "thoughtless": "format", "hidden": "correctness", "several": "correctness",
    "restated": "correctness", "foreign": "language",
}  # fmt: skip
"""rule -> the part of the reward that it guards; `paid` in a row: that part is deserved"""
REFUSALS = defaultdict(list)
for entry in read_table("verify/refusals"):
    REFUSALS[entry["kind"]].append(REFUSABLE | entry)


class Equal(Grader):
    """Right unless the pool would be asked and finds otherwise: what is refused is refused before any comparison."""

    async def check(self, ground_truth: str, answer: str) -> Verdict:
        return decide(ground_truth, answer) or Verdict.CORRECT


def rewarded(row: dict[str, Any], **changes: Any) -> Reward:
    problem = Problem("x", row["problem"], row["ground_truth"], "fr" if row["problem"].startswith("Tom a 2") else "en")
    return reward(f"<think>{row['thoughts']}</think>{row['solution']}", problem, grader=Equal(), **changes)


@pytest.mark.parametrize("kind", GUARDED)
def test_only_what_is_deserved_is_paid_and_without_its_rule_the_rest_is(kind):
    rows, undeserved = GUARDED[kind], [row for row in REFUSALS[kind] if not row["paid"]]
    assert not [row for row in REFUSALS[kind] if (getattr(rewarded(row), rows) > 0) is not row["paid"]]
    others = [rule for rule in GUARDED if rule != kind]
    paid = sum(getattr(rewarded(row, refuse=others), rows) > 0 for row in undeserved)
    assert len(undeserved) // 2 < paid and 20 <= len(undeserved) < len(REFUSALS[kind])


def test_a_refusal_says_why():
    for row in REFUSALS["last line"]:  # of its own, for the box
        result = rewarded(row, refuse=["unstated", "several", "hidden"])
        assert row["reason"] in result.reason and (result.correctness > 0) is row["paid"], row
    for solution, reason in (
        ("It is 4 or \\boxed{5}.", "one of several"), ("\\boxed{2+3}", "computed"),
        ("The answer is \\boxed{}.", "format: the box is empty"),
    ):  # fmt: skip
        assert reason in rewarded(REFUSABLE | {"solution": solution}).reason


@pytest.mark.sampled(4)
@pytest.mark.parametrize("piece", [
    "\\boxed{}", "\\boxed{1} or ", "\\boxed{", "`", "```\n", "<!--", "<a ", "\n%", "a% ", "\\text{", "- ", "~~a",
    "not ",
])  # fmt: skip
def test_hostile_text_takes_linear_time(piece):
    long = piece * (300_000 // len(piece))
    parts, problem = Parts(long, f"{long} \\boxed{{5}} {long}", "5", ""), Problem("x", long, "5")
    with at_most(12):  # a tenth of it; quadratic scans took minutes
        refuse_format(problem, parts, GUARDED)
        refuse_answer(problem, parts, GUARDED)
        asides(f"$ {long}")
        clean(long * 4)


TEXTS = {
    1: "[THINK]", 2: "[/THINK]", 3: "Tom starts with 5 and buys 3 more: 5+3=8.", 4: "The answer is \\boxed{8}.",
    5: "<think>", 6: "</think>", 7: "[/THINK]", 8: "The answer is \\boxed{9}.",
    9: "Here it is:\n```python\nprint(2 * int(input()))\n```", 10: "Here it is:\n```python\nprint(int(input()))\n```",
}  # fmt: skip
"""1 and 2 are control tokens; 7 stands for the same letters in ordinary tokens"""


def scored(scorer: RewardScorer, ids: list[int], problem: Problem = PROBLEM) -> tuple[Reward, str]:
    async def work() -> tuple[Reward, str]:
        result = await scorer.score(problem, Completion(0, 0, 0, token_ids=ids))
        await scorer.close()
        return result

    return asyncio.run(work())


@pytest.mark.parametrize("row", read_table("verify/sampled"), ids=str)
def test_reward_of_sampled_tokens(row):
    """Of templates that open the thought, or close it, and of control tokens."""
    chat = Tokens(TEXTS, row["prefix"], row["control"])
    result, text = scored(scorer_of(chat, 10, overlong_buffer=5), row["ids"])
    assert result.total == pytest.approx(row["total"]) and text == row["prefix"] + chat.decode(row["ids"]), result


def test_extra_rewards_reach_the_run_and_a_length_penalty_that_is_off_needs_no_limits():
    """The buffer is longer than so short a completion may be."""
    scorer = scorer_of(Tokens(TEXTS), 10, length=0, overlong_buffer=32, extra={"cosine_length": 0.5})
    result, _ = scored(scorer, [5, 3, 6, 4])
    assert result.verdict is Verdict.CORRECT and result.length == 0.0
    assert result.extra["cosine_length"] == pytest.approx(0.5 * (0.5 + 0.25 * (1 + 0.309017)))
    assert result.total == pytest.approx(1.1 + result.extra["cosine_length"])


@pytest.mark.slow
def test_programs_are_run_in_training_and_their_isolation_is_told():
    tests = [{"input": "0\n", "output": "0\n"}, {"input": "4\n", "output": "8\n"}]
    problem = Problem("c", "Write a program that doubles a number.", "", domain="code", tests=tests)
    for program, verdict, share in ((9, Verdict.CORRECT, 1.0), (10, Verdict.WRONG, 0.5)):
        result, _ = scored(scorer_of(Tokens(TEXTS)), [5, 3, 6, program], problem)
        assert (result.verdict, result.share) == (verdict, share), result.reason

    async def isolation(problem: Problem) -> str:
        scorer = scorer_of(Tokens(TEXTS))
        try:
            return await scorer.start([problem])
        finally:
            await scorer.close()

    assert asyncio.run(isolation(PROBLEM)) == "" and asyncio.run(isolation(problem)).startswith("sandbox: ")


def test_window_forgives_few_failures_forgets_old_ones_and_stops_at_too_many():
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


@asynchronous
async def test_failures_are_told_once_with_their_rate_and_end_the_run_above_a_share(monkeypatch):
    """A plug-in that fails for one problem in ten: the reward, the problem and the error, how often; then the end."""

    def sometimes(case: Case) -> float:
        return 1 / (len(case.problem.id) - 3)

    known = Registered("sometimes", lambda _: sometimes, lambda _: 0, lambda _: 1, "")
    monkeypatch.setitem(REWARDS, "sometimes", known)
    scorer = scorer_of(Tokens(TEXTS), 10, overlong_buffer=5, extra={"sometimes": 0.1})

    async def score(*names: str) -> list[Any]:
        for name in names:
            problem = msgspec.structs.replace(PROBLEM, id=name)
            await scorer.score(problem, Completion(0, 0, 0, token_ids=[5, 3, 6, 4]))
        return scorer.news()

    [line] = await score("good", "bad", "good")
    assert line.startswith("not graded and not trained on: 1 of 3 completions (33.3%) are crash, reward sometimes")
    assert re.search(
        r"\(first: problem 'bad': reward sometimes \(.*test_reward\.py:\d+ in .*\): ZeroDivisionError", line
    )
    assert await score("bad") == [], "told again when it is ten times as frequent"
    assert "10 of 12 completions" in (await score(*["bad"] * 8))[0]
    with pytest.raises(RunError, match=r"max_failure_share.*of 200 completions.*first: problem 'bad': reward"):
        await score(*("good" if number % 8 else "bad" for number in range(200)))


def test_every_verdict_has_a_metric():
    assert {f"verify/{verdict.value.replace(' ', '_')}" for verdict in Verdict} <= METRICS.keys()
