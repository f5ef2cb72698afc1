r"""Rewritings of answers that keep their meaning, and changes that do not: for any list of real answers.

Each gives a new spelling, or None where it does not apply.
"""

import re
from collections.abc import Callable
from fractions import Fraction

Change = Callable[[str], str | None]

_INTEGER = re.compile(r"^-?\d{1,15}$")
_FRACTION = re.compile(r"^(-?)\\[dt]?frac\{(\d{1,6})\}\{(\d{1,6})\}$")
_NUMBER = re.compile(r"(?<![\d.,!_^{\\])(\d+)(?![\d.,!_])")
_TUPLE = re.compile(r"^(?:\\left)?\(([^()\[\]{}]+?)(?:\\right)?\)$")
_BINARY = re.compile(r"(?<=[\w})]) ?([+-]) ?(?=[\w\\(])")
_UNICODE = {"\\pi": "π", "\\infty": "∞", "\\cup": "∪", "\\leq": "≤"}
_ALTERING = ("doubled", "verdoppelt", "et demi", "negativo", "al quadrato", "с половиной", "的两倍")


def _items(text: str) -> list[str]:
    """Items of (a, b, ...) without brackets inside; none of anything else."""
    match = _TUPLE.match(text)
    return [item.strip() for item in match[1].split(",")] if match and "," in match[1] else []


def _whole(text: str) -> int | None:
    return int(text) if _INTEGER.match(text) else None


def with_unicode(text: str) -> str | None:
    changed = text
    for latex, sign in _UNICODE.items():
        changed = changed.replace(latex, sign)
    return changed if changed != text and "\\pi_" not in text else None


def one_more(text: str) -> str | None:
    """The first free-standing number plus one."""
    match = _NUMBER.search(text)
    return match and f"{text[: match.start()]}{int(match[1]) + 1}{text[match.end() :]}"


def negated(text: str) -> str | None:
    if not (_INTEGER.match(text) or _FRACTION.match(text)) or Fraction(re.sub(r"\D", "", text) or 0) == 0:
        return None
    return text.removeprefix("-") if text.startswith("-") else "-" + text


def turned_sign(text: str) -> str | None:
    """a + b -> a - b at the first sign between two terms of a polynomial."""
    if not re.fullmatch(r"[\w\s+\-^{}\\]+", text) or "pm" in text or "text" in text:
        return None
    match = _BINARY.search(text)
    return match and text[: match.start(1)] + "+-"[match[1] == "+"] + text[match.end(1) :]


def inverted(text: str) -> str | None:
    match = _FRACTION.match(text)
    return f"{match[1]}\\frac{{{match[3]}}}{{{match[2]}}}" if match and match[2] not in (match[3], "0") else None


def swapped_items(text: str) -> str | None:
    items = _items(text)
    return f"({', '.join([items[1], items[0], *items[2:]])})" if items and items[0] != items[1] else None


def unsolved(text: str) -> str | None:
    """An equation of which the answer is the solution."""
    if not re.search(r"\d", text) or re.search(r"[<>=]", text[3:]):
        return None
    return f"2x = 2({text.removeprefix('x =').removeprefix('x=')})"


SAME: dict[str, Change] = {
    "in dollars": lambda text: f"${text}$.",
    "displayed": lambda text: None if "\\begin" in text else f"\\displaystyle {text}",
    "loosely spaced": lambda text: (
        None if re.search(r"text|box|\{,\}", text) else text.replace("+", " + ").replace(",", ",\\, ")
    ),
    "other fraction": lambda text: text.replace("\\frac", "\\dfrac") if "\\frac{" in text else None,
    "sized brackets": lambda text: (
        text.replace("(", "\\bigl(").replace(")", "\\bigr)") if "(" in text and "\\left" not in text else None
    ),
    "full width": lambda text: (items := _items(text)) and "（" + "，".join(items) + "）" or None,
    "with unicode": with_unicode,
    "grouped": lambda text: f"{whole:,}" if abs(whole := _whole(text) or 0) >= 1000 else None,
    "with decimal zeros": lambda text: text + ".00" if _INTEGER.match(text) else None,
    "as a sum": lambda text: f"{int(text) - 7}+7" if _INTEGER.match(text) else None,
    "in scientific notation": lambda text: (
        f"{Fraction(int(text), 100)}\\times 10^{{2}}" if _INTEGER.match(text) and int(text) % 100 == 0 else None
    ),
    "expanded fraction": lambda text: (
        f"{match[1]}{int(match[2]) * 3}/{int(match[3]) * 3}" if (match := _FRACTION.match(text)) else None
    ),
    "as a named value": lambda text: f"x = {text}" if _INTEGER.match(text) or _FRACTION.match(text) else None,
    "counted": lambda text: f"{text} Äpfel" if _INTEGER.match(text) else None,
}
DIFFERENT: dict[str, Change] = {
    "one more": one_more,
    "negated": negated,
    "turned sign": turned_sign,
    "inverted": inverted,
    "without the last item": lambda text: f"({', '.join(items[:-1])})" if len(items := _items(text)) > 2 else None,
    "with another item": lambda text: f"({', '.join([*items, '77'])})" if (items := _items(text)) else None,
    "swapped items": swapped_items,
    "other brackets": lambda text: f"[{', '.join(items)}]" if (items := _items(text)) else None,
    "times ten": lambda text: text + "0" if _whole(text) else None,
    # a word behind a number that makes another one of it
    "altered": lambda text: f"{text} {_ALTERING[len(text) % len(_ALTERING)]}" if _INTEGER.match(text) else None,
    "unsolved": unsolved,
}
