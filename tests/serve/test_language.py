"""Which language is wanted, by whom; and what is called a match."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from langcodes import Language

from serve.reasoning_language import (
    LanguageChoice,
    accepted,
    choose_language,
    codes,
    language_of,
    measure,
    read_tag,
    without_quotations,
)
from serve.system_prompts import SYSTEM_PROMPTS, prompts_of
from shared.languages import LANGUAGES, TAGS, WITH_REQUEST, name_of, request_for
from shared.reasoning_tags import CONTROL, TEXT
from verify.language import detect, known_languages, spoken_in

FRENCH = "Un train part de Lyon à huit heures et roule à cent kilomètres par heure. Quand arrive-t-il à Paris ?"
GERMAN = "Ein Zug fährt um acht Uhr in Köln ab und ist um zehn Uhr in Frankfurt. Wie schnell fährt er im Mittel?"
ENGLISH = "The train leaves at eight and we need to know when it arrives, so we divide the distance by the speed."


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ("auto", "auto"),
        (" OFF ", "off"),
        ("fr", "fr"),
        ("fr-CA", "fr"),
        ("zh-Hans-CN", "zh"),
        ("DE", "de"),
        ("pt-BR", "pt"),
        ("zh-Hant", "zh"),
        ("en-GB", "en"),
        ("uk", "uk"),
        ("deu", "de"),
        ("ger", "de"),
        ("nb", "no"),
        ("nn", "nn"),
        ("fil", "tl"),
        ("iw", "he"),
        ("cmn-Hans", "zh"),
        ("sr-Latn-RS", "sr"),
        ("gsw", "als"),
        ("als", "sq"),
        ("yue", "yue"),
        ("ar-EG", "ar"),
        ("bho", "bh"),
        ("egl", "eml"),
    ],
)
def test_tags(given: str, code: str) -> None:
    assert read_tag(given) == code


@pytest.mark.parametrize("given", ["", "french", "f", "fr_CA", "fr-", "../fr", "fr CA", "x" * 1000, "фр"])
def test_what_is_no_tag(given: str) -> None:
    with pytest.raises(ValueError, match="is no language: give auto, off, or a BCP 47 code"):
        read_tag(given)


@pytest.mark.parametrize("given", ["", "  "])
def test_an_empty_tag_is_near_no_language(given: str) -> None:
    with pytest.raises(ValueError, match="such as fr or pt-BR$"):
        read_tag(given)


@pytest.mark.parametrize(
    ("given", "near"),
    [("french", '"fr" (French)'), ("Deutsch", '"de" (German)'), ("portugese", '"pt" (Portuguese)'),
     ("ary", '"ar" (Arabic)'), ("ukranian", '"uk" (Ukrainian)'), ("qq", '"'), ("tlh", '"')],
)  # fmt: skip
def test_the_nearest_language_is_named(given: str, near: str) -> None:
    with pytest.raises(ValueError, match="the nearest is") as caught:
        read_tag(given)
    assert near in str(caught.value)


def test_every_language_that_the_detector_knows_has_an_instruction() -> None:
    codes = known_languages()
    assert len(codes) == 176 and set(LANGUAGES) < set(WITH_REQUEST) < codes and set(SYSTEM_PROMPTS) == set(WITH_REQUEST)
    for code in codes:
        name = name_of(code)
        assert "Unknown" not in name.english and name.english != code, code
        texts = prompts_of(code).system_prompt(CONTROL), request_for(code)
        if code not in WITH_REQUEST:
            assert all(name.english in text and name.native in text for text in texts), code
            assert prompts_of(code).first_words == f"{name.native}:"
    assert sum(name_of(code).native != name_of(code).english for code in codes) > 100
    assert prompts_of("vi").system_prompt(CONTROL).count("in Vietnamese (Tiếng Việt), even") == 1
    assert request_for("el") == "Think and answer in Greek (Ελληνικά)."
    assert {code for code in codes if read_tag(TAGS.get(code, code)) != code} == set()


@pytest.mark.parametrize(
    ("header", "codes"),
    [
        ("fr-CH, fr;q=0.9, en;q=0.8, de;q=0.7, *;q=0.5", ["fr", "fr", "en", "de"]),
        ("de;q=0.3,it", ["it", "de"]),
        ("es;q=0", []),
        ("", []),
        ("en;q=2, ;;;, fr;level=1, ru", ["ru"]),
    ],
)
def test_accept_language(header: str, codes: list[str]) -> None:
    assert accepted(header) == codes


def test_the_strongest_wish_counts() -> None:
    assert choose_language([("", "body"), ("it", "header"), ("fr", "default")], [FRENCH]) == LanguageChoice(
        "it", "header"
    )
    assert choose_language([("off", "body"), ("fr", "default")], [FRENCH]) == LanguageChoice("", "off")
    assert choose_language([("", "body"), ("auto", "default")], [FRENCH]) == LanguageChoice("fr", "question")


def test_auto_falls_back_step_by_step() -> None:
    auto = [("auto", "default")]
    assert choose_language(auto, [GERMAN, FRENCH]) == LanguageChoice("fr", "question")
    assert choose_language(auto, [GERMAN, "$2+2$?"]) == LanguageChoice("de", "earlier turn")
    assert choose_language(auto, ["$2+2$?"], "it, en;q=0.5") == LanguageChoice("it", "accept-language")
    assert choose_language(auto, ["2+2?"], "", "es") == LanguageChoice("es", "fallback")
    assert choose_language(auto, []) == LanguageChoice("en", "fallback")


def test_what_a_question_is_about_does_not_decide() -> None:
    assert language_of(f"Peux-tu résumer ce texte pour moi, s'il te plaît ?\n> {ENGLISH}\n> {ENGLISH}") == "fr"
    assert language_of(f"Übersetze bitte diesen Satz ins Deutsche: “{ENGLISH}”") == "de"
    assert language_of(f"Pourquoi ce programme échoue-t-il à la dernière ligne ?\n```\n# {ENGLISH}\nx = 1\n```") == "fr"
    assert language_of(f"> {ENGLISH}") == "en", "there is nothing else"
    assert without_quotations("say \"yes\" or 'no'") == "say \"yes\" or 'no'"


@pytest.mark.parametrize(
    ("text", "code"),
    [("你好", "zh"), ("こんにちは", "ja"), ("안녕", "ko"), ("สวัสดี", "th"), ("2+2=? 你好", "zh"),
     ("שלום", ""), ("Привет", ""), ("مرحبا", ""), ("Hallo", ""), ("αβγδ", ""), ("2+2=?", ""), ("", "")],
)  # fmt: skip
def test_a_script_of_one_language_tells_the_language_of_a_greeting(text: str, code: str) -> None:
    assert language_of(text) == code


def test_a_match_is_measured_or_not_told() -> None:
    assert measure(FRENCH, "", "fr").match is True
    assert measure(FRENCH, GERMAN, "fr").match is False
    assert measure(ENGLISH, FRENCH, "fr").match is False
    assert measure("$x=2$, $y=3$", FRENCH, "fr").match is None, "reasoning without words proves nothing"
    assert measure("", "", "fr").match is None
    assert measure(f"{FRENCH} {ENGLISH} {FRENCH}", "", "fr").match is False, "a third of it is English"
    found = measure(FRENCH, GERMAN, "")
    assert (found.reasoning.language, found.answer.language, found.match) == ("fr", "de", None)


def test_one_part_is_judged_by_the_rules_of_consistency() -> None:
    assert spoken_in(FRENCH, "fr")[1] is True and spoken_in(FRENCH, "de")[1] is False
    assert spoken_in("42", "de")[1] is None
    assert spoken_in(f"{GERMAN} 这里有一些中文字。", "de")[1] is False


@pytest.mark.parametrize("code", sorted(WITH_REQUEST))
def test_every_language_has_its_texts_in_itself(code: str) -> None:
    texts, language = prompts_of(code), WITH_REQUEST[code]
    system = texts.system_prompt(CONTROL)
    for text in (system, texts.language, texts.first_words, texts.budget_phrase):
        assert detect(text).language == code and spoken_in(text, code)[1] is True
    undetermined = code == "it"  # five words that Italian shares with its neighbours
    assert spoken_in(language.request, code)[1] is (None if undetermined else True)
    assert system.count(texts.language) == 1 and "[THINK]\n" in system and "{" not in system
    assert (language.english, language.native) == (Language.get(code).display_name(), Language.get(code).autonym())


def test_the_texts_of_the_seven_languages_are_those_of_every_release() -> None:
    """A model that was trained with a request is served with the same one."""
    texts = [f"{prompts_of(code).system_prompt(TEXT)}\n{request_for(code)}" for code in LANGUAGES]
    assert hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16] == "f35d8df6a78ff4d1"
    assert "English" not in prompts_of("").system_prompt(TEXT), "none is asked for"


def test_auto_agrees_with_the_users_language_on_mgsm(data_folder: Path) -> None:
    with gzip.open(data_folder / "mgsm.jsonl.gz", "rt", encoding="utf-8") as stream:
        rows = [json.loads(line) for line in stream]
    asked = [row for row in rows if row["language"] in LANGUAGES]
    right = sum(language_of(row["problem"]) == row["language"] for row in asked)
    assert len(asked) >= 1500 and right >= 0.99 * len(asked)


@given(st.text())
@example("a\0b")
@example("\0ġ")
@example("\ud800")
def test_any_text_is_a_language_or_refused_with_a_hint(value: str) -> None:
    try:
        assert read_tag(value) in {"auto", "off", *codes().values()}
    except ValueError as refusal:
        assert type(refusal) is ValueError and "give auto, off" in str(refusal)
