"""Language of short problems in seven languages; what earns the bonus and what does not."""

from __future__ import annotations

import gzip
import json
import unicodedata
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.processor_time import at_most
from tests.tables import read_table
from verify.language import Undetermined, consistency, detect, spoken_in
from verify.text_cleaning import clean, letter_units, sentences


def texts(kind: str) -> dict[str, Any]:
    """Language -> text; of "other", a sentence about apples in languages that nobody here was tuned for."""
    return {row["language"]: row["text"] for row in read_table("verify/languages", kind=kind)}


PROBLEM, THOUGHTS, ANSWER, STEPS, OTHERS = map(texts, ("problem", "thoughts", "answer", "steps", "other"))


@pytest.mark.parametrize("language", PROBLEM)
def test_short_problems_and_thoughts_are_detected(language: str) -> None:
    assert detect(PROBLEM[language]).language == language
    assert detect(THOUGHTS[language]).language == language


@pytest.mark.parametrize("language", PROBLEM)
def test_one_language_throughout_is_consistent(language: str) -> None:
    found = consistency(PROBLEM[language], THOUGHTS[language], ANSWER[language])
    assert found.consistent, found
    assert found.languages[:2] == (language, language)


@pytest.mark.parametrize("language", PROBLEM)
@pytest.mark.parametrize("other", PROBLEM)
def test_thoughts_or_an_answer_in_another_language_are_not(language: str, other: str) -> None:
    for thoughts, answer in ((other, language), (language, other)):
        found = consistency(PROBLEM[language], THOUGHTS[thoughts], ANSWER[answer])
        assert found.consistent == (language == other), found


@pytest.mark.parametrize("language", PROBLEM)
@pytest.mark.parametrize("other", PROBLEM)
def test_thoughts_that_switch_midway_are_not(language: str, other: str) -> None:
    mixed = PROBLEM[language] + " " + THOUGHTS[language] + " " + PROBLEM[other]
    assert consistency(PROBLEM[language], mixed, ANSWER[language]).consistent == (language == other)


@pytest.mark.parametrize("language", STEPS)
@pytest.mark.parametrize("other", STEPS)
@pytest.mark.parametrize("switch", [1, 2, 3])
def test_switch_after_any_short_step_is_noticed(language: str, other: str, switch: int) -> None:
    reasoning = " ".join(STEPS[language][:switch] + STEPS[other][switch:])
    assert consistency(PROBLEM[language], reasoning, ANSWER[language]).consistent == (language == other)


def test_three_foreign_words_in_another_script_are_noticed() -> None:
    reasoning = "First we count the apples that Tom has. 所以 then we add the ones that he buys, and 答案 is clear."
    found = consistency(PROBLEM["en"], reasoning, ANSWER["en"])
    assert not found.consistent and "Han" in found.reason


@pytest.mark.parametrize("language", OTHERS)
def test_any_language_of_the_model_by_its_code(language: str) -> None:
    text = OTHERS[language]
    assert detect(text).language == language
    assert consistency(text, text, text).consistent
    assert not consistency(text, PROBLEM["en"], text).consistent
    assert not consistency(PROBLEM["en"], f"{PROBLEM['en']} {text}", ANSWER["en"]).consistent


def test_accents_as_marks_of_their_own() -> None:
    apart = unicodedata.normalize("NFD", "Léa a acheté trois pêches très mûres à l'épicerie du marché.")
    assert detect(apart) == detect(unicodedata.normalize("NFC", apart))


def test_english_inside_a_chinese_sentence_is_noticed() -> None:
    reasoning = "汤姆开始有5个苹果，so we have to add the three apples that he buys now，一共是8个。这就是最后的结果。"
    assert not consistency(PROBLEM["zh"], reasoning, ANSWER["zh"]).consistent
    names = "汤姆用 Windows 电脑算了一下，他有5个苹果，又买了3个，一共是8个苹果。这就是最后的结果。"
    assert consistency(PROBLEM["zh"], names, ANSWER["zh"]).consistent


@pytest.mark.parametrize("own", ["fr", "de", "es", "it", "ru", "zh"])
def test_forty_percent_of_english_do_not_pass(own: str) -> None:
    foreign = " ".join(STEPS["en"])
    reasoning = foreign + " " + " ".join(STEPS[own])
    while 0.4 * letter_units(clean(reasoning)) > letter_units(clean(foreign)):
        reasoning = f"{foreign} {reasoning}"
    reasoning += " " + PROBLEM[own]
    share = reasoning.count(foreign) * letter_units(clean(foreign)) / letter_units(clean(reasoning))
    assert 0.2 < share < 0.55
    assert not consistency(PROBLEM[own], reasoning, ANSWER[own]).consistent


