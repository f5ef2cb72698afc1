"""Each kind of instruction against answers that follow it and answers that do not, written by hand."""

from __future__ import annotations

import pytest

from shared.errors import DataError
from tests.processor_time import at_most
from tests.tables import read_table
from verify.verifiers.instructions import CHECKS, follow, loose_forms, sentence_count

CASES = {row["kind"]: row for row in read_table("verify/instructions")}


@pytest.mark.parametrize("name", CHECKS)
def test_right_and_wrong_answers(name: str) -> None:
    case = CASES[name]
    for answer in case["right"]:
        assert follow(answer, [name], [case["given"]]).strict == [True], answer
    for answer in (*case["wrong"], "", " \n"):
        assert follow(answer, [name], [case["given"]]).strict == [False], answer


def test_loose_forgives_an_introduction_an_ending_and_stars() -> None:
    names, comma = ["punctuation:no_comma", "startend:quotation", "keywords:existence"], ["punctuation:no_comma"]
    answer = 'Sure, here it is:\n"**one** fine day"\nI hope, that helps.'
    found = follow(answer, names, [{}, {}, {"keywords": ["one fine"]}])
    assert found.strict == [False, False, False] and found.loose == [True, True, True]
    assert follow("a, b", comma, [{}]).loose == [False]
    assert follow("one, line", comma, [{}]).loose == [False], "nothing is left without its one line"
    assert loose_forms("a\nb\nc") == ["a\nb\nc", "a\nb", "b\nc", "b"]


def test_sentences() -> None:
    assert sentence_count("Really?! Yes... maybe. J. R. Tolkien wrote it.") == 4
    assert sentence_count("no end") == 1 and sentence_count("...") == 0


def test_what_is_not_known_is_named() -> None:
    for name, given, message in (
        ("keywords:rhyme", {}, '"keywords:rhyme" is not known'),
        ("keywords:existence", {}, "lacks a value"),
        ("length_constraints:number_words", {"num_words": 3, "relation": "about"}, 'relation "about"'),
    ):
        with pytest.raises(DataError, match=message):
            follow("a", [name], [given])


def test_no_answer_takes_long() -> None:
    for evil in ("[" * 60_000, "*" * 60_000, "\n" * 60_000, "<<" * 30_000, ". " * 30_000, "." * 60_000 + "a",
                 "P.P." * 15_000, "***" * 20_000, "SECTION" * 9_000):  # fmt: skip
        with at_most(20):  # 25 checks of sixty thousand signs
            for name, case in CASES.items():
                follow(evil, [name], [case["given"]])
