r"""Reads a number with what is written around it: currency before, unit, percent or multiplier after it.

"$5" is (5, "dollar"), "18 apples" is (18, "apples"), "2.5 million" is (2500000, "").
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from verify.math.brackets import without_text
from verify.math.number import exact_value
from verify.math.unit import is_known, unit


class Quantity(NamedTuple):
    """An exact number with its unit, percent sign and number of digits."""

    value: Fraction
    unit: str = ""
    percent: bool = False
    significant: int = 0
    """significant digits when written as a decimal literal with a point, else 0"""
    decimals: int = 0
    """digits after that point"""


_CURRENCY = (
    r"(?:US|AU?|CA?|NZ|HK|S|R)\s?\$|[$€£¥₽₹₩₺₪₫₴₱฿₦¢]"
    r"|(?:USD|EUR|GBP|RMB|CNY|JPY|INR|AUD|CAD|CHF|NZD|HKD|SGD|KRW|BRL|MXN|RUB|PLN|SEK|NOK|DKK|CZK|HUF|TRY|ZAR|PHP|IDR|VND|THB"
    r"|MYR|PKR|BDT|NGN|Rs|Re|Rp|RM|Ksh|KSh)(?![A-Za-z])\.?"
)
_PREFIX = re.compile(rf"^([-+]?)\s*({_CURRENCY})\s*(?=[-\d.\\])")
_SUFFIX = re.compile(rf"^(.*[\d}})])\s*({_CURRENCY})$", re.DOTALL)
_MULTIPLIERS = {
    "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12,
    "lakh": 10**5, "crore": 10**7, "十": 10, "百": 10**2, "千": 10**3, "万": 10**4, "亿": 10**8,
}  # fmt: skip
_MANY = re.compile("|".join(_MULTIPLIERS), re.IGNORECASE)
_SCALES = rf"(?:{_MANY.pattern})s?(?![A-Za-z])"
_SCALED = re.compile(
    rf"^(.*?[\d}})])\s*({_SCALES}(?:\s*{_SCALES})*)\s*((?:[^\W\d][^\d]{{0,30}})?)$", re.DOTALL | re.IGNORECASE
)
_PERCENT = re.compile(
    r"\s*(?:%|\\text\s*\{\s*(?:percent|per cent|%)\s*\}|percentage points?|percent|per cent|Prozent|pour cent"
    r"|por ciento|процентов|процента)$"
)
_TEXT_UNIT = re.compile(r"^(.*?[\d})!])\s*\\text\s*\{\s*([^{}]*?)\s*\}\s*(\^\s*\{?-?\d\}?)?$", re.DOTALL)
_WORD_UNIT = re.compile(
    r"^(.*?[\d})!])(\s*)((?:[^\W\d_](?:[^\W\d_]|[.'/-])*)(?: [^\W\d_][\w.'/-]*){0,3})(\^\{?\d\}?)?$", re.DOTALL
)
_ANY_TEXT_UNIT = re.compile(r"^(.*\S)\s*\\text\s*\{\s*([^{}]+?)\s*\}\s*(\^\s*\{?\d\}?)?$", re.DOTALL)
_SI = "m|s|g|kg|mg|cm|mm|km|mol|J|kJ|N|kN|W|kW|K|L|mL|V|Pa|kPa|Hz|h|min|rad"
_POWERS = re.compile(
    rf"^(.*?[\d}})])\s*((?:(?:{_SI})(?:\^\{{?-?\d\}}?)?[\s*]*(?:\\cdot\s*)?)*(?:{_SI})\^\{{?-\d\}}?)$", re.DOTALL
)
"""units side by side, the last one to a negative power: 3 m s^{-1}"""
_KNOWN_UNIT = re.compile(
    r"^(.*(?:\\pi|\}))\s*(cm|mm|km|ft|[a-z]{4,12}|[\u4e00-\u9fff]{1,6})(\^\s*\{?\d\}?)?$", re.DOTALL
)
_COMPOUND = re.compile(r"^(\d{1,9})\s*([^\W\d_]+)\.?\s*(,?)\s*(?:and\s+)?(\d{1,9}(?:\.\d{1,9})?)\s*([^\W\d_]+)\.?$")
_UNIT_FRACTION = re.compile(r"^(.*?[\d})])\s*\\frac\s*\{([^{}]*)\}\s*\{([^{}]*(?:\{\d\})?)\}$", re.DOTALL)
_DEGREES = re.compile(r"^(.*?[\d})])\s*\^\\circ\s*([CF]?)$")
_NO_UNITS = (
    "or and not less more than plus minus times over million millions billion billions thousand hundred trillion dozen "
    "half halves third thirds quarter quarters percent pi sqrt sin cos tan log ln exp frac base mod if for when where "
    "Million Millionen Milliarden millones milliards milioni тысяч миллионов миллиона е e i x y z n k a b c"
)
_UNITS = "m g s h l t A V W J N K C F L cm mm km kg mg ml dl ft in lb oz mi mph hr min sec °"
_NOT_UNITS, _SHORT_UNITS = frozenset(_NO_UNITS.split()), frozenset(_UNITS.split())
_NO_BRACES = str.maketrans("", "", "{}")
_DECIMAL = re.compile(r"^-?(\d*)\.(\d+)$")


def _split_unit(text: str) -> tuple[str, str]:
    r"""Split a number and its unit; the number is never "". Words that change the value are not units."""
    degrees = _DEGREES.match(text)
    if degrees:
        return degrees.group(1), "degree" + degrees.group(2)
    quotient = _UNIT_FRACTION.match(text)
    if quotient:
        above, below = quotient.group(2), re.sub(r"\{(\d)\}", r"\1", quotient.group(3))
        if is_known(above) and is_known(below):
            return quotient.group(1), f"{above}/{below}"  # 5\frac{m}{s}
    side_by_side = _POWERS.match(text) if "^" in text else None
    if side_by_side and re.search(r"[\s*]|mol|kg|cm|km|Pa|Hz|min", side_by_side.group(2)):
        return side_by_side.group(1), re.sub(r"\\cdot|\s+", " ", side_by_side.group(2)).translate(_NO_BRACES)
    wrapped = _TEXT_UNIT.match(text)
    if not wrapped and "\\text" in text and "\\text" not in text[:1]:
        text = without_text(text).replace(" / ", "/")
    if wrapped:
        words = wrapped.group(2)
        if words and not _NOT_UNITS & set(words.split()) and not re.search(r"(?<!\^)(?<!\^-)\d", words):
            return wrapped.group(1), words + (wrapped.group(3) or "").translate(str.maketrans("", "", "{} "))
        return text, ""
    plain = _WORD_UNIT.match(text)
    if plain:
        number, space, words, power = plain.groups()
        if _NOT_UNITS & set(words.split()) or (number.endswith("}") and "\\" in number.rsplit("{", 1)[-1]):
            return text, ""
        if "/" in words and not all(is_known(part) for part in words.split("/")):
            return text, ""
        if "/" in words and space:
            return number, words + (power or "").translate(str.maketrans("", "", "{}"))
        one_letter = len(words) == 1 and words.isascii()
        if words in _SHORT_UNITS and (space or not one_letter):
            return number, words + (power or "").translate(str.maketrans("", "", "{}"))
        if not words.isascii() or (len(words) >= 3 and (space or is_known(words))):
            return number, words
    return text, ""


def in_base_units(value: Fraction, unit_text: str) -> tuple[Fraction, tuple[tuple[str, int], ...]]:
    """Return the value in base units, and its dimensions; without a unit the value itself and ()."""
    if not unit_text:
        return value, ()
    read = unit(unit_text)
    return value * read.factor, read.dimensions


def without_unit(text: str) -> tuple[str, str]:
    r"""Cut the unit off a value that is not a plain number: "16\pi \text{ cm}^2" -> ("16\pi", "cm^2")."""
    wrapped = _ANY_TEXT_UNIT.match(text)
    if wrapped and not _NOT_UNITS & set(wrapped.group(2).split()) and not re.search(r"\d", wrapped.group(2)):
        return wrapped.group(1), wrapped.group(2) + (wrapped.group(3) or "").translate(str.maketrans("", "", "{} "))
    plain = _KNOWN_UNIT.match(text)
    if plain and (len(plain.group(2)) > 1 or not plain.group(2).isascii()) and is_known(plain.group(2)):
        return plain.group(1), plain.group(2) + (plain.group(3) or "").translate(str.maketrans("", "", "{} "))
    return text, ""


@lru_cache(maxsize=8192)
def quantity(text: str) -> Quantity | None:
    """Read normalised text as a number with unit, or None. Raises number.TooLarge for numbers beyond the bounds."""
    compound = read_compound(text)
    if compound is not None:
        return compound
    named, percent = "", False
    factor = 1
    prefix, suffix = _PREFIX.match(text), _SUFFIX.match(text)
    if prefix:
        named, text = prefix.group(2).replace(" ", ""), prefix.group(1) + text[prefix.end() :]
    elif suffix:
        text, named = suffix.group(1), suffix.group(2).replace(" ", "")
    cut = _PERCENT.search(text)
    if text.endswith("\\permil"):
        return _finish(text.removesuffix("\\permil"), named, False, Fraction(1, 1000))
    if cut:
        percent, text = True, text[: cut.start()].rstrip()
    scaled = _SCALED.match(without_text(text)) if _MANY.search(text) else None
    if scaled:
        text, tail = scaled.group(1), scaled.group(3).strip()
        factor = math.prod(_MULTIPLIERS[name.casefold()] for name in _MANY.findall(scaled.group(2)))
        if tail and named and unit(tail) != unit(named):
            return None
        named = named or tail
    if factor == 1 and not percent:
        text, tail_unit = _split_unit(text)
        if named and tail_unit.startswith("per "):
            named, tail_unit = f"{named}/{tail_unit.removeprefix('per ')}", ""
        if tail_unit and named and unit(tail_unit) != unit(named):
            return None
        named = named or tail_unit
    return _finish(text, named, percent, factor)


def read_compound(text: str) -> Quantity | None:
    """Read 2 hours 30 minutes as one quantity in the smaller unit; None for units of two kinds, and for 5 m, 30 cm."""
    match = _COMPOUND.match(without_text(text))
    if match is None:
        return None
    large, large_unit, comma, small, small_unit = match.groups()
    larger, smaller = unit(large_unit), unit(small_unit)
    if comma and larger.dimensions != unit("hour").dimensions and large_unit[:4] not in ("foot", "feet", "ft", "poun"):
        return None
    if larger.dimensions != smaller.dimensions or not larger.factor > smaller.factor or not is_known(small_unit):
        return None
    return Quantity(Fraction(large) * larger.factor / smaller.factor + Fraction(small), small_unit)


def _finish(text: str, named: str, percent: bool, factor: int | Fraction) -> Quantity | None:
    text = text.strip()
    if text.startswith("(") and text.endswith(")") and "(" not in text[1:]:
        text = text[1:-1]
    value = exact_value(text)
    if value is None:
        return None
    decimal = _DECIMAL.match(text)
    significant = len((decimal.group(1) + decimal.group(2)).lstrip("0")) if decimal else 0
    return Quantity(value * factor, named, percent, significant, len(decimal.group(2)) if decimal else 0)
