r"""A number with what people write around it: currency before, unit, percent or multiplier behind.

"$5" is (5, "dollar"), "18 apples" is (18, "apples"), "2.5 million" is (2500000, "").
What it does not do: convert units (2 hours is not 120 minutes here), or read words as numbers. Who calls this:
`symbolic.py`.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from verify.number import exact_value


class Quantity(NamedTuple):
    """An exact number and its dress."""

    value: Fraction
    unit: str = ""
    percent: bool = False
    significant: int = 0
    """significant digits when written as a decimal literal with a point, else 0"""
    decimals: int = 0
    """digits after that point"""


_CURRENCY = {
    "$": "dollar", "€": "euro", "£": "pound", "¥": "yen", "₽": "rouble", "元": "yuan", "USD": "dollar", "EUR": "euro",
    "US$": "dollar", "dollars": "dollar", "euros": "euro", "pounds": "pound",
}  # fmt: skip
_PREFIX = re.compile(r"^(-?)\s*(US\$|[$€£¥₽]|USD|EUR)\s*(?=[-\d.])")
_MULTIPLIERS = {
    "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12,
    "万": 10**4, "亿": 10**8, "百万": 10**6,
}  # fmt: skip
_PERCENT = re.compile(r"\s*(?:%|percent|per cent|Prozent|pour cent|por ciento|процентов|процента)$")
_TEXT_UNIT = re.compile(r"^(.*?[\d})!])\s*\\text\s*\{\s*([^{}]*?)\s*\}\s*(\^\s*\{?\d\}?)?$", re.DOTALL)
_WORD_UNIT = re.compile(
    r"^(.*?[\d})!])(\s*)((?:[^\W\d_][^\W\d_.'/-]*)(?: [^\W\d_][\w.'/-]*){0,3})(\^\{?\d\}?)?$", re.DOTALL
)
_DEGREES = re.compile(r"^(.*?[\d})])\s*\^\\circ\s*([CF]?)$")
_NO_UNITS = (
    "or and not less more than plus minus times over million millions billion billions thousand hundred trillion dozen "
    "half halves third thirds quarter quarters percent pi sqrt sin cos tan log ln exp frac base mod if for when where "
    "Million Millionen Milliarden millones milliards milioni тысяч миллионов миллиона е e i x y z n k a b c"
)
_UNITS = "m g s h l t A V W J N K C F L cm mm km kg mg ml dl ft in lb oz mi mph hr min sec °"
_NOT_UNITS, _SHORT_UNITS = frozenset(_NO_UNITS.split()), frozenset(_UNITS.split())
_DECIMAL = re.compile(r"^-?(\d*)\.(\d+)$")


def _split_unit(text: str) -> tuple[str, str]:
    r"""Cut a trailing unit off; ("", unit) never happens. Words that change the value are no units."""
    degrees = _DEGREES.match(text)
    if degrees:
        return degrees.group(1), "degree" + degrees.group(2)
    wrapped = _TEXT_UNIT.match(text)
    if wrapped:
        words = wrapped.group(2)
        if words and not _NOT_UNITS & set(words.split()) and not re.search(r"\d", words):
            return wrapped.group(1), words + (wrapped.group(3) or "").translate(str.maketrans("", "", "{} "))
        return text, ""
    plain = _WORD_UNIT.match(text)
    if plain:
        number, space, words, power = plain.groups()
        if _NOT_UNITS & set(words.split()) or (number.endswith("}") and "\\" in number.rsplit("{", 1)[-1]):
            return text, ""
        one_letter = len(words) == 1 and words.isascii()
        if words in _SHORT_UNITS and (space or not one_letter):
            return number, words + (power or "").translate(str.maketrans("", "", "{}"))
        if not words.isascii() or (len(words) >= 3 and (space or len(words) >= 4)):
            return number, words
    return text, ""


def same_unit(left: str, right: str) -> bool:
    """True when two units are one, or one of them is not given; a plural s does not count."""
    if not left or not right:
        return True
    left, right = (_CURRENCY.get(unit, unit).casefold() for unit in (left, right))
    return left == right or left.rstrip("s.") == right.rstrip("s.")


@lru_cache(maxsize=8192)
def quantity(text: str) -> Quantity | None:
    """Read normalised text as a number with unit, or None. Raises number.TooLarge for numbers beyond the bounds."""
    unit, percent, factor = "", False, 1
    prefix = _PREFIX.match(text)
    if prefix:
        unit, text = _CURRENCY[prefix.group(2)], prefix.group(1) + text[prefix.end() :]
    cut = _PERCENT.search(text)
    if cut:
        percent, text = True, text[: cut.start()].rstrip()
    for word, value in _MULTIPLIERS.items():
        if text.endswith(word) and text[: -len(word)].rstrip()[-1:].isdigit():
            factor, text = value, text[: -len(word)].rstrip()
            break
    if factor == 1 and not percent:
        text, found = _split_unit(text)
        if found:
            unit = unit or found
            return _finish(text, unit, percent, 1)
    return _finish(text, unit, percent, factor)


def _finish(text: str, unit: str, percent: bool, factor: int) -> Quantity | None:
    text = text.strip()
    if text.startswith("(") and text.endswith(")") and "(" not in text[1:]:
        text = text[1:-1]
    value = exact_value(text)
    if value is None:
        return None
    decimal = _DECIMAL.match(text)
    significant = len((decimal.group(1) + decimal.group(2)).lstrip("0")) if decimal else 0
    return Quantity(value * factor, unit, percent, significant, len(decimal.group(2)) if decimal else 0)
