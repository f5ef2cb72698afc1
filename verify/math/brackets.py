r"""Cuts an answer where no bracket is open, finds the pair that spans it, and unwraps \text{...}."""

from __future__ import annotations

import re
from typing import NamedTuple

BAR = re.compile(r"\\(?:mid|vert)(?![A-Za-z])|\||:")
"""before the conditions of a set-builder"""
COMMA = re.compile("[,;]")
TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_CLOSERS = {"(": ")]", "[": ")]", "\\{": ("\\}",)}


def without_text(text: str) -> str:
    r"""Return the text with the words of \text{...} as they stand and with single spaces."""
    return " ".join(TEXT.sub(r" \1 ", text).split())


class Form(NamedTuple):
    """The outer form of an answer: kind and items; kind "scalar" has the text itself as its only item.

    A bare list ("1, 2") is a "list"; values of which each is right ("1 or 2", "\\pm 1", "x = 1, x = 2") are "either".
    """

    kind: str
    items: tuple[str, ...]
    name: str = ""
    """the text before "=", where that was one name"""

    @property
    def ordered(self) -> bool:
        """False for sets, unions and bare lists."""
        return self.kind not in ("{}", "list", "cases", "or", "either", "union", "intersection")


def split_top(text: str, separator: re.Pattern[str]) -> list[str]:
    """Split where `separator` matches outside of all brackets."""
    level, start, position, parts = 0, 0, 0, []
    while position < len(text):
        if level == 0:
            match = separator.match(text, position)
            if match and match.end() > position:
                parts.append(text[start:position])
                start = position = match.end()
                continue
        character = text[position]
        if character == "\\" and position + 1 < len(text):
            position += 1
            character = text[position]
            if character not in "{}":
                position += 1
                continue
        if character in "([{":
            level += 1
        elif character in ")]}":
            level = max(0, level - 1)
        position += 1
    parts.append(text[start:])
    return [part.strip() for part in parts]


def bracketed(text: str) -> tuple[str, str] | None:
    """Return (kind, inside) when one pair of brackets spans the whole text, else None."""
    opening = "\\{" if text.startswith("\\{") else text[:1]
    if opening not in _CLOSERS:
        return None
    closing = next((closer for closer in _CLOSERS[opening] if text.endswith(closer)), None)
    inside = text[len(opening) : len(text) - len(closing)] if closing else ""
    if closing is None or len(text) < len(opening) + len(closing):
        return None
    level = 0
    for token in re.finditer(r"\\[^{}]|\\?[{}]|[()\[\]]", inside):
        sign = token.group()[-1]
        level += 1 if sign in "([{" else -1 if sign in ")]}" else 0
        if level < 0:
            return None
    kind = opening[-1] + closing[-1]
    return (kind, inside.strip()) if level == 0 else None


_FRENCH = re.compile(
    r"(^|\\(?:cup|cap|in|setminus|lor)(?![A-Za-z])|=|[,;]\s|(?<![A-Za-z])or\s)(\s*)"
    r"([\[\]])([^\[\]]*[,;][^\[\]]*)([\[\]])(?=\s*(?:$|\\(?:cup|cap|setminus|lor)(?![A-Za-z])|[,;.]\s|or(?![A-Za-z])))"
)
_DECIMAL_COMMA = re.compile(r"(?<=\d),(?=\d)")
_WITH_COMMA = re.compile(r"\d[\d,]*\d")
_GROUPED = re.compile(r"[1-9]\d{0,2}(?:,\d{3})+|\d+")
_OPENING, _CLOSING = "([{", ")]}"


def french_brackets(text: str) -> str:
    """Rewrite intervals as written in France and Germany, alone or in a union: ]0,1[ -> (0,1)."""
    return _FRENCH.sub(_usual, text) if "]" in text or "[" in text else text


def _usual(match: re.Match[str]) -> str:
    before, space, left, inside, right = match.groups()
    return f"{before}{space}{'(' if left == ']' else '['}{inside}{')' if right == '[' else ']'}"


def decimal_commas(text: str) -> str:
    """Rewrite (0;1,5) as (0,1.5): where semicolons separate, a comma between digits is a decimal point."""
    if ";" not in text or "," not in text:
        return text
    open_at, levels = [-1], {-1: list[int]()}  # which signs stand in one pair of brackets, but in none inside of it
    for at, sign in enumerate(text):
        if sign in _CLOSING and len(open_at) > 1:
            open_at.pop()
        levels[open_at[-1]].append(at)
        if sign in _OPENING:
            open_at.append(at)
            levels[at] = []
    signs = list(text)
    for places in levels.values():
        own = "".join(text[at] for at in places)
        commas = own.count(",")
        if ";" not in own or not commas or len(_DECIMAL_COMMA.findall(own)) != commas:
            continue
        point = "" if all(map(_GROUPED.fullmatch, _WITH_COMMA.findall(own))) else "."
        for at in places:
            signs[at] = {",": point, ";": ","}.get(text[at], text[at])
    return "".join(signs)
