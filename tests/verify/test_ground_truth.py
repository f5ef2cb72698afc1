"""Which ground truths are refused before a run, which are told with a count, and which are answers."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from shared.types import Verdict
from verify.answer_checker import check_answer
from verify.ground_truth import may_be_placeholder, not_an_answer
from verify.math.dress import dress_of

REFUSED = {
    "a placeholder": (
        *("notfound", "NotFound", "not_found", "Not found.", r"\text{notfound}", r"\mathrm{NOT\_FOUND}", "$notfound$"),
        *("NaN", "null", "N/A", "#N/A", "[INVALID]", "<unknown>", "[None]", "{{answer}}", "<answer>", "NO_ANSWER"),
        *("noanswer", "No final answer", "proof", r"\textbf{Proof}", "unanswered", "[object Object]", "TBD", "—", "?"),
        *("See the solution", "Your answer here", "答案见图", "见解析", "无答案", "keine Antwort", "нет ответа", "  "),
    ),
    "a picture": (
        r"\includegraphics[width=3cm]{a.png}",
        '<img src="7.gif">',
        "![graph](x)",
        "figure7.svg",
        "[asy]x[/asy]",
    ),
    "written in HTML": ("5 <!-- checked -->", "<math><mn>5</mn></math>", '<table class="a">', "<sup>2"),
    "damaged: a backslash and the letter after it were read as one control character": (
        *("\x0crac{3}{4}", "\x08inom{4}{2}", "2\times 3", "x \neq 2", "\right)"),
    ),
    "the text of a Python or JSON value": ("['5']", '{"answer": 5}', "('5',)", '["7"]'),
    "a value with a remark beside it": (
        *("7 (rounded to 2 d.p.)", "7 (correct to 3 s.f.)", "5 (2 marks)", "5 [1 point]", "around 30", "5 or so"),
        *("about 7", "roughly $5$", "5, because 2 + 3 = 5", "5 (accept 4.9 to 5.1)"),
        r"5\text{ (to the nearest integer)}",
    ),
}
READ = {
    "<b>5</b>": "5", "5<br>": "5", "5<br/>": "5", "5&nbsp;cm": "5\\text{ cm}",
    "x<sup>2</sup>": "x^2", "&pi;/2": "\\pi/2",
    "30&deg;": "30^\\circ", "&#8722;4": "-4", "x &lt; 5": "x<5",
    '<span class="m">5</span>': "5", "5 <SUB>10</SUB>": "5",
    r"\\frac{3}{4}": "3/4", r"\\sqrt{2}": r"\sqrt2", r"2\\pi": r"2\pi", r"\\text{ even }": "even", "b'5'": "5",
    r"5\\,\\mathrm{cm}": r"5\text{ cm}", "= 5": "5", r"=\frac{3}{4}": "3/4", "=x+1": "1+x", "5 (approx)": "5",
    "5 (approx.)": "5", "approximately 12 km": "12\\text{ km}",
}  # fmt: skip
"""answers with something around them -> the value"""
TOLD = (
    "None",
    "none",
    r"\text{None}",
    "unknown",
    "Unknown.",
    "error",
    "ERROR",
    "nil",
    "invalid",
    r"\text{failed}",
)
ANSWERS = (
    *(
        "5",
        "-4",
        r"\frac{3}{4}",
        r"x \approx 0.74",
        r"\approx 3",
        "x=5",
        "f(x)=2x+1",
        "x<5",
        "3<x<5",
        "a<b",
        "1=1",
        "<",
    ),
    *(
        r"\emptyset",
        r"\text{no solution}",
        r"\text{undefined}",
        r"\text{does not exist}",
        r"\text{impossible}",
        "E",
        "N",
    ),
    *(
        r"\text{cannot be determined}",
        r"\text{true}",
        r"\text{Alice}",
        r"\text{no}",
        r"\{1, 2\}",
        "(1, 2)",
        "[2, 5)",
        "n!",
    ),
    *(
        r"\begin{pmatrix} a & b \\ c & d \end{pmatrix}",
        r"\begin{cases} x\\y \end{cases}",
        r"\begin{pmatrix}a\\\pi\end{pmatrix}",
    ),
    *(
        r"\xi",
        r"x \ne 2",
        "x\n+ 1",
        "5\t",
        r"\text{7 o'clock}",
        r"3\text{ are missing}",
        r"\text{around the circle}",
        "HELLO",
    ),
    *(
        r"\text{point }A",
        "f''(x)",
        r"7\text{ points}",
        r"\text{Na}",
        "NP",
        "3:2",
        r"5\text{ (C)}",
        r"\text{(C)}",
        "a' = b'",
    ),
    *(
        "Prove",
        r"\text{nearly always}",
        "3 & 4",
        r"\text{none of them}",
        r"\text{the unknown}",
        r"\text{empty}",
        "ratio 2 to 3",
        r"\text{mean value}",
    ),
)


@pytest.mark.parametrize(
    ("what", "answer"), [(what, answer) for what, answers in REFUSED.items() for answer in answers]
)
def test_what_no_completion_equals_is_named(what: str, answer: str) -> None:
    assert not_an_answer(answer) == what


@pytest.mark.parametrize(("answer", "value"), READ.items())
def test_what_stands_around_a_value_is_taken_away_and_told(answer: str, value: str) -> None:
    assert not_an_answer(answer) == "" and dress_of(answer) and check_answer(answer, value) is Verdict.CORRECT


@pytest.mark.parametrize("answer", TOLD)
def test_what_may_stand_for_no_answer_is_told_and_not_refused(answer: str) -> None:
    assert not_an_answer(answer) == "" and may_be_placeholder(answer)


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_is_one(answer: str) -> None:
    assert not_an_answer(answer) == "" and not may_be_placeholder(answer)


def test_answers_of_real_sets(data_folder: Path) -> None:
    told = []
    for name in ("math_train.jsonl.gz", "gsm8k_train.jsonl.gz", "deepmath_sample.jsonl.gz", "reasoning_gym.jsonl.gz"):
        with gzip.open(data_folder / name, "rt", encoding="utf-8") as file:
            answers = [row["answer"] for row in map(json.loads, file) if row["domain"] == "math" and "answer" in row]
        assert [answer for answer in answers if not_an_answer(answer)] == []
        told += [answer for answer in answers if may_be_placeholder(answer)]
    assert told == ["None", "None"]
