r"""Formats and boxes; answers that are equal or different in meaning, exact arithmetic, ground truths, hostile texts.

A row of cases.tsv says what mathematicians would say, not what the code does; a rule that needs a row changed is a
wrong rule. One row was changed: five of seven languages write 1,23 for 1.23, and where the true answer is one number no
list equals it. written.tsv has names, parts, choices, currencies and dress as models and data sets write them.
"""

import re
from collections import defaultdict
from contextlib import suppress
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.types import Verdict
from tests.processor_time import at_most
from tests.tables import read_table
from tests.verify.blocking import check_completion, judge
from tests.verify.hostile import hostile, written
from tests.verify.rewritings import DIFFERENT, SAME
from verify.code_block import first_program
from verify.extract import extract_answer, within_limits
from verify.format import Parts, check_format, check_tokens
from verify.ground_truth import may_be_placeholder, not_an_answer
from verify.math.dress import dress_of
from verify.math.number import TooLarge, exact_value
from verify.math.plain import decide

Rows = list[tuple[bool, str, str]]
"""(equal, ground truth, answer)"""


def by_category(*names: str) -> dict[str, Rows]:
    rows: defaultdict[str, Rows] = defaultdict(list)
    for name in names:
        for line in (Path(__file__).parent / f"{name}.tsv").read_text(encoding="utf-8").splitlines():
            if line and not line.startswith("#"):
                category, sign, ground_truth, answer = line.split("\t")
                rows[category if name == "cases" else f"{name}, {category}"].append((sign == "=", ground_truth, answer))
    return rows


CASES = by_category("cases", "plain", "written")


@pytest.mark.sampled(24)
@pytest.mark.parametrize("category", CASES)
def test_verdicts(category):
    """Both ways round; but decimals stand for an exact number only as an answer, and conditions are no answer."""
    pairs = list(CASES[category])
    if not category.endswith(("decimal", "condition", "unsolved")):
        exact = [row for row in pairs if row[2] and not re.search(r"\d\.(?:\d*333|8660)", row[1] + row[2])]
        pairs += [(same, answer, truth) for same, truth, answer in exact]
    assert not [pair for pair in pairs if (judge(*pair[1:]) is Verdict.CORRECT) is not pair[0]]
    assert {same for same, *_ in pairs} == ({False} if category == "unsolved" else {True, False})


def test_a_condition_is_no_answer_where_its_solution_is_asked_for():
    """Else a policy would be paid for repeating the problem."""
    assert not [row for row in CASES["condition"] if judge(row[2], row[1]) is Verdict.CORRECT]


NUMBER = re.compile(r"^-?(?:\d*\.?\d+|\d+/\d+|\\d?frac\{\d+\}\{\d+\}|\d\^\{?\d+\}?|\d+!|\d*\\sqrt\{\d+\})$")
WRAPPINGS = (" {} ", "${}$", "\\({}\\)", "{}.", "\\left({}\\right)", "\\displaystyle {}", "{}\\!", "{} \\text{{ cm}}")


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_wrapping_keeps_every_verdict(wrapping):
    pairs = [row[1:] for rows in by_category("plain").values() for row in rows]
    pairs = [(truth, answer) for truth, answer in pairs if NUMBER.match(truth) and NUMBER.match(answer)]
    assert len(pairs) > 30
    for truth, answer in pairs:
        assert judge(truth, wrapping.format(answer)) is judge(truth, answer), (truth, answer)


ANSWERS = ["12", "-3400", "\\frac{3}{4}", "-\\frac{7}{2}", "(1,2)", "(1,-2,3)", "x^2 + 3x - 2", "2\\pi", "[0,\\infty)"]


@pytest.mark.parametrize("name", [*SAME, *DIFFERENT])
def test_each_rewriting_applies_and_is_judged_right(name):
    changed = {answer: (SAME | DIFFERENT)[name](answer) for answer in ANSWERS}
    pairs = [(answer, new) for answer, new in changed.items() if new is not None]
    assert pairs and not [pair for pair in pairs if (judge(*pair) is Verdict.CORRECT) is not (name in SAME)]


def test_only_what_is_spelled_alike_equals_what_is_not_understood():
    for ground_truth, answer in (("\\foo{x}{", "3x"), ("", "3"), ("1" * 500, "3")):
        assert judge(ground_truth, answer) is Verdict.UNVERIFIABLE
    assert judge("x+1", "\\foo{x}{") is Verdict.WRONG and judge("\\foo{x}", "$\\foo{x}$.") is Verdict.CORRECT


@pytest.mark.parametrize("row", read_table("verify/formats", kind="completion"), ids=lambda row: row["text"])
def test_last_box_after_the_thoughts_is_graded(row):
    for ground_truth in ("5", "\\boxed{5}"):
        assert check_completion(ground_truth, row["text"]) == row["verdict"]


@pytest.mark.parametrize("row", read_table("verify/formats", kind="box"), ids=lambda row: row["text"])
def test_last_balanced_box(row):
    assert extract_answer(row["text"]) == row["answer"]


def test_limits_of_an_answer():
    assert all(within_limits(text) for text in ("1" * 400, "x " * 1000, "{" * 200, "{}" * 300))
    assert not any(within_limits(text) for text in ("1" * 401, "x = " + "1" * 401, "x " * 1001, "{" * 201))


