"""Language of short problems in seven languages; what earns the bonus and what does not."""

import unicodedata
from typing import Any

import pytest

from tests.processor_time import at_most
from tests.tables import read_table
from verify.language import consistency, detect, spoken_in
from verify.text_cleaning import clean, letter_units, sentences


def texts(kind: str) -> dict[str, Any]:
    """Language -> text; of "other", a sentence about apples in languages that nobody here was tuned for."""
    return {row["language"]: row["text"] for row in read_table("verify/languages", kind=kind)}


PROBLEM, THOUGHTS, ANSWER, STEPS, OTHERS = map(texts, ("problem", "thoughts", "answer", "steps", "other"))


def consistent(language: str, reasoning: str, answer: str = "", **options: Any) -> bool:
    return bool(consistency(PROBLEM[language], reasoning, answer or ANSWER[language], **options).consistent)


@pytest.mark.parametrize("language", PROBLEM)
def test_one_language_throughout_is_consistent_and_another_is_noticed(language):
    """In the thoughts or the answer, midway in the thoughts, and after any short step of them."""
    assert detect(PROBLEM[language]).language == detect(THOUGHTS[language]).language == language
    result = consistency(PROBLEM[language], THOUGHTS[language], ANSWER[language])
    assert result.consistent and result.languages[:2] == (language, language), result
    for other in PROBLEM:
        midway = f"{PROBLEM[language]} {THOUGHTS[language]} {PROBLEM[other]}"
        steps = [" ".join(STEPS[language][:count] + STEPS[other][count:]) for count in (1, 2, 3)]
        for reasoning in (THOUGHTS[other], midway, *steps):
            assert consistent(language, reasoning) is (language == other), (other, reasoning)
        assert consistent(language, THOUGHTS[language], ANSWER[other]) is (language == other)


@pytest.mark.parametrize("language", OTHERS)
def test_any_language_of_the_model_by_its_code(language):
    text = OTHERS[language]
    assert detect(text).language == language and consistency(text, text, text).consistent
    assert not consistency(text, PROBLEM["en"], text).consistent
    assert not consistent("en", f"{PROBLEM['en']} {text}")


def test_accents_as_marks_of_their_own():
    apart = unicodedata.normalize("NFD", "Léa a acheté trois pêches très mûres à l'épicerie du marché.")
    assert detect(apart) == detect(unicodedata.normalize("NFC", apart))


@pytest.mark.parametrize("language", ["fr", "de", "es", "it", "ru", "zh"])
def test_forty_percent_of_english_do_not_pass(language):
    foreign = " ".join(STEPS["en"])
    reasoning = f"{foreign} {' '.join(STEPS[language])}"
    while 0.4 * letter_units(clean(reasoning)) > letter_units(clean(foreign)):
        reasoning = f"{foreign} {reasoning}"
    reasoning += " " + PROBLEM[language]
    share = reasoning.count(foreign) * letter_units(clean(foreign)) / letter_units(clean(reasoning))
    assert 0.2 < share < 0.55 and not consistent(language, reasoning)


@pytest.mark.parametrize("text", ["", "8", "\\boxed{42}", "$x^2$", "ok", "\0", "\ud800 \ud800", "a" * 5])
def test_too_little_text_is_undetermined(text):
    result = detect(text)
    assert result.undetermined and result.share == 0.0


def test_hostile_and_long_text_is_answered_quickly():
    for text in ("{" * 500_000, "\\boxed{" * 50_000, "$" * 100_001, "`" * 100_001, "\\begin{align}" * 20_000,
                 "<" * 200_000, "a b, " * 100_000, "\u093f" * 200_000):  # fmt: skip
        with at_most(1.5):
            consistency(PROBLEM["en"], text, text)
    with at_most(1.0):
        assert consistent("de", (PROBLEM["de"] + " ") * 2_000), "long thoughts are sampled"


def test_what_is_left_of_a_text_is_measured_and_parted():
    assert "apples" in clean("She pays $5 for the apples and then $3 for the pears."), "prices are no formula"
    assert clean("so $x+y$ then") == "so then"
    assert letter_units("ab c1 _") == 3 and letter_units("答案") == 6
    assert sentences("One. Two. Three words here.", 10) == [("One. Two. Three words here.", 20)]
    two = ["This is long enough.", "And so is this one."]
    assert [text for text, _ in sentences(" ".join(two), 10)] == two


SPOKEN = read_table("verify/spoken")
ASKED = {(row["topic"], row["language"]): row["problem"] for row in SPOKEN if "problem" in row}


@pytest.mark.parametrize("kind", sorted({row["kind"] for row in SPOKEN if "kind" in row}))
def test_texts_that_are_paid_and_texts_that_are_not(kind):
    wrong = []
    for row in (row for row in SPOKEN if row.get("kind") == kind):
        result = consistency(ASKED[row["topic"], row["language"]], row["reasoning"], row["answer"], hidden=True)
        wrong += [] if result.consistent is row["paid"] else [(row, result)]
    assert not wrong


@pytest.mark.parametrize("row", read_table("verify/languages", kind="held"), ids=lambda row: row["name"])
def test_reasoning_and_answer_are_held_to_one_language(row):
    """That of the problem, of its data, or the one that is asked for; what has no language is a setting."""
    result = consistency(row["problem"], row["reasoning"], row["answer"], **row.get("options", {}))
    assert result.consistent is row["consistent"] and row.get("reason", "") in result.reason, result
    assert list(result.languages) == row.get("languages", list(result.languages))


def test_twins_are_told_apart_in_long_and_clear_texts_only():
    """And what is in no language in long ones."""
    words = "fo kapi zu remo tila nuso vake " * 2
    assert spoken_in(f"{words}, {words}", "en")[1] is False and spoken_in(words[:40], "en")[1] is None
    long = (
        "Først tæller vi æblerne, som Tom havde i går, og derefter lægger vi dem til, som hans søster gav ham, så "
        "vi kan sige, hvor mange han nu har tilbage, når han også har spist nogle af dem."
    )
    assert spoken_in("Svaret er otte æbler i alt.", "no")[1] is not False
    assert spoken_in(long, "da")[1] is True and spoken_in(long, "no")[1] is False


@pytest.mark.parametrize("row", read_table("verify/languages", kind="short"), ids=lambda row: row["text"])
def test_a_short_answer_is_told_by_its_script_or_a_sure_model_or_stays_open(row):
    """Another script refuses; Greek letters and single ones may be mathematics; relatives share their words."""
    detection, same = spoken_in(rf"{row['text']} \boxed{{7}}.", row["language"])
    assert same is row["same"] and (not same or detection.language == row["language"])
