r"""Normalises English around and inside an answer: frames ("The answer is 5", "Option D"), number words, exceptions.

Frames are dropped only where what is left is the answer itself; a frame that denies ("is not") stays. Numbers in words
are read only when they are the whole answer.
"""

from __future__ import annotations

import re

from verify.math.brackets import without_text
from verify.math.unit import is_forgivable
from verify.math.word_lists import LISTS, pattern_of, words_in

_SMALL = {word: value for value, word in enumerate(words_in("english", "numbers"))} | {
    word: 10 * value for value, word in enumerate(words_in("english", "tens"), start=2)
}
_LARGE = {"thousand": 1_000, "million": 1_000_000, "billion": 1_000_000_000}
_WORD = f"(?:{'|'.join([*_SMALL, *_LARGE, 'hundred', 'and'])})"
_NUMBER = re.compile(rf"^{_WORD}(?:[\s-]{_WORD})*$")
_ARTICLE = re.compile(r"^an? (?=(?:dozen|hundred|thousand|million|billion)$)")
_SIGN = re.compile(r"(?:minus|negative)\s+|-\s*(?=[a-z])")
_CHOICE = re.compile(
    r"^(?:the\s+)?(?:correct\s+|right\s+|best\s+)?(?:answer|choice|option|statement)s?\s*(?:(?:is|are)\s+|:\s*)?"
    r"(?:option\s+|choice\s+)?(\(?[A-J]\)?(?:\s*(?:,|and|&)+\s*\(?[A-J]\)?)*)\s*\.?$",
    re.IGNORECASE,
)
NOUNS = pattern_of("english", "nouns")
"""nouns that may stand before an answer"""
_FRAME = re.compile(
    r"^\\text\s*\{\s*(?:[A-Z][a-z]+\s+(?:made|has|had|earned|pays|paid|spent|saved|needs)\s+(?:an?\s+)?(?:profit|total)"
    r"\s+of\s*\}\s*(?=[\d\\$])|(?:(?:so|thus|hence|therefore|then),?\s+)?(?:(?:the|its|their|his|her|our)\s+)?"
    r"(?:(?:final|correct|required|desired|total|exact|only|possible|maximum|minimum|largest|smallest|general)\s+){0,2}"
    rf"(?:{NOUNS})(?:\s+of\s+(?!(?:[a-z]+\s+)*(?:not|or|and|than|wrong|answer)\b)[a-z ]{{1,30}})?"
    r"\s*(?:is|are|equals|was|=|:)\s*:?\s*\}\s*(?=[-+\d\\$(\[a-zA-Z|]))",
    re.IGNORECASE,
)
_NO_CONDITION = r"(?![^$]*(?:\b(?:else|otherwise|wrong|not|bound|only|max|min|even|odd)\b|[\d=<>]))"
_EXPLANATION = re.compile(
    rf"\s*(?:\\text\s*\{{\s*\((?:where|with|since|because|as|for)\b{_NO_CONDITION}[^{{}}()]*\)\s*\}}"
    rf"|\\text\s*\{{\s*\((?:where|since|because)\b{_NO_CONDITION}[^{{}}()]*\}}[^{{}}]*\\text\s*\{{[^{{}}()]*\)\s*\}})$"
)
_EXCEPT = re.compile(
    r"^all\s+real\s+(?:numbers|values)(?:\s+of\s+[a-z])?\s*(?:except(?:\s+for)?|other\s+than|excluding|but)\s*(?:[a-z]\s*=\s*)?"
    r"(.+)$",
    re.IGNORECASE,
)
_AND = re.compile(r"\s*,?\s*\b(?:and|or)\b\s*|\s*,\s*")


