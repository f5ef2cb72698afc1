r"""Checks translations of problems: same numbers and formulas, the requested language, nothing added."""

from __future__ import annotations

import re
from collections import Counter
from decimal import Decimal

from curate.wording import drawings
from verify.language import detect
from verify.prose import clean, letter_units

LENGTH = (0.35, 2.5)
"""range of the letters of a translation by those of the original (a Chinese character counts as three); outside of it,
something was left out or added"""
_FORMULA = re.compile(
    r"\$\$.+?\$\$|\$(?:\\.|[^$\\])+\$|\\\[.+?\\\]|\\\(.+?\\\)|"
    r"\\begin\{([a-z]+\*?)\}.+?\\end\{\1\}",
    re.DOTALL,
)
_WORDS_INSIDE = re.compile(r"\\(?:text|textbf|textit|mbox|textrm)\s*\{[^{}]*\}")
_PROSE = re.compile(r"[^\W\d_]{3,}\s+[^\W\d_]{2,}|[\u4e00-\u9fff]{3,}")
_NUMBER = re.compile(r"\d+(?:[.,\u00a0\u202f ]\d{3}(?!\d))+(?:[.,]\d+)?|\d+[.,]\d+|\.\d+|\d+")
_SPACES = re.compile(r"\s+|\\[,;:!]|[.,;:]$")


def formulas(text: str) -> Counter[str]:
    """Count the formulas of a text, each without spacing and without the words in it."""
    spans = (match.group() for match in _FORMULA.finditer(text))
    real = (span for span in spans if "\\" in span or not _PROSE.search(span))  # not "$5 a day and $6"
    found = (span.strip("$").removeprefix("\\[").removesuffix("\\]") for span in real)
    plain = (re.sub(r"^\\\(|\\\)$", "", formula) for formula in found)
    return Counter(_SPACES.sub("", _WORDS_INSIDE.sub("", formula).strip().rstrip(".,;:")) for formula in plain)


def numbers(text: str) -> Counter[Decimal]:
    """Count the values of numbers written in digits, with a point or a comma, and with or without groups of three.

    "1.500" and "1,500" are both read as fifteen hundred, since the convention of the language is not known here.
    """
    return Counter(_value(found) for found in _NUMBER.findall(text))


def _value(number: str) -> Decimal:
    grouped = re.fullmatch(r"(\d{1,3}(?:[.,\u00a0\u202f ]\d{3})+)([.,]\d+)?", number)
    if grouped:
        whole, rest = grouped.groups()
        number = re.sub(r"\D", "", whole) + (rest or "")
    return Decimal(re.sub(r"[\u00a0\u202f ]", "", number).replace(",", ".")).normalize()


def why_unfaithful(original: str, translation: str, language: str) -> str:
    """Return why a text is not a translation of the original into the language; "" if all checks pass.

    Raises InputError if the language classifier is not installed.
    """
    if not translation.strip():
        return "empty"
    if numbers(original) != numbers(translation):
        return "other numbers"
    if formulas(original) != formulas(translation) or drawings(original) != drawings(translation):
        return "other formulas"
    if "\\boxed" in translation or "<think>" in translation:
        return "it answers the problem"
    found = detect(translation)
    if found.undetermined:
        return "too few words to tell its language"
    if found.language != language:
        return "another language"
    letters = letter_units(clean(original))
    if letters and not LENGTH[0] <= letter_units(clean(translation)) / letters <= LENGTH[1]:
        return "too short or too long"
    return ""
