"""Which language is wanted, by whom (languages.jsonl); and what is called a match."""

import gzip
import hashlib
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from langcodes import Language

from serve import reasoning_language
from serve.reasoning_language import LanguageChoice, accepted, choose_language, codes, language_of, measure, read_tag
from serve.system_prompts import SYSTEM_PROMPTS, prompts_of
from shared.languages import LANGUAGES, TAGS, WITH_REQUEST, name_of, request_for
from shared.reasoning_tags import CONTROL, TEXT
from tests.tables import read_table
from verify.language import detect, known_languages, spoken_in

FRENCH = "Un train part de Lyon à huit heures et roule à cent kilomètres par heure. Quand arrive-t-il à Paris ?"
GERMAN = "Ein Zug fährt um acht Uhr in Köln ab und ist um zehn Uhr in Frankfurt. Wie schnell fährt er im Mittel?"
ENGLISH = "The train leaves at eight and we need to know when it arrives, so we divide the distance by the speed."


def test_tags_are_read_or_refused_with_the_nearest_language():
    for row in read_table("serve/languages", kind="tag"):
        assert read_tag(row["text"]) == row["code"], row
    for row in read_table("serve/languages", kind="no tag"):
        with pytest.raises(ValueError, match="give auto, off, or a BCP 47 code") as caught:
            read_tag(row["text"])
        assert row["hint"] in str(caught.value), row


@given(st.text())
@example("a\0b")
@example("\0ġ")
@example("\ud800")
def test_any_text_is_a_language_or_refused_with_a_hint(value):
    try:
        assert read_tag(value) in {"auto", "off", *codes().values()}
    except ValueError as refusal:
        assert type(refusal) is ValueError and "give auto, off" in str(refusal)


def test_every_language_that_the_detector_knows_has_an_instruction():
    codes = known_languages()
    assert len(codes) == 176 and set(LANGUAGES) < set(WITH_REQUEST) < codes and set(SYSTEM_PROMPTS) == set(WITH_REQUEST)
    for code in codes:
        name = name_of(code)
        assert "Unknown" not in name.english and name.english != code, code
        assert read_tag(TAGS.get(code, code)) == code
        texts = prompts_of(code).system_prompt(CONTROL), request_for(code)
        if code not in WITH_REQUEST:
            assert all(name.english in text and name.native in text for text in texts), code
            assert prompts_of(code).first_words == f"{name.native}:"
    assert sum(name_of(code).native != name_of(code).english for code in codes) > 100
    assert prompts_of("vi").system_prompt(CONTROL).count("in Vietnamese (Tiếng Việt), even") == 1
    assert request_for("el") == "Think and answer in Greek (Ελληνικά)."


@pytest.mark.parametrize("code", sorted(WITH_REQUEST))
def test_every_language_has_its_texts_in_itself(code):
    texts, language = prompts_of(code), WITH_REQUEST[code]
    system = texts.system_prompt(CONTROL)
    for text in (system, texts.language, texts.first_words, texts.budget_phrase):
        assert detect(text).language == code and spoken_in(text, code)[1] is True
    undetermined = code == "it"  # five words that Italian shares with its neighbours
    assert spoken_in(language.request, code)[1] is (None if undetermined else True)
    assert system.count(texts.language) == 1 and "[THINK]\n" in system and "{" not in system
    assert (language.english, language.native) == (Language.get(code).display_name(), Language.get(code).autonym())


def test_the_texts_of_the_seven_languages_are_those_of_every_release():
    """A model that was trained with a request is served with the same one."""
    texts = [f"{prompts_of(code).system_prompt(TEXT)}\n{request_for(code)}" for code in LANGUAGES]
    assert hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16] == "f35d8df6a78ff4d1"
    assert "English" not in prompts_of("").system_prompt(TEXT), "none is asked for"


@pytest.mark.parametrize(("wishes", "turns", "header", "fallback", "choice"), [
    ([("", "body"), ("it", "header"), ("fr", "default")], [FRENCH], "", "en", ("it", "header")),
    ([("off", "body"), ("fr", "default")], [FRENCH], "", "en", ("", "off")),
    ([("", "body"), ("auto", "default")], [GERMAN, FRENCH], "", "en", ("fr", "question")),
    ([("auto", "default")], [GERMAN, "$2+2$?"], "", "en", ("de", "earlier turn")),
    ([("auto", "default")], ["$2+2$?"], "it, en;q=0.5", "en", ("it", "accept-language")),
    ([("auto", "default")], ["2+2?"], "", "es", ("es", "fallback")),
    ([("auto", "default")], [], "", "en", ("en", "fallback")),
])  # fmt: skip
def test_the_strongest_wish_counts_and_auto_falls_back_step_by_step(wishes, turns, header, fallback, choice):
    assert choose_language(wishes, turns, header, fallback) == LanguageChoice(*choice)


def test_a_question_decides_by_its_own_words_or_by_a_script_of_one_language():
    for row in read_table("serve/languages", kind="question"):
        assert language_of(row["text"]) == row["code"], row
    assert reasoning_language.without_quotations("say \"yes\" or 'no'") == "say \"yes\" or 'no'"
    for row in read_table("serve/languages", kind="header"):
        assert accepted(row["text"]) == row["codes"], row


def test_auto_agrees_with_the_users_language_on_mgsm(data_folder):
    with gzip.open(data_folder / "mgsm.jsonl.gz", "rt", encoding="utf-8") as stream:
        asked = [row for row in map(json.loads, stream) if row["language"] in LANGUAGES]
    right = sum(language_of(row["problem"]) == row["language"] for row in asked)
    assert len(asked) >= 1500 and right >= 0.99 * len(asked)


@pytest.mark.parametrize(
    ("reasoning", "answer", "match"),
    [(FRENCH, "", True), (FRENCH, GERMAN, False), (ENGLISH, FRENCH, False), ("", "", None),
     ("$x=2$, $y=3$", FRENCH, None),  # reasoning without words proves nothing
     (f"{FRENCH} {ENGLISH} {FRENCH}", "", False), (f"{FRENCH} 这里有一些中文字。", "", False)],
)  # fmt: skip
def test_a_match_is_measured_or_not_told(reasoning, answer, match):
    assert measure(reasoning, answer, "fr").match is match
    measured = measure(FRENCH, GERMAN, "")
    assert (measured.reasoning.language, measured.answer.language, measured.match) == ("fr", "de", None)
