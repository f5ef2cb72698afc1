r"""The paper's reward on hand-written completions: every rule alone and in combination, counted out by hand.

Each row says what the paper gives: format 0.1 (0 and nothing else when broken), correctness 0.9, length 0 to -0.1 over
the last 20 of 100 tokens, language 0.1. Source: Magistral (2506.10910), section 2.2.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import pytest

from shared.sections import RewardWeights
from shared.types import Problem, Verdict
from verify.math.plain import decide
from verify.reward import CompletionScorer

WEIGHTS = RewardWeights(length_max=100, overlong_buffer=20, refuse=[])
APPLES = Problem("a", "Tom has 5 apples. Tom buys 3 more. How many apples does Tom have now?", "8")
POMMES = Problem("f", "Tom a 5 pommes. Il achète 3 pommes de plus. Combien de pommes a-t-il ?", "8", language="fr")
QUOTIENT = Problem("q", "What is one half of one half? Give the answer as a fraction.", "\\frac{1}{4}")
DOUBLE = Problem("c", "Write a program that reads a whole number and prints its double.", "", domain="code")

EN = "Tom starts with 5 apples and buys 3 more, so we add them: 5+3=8."
FR = "Tom commence avec 5 pommes et il en achète 3 de plus, donc on les ajoute."
ZH = "汤姆有五个苹果，又买了三个，所以一共有八个苹果。"
HALF = "One half of one half is one quarter."
PLAN = "We read the number, multiply it by two, and print the result."
BOX, WRONG = "The answer is \\boxed{8}.", "The answer is \\boxed{9}."
REPONSE = "La réponse est \\boxed{8}."
DOUBLE_IT = "This program doubles it.\n```python\nprint(2 * int(input()))\n```\n"
TRIPLE_IT = "This program doubles it.\n```python\nprint(3 * int(input()))\n```\n"


def think(reasoning: str, rest: str) -> str:
    return f"<think>{reasoning}</think>{rest}"


def control(reasoning: str, rest: str) -> str:
    return f"[THINK]{reasoning}[/THINK]{rest}"


class Row(NamedTuple):
    """A completion and the four parts of its reward."""

    name: str
    response: str
    parts: tuple[float, float, float, float]
    """format, correctness, length, language"""
    tokens: int = 50
    problem: Problem = APPLES
    opened: bool = False


NOTHING = (0.0, 0.0, 0.0, 0.0)
TABLE = [
    # each part alone
    Row("all right", think(EN, BOX), (0.1, 0.9, 0, 0.1)),
    Row("format only", think(FR, WRONG), (0.1, 0, 0, 0)),
    Row("format and language", think(EN, WRONG), (0.1, 0, 0, 0.1)),
    Row("format and correctness", think(FR, BOX), (0.1, 0.9, 0, 0)),
    Row("format and full length penalty", think(FR, WRONG), (0.1, 0, -0.1, 0), tokens=100),
    # length: 80 is free, then 0.005 a token, never more than 0.1
    Row("last free token", think(EN, BOX), (0.1, 0.9, 0, 0.1), tokens=80),
    Row("first token that costs", think(EN, BOX), (0.1, 0.9, -0.005, 0.1), tokens=81),
    Row("half of the penalty", think(EN, BOX), (0.1, 0.9, -0.05, 0.1), tokens=90),
    Row("at the limit", think(EN, BOX), (0.1, 0.9, -0.1, 0.1), tokens=100),
    Row("above the limit", think(EN, BOX), (0.1, 0.9, -0.1, 0.1), tokens=101),
    Row("far above the limit", think(EN, BOX), (0.1, 0.9, -0.1, 0.1), tokens=10_000),
    Row("wrong and long", think(EN, WRONG), (0.1, 0, -0.05, 0.1), tokens=90),
    Row("other language and long", think(FR, BOX), (0.1, 0.9, -0.05, 0), tokens=90),
    # correctness: the last box after the reasoning, by meaning
    Row("equal by meaning", think(HALF, "The answer is \\boxed{0.25}."), (0.1, 0.9, 0, 0.1), problem=QUOTIENT),
    Row("another fraction", think(HALF, "The answer is \\boxed{\\frac14}."), (0.1, 0.9, 0, 0.1), problem=QUOTIENT),
    Row("inverse", think(HALF, "The answer is \\boxed{4}."), (0.1, 0, 0, 0.1), problem=QUOTIENT),
    Row("last box wins, right", think(EN, "Not \\boxed{9}: the answer is \\boxed{8}."), (0.1, 0.9, 0, 0.1)),
    Row("last box wins, wrong", think(EN, "Not \\boxed{8}: the answer is \\boxed{9}."), (0.1, 0, 0, 0.1)),
    Row("box of the reasoning is not graded", think(EN + " \\boxed{8}", WRONG), (0.1, 0, 0, 0.1)),
    Row("two answers are none", think(EN, "The answer is \\boxed{8, 9}."), (0.1, 0, 0, 0.1)),
    Row("empty box", think(EN, "The answer is \\boxed{}."), (0.1, 0, 0, 0.1)),
    # language: problem, reasoning and answer
    Row("all French", think(FR, REPONSE), (0.1, 0.9, 0, 0.1), problem=POMMES),
    Row("English reasoning on a French problem", think(EN, REPONSE), (0.1, 0.9, 0, 0), problem=POMMES),
    Row("English answer to a French problem", think(FR, BOX), (0.1, 0.9, 0, 0), problem=POMMES),
    Row("Chinese reasoning", think(ZH, BOX), (0.1, 0.9, 0, 0)),
    Row("half of the reasoning French", think(f"{EN} {FR}", BOX), (0.1, 0.9, 0, 0)),
    Row("formulas as reasoning", think("$5+3=8$", BOX), (0.1, 0.9, 0, 0.1)),
    Row("no words at all", think("$5+3=8$", "\\boxed{8}"), (0.1, 0.9, 0, 0)),
    Row("empty reasoning", think("", BOX), (0.1, 0.9, 0, 0)),
    Row("French only inside code", think(f"{EN} `la somme des pommes`", BOX), (0.1, 0.9, 0, 0.1)),
    # format: each rule broken, everything else right
    Row("no reasoning", BOX, NOTHING),
    Row("space before the reasoning", " " + think(EN, BOX), NOTHING),
    Row("words before the reasoning", "Sure. " + think(EN, BOX), NOTHING),
    Row("reasoning never close", f"<think>{EN} {BOX}", NOTHING),
    Row("close before open", f"</think>{EN}<think>{BOX}", NOTHING),
    Row("two closes", f"<think>{EN}</think></think>{BOX}", NOTHING),
    Row("nested reasoning", f"<think><think>{EN}</think></think>{BOX}", NOTHING),
    Row("two reasoning", think(EN, "") + think(EN, BOX), NOTHING),
    Row("no box", think(EN, "The answer is 8."), NOTHING),
    Row("box only in the reasoning", think(EN + " \\boxed{8}", "The answer is 8."), NOTHING),
    Row("upper case tag", f"<THINK>{EN}</THINK>{BOX}", NOTHING),
    Row("broken and long: no penalty either", BOX, NOTHING, tokens=500),
    # truncated by the token limit
    Row("cut in the tag", "<thi", NOTHING, tokens=100),
    Row("cut in the reasoning", f"<think>{EN}", NOTHING, tokens=100),
    Row("cut after the reasoning", f"<think>{EN}</think>The ans", NOTHING, tokens=100),
    Row("cut in the box", think(EN, "The answer is \\boxed{8"), NOTHING, tokens=100),
    Row("cut after the box", think(EN, "The answer is \\boxed{8} because"), (0.1, 0.9, -0.1, 0.1), tokens=100),
    Row("nothing sampled", "", NOTHING, tokens=0),
    # templates that open the thought
    Row("opened by the template", f"{EN}</think>{BOX}", (0.1, 0.9, 0, 0.1), opened=True),
    Row("opened, wrong answer", f"{EN}</think>{WRONG}", (0.1, 0, 0, 0.1), opened=True),
    Row("opened and opened again", think(EN, BOX), NOTHING, opened=True),
    Row("opened and never closed", f"{EN} {BOX}", NOTHING, opened=True),
    Row("opened and cut", f"{EN}</think>The answer is \\boxed{{", NOTHING, opened=True, tokens=100),
    Row("not opened by the template", f"{EN}</think>{BOX}", NOTHING),
    # control tokens
    Row("control tokens", control(EN, BOX), (0.1, 0.9, 0, 0.1)),
    Row("control tokens, wrong and long", control(EN, WRONG), (0.1, 0, -0.05, 0.1), tokens=90),
    Row("control tokens opened by the template", f"{EN}[/THINK]{BOX}", (0.1, 0.9, 0, 0.1), opened=True),
    Row("control token never closes", f"[THINK]{EN} {BOX}", NOTHING),
    Row("mixed pair", f"[THINK]{EN}</think>{BOX}", NOTHING),
    Row("two control pairs", control(EN, "") + control(EN, BOX), NOTHING),
    # code: a fenced block that names its language
    Row("program that passes", think(PLAN, DOUBLE_IT), (0.1, 0.9, 0, 0.1), problem=DOUBLE),
    Row("program that fails", think(PLAN, TRIPLE_IT), (0.1, 0, 0, 0.1), problem=DOUBLE),
    Row("first program counts", think(PLAN, DOUBLE_IT + TRIPLE_IT), (0.1, 0.9, 0, 0.1), problem=DOUBLE),
    Row("first program fails", think(PLAN, TRIPLE_IT + DOUBLE_IT), (0.1, 0, 0, 0.1), problem=DOUBLE),
    Row("fence without a language", think(PLAN, "```\nprint(2 * int(input()))\n```"), NOTHING, problem=DOUBLE),
    Row("program in the reasoning", think(DOUBLE_IT, "See above."), NOTHING, problem=DOUBLE),
    Row("program cut off", think(PLAN, "```python\nprint(2 *"), NOTHING, problem=DOUBLE, tokens=100),
    Row("a box is no program", think(PLAN, BOX), NOTHING, problem=DOUBLE),
]


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


def test_table_is_long_enough_and_names_are_unique() -> None:
    assert len(TABLE) >= 40 and len({row.name for row in TABLE}) == len(TABLE)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_reward_is_the_papers(row: Row) -> None:
    check(row, WEIGHTS, row.parts)


REFUSED = {"empty box", "empty reasoning"}
"""what the default of `reward.refuse` changes in the table: nothing is paid, for the format counts as broken"""


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_by_default_only_empty_boxes_and_thoughts_differ(row: Row) -> None:
    check(row, RewardWeights(length_max=100, overlong_buffer=20), NOTHING if row.name in REFUSED else row.parts)


def check(row: Row, weights: RewardWeights, parts: tuple[float, float, float, float]) -> None:
    scorer = CompletionScorer(weights, Plain(), Plain())
    found = asyncio.run(scorer.score(row.problem, row.response, row.tokens, opened=row.opened))
    assert (found.format, found.correctness, found.length, found.language) == pytest.approx(parts), found
    assert found.total == pytest.approx(sum(parts))
    assert found.extra == {}
