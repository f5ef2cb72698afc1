"""Each kind of instruction against answers that follow it and answers that do not, written by hand."""

from __future__ import annotations

from typing import Any

import pytest

from shared.errors import DataError
from shared.jsonl import read_rows
from tests.processor_time import at_most
from verify.verifiers.instructions import CHECKS, follow, loose_forms, sentence_count

ENGLISH = "there are three red apples in the basket on the kitchen table"
GERMAN = "Auf dem Tisch in der Küche stehen drei rote Äpfel in einem Korb."
CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "keywords:existence": (
        {"keywords": ["Mom", "tea"]}, ["My MOM drinks tea.", "moment, teapot"], ["My mom drinks.", "tea"],
    ),
    "keywords:frequency": (
        {"keyword": "war", "frequency": 2, "relation": "at least"}, ["War and war.", "warm, warden"], ["War."],
    ),
    "keywords:forbidden_words": (
        {"forbidden_words": ["rock"]}, ["A rocket.", "stone"], ["No ROCK.", "rock"],
    ),
    "keywords:letter_frequency": (
        {"letter": "o", "let_frequency": 3, "let_relation": "less than"}, ["Oh no", "abc"], ["o, O, o", "book lot"],
    ),
    "language:response_language": ({"language": "de"}, [GERMAN], [f"{ENGLISH}."]),
    "length_constraints:number_sentences": (
        {"num_sentences": 3, "relation": "less than"},
        ["One. Two!", "Mr. Smith came, e.g. with Dr. Jones. He left.", "It costs 3.50 in all. Good."],
        ["One. Two? Three.", "一。二。三。"],
    ),
    "length_constraints:number_words": (
        {"num_words": 3, "relation": "at least"}, ["one two three", "a-b c"], ["one two", "one, two!"],
    ),
    "length_constraints:number_paragraphs": (
        {"num_paragraphs": 2}, ["a\n***\nb", "***\na\n***\nb\n***"], ["a", "a\n***\n\n***\nb", "a\n\nb", "a***b***c"],
    ),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "president"},
        ["a\n\nPresident, b", "a\n\n\"president\" b"], ["a\n\nThe president", "president\n\na", "a\n\nb\n\npresident"],
    ),
    "detectable_content:number_placeholders": (
        {"num_placeholders": 2}, ["[name] of [place]", "[a] [b] [c]"], ["[name]", "name] of [place"],
    ),
    "detectable_content:postscript": (
        {"postscript_marker": "P.P.S"}, ["a\n\nP.P.S. b", "a\np. p. s b"], ["a\nP.S. b", "a"],
    ),
    "detectable_format:number_bullet_lists": (
        {"num_bullets": 2}, ["a\n* b\n* c", "- a\n  - b"], ["* a", "* a\n* b\n- c", "**a**\n* b"],
    ),
    "detectable_format:constrained_response": (
        {}, ["My answer is maybe.", "Well. My answer is no."], ["Yes.", "my answer is yes"],
    ),
    "detectable_format:number_highlighted_sections": (
        {"num_highlights": 2}, ["*a* and *b c*", "**a** **b**"], ["*a*", "* a\n* b", "** **"],
    ),
    "detectable_format:multiple_sections": (
        {"section_spliter": "SECTION", "num_sections": 2}, ["SECTION 1\na\nSECTION 2\nb"], ["SECTION 1", "Section 1 2"],
    ),
    "detectable_format:json_format": (
        {}, ['{"a": [1, 2]}', "```json\n[1]\n```", "```\n{}\n```"], ["{a: 1}", "The JSON: {}", "[" * 5000],
    ),
    "detectable_format:title": ({}, ["<<A day>>\nb", "a <<b>>"], ["<a>", "<< >> a", "<<a"]),
    "combination:two_responses": (
        {}, ["a\n******\nb", "a ****** b"], ["a", "a******a", "a******b******c", "******a"],
    ),
    "combination:repeat_prompt": (
        {"prompt_to_repeat": "Write a haiku."}, ["Write a haiku.\n\nSnow", "write a Haiku. b"], ["Snow", "haiku"],
    ),
    "startend:end_checker": (
        {"end_phrase": "Any questions?"}, ["a. Any questions?", 'a "any questions?"\n'], ["Any questions? Yes."],
    ),
    "startend:quotation": ({}, ['"a"', ' "a b" \n'], ['"a', 'a"', '"', "'a'"]),
    "change_case:capital_word_frequency": (
        {"capital_frequency": 2, "capital_relation": "at least"}, ["NO WAY", "WELL-KNOWN to US"], ["NO", "No Way"],
    ),
    "change_case:english_capital": ({}, [ENGLISH.upper(), "YES!"], [ENGLISH, GERMAN.upper(), "123"]),
    "change_case:english_lowercase": ({}, [ENGLISH, "yes!"], [ENGLISH.title(), GERMAN.lower()]),
    "punctuation:no_comma": ({}, ["a b.", "a; b"], ["a, b"]),
}  # fmt: skip


def test_every_kind_has_its_cases() -> None:
    assert CASES.keys() == CHECKS.keys() and len(CHECKS) == 25


@pytest.mark.parametrize("name", CASES)
def test_right_and_wrong_answers(name: str) -> None:
    given, right, wrong = CASES[name]
    for answer in right:
        assert follow(answer, [name], [given]).strict == [True], answer
    for answer in (*wrong, "", " \n"):
        assert follow(answer, [name], [given]).strict == [False], answer


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
        for name, (given, _, _) in CASES.items():
            follow(evil, [name], [given])


def test_all_rows_of_ifeval_are_understood(data_folder: Any) -> None:
    rows = [row.fields["tests"] for row in read_rows(data_folder / "ifeval.jsonl")]
    assert len(rows) == 541
    for tests in rows:
        found = follow("A short answer, in English.", tests["instruction_id_list"], tests["kwargs"])
        assert len(found.strict) == len(tests["instruction_id_list"])
