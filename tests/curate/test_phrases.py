"""The data of phrases.toml: every table is of known languages, compiles, and finds what it is for in each language."""

from __future__ import annotations

import pytest

from curate.statements import PHRASES, compile_phrases
from shared.languages import LANGUAGES


@pytest.mark.parametrize("kind", PHRASES)
def test_tables_are_of_known_languages_and_compile(kind: str) -> None:
    assert PHRASES[kind].keys() <= {*LANGUAGES, "romance"}
    assert all(phrases and all(phrases) for phrases in PHRASES[kind].values())
    assert compile_phrases(kind).pattern


def test_words_end_where_they_are_told_to_except_in_chinese() -> None:
    pattern = compile_phrases("request", before=r"\b", after=r"\b")
    assert pattern.search("FIND it") and not pattern.search("unfindable") and pattern.search("共有多少个")
    assert compile_phrases("no_answer", r"^\W*(?:{})\W*$").match("See solution.")