def number_of(words: str) -> int | None:
    """Return the number that words name ("twenty-one", "two hundred and five", "minus three"), or None."""
    words = _ARTICLE.sub("one ", words.strip().casefold())
    if words.endswith(" dozen"):
        dozens = number_of(words.removesuffix(" dozen"))
        return None if dozens is None else 12 * dozens
    sign = _SIGN.match(words)
    if sign:
        size = number_of(words[sign.end() :])
        return None if size is None else -size
    if len(words) > 100 or not _NUMBER.match(words):
        return None
    total, largest = 0, 10**12
    rest = words.replace("-", " ").split()
    while rest:
        group, rest = _below_thousand(rest)
        if group is None:
            return None
        scale = _LARGE.get(rest[0], 0) if rest else 1
        rest = rest[1:]
        if not 0 < scale < largest or (group == 0 and words != "zero"):
            return None
        total, largest = total + group * scale, scale
    return total


_ABROAD = {
    word: value
    for language in LISTS["numerals"]
    for value, word in enumerate(words_in("numerals", language))
    if word != "-"
}
"""numerals that are the whole answer"""
_COUNTED = re.compile(rf"^({_WORD}(?:[\s-]{_WORD})*)\s+([A-Za-z]+(?: [a-z]+)?)$", re.IGNORECASE)
_PARTS = {"half": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7, "eighth": 8,
          "ninth": 9,
          "tenth": 10, "hundredth": 100}  # fmt: skip
_FRACTION = re.compile(
    rf"^(?P<sign>(?:minus|negative) )?(?:(?P<whole>{_WORD}(?:[\s-]{_WORD})*?)\s+and\s+)?"
    rf"(?P<top>an?|{'|'.join(_SMALL)})?[\s-]*(?P<part>{'|'.join(_PARTS)}|halve)s?$"
)


def _fraction_of(words: str) -> str:
    """Return the fraction that words name ("three quarters", "two and a half"), "" for others."""
    match = _FRACTION.match(words.strip().casefold())
    if match is None or (match.group("top") is None and match.group("part") != "half"):
        return ""
    whole = number_of(match.group("whole")) if match.group("whole") else 0
    top, bottom = _SMALL.get(match.group("top") or "a", 1), _PARTS.get(match.group("part"), 2)
    sign = "-" if match.group("sign") else ""
    return "" if whole is None or top == 0 else rf"{sign}\frac{{{whole * bottom + top}}}{{{bottom}}}"


def _below_thousand(words: list[str]) -> tuple[int | None, list[str]]:
    """Return the number below 1,000 that begins the words, None when none does, and the words that follow it."""
    value, rest = None, list(words)
    if len(rest) > 1 and rest[1] == "hundred" and 1 <= _SMALL.get(rest[0], 0) <= 19:
        value, rest = 100 * _SMALL[rest[0]], rest[2:]
        if rest[:1] == ["and"]:
            rest = rest[1:]
            if not rest or rest[0] not in _SMALL:
                return None, rest
    elif rest[:1] == ["hundred"]:
        return 100, rest[1:]
    if rest and rest[0] in _SMALL:
        small, rest = _SMALL[rest[0]], rest[1:]
        if small >= 20 and rest and 0 < _SMALL.get(rest[0], 0) < 10:
            small, rest = small + _SMALL[rest[0]], rest[1:]
        value = (value or 0) + small
    return value, rest


def spell_english(text: str) -> str:
    """Drop frames and explanations, write number words in digits and exceptions as a set difference."""
    if "text" not in text and not re.search(r"[^\W\d_]{3}", text):
        return text
    plain = without_text(text)
    choice = _CHOICE.match(plain)
    if choice:
        return choice.group(1).upper() if plain[:6].casefold() in ("option", "choice") else choice.group(1)
    number = number_of(plain)
    if number is not None:
        return str(number)
    if fraction := _fraction_of(plain):
        return fraction
    if plain.casefold() in _ABROAD:
        return str(_ABROAD[plain.casefold()])
    counted = _COUNTED.match(plain)
    if counted and (number := number_of(counted.group(1))) is not None and is_forgivable(counted.group(2)):
        return f"{number} {counted.group(2)}"
    text = _EXPLANATION.sub("", _FRAME.sub("", text))
    excluded = _EXCEPT.match(without_text(text))
    if excluded:
        members = [part.strip() for part in _AND.split(excluded.group(1)) if part.strip()]
        return rf"\mathbb{{R}}\setminus \{{{', '.join(members)}\}}"
    return text
