"""Which language a model is to reason in, and whether it did. Nothing is called a match that was not measured.

The language is wanted by the request (body, then header), else by the key, else by the server's default. Where that is
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
"""BCP 47, as much of it as matters here"""
_QUOTED_LINE = re.compile(r"^[ \t]*>.*$", re.MULTILINE)
_QUOTATION = re.compile(r"“[^“”]{20,}”|„[^„“”]{20,}[“”]|«[^«»]{20,}»|「[^「」]{8,}」|\"[^\"\n]{20,}\"")
"""foreign texts that a question is about; names and single words in quotation marks say nothing. None reaches over a
second opening mark: a search that does takes an hour in a body full of them"""
MOST_LETTERS = 10_000
"""read at the beginning of a turn, and as many at its end"""


class Choice(NamedTuple):
    """The language that a response is to be reasoned in."""

    code: str
    """"" where no language is asked for"""
    source: Source
    """what decided"""


class Measured(NamedTuple):
    """What a response was written in, against what was wanted."""

    thoughts: Detection
    answer: Detection
    match: bool | None
    """the thoughts are in the language that was wanted and the answer in no other; None where the thoughts have too few
    words to tell"""


def read_tag(value: str) -> str:
    """The language of a wish: "auto", "off", or the detector's code of a BCP 47 tag ("fr-CA" is fr). Raises ValueError
    for what is none, and for a language that the detector does not know."""
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
    """Languages of an Accept-Language header, best first; what is not understood or known is left out."""
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
    """A user's turn without what it quotes."""
    return _QUOTATION.sub(" ", _QUOTED_LINE.sub(" ", text))


def language_of(text: str) -> str:
    """Code of the language of a user's turn, "" when it has too few words to tell; quotations count only alone."""
    if len(text) > 2 * MOST_LETTERS:
        text = f"{text[:MOST_LETTERS]}\n{text[-MOST_LETTERS:]}"
    return detect(own_words(text)).language or detect(text).language


def choose(
    wishes: Sequence[tuple[str, Source]], turns: Sequence[str], accept_language: str = "", fallback: str = "en"
) -> Choice:
    """The language to reason in. wishes: (what is wanted, by whom), the strongest first, "" for no wish; at least the
    server's default. turns: what the user wrote, in order."""
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
    """What thoughts and answer are written in; with a code, whether the response is in that language."""
    if not code:
        return Measured(detect(thoughts), detect(answer), None)
    (of_thoughts, thoughts_match), (of_answer, answer_match) = spoken_in(thoughts, code), spoken_in(answer, code)
    return Measured(of_thoughts, of_answer, False if answer_match is False else thoughts_match)
