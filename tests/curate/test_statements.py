"""What a problem's words ask for: proofs, several parts, figures, in seven languages; and what only looks like it."""

import time
from collections.abc import Callable

import pytest

from curate.statements import (
    PHRASES,
    asks_proof,
    compile_phrases,
    drawings,
    missing_figure,
    several_parts,
    without_drawings,
)  # fmt: skip
from shared.languages import LANGUAGES
from tests.tables import read_table

ASY = '[asy] draw((0,0)--(1,1)); label("(a) Find", (0,0)); [/asy]'
READERS: dict[str, Callable[[str], object]] = {
    "proof": asks_proof,
    "several parts": several_parts,
    "missing figure": missing_figure,
}
CASES = read_table("curate/statements")


@pytest.mark.parametrize("case", CASES, ids=[f"{case['asks']}: {case['text'][:30]}" for case in CASES])
def test_what_a_text_asks_for(case):
    assert bool(READERS[case["asks"]](case["text"].replace("ASY", ASY))) is case["does"]


def test_answer_with_labelled_parts():
    assert several_parts("Find both.", "(a) 3 (b) 4") and several_parts("Find both.", "a) 3, b) 4")
    assert not several_parts("Find both.", "3, 4") and not several_parts("Find it.", "a + b")


def test_drawings_are_blanked_in_place():
    text = f"a {ASY} b"
    assert len(without_drawings(text)) == len(text) and without_drawings(text).split() == ["a", "b"]
    assert drawings(text) == [ASY] and not several_parts(text)


@pytest.mark.parametrize("piece", [" ", "$", "(A) ", "(", "{", "[asy]", "\\textbf{", "prove ", "\\quad ", "a. ", "1,"])
def test_hostile_texts_take_no_time(piece):
    text = piece * (10_000 // len(piece))
    started = time.process_time()
    asks_proof(text), several_parts(text), missing_figure(text)
    assert time.process_time() - started < 2


@pytest.mark.parametrize("kind", PHRASES)
def test_tables_of_phrases_are_of_known_languages_and_compile(kind):
    assert PHRASES[kind].keys() <= {*LANGUAGES, "romance"}
    assert all(phrases and all(phrases) for phrases in PHRASES[kind].values())
    assert compile_phrases(kind).pattern


def test_words_end_where_they_are_told_to_except_in_chinese():
    pattern = compile_phrases("request", before=r"\b", after=r"\b")
    assert pattern.search("FIND it") and not pattern.search("unfindable") and pattern.search("共有多少个")
    assert compile_phrases("no_answer", r"^\W*(?:{})\W*$").match("See solution.")
