"""Chooses the language that a model is to reason in, and measures whether it did. A match is always measured.

The language comes from the request (body, then header), else from the key, else from the server's default. If that is
"auto", it is the language of the question: the last user turn without code, formulas, quotations and addresses, else
an earlier turn, else the client's Accept-Language, else the fallback.

The languages are all that the detector knows. Their names and the normalisation of BCP 47 tags come from the Unicode
CLDR and the IANA registry, through langcodes.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Literal, NamedTuple

import langcodes
from pydantic import AfterValidator

from shared.languages import TAGS, name_of
from verify.language import Detection, detect, known_languages, spoken_in
from verify.scripts import only_writer
from verify.text_cleaning import clean

ALSO = {"nb": "no"}
"""subtags that the registry keeps separate from the detector's code for the same language -> that code"""
MOST_DISTANCE = 20
"""largest CLDR distance from a language to another that its speakers understand"""


@lru_cache(maxsize=1)
def codes() -> dict[str, str]:
    """Map language subtags to the detector's codes, for all spellings of a language (no and nb, tl and fil)."""
    known = sorted(known_languages())
    by_subtag = {code: code for code in known if code not in TAGS} | ALSO
    for code in known:
        tag = TAGS.get(code, code)
        by_subtag.setdefault(tag, code)
        by_subtag.setdefault(langcodes.standardize_tag(tag, macro=True).partition("-")[0], code)
    return by_subtag


def code_of(subtag: str) -> str | None:
    """Return the detector's code of a language subtag ("deu" and "ger" are de), or None if it knows none."""
    by_subtag = codes()
    if subtag in by_subtag:
        return by_subtag[subtag]
    try:
        standard = [langcodes.standardize_tag(subtag, macro=macro).partition("-")[0] for macro in (False, True)]
    except langcodes.LanguageTagError:
        return None
    return next((by_subtag[one] for one in standard if one in by_subtag), None)


def nearest(text: str) -> str:
    """Return the code of the language that a text most likely means, for the hint in an error message."""
    try:
        meant = code_of(langcodes.find(text).language or "")
    except LookupError:
        meant = None
    if meant is not None:
        return meant
    try:
        tag, distance = langcodes.closest_match(text, list(codes()), max_distance=MOST_DISTANCE)
    except langcodes.LanguageTagError:
        tag, distance = "und", MOST_DISTANCE
    if tag in codes() and distance < MOST_DISTANCE:
        return codes()[tag]
    names = {name_of(code).english.lower(): code for code in codes().values()} | codes()
    close = difflib.get_close_matches(text.lower(), names, 1, cutoff=0)
    return names[close[0]] if close else "en"


AUTO, OFF = "auto", "off"
Enforcement = Literal["prompt", "constrain", "prefill", "retry", "strict"]
"""how a language is brought about, weakest first (generation.py)"""
REFUSALS = MISMATCH, CUT, NO_ANSWER = ("reasoning_language_mismatch", "response_cut", "no_answer")
"""codes of the errors that strict returns in place of a response"""
Source = Literal["body", "header", "key", "default", "question", "earlier turn", "accept-language", "fallback", "off"]
TAG = re.compile(r"(?P<language>[A-Za-z]{2,3})(?:-[A-Za-z0-9]{1,8})*")
"""the part of BCP 47 that matters here: a language subtag and any further subtags"""
_QUOTED_LINE = re.compile(r"^[ \t]*>.*$", re.MULTILINE)
_QUOTATION = re.compile(r"“[^“”]{20,}”|„[^„“”]{20,}[“”]|«[^«»]{20,}»|「[^「」]{8,}」|\"[^\"\n]{20,}\"")
"""quoted texts that a question is about; names and single words in quotation marks are too short to matter. No match
spans a second opening mark: such a search takes an hour in a body full of them"""
MOST_LETTERS = 10_000
"""letters that are read at the beginning of a turn, and again at its end"""


class LanguageChoice(NamedTuple):
    """The language that a response is to be reasoned in."""

    code: str
    """"" if no language is requested"""
    source: Source


