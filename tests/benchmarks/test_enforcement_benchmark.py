"""The page of enforcement: what is asked is held out, nothing undetermined or refused counts, the bounds are told."""

from __future__ import annotations

from benchmarks.enforcement import HEAD, LANGUAGES, Outcome, in_language, loss, matrix, questions, rows, verdict
from examples.quickstart.word_problems import is_validation

OWN = [Outcome("en", "en", True, True, 1.0, 30, 1)] * 100
"""one language, right, in it"""


def other(count: int, match: bool | None, correct: bool, refused: bool = False) -> list[Outcome]:
    return [Outcome("en", "de", match, correct, 2.0, 0 if refused else 40, 0 if refused else 1, refused)] * count


def test_the_questions_are_held_out_and_the_same_for_every_language_asked_for() -> None:
    found = questions(3)
    assert [one.language for one in found] == [language for language in LANGUAGES for _ in range(3)]
    assert all(is_validation(one.start, one.changes) and not one.asked for one in found)


def test_undetermined_and_refused_responses_count_as_not_in_the_language() -> None:
    outcomes = [*other(6, True, True), *other(2, None, True), *other(1, False, True), *other(1, False, False, True)]
    assert in_language(outcomes) == 0.6
    row = dict(zip(HEAD, next(rows({"strict": outcomes})), strict=True))
    assert row == {
        "enforcement": "strict", "language asked for": "another one", "responses": "10", "in it": "**0.600**",
        "too few words": "2", "refused": "1", "right": "0.900", "tokens": "40.0", "seconds, median": "2.00",
        "tries": "1.00",
    }  # fmt: skip


def test_both_bounds_have_to_hold() -> None:
    assert loss([*OWN, *other(97, True, True), *other(3, True, False)]) <= 0.03 + 1e-9
    assert verdict("m", "prompt", [*OWN, *other(98, True, True), *other(2, True, False)])[-1] == "yes"
    assert verdict("m", "prompt", [*OWN, *other(90, True, True), *other(10, True, False)])[-1] == "**no**", "accuracy"
    assert verdict("m", "prompt", [*OWN, *other(80, True, True), *other(20, None, True)])[-1] == "**no**", "language"


def test_the_matrix_has_questions_in_rows_and_requests_in_columns() -> None:
    lines = matrix([*OWN, *other(1, True, True), *other(3, False, True)]).splitlines()
    assert lines[0].startswith("| question | en | fr | de |") and len(lines) == 2 + len(LANGUAGES)
    assert lines[2].startswith("| en | 1.00 | 0.00 | 0.25 |")
