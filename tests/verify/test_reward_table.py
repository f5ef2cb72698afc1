r"""The paper's reward on hand-written completions: every rule alone and in combination, counted out by hand.

Each row says what the paper gives: format 0.1 (0 and nothing else when broken), correctness 0.9, length 0 to -0.1 over
the last 20 of 100 tokens, language 0.1. Source: Magistral (2506.10910), section 2.2.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shared.sections import RewardWeights
from shared.types import Problem, Verdict
from tests.tables import read_table
from verify.math.plain import decide
from verify.reward import CompletionScorer

POMMES = "Tom a 5 pommes. Il achète 3 pommes de plus. Combien de pommes a-t-il ?"
APPLES = "Tom has 5 apples. Tom buys 3 more. How many apples does Tom have now?"
PROBLEMS = {
    "apples": Problem("a", APPLES, "8"),
    "pommes": Problem(
        "f", "Tom a 5 pommes. Il achète 3 pommes de plus. Combien de pommes a-t-il ?", "8", language="fr"
    ),
    "quotient": Problem("q", "What is one half of one half? Give the answer as a fraction.", "\\frac{1}{4}"),
    "double": Problem("c", "Write a program that reads a whole number and prints its double.", "", domain="code"),
}
TABLE = read_table("verify/rewards")
REFUSED = {"empty box", "empty reasoning"}
"""for which nothing is paid by default (`reward.refuse`): the format counts as broken"""


class Plain:
    """Answers without SymPy; programs by comparing them with the right one (in boxes: test_code_reward.py)."""

    async def check(self, ground_truth: str, answer: str) -> Verdict:
        return decide(ground_truth, answer) or Verdict.UNVERIFIABLE

    async def run(self, problem: Problem, source: str, language: str, group: int) -> Plain:
        assert language == "python"
        self.share = 1.0 if source == "print(2 * int(input()))\n" else 0.25
        self.verdict = Verdict.CORRECT if self.share == 1 else Verdict.WRONG
        return self

    verdict = Verdict.WRONG
    share = 0.0
    reason = ""


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row["name"])
def test_reward_is_the_papers_and_by_default_only_empty_boxes_and_thoughts_differ(row: dict[str, Any]) -> None:
    for refuse, parts in (([], row["parts"]), (None, [0] * 4 if row["name"] in REFUSED else row["parts"])):
        weights = RewardWeights(length_max=100, overlong_buffer=20, **({} if refuse is None else {"refuse": refuse}))
        scorer = CompletionScorer(weights, Plain(), Plain())
        problem, opened = PROBLEMS[row.get("problem", "apples")], row.get("opened", False)
        reward = asyncio.run(scorer.score(problem, row["response"], row.get("tokens", 50), opened=opened))
        assert [reward.format, reward.correctness, reward.length, reward.language] == pytest.approx(parts), reward
        assert reward.total == pytest.approx(sum(parts)) and reward.extra == {}