@pytest.mark.parametrize("row", read_table("verify/arithmetic"), ids=lambda row: row["text"][:20])
def test_values_by_hand_and_what_is_no_number_or_too_large(row):
    with at_most(1.0):
        try:
            value = exact_value(row["text"])
        except TooLarge:
            assert row["kind"] == "huge"
        else:
            assert value == (Fraction(row["value"]) if row["kind"] == "value" else None) and row["kind"] != "huge"


@settings(max_examples=100)
@given(st.integers(-(10**12), 10**12), st.integers(1, 10**6))
def test_every_fraction_is_read_back(top, bottom):
    value = Fraction(top, bottom)
    assert exact_value(f"\\frac{{{top}}}{{{bottom}}}") == exact_value(f"{top}/{bottom}") == value
    assert exact_value(f"{top:,}") == top


@settings(max_examples=300)
@given(st.text(alphabet="0123456789+-*/^!(){}., \\fracsqrtbinome", max_size=60))
def test_any_text_is_answered(text):
    with suppress(TooLarge):  # an answer as well; any other exception fails
        exact_value(text)


@pytest.mark.parametrize("row", read_table("verify/ground_truths"), ids=lambda row: row["answer"])
def test_what_no_completion_equals_is_named_and_an_answer_is_one(row):
    assert not_an_answer(row["answer"]) == row.get("what", "")
    if row["kind"] != "refused":
        assert may_be_placeholder(row["answer"]) is (row["kind"] == "doubtful")
    if row["kind"] == "dressed":  # what stands around a value is taken away and told
        assert dress_of(row["answer"]) and judge(row["answer"], row["value"]) is Verdict.CORRECT


def test_cheap_stage_and_extraction_never_raise_and_are_quick():
    for text in ("{" * 1_000_000, "\\boxed{" * 200_000, "\\boxed{" + "}" * 1_000_000, "\\" * 1_000_000):
        with at_most(0.5):
            extract_answer("\\boxed{1}" + text)
    for ground_truth, answer in hostile(700, seed=2):
        with at_most(0.5):
            decide(ground_truth, answer)
            extract_answer(f"so \\boxed{{{answer}}}")


@pytest.mark.parametrize("answer", written("cheap"), ids=lambda answer: ascii(answer[:16]))
def test_cheap_stage_finds_no_hostile_answer_right(answer):
    for ground_truth in ("7", "x^2+1", "(1,2)", "\\text{yes}"):
        with at_most(0.5):
            verdict = decide(ground_truth, answer)
        assert verdict is None or verdict is Verdict.WRONG or (ground_truth == "7" and answer == "7\0")


SPELLED = {1: "[THINK]", 2: "[/THINK]", 3: "so 2+3=5", 4: "\\boxed{5}", 5: "[THINK]", 6: "[/THINK]", 7: "<think>",
           8: "</think>"}  # fmt: skip
"""1 and 2 are control tokens; 5 and 6 stand for the same letters in ordinary tokens"""


def test_well_formed_response_is_cut_in_two():
    result = check_format("<think>2+3=5</think>The answer is \\boxed{5}.")
    assert result == Parts("2+3=5", "The answer is \\boxed{5}.", "5", "") and result.ok
    assert check_format("<think>\\boxed{1}</think>\\boxed{2}, so \\boxed{3}").answer == "3", "the last of the solution"
    empty = check_format("<think></think>\\boxed{}")
    assert empty.ok and empty.answer == "", "well-formed, but empty"
    assert check_format("a</think>\\boxed{5}", opened=True).ok, "opened by the template"
    assert not check_format("<think>a</think>\\boxed{5}", opened=True).ok


@pytest.mark.parametrize("row", read_table("verify/formats", kind="broken"), ids=lambda row: row["text"])
def test_each_broken_rule_is_named(row):
    result = check_format(row["text"])
    assert not result.ok and row["rule"] in result.failed and result.answer is None


@pytest.mark.parametrize("row", read_table("verify/formats", kind="tokens"), ids=str)
def test_control_tokens_are_counted_as_tokens(row):
    """Letters close nothing, but a model with control tokens may still write the tags as text."""
    result = check_tokens(row["ids"], (1, 2), lambda ids: "".join(SPELLED[i] for i in ids), opened=row["opened"])
    assert result.ok is not bool(row["rule"]) and row["rule"] in result.failed
    if result.ok:
        reasoning = "".join(SPELLED[i] for i in row["ids"] if i in (3, 5, 6))
        assert result == Parts(reasoning, "\\boxed{5}", "5", "")


@pytest.mark.parametrize("row", read_table("verify/code_blocks"), ids=lambda row: row["solution"])
def test_first_fenced_block_that_names_a_language(row):
    """In lists, quotations and other fences, too."""
    assert first_program(row["solution"]) == (tuple(row["block"]) if row["block"] else None)


def test_fences_are_found_in_linear_time():
    for text in ("```" + "a" * 200_000 + "`", "`" * 200_000 + "a`", "```py\n" * 50_000, "```" + " " * 200_000 + "`"):
        with at_most(1):
            first_program(text)