def test_parts_with_too_few_words_have_no_language() -> None:
    found = consistency(PROBLEM["fr"], "$5+3$", ANSWER["fr"])
    assert found.languages == ("fr", "", "fr") and detect(PROBLEM["fr"]).share > 0.9
    assert consistency(PROBLEM["fr"], "$5+3$", "\\boxed{8}").languages[1:] == ("", "")


@pytest.mark.parametrize(
    ("mode", "wordless", "half", "empty"),
    [("neutral", False, True, False), ("nothing", False, False, False), ("bonus", True, True, True)],
)
def test_what_undetermined_parts_earn_is_a_switch(mode: Undetermined, wordless: bool, half: bool, empty: bool) -> None:
    def holds(reasoning: str, answer: str) -> bool:
        return consistency(PROBLEM["fr"], reasoning, answer, undetermined=mode).consistent

    assert holds("5+3=8", "\\boxed{8}") == wordless
    assert holds("5+3=8", ANSWER["fr"]) == half
    assert holds("", "\\boxed{8}") == empty
    assert not holds("5+3=8", ANSWER["de"]) and holds(THOUGHTS["fr"], ANSWER["fr"])


def test_formulas_code_and_addresses_do_not_count() -> None:
    reasoning = (
        "Nous avons 5 pommes et nous en achetons 3. `the result is stored` $x = \\text{number of apples bought}$\n"
        "```python\n# the total number of apples is printed here\nprint(5 + 3)\n```\n"
        "https://example.com/how-many-apples-are-there \\begin{align} \\text{the sum} &= 8 \\end{align} "
        "Donc le total est 8."
    )
    assert consistency(PROBLEM["fr"], reasoning, ANSWER["fr"]).consistent


@pytest.mark.parametrize("reasoning", ["", "   \n", "...", "?!", "$$", "—"])
def test_empty_thoughts_earn_nothing(reasoning: str) -> None:
    found = consistency(PROBLEM["en"], reasoning, "The answer is \\boxed{8}.")
    assert not found.consistent and "empty" in found.reason


def test_undetermined_problem_takes_the_language_of_its_data_or_of_the_thoughts() -> None:
    assert consistency("$2+3=$", THOUGHTS["it"], "\\boxed{5}").consistent
    assert consistency("$2+3=$", THOUGHTS["it"], "\\boxed{5}", hint="it").consistent
    assert not consistency("$2+3=$", THOUGHTS["it"], "\\boxed{5}", hint="en").consistent
    assert not consistency("$2+3=$", "2+3", ANSWER["it"]).consistent


def test_reasoning_and_answer_are_held_to_the_language_that_is_asked_for() -> None:
    asked = partial(consistency, PROBLEM["en"], asked="de")
    assert asked(THOUGHTS["de"], ANSWER["de"]).consistent
    assert asked(THOUGHTS["de"], "$18$").consistent, "a formula is in no language"
    for reasoning, answer, reason in (
        (THOUGHTS["en"], ANSWER["en"], "reasoning in en, expected de"),
        (THOUGHTS["de"], "The answer is therefore eight apples.", "answer in en, expected de"),
        ("", ANSWER["de"], "the reasoning is empty"),
    ):
        found = asked(reasoning, answer)
        assert (found.consistent, found.reason) == (False, reason) and found.languages[0] == "en"
    assert consistency("2+2=?", THOUGHTS["de"], ANSWER["de"], asked="de", undetermined="nothing").consistent
    assert not consistency("2+2=?", THOUGHTS["de"], "4", asked="de", undetermined="nothing").consistent
    assert consistency(PROBLEM["de"], THOUGHTS["de"], ANSWER["de"], asked="de").consistent, "its own, too"


@pytest.mark.parametrize("text", ["", "8", "\\boxed{42}", "$x^2$", "ok", "\0", "\ud800 \ud800", "a" * 5])
def test_too_little_text_is_undetermined(text: str) -> None:
    found = detect(text)
    assert found.undetermined and found.share == 0.0


def test_hostile_text_is_answered_quickly() -> None:
    for text in (
        "{" * 500_000,
        "\\boxed{" * 50_000,
        "$" * 100_001,
        "`" * 100_001,
        "\\begin{align}" * 20_000,
        "<" * 200_000,
        "a b, " * 100_000,
        "\u093f" * 200_000,
    ):
        with at_most(1.5):
            consistency(PROBLEM["en"], text, text)


