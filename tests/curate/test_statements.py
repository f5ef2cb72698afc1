"""What a problem's words ask for: proofs, several parts, figures, in seven languages; and what only looks like it."""

from __future__ import annotations

import time

import pytest

from curate.statements import asks_proof, drawings, missing_figure, several_parts, without_drawings

PROOFS = [
    "Prove that $n^2+n$ is even.",
    "Let $x>0$. Show that $x+1/x \\ge 2$.",
    "Given a triangle, prove that $AB = AC$.",
    "Show analytically that the series converges.",
    "Find the norm of $M$ and show that it equals $n$.",
    "Use the substitution $z=xy$ to show that the equation has no solution.",
    "Montrer que $n^2+n$ est pair.",
    "Soit $n$ un entier. Démontrez que $n^2+n$ est pair.",
    "Zeigen Sie, dass $n^2+n$ gerade ist.",
    "Sei $n$ ganz. Beweise, dass $n^2+n$ gerade ist.",
    "Demuestra que $n^2+n$ es par.",
    "Sea $n$ entero. Probar que $n^2+n$ es par.",
    "Dimostrare che $n^2+n$ è pari.",
    "Sia $n$ intero; si dimostri che $n^2+n$ è pari.",
    "Докажите, что $n^2+n$ чётно.",
    "Пусть $n$ целое. Покажите, что $n^2+n$ чётно.",
    "求证：$n^2+n$ 是偶数。",
    "设 $n$ 是整数，证明 $n^2+n$ 是偶数。",
]
NO_PROOFS = [
    "In what year will the census show that the number of wrens is less than $10$?",
    "One of Euler's conjectures was disproved in the 1960s. Find the value of $n$.",
    "What is the probability that at least two of the dice show an even number?",
    "Use Fermat's theorem to show that $p$ divides it. Then find $p$.",
    "Determine whether it is countable or uncountable. Provide a proof for your answer.",
    "Is every such ring a field? Answer yes or no and justify your answer.",
    "Combien de preuves y a-t-il ?",
    "He wants to show the class 12 slides. How many minutes does he need?",
    "已证明 $p$ 是质数，求 $p+1$ 的值。",
    "这个定理被证明于 1994 年。求 $n$。",
]


@pytest.mark.parametrize("text", PROOFS)
def test_proofs(text: str) -> None:
    assert asks_proof(text)


@pytest.mark.parametrize("text", NO_PROOFS)
def test_uses_of_the_words_that_ask_for_no_proof(text: str) -> None:
    assert not asks_proof(text)


PARTS = [
    "Let $f(x)=x^2$. (a) Find $f(2)$. (b) Find $f(3)$.",
    "i) What is $2+2$? ii) What is $3+3$?",
    "Part 1: Compute $2+2$.\nPart 2: Compute $3+3$.",
    "1. Find the mean.\n2. Find the median.",
    "\\textbf{(a)} Calculate $x$.\n\\textbf{(b)} How large is $y$?",
    "Soit $f$. a) Calculer $f(2)$. b) Déterminer $f(3)$.",
    "(a) Bestimme $x$. (b) Wie viele Lösungen gibt es?",
    "а) Найдите $x$. б) Найдите $y$.",
    "（1）求 $x$；（2）求 $y$。",
    "(a) If $x+y=3$ and $xy=2$, find $x$.\n(b) Let $z=2$.\n\nWhat is $z^2$?",
    "1. Let $a$ be the largest root. Then find $a$.\n2. Compute $a^2$.",
]
NO_PARTS = [
    "Find $n$ such that (i) $n^2$ is a difference of two cubes; (ii) $2n+79$ is a square.",
    "Rules:\n1) The marksman chooses a column.\n2) He breaks the lowest target.\nIn how many orders can he shoot?",
    "The parabola has these properties: (1) Its maximum is 5, which occurs at 3. (2) It passes through $(0,-13)$. "
    "If it passes through $(4,m)$, what is $m$?",
    "Operations:\n1) Choose two points and paint their midpoint.\n2) Choose two and paint another.\n\nIs it true?",
    "Two loans:\n1. Ten years at $10\\%$.\n\n2. Ten years at $12\\%$.\n\nWhat is the difference?",
    "Let $f(a)=2$ and $f(b)=3$. What is $f(a)+f(b)$?",
]


@pytest.mark.parametrize("text", PARTS)
def test_several_parts(text: str) -> None:
    assert several_parts(text)


@pytest.mark.parametrize("text", NO_PARTS)
def test_labelled_conditions_are_no_parts(text: str) -> None:
    assert not several_parts(text)


def test_answer_with_labelled_parts() -> None:
    assert several_parts("Find both.", "(a) 3 (b) 4") and several_parts("Find both.", "a) 3, b) 4")
    assert not several_parts("Find both.", "3, 4") and not several_parts("Find it.", "a + b")


ASY = '[asy] draw((0,0)--(1,1)); label("(a) Find", (0,0)); [/asy]'
FIGURES = [
    "In the diagram, $AB=3$. Find $BC$.",
    "Triangle $ABC$ is cut as shown. Find its area.",
    "Find the area of the shaded region.",
    "The figure below shows a square. Find its side.",
    "The triangle shown has equal sides. Find its area.",
    "What is the sum of the numbers in each row of the square $ABCD$ shown?",
    "According to the graph, what is the mean?",
    "See the image: ![](square.png) What is its side?",
    "Sur la figure, $AB=3$. Calculer $BC$.",
    "In der Abbildung ist $AB=3$. Bestimme $BC$.",
    "En la figura, $AB=3$. Halla $BC$.",
    "Nella figura, $AB=3$. Trova $BC$.",
    "На рисунке $AB=3$. Найдите $BC$.",
    "如图，$AB=3$，求 $BC$。",
]
NO_FIGURES = [
    f"In the diagram, $AB=3$. Find $BC$. {ASY}",
    "In the figure below: \\begin{tikzpicture}\\draw (0,0);\\end{tikzpicture} Find $x$.",
    "A figure is created by connecting $A$ to $B$. Find its area.",
    "A circle is drawn around a square. Find its radius.",
    "What is the sum of the numbers shown on the two dice?",
    "How many edges are in the graph $K_5$?",
    "Find the image of the point $(1,2)$ under the reflection.",
    "The values are shown below.\n\\begin{tabular}{cc} 1 & 2 \\end{tabular} Find $f(1)$.",
    "The equation below is a parabola: \\[y=x^2\\] What is its vertex?",
    "How many plants are in each picture, if 960 pictures show 1920 plants?",
]


@pytest.mark.parametrize("text", FIGURES)
def test_missing_figures(text: str) -> None:
    assert missing_figure(text)


@pytest.mark.parametrize("text", NO_FIGURES)
def test_figures_that_are_there_or_not_needed(text: str) -> None:
    assert not missing_figure(text)


def test_drawings_are_blanked_in_place() -> None:
    text = f"a {ASY} b"
    assert len(without_drawings(text)) == len(text) and without_drawings(text).split() == ["a", "b"]
    assert drawings(text) == [ASY] and not several_parts(text)


@pytest.mark.parametrize("piece", [" ", "$", "(A) ", "(", "{", "[asy]", "\\textbf{", "prove ", "\\quad ", "a. ", "1,"])
def test_hostile_texts_take_no_time(piece: str) -> None:
    text = piece * (10_000 // len(piece))
    started = time.process_time()
    asks_proof(text), several_parts(text), missing_figure(text)
    assert time.process_time() - started < 2
