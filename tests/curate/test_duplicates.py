"""Near duplicates, contradicting answers, templates and contamination."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from curate.duplicates import CONFLICT, DuplicatesStage, NgramIndex, jaccard, read_text, same_drawings
from tests.curate.deciding import reasons_of

BASE = "Tom has $5$ apples and buys $\\frac{3}{4}$ as many pears as apples. How many pieces of fruit has Tom in all?"
SOCKS = "I have 10 socks in my drawer: 4 white, 4 brown and 2 blue. In how many ways can I choose a pair of socks"


def decide(
    rows: list[dict[str, Any]], against: list[dict[str, Any]] | None = None, folder: Path | None = None
) -> list[str]:
    """ "kept", or the reason, of each row."""
    files = []
    if against is not None and folder is not None:
        files = [folder / "test.jsonl"]
        files[0].write_text("".join(json.dumps(row) + "\n" for row in against))

    named = [{"id": f"r{number}", **fields} for number, fields in enumerate(rows, 1)]
    return reasons_of(DuplicatesStage(against=files), named)


def math(problem: str, answer: str = "1") -> dict[str, Any]:
    return {"problem": problem, "answer": answer}


@pytest.mark.parametrize(
    "copy",
    [
        BASE.upper().replace("\\FRAC", "\\frac"),
        BASE.replace(".", " ;").replace("$", "").replace("How", "  how"),
        BASE.replace("\\frac{3}{4}", "\\dfrac { 3 } {4}\\,").replace("$5$", "\\(5\\)"),
        BASE.replace("How many pieces of fruit has Tom in all?", "Find how many pieces of fruit Tom has in all."),
        BASE.replace("5", "５").replace("Tom", "Tom\u00a0"),
        BASE.replace("$5$", "$5^{}_{}$"),
    ],
)
def test_copies_are_found(copy: str) -> None:
    assert decide([math(BASE, "\\frac{35}{4}"), math(copy, "8.75")]) == ["kept", "near duplicate"]


def test_other_numbers_are_another_problem() -> None:
    assert decide([math(BASE, "1"), math(BASE.replace("5", "6"), "1")]) == ["kept", "kept"]


def test_similar_texts_with_other_answers_are_other_problems() -> None:
    rows = [math(f"{SOCKS} of one colour?", "13"), math(f"{SOCKS} of different colours?", "32")]
    assert decide(rows) == ["kept", "kept"]
    rows = [math("If $(x+2)(x-3)=14$, find the sum of the roots.", "1"),
            math("If $(x+2)(x-3)=14$, find the product of the roots.", "-20")]  # fmt: skip
    assert decide(rows) == ["kept", "kept"]
    assert decide([math("Sketch $f(x)-1$. What is $f(x)-1$ at $1$?", "2"),
                   math("Sketch $f(x-1)$. What is $f(x-1)$ at $1$?", "3")]) == ["kept", "kept"]  # fmt: skip


def test_contradicting_copies_all_go() -> None:
    rows = [math(BASE, "7"), math("Something else entirely, with 3 words?", "2"), math(BASE.lower(), "8"),
            math(BASE.replace("How many", "Find how many"), "7.0")]  # fmt: skip
    assert decide(rows) == [CONFLICT, "kept", CONFLICT, CONFLICT]


def test_equal_answers_in_other_forms_do_not_contradict() -> None:
    rows = [math(BASE, "\\frac{1}{2}"), math(BASE, "0.5"), math(BASE, "\\tfrac12")]
    assert decide(rows)[1:] == ["near duplicate"] * 2


def test_short_texts_are_compared_by_what_they_ask() -> None:
    texts = ("Compute $\\sin 60^\\circ$.", "What is $\\sin 60^{\\circ}$?", "Find $\\cos 60^\\circ$.")
    assert decide([math(text, "a") for text in texts]) == ["kept", "near duplicate", "kept"]


def test_drawings_tell_problems_apart() -> None:
    text = 'In the figure, find $x$. [asy] label("${}$", (0,0)); draw((0,0)--({},1)); [/asy]'
    rows = [math(text.format(12, 1), "3"), math(text.format(48, 9), "4"), math(text.format(12, 1), "3")]
    assert decide(rows) == ["kept", "kept", "near duplicate"]
    assert same_drawings(read_text(rows[0]["problem"]), read_text("In the figure, find $x$."))


def test_programming_problems() -> None:
    tests = [{"function": "f", "args": [1], "expected": 2}]
    text = "Write a function to count the squares in a rectangle, for example 3 times 4."
    rows = [
        {"problem": text, "domain": "code", "tests": tests},
        {"problem": text.upper(), "domain": "code", "tests": [*tests, *tests]},
        {"problem": text.replace("squares", "corners"), "domain": "code", "tests": [{**tests[0], "expected": 3}]},
    ]
    assert decide(rows) == ["kept", "near duplicate", "kept"]


def test_contamination(tmp_path: Path) -> None:
    item = {"id": "test/1", **math(BASE, "8.75")}
    long = "Here is a story about fruit that goes on for some time before it begins. " * 3
    rows = [
        math(BASE.lower(), "8"),  # another answer does not help
        math(long + BASE + " Then add 100 to it.", "108.75"),  # embedded
        math(BASE.replace("5", "6"), "1"),  # another problem
        math("How many apples has Tom?", "5"),
    ]
    found = decide(rows, [item], tmp_path)
    assert found == ["contamination: test.jsonl", "contamination: test.jsonl", "kept", "kept"]
    assert decide([math(BASE), math(BASE)], [item], tmp_path) == ["contamination: test.jsonl"] * 2


def test_standing_phrases_are_no_contamination() -> None:
    phrase = "can be written as $\\frac{m}{n}$ where $m$ and $n$ are relatively prime positive integers. Find $m+n$."
    one = read_text(f"The probability that six dice of different colours show no two equal faces in a row {phrase}")
    two = read_text(f"A bug walks along the edges of a cube until it has seen every corner; the chance {phrase}")
    assert NgramIndex([one]).sharing(two) == [] and NgramIndex([one]).sharing(one) == [(0, 1.0)]


def test_text_is_taken_apart() -> None:
    text = read_text("Let $x\\leq 10{,}000$ and \\text{ find } \\left( 2.50 \\right)^{} + 007 [asy] dot((1,2)); [/asy]")
    assert text.tokens == ("let", "x", "<", "=", "10000", "and", "find", "(", "2.50", ")", "+", "7")
    assert sorted(text.numbers) == ["10000", "2.50", "7"] and text.core == text.tokens[1:5] + text.tokens[7:]
    assert text.drawing == ("[", "asy", "]", "dot", "(", "(", "1", "2", ")", ")", "[", "/", "asy", "]")
    assert read_text("求 3 个数").tokens == ("求", "3", "个", "数") and read_text("求三个数的和").is_chinese
    assert jaccard(frozenset("abc"), frozenset("bcd")) == 0.5


def test_chinese_is_compared_by_characters(tmp_path: Path) -> None:
    text = "小明有 5 个苹果，又买了 3 个梨，请问小明一共有多少个水果？"
    assert decide([math(text, "8"), math(text.replace("，", " , "), "8"), math(text.replace("5", "6"), "9")]) == [
        "kept", "near duplicate", "kept",
    ]  # fmt: skip
