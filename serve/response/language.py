"""Chooses the language that a model is to reason in, and measures whether it did. A match is always measured.

The language comes from the request (body, then header), else from the key, else from the server's default. If that is
"auto", it is the language of the question: the last user turn without code, formulas, quotations and addresses, else
an earlier turn, else the client's Accept-Language, else the fallback.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from serve.response.names import code_of, name_of, nearest
from verify.language import Detection, detect, spoken_in

AUTO, OFF = "auto", "off"
Source = Literal["body", "header", "key", "default", "question", "earlier turn", "accept-language", "fallback", "off"]
TAG = re.compile(r"(?P<language>[A-Za-z]{2,3})(?:-[A-Za-z0-9]{1,8})*")
"""the part of BCP 47 that matters here: a language subtag and any further subtags"""
_QUOTED_LINE = re.compile(r"^[ \t]*>.*$", re.MULTILINE)
_QUOTATION = re.compile(r"“[^“”]{20,}”|„[^„“”]{20,}[“”]|«[^«»]{20,}»|「[^「」]{8,}」|\"[^\"\n]{20,}\"")
"""quoted texts that a question is about; names and single words in quotation marks are too short to matter. No match
spans a second opening mark: such a search takes an hour in a body full of them"""
MOST_LETTERS = 10_000
"""letters that are read at the beginning of a turn, and again at its end"""


class Choice(NamedTuple):
    """The language that a response is to be reasoned in."""

    code: str
    """"" if no language is requested"""
    source: Source
    """what determined the language"""


class Measured(NamedTuple):
    """The detected languages of a response, compared with the requested one."""

    thoughts: Detection
    answer: Detection
    match: bool | None
    """whether the thoughts are in the requested language and the answer is in no other; None if the thoughts have too
    few words to decide"""


def read_tag(value: str) -> str:
    """Parse a requested language: "auto", "off", or the detector's code of a BCP 47 tag ("fr-CA" is fr). Raises
    ValueError for anything else, and for a language that the detector does not know."""
    wish = value.strip()
    if wish.lower() in (AUTO, OFF):
        return wish.lower()
    found = TAG.fullmatch(wish)
    code = code_of(found["language"].lower()) if found is not None else None
    if code is not None:
        return code
    what = "no language" if found is None else "no language that can be told apart here"
    near = nearest(wish[:40])
    raise ValueError(
        f'"{value[:40]}" is {what}: give auto, off, or a BCP 47 code such as fr or pt-BR; the nearest is "{near}" '
        f"({name_of(near).english})"
    )


def accepted(header: str) -> list[str]:
    """Return the languages of an Accept-Language header, best first, without malformed and unknown ones."""
    wishes: list[tuple[float, int, str]] = []
    for place, part in enumerate(header[:500].split(",")):
        tag, _, weight = part.strip().partition(";")
        number = re.fullmatch(r"\s*q=(0(?:\.\d{0,3})?|1(?:\.0{0,3})?)\s*", weight) if weight else None
        found = TAG.fullmatch(tag.strip())
        code = code_of(found["language"].lower()) if found is not None else None
        if code is not None and (number is not None or not weight):
            wishes.append((-float(number[1]) if number else -1.0, place, code))
    return [code for weight, _, code in sorted(wishes) if weight < 0]


def own_words(text: str) -> str:
    """Return a user's turn without its quotations."""
    return _QUOTATION.sub(" ", _QUOTED_LINE.sub(" ", text))


def language_of(text: str) -> str:
    """Return the language code of a user's turn, "" if it has too few words; quotations count only if needed."""
    if len(text) > 2 * MOST_LETTERS:
        text = f"{text[:MOST_LETTERS]}\n{text[-MOST_LETTERS:]}"
    return detect(own_words(text)).language or detect(text).language


def choose(
    wishes: Sequence[tuple[str, Source]], turns: Sequence[str], accept_language: str = "", fallback: str = "en"
) -> Choice:
    """Choose the language to reason in. wishes: (requested language, source), strongest first, "" for none; at least
    the server's default. turns: the user's turns, in order."""
    wish, source = next((wish, source) for wish, source in wishes if wish)
    if wish == OFF:
        return Choice("", "off")
    if wish != AUTO:
        return Choice(wish, source)
    for number, turn in enumerate(reversed(turns)):
        if code := language_of(turn):
            return Choice(code, "earlier turn" if number else "question")
    for code in accepted(accept_language):
        return Choice(code, "accept-language")
    return Choice(fallback, "fallback")


def measure(thoughts: str, answer: str, code: str) -> Measured:
    """Detect the languages of thoughts and answer and, given a code, whether the response is in that language."""
    if not code:
        return Measured(detect(thoughts), detect(answer), None)
    (of_thoughts, thoughts_match), (of_answer, answer_match) = spoken_in(thoughts, code), spoken_in(answer, code)
    return Measured(of_thoughts, of_answer, False if answer_match is False else thoughts_match)