def test_long_thoughts_are_sampled() -> None:
    with at_most(1.0):
        assert consistency(PROBLEM["de"], (PROBLEM["de"] + " ") * 2_000, ANSWER["de"]).consistent


def test_prices_are_not_a_formula() -> None:
    assert "apples" in clean("She pays $5 for the apples and then $3 for the pears.")
    assert clean("so $x+y$ then") == "so then"


def test_letter_units_and_sentences() -> None:
    assert letter_units("ab c1 _") == 3
    assert letter_units("答案") == 6
    assert sentences("One. Two. Three words here.", 10) == [("One. Two. Three words here.", 20)]
    assert [text for text, _ in sentences("This is long enough. And so is this one.", 10)] == [
        "This is long enough.",
        "And so is this one.",
    ]


def read_spoken() -> list[tuple[str, bool, str, str, str]]:
    """Return (kind, paid, problem, reasoning, answer) of the rows of `spoken.jsonl`."""
    rows = read_table("verify/spoken")
    problems = {(row["topic"], row["language"]): row["problem"] for row in rows if "problem" in row}
    return [
        (row["kind"], row["paid"], problems[row["topic"], row["language"]], row["reasoning"], row["answer"])
        for row in rows
        if "kind" in row
    ]


SPOKEN = read_spoken()


def test_a_little_of_another_language_in_formulas_is_forgiven_and_more_is_not() -> None:
    english = "First we count the apples that Tom has, and then we add the ones that he buys from his sister. " * 5
    aside = "$\\text{la somme de toutes les pommes}$ "
    for times, consistent in ((1, True), (3, False)):
        found = consistency(PROBLEM["en"], english + aside * times, ANSWER["en"], hidden=True)
        assert found.consistent is consistent, found


@pytest.mark.parametrize("kind", sorted({kind for kind, *_ in SPOKEN}))
def test_texts_that_are_paid_and_texts_that_are_not(kind: str) -> None:
    rows = [row for row in SPOKEN if row[0] == kind]
    wrong = [
        (paid, reasoning, found)
        for _, paid, problem, reasoning, answer in rows
        if (found := consistency(problem, reasoning, answer, hidden=True)).consistent is not paid
    ]
    assert len(rows) >= 10 and not wrong


def test_long_thoughts_in_no_language_are_told_by_the_reason() -> None:
    words = "fo kapi zu remo tila nuso vake " * 2
    found = consistency(PROBLEM["en"], f"{words}, {words}", ANSWER["en"])
    assert found.languages == ("en", "", "en") and found.reason == "reasoning in no language"
    assert spoken_in(f"{words}, {words}", "en")[1] is False
    assert consistency(PROBLEM["en"], words[:40], ANSWER["en"]).consistent
    assert spoken_in(words[:40], "en")[1] is None


def test_twins_are_told_apart_in_long_and_clear_texts_only() -> None:
    short = "Svaret er otte æbler i alt."
    long = (
        "Først tæller vi æblerne, som Tom havde i går, og derefter lægger vi dem til, som hans søster gav ham, så "
        "vi kan sige, hvor mange han nu har tilbage, når han også har spist nogle af dem."
    )
    assert spoken_in(short, "no")[1] is not False
    assert spoken_in(long, "da")[1] is True and spoken_in(long, "no")[1] is False


@pytest.mark.parametrize("row", read_table("verify/languages", kind="short"), ids=lambda row: row["text"])
def test_a_short_answer_is_told_by_its_script_or_a_sure_model_or_stays_open(row: dict[str, Any]) -> None:
    """Another script refuses; Greek letters and single ones may be mathematics; relatives share their words."""
    detection, same = spoken_in(rf"{row['text']} \boxed{{7}}.", row["language"])
    assert same is row["same"] and (not same or detection.language == row["language"])


def test_real_problems_are_detected_in_every_language(data_folder: Path) -> None:
    right: Counter[str] = Counter()
    rows: Counter[str] = Counter()
    with gzip.open(data_folder / "mgsm.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            rows[row["language"]] += 1
            right[row["language"]] += detect(row["problem"]).language == row["language"]
    assert set(rows) == {"de", "en", "es", "fr", "ru", "zh"}
    assert all(right[language] / rows[language] >= 0.99 for language in rows), right
