"""Multiple choice: options found and removed, letters resolved, problems that need their options told apart."""

from __future__ import annotations

import pytest

from curate.format import find_choices, letter_of, needs_options, position_of

STYLES = [
    "How many?\n$\\textbf{(A) } 477 \\qquad \\textbf{(B) } 482 \\qquad \\textbf{(C) } 487$",
    "How many?\n$\\mathrm{(A) \\ 477 } \\qquad \\mathrm{(B) \\ 482 } \\qquad \\mathrm{(C) \\ 487 }$",
    "How many?\n(A) 477 (B) 482 (C) 487\n",
    "How many?\n\nA. $477$\n\nB. $482$\n\nC. $487$\n\n(Type the letter that corresponds to your answer.)",
    "How many?\nA) 477\nB) 482\nC) 487",
    "How many? Choose the correct answer from the following options: (a) 477, (b) 482, (c) 487.",
    "How many? Choose the correct option: \\( \\text{(A) } 477, \\text{(B) } 482, \\text{(C) } 487 \\).",
]


@pytest.mark.parametrize("text", STYLES)
def test_options_are_taken_out(text: str) -> None:
    found = find_choices(text, "B")
    assert found is not None
    assert (found.stem, found.options) == ("How many?", ["477", "482", "487"])
    assert position_of(found, "\\text{(B)}") == 1 and not needs_options(found, "482")


def test_open_end_is_marked_and_drawings_stay() -> None:
    asy = '[asy] draw((0,0)); label("(A)"); [/asy]'
    found = find_choices(f"If $x>0$, then $x^2$= {asy}\n(A) 1 (B) 2 (C) 4", "4")
    assert found is not None and found.stem == f"If $x>0$, then $x^2$= ____.\n{asy}"
    found = find_choices("The number of pairs $(f,m)$ is\n(A) 1 (B) 2 (C) 4", "C")
    assert found is not None and found.stem == "The number of pairs $(f,m)$ is ____."
    assert not needs_options(found, "4")


@pytest.mark.parametrize(
    ("stem", "option", "why"),
    [
        ("Which of the following is prime?", "7", "which of the following"),
        ("Laquelle des propositions suivantes est vraie ?", "7", "which of the following"),
        ("Welche der folgenden Zahlen ist prim?", "7", "which of the following"),
        ("下列哪个数是质数？", "7", "which of the following"),
        ("Какое из следующих чисел простое?", "7", "which of the following"),
        ("How many?", "\\text{none of these}", "none or all of the above"),
        ("How many?", "ninguna de las anteriores", "none or all of the above"),
        ("The mean is closest to", "9", "closest of the options"),
        ("Let $V$ be a space.", "It is finite", "no question without its options"),
        ("How many?", "A, C", "several options are right"),
        ("What does it look like?", "", "options without text"),
    ],
)
def test_problems_that_need_their_options(stem: str, option: str, why: str) -> None:
    found = find_choices(f"{stem}\n(A) 1 (B) {option} (C) 3 (D) 4", "B")
    assert found is not None and needs_options(found, option) == why


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Conditions: (a) $n$ is odd, (b) $n>3$, (c) $n<9$. Find the sum of all such $n$.", "12"),
        ("How many satisfy: A) the first digit is 1 B) the last is 2 C) no two are equal?", "54"),
        ("Bag A has 3 marbles. Bag B has 6. Bag C has 2. How many are there?", "11"),
        ("Triangle $ABC$ has $AB=3$. What is $f(A)$?", "3"),
        ("Find $x$.", "B"),
    ],
)
def test_labels_that_are_no_options(text: str, answer: str) -> None:
    assert find_choices(text, answer) is None


def test_letters() -> None:
    assert [letter_of(text) for text in ("B", "(b)", "\\text{(B)}", "$\\textbf{B}$", "B.", "B) 5")] == list("BbBBBB")
    assert [letter_of(text) for text in ("BC", "5", "x", "AB=3", "B=2")] == [""] * 5