class Measured(NamedTuple):
    """The detected languages of a response, compared with the requested one."""

    reasoning: Detection
    answer: Detection
    match: bool | None
    """whether the reasoning is in the requested language and the answer is in no other; where there is no reasoning,
    whether the answer is; None if there are too few words to decide"""


def read_tag(value: str) -> str:
    """Parse a requested language: "auto", "off", or the detector's code of a BCP 47 tag ("fr-CA" is fr). Raises
    ValueError for anything else, and for a language that the detector does not know."""
    tag = value.strip()
    if tag.lower() in (AUTO, OFF):
        return tag.lower()
    match = TAG.fullmatch(tag)
    code = code_of(match["language"].lower()) if match is not None else None
    if code is not None:
        return code
    what = "no language" if match is None else "no language that is recognised here"
    words = "".join(filter(str.isprintable, tag[:40]))  # langcodes reads past its tables at a NUL character
    near = nearest(words) if words else ""
    hint = f'; the nearest is "{near}" ({name_of(near).english})' if near else ""
    raise ValueError(f'"{value[:40]}" is {what}: give auto, off, or a BCP 47 code such as fr or pt-BR{hint}')


LanguageTag = Annotated[str, AfterValidator(read_tag)]
OptionalLanguageTag = Annotated[str, AfterValidator(lambda value: value and read_tag(value))]
"""a requested language, or "" for none"""


def accepted(header: str) -> list[str]:
    """Return the languages of an Accept-Language header, best first, without malformed and unknown ones."""
    candidates: list[tuple[float, int, str]] = []
    for position, entry in enumerate(header[:500].split(",")):
        tag, _, weight = entry.strip().partition(";")
        number = re.fullmatch(r"\s*q=(0(?:\.\d{0,3})?|1(?:\.0{0,3})?)\s*", weight) if weight else None
        match = TAG.fullmatch(tag.strip())
        code = code_of(match["language"].lower()) if match is not None else None
        if code is not None and (number is not None or not weight):
            candidates.append((-float(number[1]) if number else -1.0, position, code))
    return [code for weight, _, code in sorted(candidates) if weight < 0]


def without_quotations(text: str) -> str:
    """Return a user's turn without its quotations."""
    return _QUOTATION.sub(" ", _QUOTED_LINE.sub(" ", text))


def language_of(text: str) -> str:
    """Return the language code of a user's turn, "" if it has too few words; quotations count only if needed, and of a
    few words the script may decide it."""
    if len(text) > 2 * MOST_LETTERS:
        text = f"{text[:MOST_LETTERS]}\n{text[-MOST_LETTERS:]}"
    return detect(without_quotations(text)).language or detect(text).language or only_writer(clean(text))


def choose_language(
    candidates: Sequence[tuple[str, Source]], turns: Sequence[str], accept_language: str = "", fallback: str = "en"
) -> LanguageChoice:
    """Choose the language to reason in. candidates: (requested language, source), strongest first, "" for none; at
    least the server's default. turns: the user's turns, in order."""
    tag, source = next((tag, source) for tag, source in candidates if tag)
    if tag == OFF:
        return LanguageChoice("", "off")
    if tag != AUTO:
        return LanguageChoice(tag, source)
    for number, turn in enumerate(reversed(turns)):
        if code := language_of(turn):
            return LanguageChoice(code, "earlier turn" if number else "question")
    for code in accepted(accept_language):
        return LanguageChoice(code, "accept-language")
    return LanguageChoice(fallback, "fallback")


def measure(reasoning: str, answer: str, code: str) -> Measured:
    """Detect the languages of reasoning and answer and, given a code, whether the response is in that language.
    reasoning: what the model wrote of it, without texts that the server put in."""
    if not code:
        return Measured(detect(reasoning), detect(answer), None)
    (of_reasoning, reasoning_match), (of_answer, answer_match) = spoken_in(reasoning, code), spoken_in(answer, code)
    match = reasoning_match if is_written(reasoning) else answer_match
    return Measured(of_reasoning, of_answer, False if answer_match is False else match)


def is_written(reasoning: str) -> bool:
    """Whether there is any reasoning: a letter or a digit. Where there is none, the answer's language counts."""
    return any(map(str.isalnum, reasoning))
