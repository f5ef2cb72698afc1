r"""Rewritings of answers that keep their meaning, and changes that do not: for any list of real answers.

Each function returns a new spelling, or None where it does not apply.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

Change = Callable[[str], str | None]

_INTEGER = re.compile(r"^-?\d{1,15}$")
_FRACTION = re.compile(r"^(-?)\\[dt]?frac\{(\d{1,6})\}\{(\d{1,6})\}$")
_NUMBER = re.compile(r"(?<![\d.,!_^{\\])(\d+)(?![\d.,!_])")
_TUPLE = re.compile(r"^(?:\\left)?\((.+?)(?:\\right)?\)$")
_PLAIN_ITEMS = re.compile(r"^[^()\[\]{}]+$")
_BINARY = re.compile(r"(?<=[\w})]) ?([+-]) ?(?=[\w\\(])")


def _items(text: str) -> list[str] | None:
    """Items of (a, b, ...) without brackets inside."""
    found = _TUPLE.match(text)
    if not found or not _PLAIN_ITEMS.match(found.group(1)) or "," not in found.group(1):
        return None
    return [item.strip() for item in found.group(1).split(",")]


def in_dollars(text: str) -> str:
    return f"${text}$."


def displayed(text: str) -> str | None:
    return None if "\\begin" in text else f"\\displaystyle {text}"


def loosely_spaced(text: str) -> str | None:
    return None if re.search(r"text|box|\{,\}", text) else text.replace("+", " + ").replace(",", ",\\, ")


def other_fraction(text: str) -> str | None:
    return text.replace("\\frac", "\\dfrac") if "\\frac{" in text else None


def sized_brackets(text: str) -> str | None:
    return text.replace("(", "\\bigl(").replace(")", "\\bigr)") if "(" in text and "\\left" not in text else None


def full_width(text: str) -> str | None:
    items = _items(text)
    return None if items is None else "（" + "，".join(items) + "）"


def with_unicode(text: str) -> str | None:
    changed = text.replace("\\pi", "π").replace("\\infty", "∞").replace("\\cup", "∪").replace("\\leq", "≤")
    return changed if changed != text and "\\pi_" not in text else None


def grouped(text: str) -> str | None:
    return f"{int(text):,}" if _INTEGER.match(text) and abs(int(text)) >= 1000 else None


def with_decimal_zeros(text: str) -> str | None:
    return text + ".00" if _INTEGER.match(text) else None


def as_sum(text: str) -> str | None:
    return f"{int(text) - 7}+7" if _INTEGER.match(text) else None


def in_scientific_notation(text: str) -> str | None:
    return f"{Fraction(int(text), 100)}\\times 10^{{2}}" if _INTEGER.match(text) and int(text) % 100 == 0 else None


def expanded_fraction(text: str) -> str | None:
    found = _FRACTION.match(text)
    return f"{found.group(1)}{int(found.group(2)) * 3}/{int(found.group(3)) * 3}" if found else None


def as_named_value(text: str) -> str | None:
    return f"x = {text}" if _INTEGER.match(text) or _FRACTION.match(text) else None


def one_more(text: str) -> str | None:
    """The first free-standing number plus one."""
    found = _NUMBER.search(text)
    return None if found is None else f"{text[: found.start(1)]}{int(found.group(1)) + 1}{text[found.end(1) :]}"


def negated(text: str) -> str | None:
    if not (_INTEGER.match(text) or _FRACTION.match(text)) or Fraction(re.sub(r"\D", "", text) or 0) == 0:
        return None
    return text.removeprefix("-") if text.startswith("-") else "-" + text


def turned_sign(text: str) -> str | None:
    """a + b -> a - b at the first sign between two terms of a polynomial."""
    if not re.fullmatch(r"[\w\s+\-^{}\\]+", text) or "pm" in text or "text" in text:
        return None
    found = _BINARY.search(text)
    return None if found is None else text[: found.start(1)] + "+-"[found.group(1) == "+"] + text[found.end(1) :]


def inverted(text: str) -> str | None:
    found = _FRACTION.match(text)
    if not found or found.group(2) in (found.group(3), "0"):
        return None
    return f"{found.group(1)}\\frac{{{found.group(3)}}}{{{found.group(2)}}}"


def without_last_item(text: str) -> str | None:
    items = _items(text)
    return None if items is None or len(items) < 3 else f"({', '.join(items[:-1])})"


def with_another_item(text: str) -> str | None:
    items = _items(text)
    return None if items is None else f"({', '.join([*items, '77'])})"


def swapped_items(text: str) -> str | None:
    items = _items(text)
    return None if items is None or items[0] == items[1] else f"({', '.join([items[1], items[0], *items[2:]])})"


def other_brackets(text: str) -> str | None:
    items = _items(text)
    return None if items is None else f"[{', '.join(items)}]"


def times_ten(text: str) -> str | None:
    return text + "0" if _INTEGER.match(text) and int(text) != 0 else None


def counted(text: str) -> str | None:
    return f"{text} Äpfel" if _INTEGER.match(text) else None


def altered(text: str) -> str | None:
    """A number with a word behind it that makes another one of it."""
    words = ("doubled", "verdoppelt", "et demi", "negativo", "al quadrato", "с половиной", "的两倍")
    return f"{text} {words[len(text) % len(words)]}" if _INTEGER.match(text) else None


def unsolved(text: str) -> str | None:
    """An equation of which the answer is the solution."""
    if not re.search(r"\d", text) or re.search(r"[<>=]", text[3:]):
        return None
    return f"2x = 2({text.removeprefix('x =').removeprefix('x=')})"


SAME: list[Change] = [
    in_dollars, displayed, loosely_spaced, other_fraction, sized_brackets, full_width, with_unicode, grouped,
    with_decimal_zeros, as_sum, in_scientific_notation, expanded_fraction, as_named_value,
    counted,
]  # fmt: skip
DIFFERENT: list[Change] = [
    one_more, negated, turned_sign, inverted, without_last_item, with_another_item, swapped_items, other_brackets,
    times_ten, altered, unsolved,
]  # fmt: skip
