"""Word problems: right sums, disjoint halves, imperfect demonstrations of known shares, told in one language each."""

import random
import re
from dataclasses import replace

import pytest

from examples.quickstart.word_problems import (
    CHANGE,
    MOST,
    NO_FLAWS,
    PHRASES,
    START,
    Flaws,
    WordProblem,
    calculate,
    complete,
    demonstrate,
    estimate,
    is_validation,
    make_word_problem,
)
from shared.languages import LANGUAGES
from verify.format import check_format
from verify.language import consistency

CODES = list(PHRASES)
HAND_MADE = WordProblem("en", "Tom has 12 apples.", 12, (3, -4), 0)


def test_every_supported_language_has_phrases() -> None:
    assert set(PHRASES) == set(LANGUAGES)


def test_a_hand_made_story_is_calculated_step_by_step() -> None:
    reasoning, total = calculate(HAND_MADE, "en")
    assert total == HAND_MADE.answer == 11
    assert reasoning == ("In the beginning there are 12 apples. Then we add 3: 12+3=15. Then we take away 4: 15-4=11.")
    assert complete(reasoning, "en", total) == rf"<think>{reasoning}</think>The answer is \boxed{{11}}."


def test_a_slip_carries_on_to_the_result() -> None:
    reasoning, total = calculate(HAND_MADE, "de", slip_at=0, slip=2)
    assert total == 13
    assert "12+3=17" in reasoning and "17-4=13" in reasoning


def test_the_same_seed_tells_the_same_story() -> None:
    one, other = (make_word_problem(random.Random(5), "fr", (2, 3)) for _ in range(2))
    assert one == other
    assert demonstrate(random.Random(1), one, CODES) == demonstrate(random.Random(1), other, CODES)


@pytest.mark.parametrize("language", CODES)
@pytest.mark.parametrize("validation", [False, True])
def test_stories_stay_within_their_numbers_and_their_half(language: str, validation: bool) -> None:
    rng = random.Random(3)
    for _ in range(50):
        story = make_word_problem(rng, language, (1, 3), validation)
        assert is_validation(story.start, story.changes) == validation
        assert START[0] <= story.start <= START[1]
        assert 1 <= len(story.changes) <= 3
        assert all(CHANGE[0] <= abs(change) <= CHANGE[1] for change in story.changes)
        total = story.start
        for change in story.changes:
            total += change
            assert 1 <= total <= MOST
        assert [int(number) for number in re.findall(r"\d+", story.text)] == [
            story.start,
            *(abs(change) for change in story.changes),
        ]
        assert not re.search(r"[{}<>]", story.text)
        assert story.problem("x").answer == str(story.answer)


def test_no_chain_of_sums_is_on_both_sides() -> None:
    rng = random.Random(0)
    sides = [
        {(story.start, story.changes) for story in (make_word_problem(rng, "en", (1, 2), held) for _ in range(600))}
        for held in (False, True)
    ]
    assert not sides[0] & sides[1]


def test_which_side_a_chain_is_on_never_changes() -> None:
    assert {start for start in range(2, 21) if is_validation(start, (1, -2))} == {3, 10}


def test_every_single_sum_that_is_evaluated_is_also_trained() -> None:
    sizes = [change for change in range(-CHANGE[1], CHANGE[1] + 1) if abs(change) >= CHANGE[0]]
    sums: dict[bool, set[tuple[int, int]]] = {False: set(), True: set()}
    for start in range(START[0], START[1] + 1):
        for first in sizes:
            for second in sizes:
                if 1 <= start + first <= MOST and 1 <= start + first + second <= MOST:
                    sums[is_validation(start, (first, second))] |= {(start, first), (start + first, second)}
    assert sums[True] <= sums[False]


@pytest.mark.parametrize("language", CODES)
@pytest.mark.parametrize("flaws", [NO_FLAWS, Flaws(guess=1.0)], ids=["calculated", "guessed"])
def test_demonstrations_without_flaws_are_well_formed_and_told_in_one_language(language: str, flaws: Flaws) -> None:
    rng = random.Random(7)
    told_apart = 0
    for _ in range(100):
        story = make_word_problem(rng, language, (2, 3))
        parts = check_format(demonstrate(rng, story, CODES, flaws))
        assert parts.ok
        if flaws == NO_FLAWS:
            assert parts.answer == str(story.answer)
        told_apart += consistency(story.text, parts.reasoning, parts.response).consistent
    assert told_apart >= 98


def test_foreign_reasoning_and_foreign_answers_are_never_taken_for_consistent() -> None:
    rng = random.Random(8)
    for language in CODES:
        story = make_word_problem(rng, language, (2, 2))
        for other in CODES:
            if other == language:
                continue
            for reasoning, answered in ((calculate(story, other)[0], language), (calculate(story, language)[0], other),
                                       (PHRASES[other].guess, language)):  # fmt: skip
                parts = check_format(complete(reasoning, answered, 3))
                assert not consistency(story.text, parts.reasoning, parts.response).consistent


def test_most_demonstrations_are_bad_in_the_documented_shares() -> None:
    rng = random.Random(9)
    right = consistent = well_formed = 0
    count = 1500
    for number in range(count):
        story = make_word_problem(rng, CODES[number % len(CODES)], (2, 2))
        parts = check_format(demonstrate(rng, story, CODES))
        well_formed += parts.ok
        right += parts.answer == str(story.answer)
        consistent += parts.ok and consistency(story.text, parts.reasoning, parts.response).consistent
    assert 0.88 < well_formed / count < 0.96
    assert 0.35 < right / count < 0.48
    assert 0.45 < consistent / count < 0.56


def test_demonstrations_without_flaws_are_in_the_language_asked_for_and_foreign_ones_never() -> None:
    rng = random.Random(6)
    for language in CODES:
        for asked in CODES:
            story = replace(make_word_problem(rng, language, (2, 2)), asked=asked)
            problem = story.problem("x")
            assert (problem.reasoning_language, problem.language) == (asked, language)
            parts = check_format(demonstrate(rng, story, CODES, NO_FLAWS))
            assert parts.answer == str(story.answer)
            assert consistency(story.text, parts.reasoning, parts.response, asked=asked).consistent, (language, asked)
            parts = check_format(demonstrate(rng, story, CODES, Flaws(foreign=1.0)))
            assert not consistency(story.text, parts.reasoning, parts.response, asked=asked).consistent
            assert PHRASES[asked].answer in estimate(rng, story)


def test_a_single_language_has_no_foreign_reasoning() -> None:
    story = make_word_problem(random.Random(2), "it", (2, 2))
    completion = demonstrate(random.Random(1), story, ["it"], Flaws(foreign=1.0))
    assert PHRASES["it"].answer in completion
