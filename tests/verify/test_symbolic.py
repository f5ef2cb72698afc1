r"""Equality by meaning: a table of pairs, rewritings that keep the verdict, and limits."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from shared.types import Verdict
from tests.processor_time import at_most
from tests.verify.blocking import check_completion, is_equivalent
from verify.math.algebra import equal
from verify.math.plain import decide

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


def read_pairs(name: str) -> list[tuple[str, str]]:
    """Lines of ground_truth, tab, answer."""
    lines = (Path(__file__).parent / name).read_text(encoding="utf-8").splitlines()
    return [(ground_truth, answer) for ground_truth, answer in (line.split("\t") for line in lines)]


EQUAL = read_pairs("equal.tsv")
DIFFERENT = read_pairs("different.tsv")


def judge(ground_truth: str, answer: str) -> Verdict:
    """The two stages of the pool without its process."""
    return decide(ground_truth, answer) or equal(ground_truth, answer)


@pytest.mark.parametrize(("ground_truth", "answer"), EQUAL)
def test_equal_in_meaning(ground_truth: str, answer: str) -> None:
    assert judge(ground_truth, answer) is Verdict.CORRECT


@pytest.mark.parametrize(("ground_truth", "answer"), DIFFERENT)
def test_different_in_meaning(ground_truth: str, answer: str) -> None:
    assert judge(ground_truth, answer) is Verdict.WRONG


def test_table_is_large_enough() -> None:
    assert len(EQUAL) + len(DIFFERENT) >= 200
    assert len(set(EQUAL)) == len(EQUAL) and len(set(DIFFERENT)) == len(DIFFERENT)


PLAIN = re.compile(r"^-?(?:\d*\.?\d+|\d+/\d+|\\d?frac\{\d+\}\{\d+\}|\d\^\{?\d+\}?|\d+!|\d*\\sqrt\{\d+\})$")


@pytest.mark.parametrize(
    "wrapping",
    [
        "{}",
        " {} ",
        "${}$",
        "\\({}\\)",
        "{}.",
        "\\left({}\\right)",
        "\\displaystyle {}",
        "{}\\!",
        "\\ {}",
        "{} \\text{{ cm}}",
    ],
)
def test_wrapping_keeps_every_verdict(wrapping: str) -> None:
    pairs = [
        (ground_truth, answer)
        for ground_truth, answer in EQUAL + DIFFERENT
        if PLAIN.match(answer) and PLAIN.match(ground_truth)
    ]
    assert len(pairs) > 30
    for ground_truth, answer in pairs:
        assert judge(ground_truth, wrapping.format(answer)) is judge(ground_truth, answer), (
            ground_truth,
            wrapping.format(answer),
        )


def test_equality_of_exact_values_is_symmetric() -> None:
    for ground_truth, answer in EQUAL + DIFFERENT:
        if "333" in answer + ground_truth or "866" in answer or not answer:
            continue
        correct = judge(ground_truth, answer) is Verdict.CORRECT
        assert correct is (judge(answer, ground_truth) is Verdict.CORRECT), (ground_truth, answer)


def test_true_answer_that_is_not_understood_is_unverifiable() -> None:
    assert judge("\\foo{x}{", "3x") is Verdict.UNVERIFIABLE
    assert judge("", "3") is Verdict.UNVERIFIABLE
    assert judge("1" * 500, "3") is Verdict.UNVERIFIABLE


def test_answer_that_is_not_understood_is_wrong_unless_spelled_alike() -> None:
    assert judge("x+1", "\\foo{x}{") is Verdict.WRONG
    assert judge("\\foo{x}", "$\\foo{x}$.") is Verdict.CORRECT


def test_last_box_after_the_thoughts_is_graded() -> None:
    assert check_completion("5", "<think>\\boxed{4}</think>It is \\boxed{5}.") is Verdict.CORRECT
    assert check_completion("5", "<think>\\boxed{5}</think>It is 5.") is Verdict.NO_ANSWER
    assert check_completion("5", "<think>So far \\boxed{5}") is Verdict.NO_ANSWER, "cut off in its reasoning"
    assert check_completion("5", "[THINK]\\boxed{4}[/THINK]It is \\boxed{5}.") is Verdict.CORRECT
    assert check_completion("5", "[THINK]\\boxed{5}[/THINK]It is 5.") is Verdict.NO_ANSWER
    assert check_completion("5", "\\boxed{4} is wrong.</think>It is \\boxed{5}.") is Verdict.CORRECT, (
        "opened by a template"
    )
    assert check_completion("5", "\\boxed{4} is wrong.[/THINK]It is \\boxed{5}.") is Verdict.CORRECT
    assert check_completion("5", "\\boxed{4} no, \\boxed{5}") is Verdict.CORRECT
    assert check_completion("5", "\\boxed{5} no, \\boxed{4}. In fact 5.") is Verdict.WRONG
    assert check_completion("\\boxed{5}", "\\boxed{5}") is Verdict.CORRECT


def test_blocking_entry_uses_a_worker_process() -> None:
    assert is_equivalent("\\sqrt{8}", "\\boxed{2\\sqrt2}")
    assert not is_equivalent("\\sqrt{8}", "3\\sqrt2")


HOSTILE = [
    "ﷺ" * 1990,
    "½" * 1990,
    "x^2<-1",
    "|x|<3i",
    "\\setminus",
    "\\{1,\\ldots,n\\}",
    "2_x",
    "\\begin{vmatrix}1&2\\\\3&4\\end{vmatrix}^T",
    "一分之" + "一" + "万" * 1100,
    "9**9**9**9",
    "9^{9^{9^9}}",
    "5^(5^(5^5))",
    "(10^9)!",
    "10000000!",
    "(((9!)!)!)!",
    "{" * 1_000_000,
    "(" * 100_000,
    "\\frac{" * 300,
    "\\sqrt{" * 150 + "2" + "}" * 150,
    "7\0",
    "\ud800",
    "__import__('os').system('touch /tmp/owned')",
    "9" * 5_000,
    "1e999999",
    "0.\\overline{" + "3" * 390 + "}",
    "1+" * 900 + "1",
    "2^" * 90 + "2",
    "a" * 1_999,
    "\\left" * 300,
    ", " * 900,
    "1,2," * 450,
    "\\text{" * 100,
    "1" + "!" * 500,
    "\\begin{pmatrix}" + "1&" * 600 + "\\end{pmatrix}",
    "{1}^{" * 100 + "}" * 100,
    "-" * 1_990,
    "\\pm" * 500,
]


@pytest.mark.parametrize("answer", HOSTILE, ids=lambda answer: repr(answer[:16]))
def test_cheap_stage_never_raises_and_is_quick(answer: str) -> None:
    for ground_truth in ("7", "x^2+1", "(1,2)", "\\text{yes}"):
        with at_most(0.5):
            verdict = decide(ground_truth, answer)
        assert verdict is None or verdict is Verdict.WRONG or (ground_truth == "7" and answer == "7\0")


def test_real_answers_equal_themselves_and_not_their_neighbours() -> None:
    for name in ("gsm8k_test", "math500"):
        path = DATA / f"{name}.jsonl.gz"
        if not path.is_file():
            pytest.skip(f"{path} is not there: the shared data folder lies beside the checkout")
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            answers = [json.loads(line)["answer"] for line in lines]
        assert all(decide(answer, answer) is Verdict.CORRECT for answer in answers)
        assert all(decide(answer, f"$ {answer} $.") is Verdict.CORRECT for answer in answers)
        assert all(decide(answer, answer + "1") is not Verdict.CORRECT for answer in answers if "text" not in answer)
