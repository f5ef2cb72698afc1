"""Each kind of instruction against answers that follow it and answers that do not, written by hand."""

from __future__ import annotations

from typing import Any

import pytest

from shared.errors import DataError
from shared.jsonl import read_rows
from tests.processor_time import at_most
from tests.tables import read_table
from verify.verifiers.instructions import CHECKS, follow, loose_forms, sentence_count

CASES = {row["kind"]: row for row in read_table("verify/instructions")}


def test_every_kind_has_its_cases() -> None:
    assert CASES.keys() == CHECKS.keys() and len(CHECKS) == 25


@pytest.mark.parametrize("name", CASES)
def test_right_and_wrong_answers(name: str) -> None:
    case = CASES[name]
    for answer in case["right"]:
        assert follow(answer, [name], [case["given"]]).strict == [True], answer
    for answer in (*case["wrong"], "", " \n"):
        assert follow(answer, [name], [case["given"]]).strict == [False], answer


def test_loose_forgives_an_introduction_an_ending_and_stars() -> None:
    answer = 'Sure, here it is:\n"**one** fine day"\nI hope, that helps.'
    found = follow(answer, ["punctuation:no_comma", "startend:quotation", "keywords:existence"],
                   [{}, {}, {"keywords": ["one fine"]}])  # fmt: skip
    assert found.strict == [False, False, False] and found.loose == [True, True, True]
    assert follow("a, b", ["punctuation:no_comma"], [{}]).loose == [False]
    assert follow("one, line", ["punctuation:no_comma"], [{}]).loose == [False], "nothing is left without its one line"
    assert loose_forms("a\nb\nc") == ["a\nb\nc", "a\nb", "b\nc", "b"]


def test_sentences() -> None:
    assert sentence_count("Really?! Yes... maybe. J. R. Tolkien wrote it.") == 4
    assert sentence_count("no end") == 1 and sentence_count("...") == 0


def test_what_is_not_known_is_named() -> None:
    with pytest.raises(DataError, match='"keywords:rhyme" is not known'):
        follow("a", ["keywords:rhyme"], [{}])
    with pytest.raises(DataError, match="lacks a value"):
        follow("a", ["keywords:existence"], [{}])
    with pytest.raises(DataError, match='relation "about"'):
        follow("a", ["length_constraints:number_words"], [{"num_words": 3, "relation": "about"}])


@pytest.mark.parametrize("evil", ["[" * 60_000, "*" * 60_000, "\n" * 60_000, "<<" * 30_000, ". " * 30_000,
                                  "." * 60_000 + "a", "P.P." * 15_000, "***" * 20_000, "SECTION" * 9_000])  # fmt: skip
def test_no_answer_takes_long(evil: str) -> None:
    with at_most(20):  # 25 checks of sixty thousand signs
        for name, case in CASES.items():
            follow(evil, [name], [case["given"]])


def test_all_rows_of_ifeval_are_understood(data_folder: Any) -> None:
    rows = [row.fields["tests"] for row in read_rows(data_folder / "ifeval.jsonl")]
    assert len(rows) == 541
    for tests in rows:
        found = follow("A short answer, in English.", tests["instruction_id_list"], tests["kwargs"])
        assert len(found.strict) == len(tests["instruction_id_list"])
