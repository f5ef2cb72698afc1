r"""Brackets of an answer: cutting a text where no bracket is open, the pair that spans it, \text{...} unwrapped.

What it does not do: compare. Who calls this: `structure.py`, `matrix.py`, `region.py`, `relation.py`, `family.py`,
`quantity.py`, `words.py`, `english.py`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_CLOSERS = {"(": ")]", "[": ")]", "\\{": ("\\}",)}


def without_text(text: str) -> str:
    r"""The words of \text{...} as they stand, single spaces."""
    return " ".join(TEXT.sub(r" \1 ", text).split())


class Form(NamedTuple):
    """Kind and items of an answer; kind "scalar" has the text itself as its only item.

    A bare list ("1, 2") is a "list"; values of which each is right ("1 or 2", "\\pm 1", "x = 1, x = 2") are "either".
    """

    kind: str
    items: tuple[str, ...]
    name: str = ""
    """what stood before "=", where that was one name"""

    @property
    def ordered(self) -> bool:
        """False for sets, unions and bare lists."""
        return self.kind not in ("{}", "list", "or", "either", "union", "intersection")


def split_top(text: str, separator: re.Pattern[str]) -> list[str]:
    """Split where `separator` matches outside of all brackets."""
    level, start, position, parts = 0, 0, 0, []
    while position < len(text):
        if level == 0:
            found = separator.match(text, position)
            if found and found.end() > position:
                parts.append(text[start:position])
                start = position = found.end()
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
    """(kind, inside) when one pair of brackets spans the whole text."""
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


_FRENCH = re.compile(r"(?<![\w)\]}])\](?=[^\[\]]*[,;][^\[\]]*[\[\]])|(?<=[\w)}])\[(?=\s*(?:$|\\cup|\\cap))")


def french_brackets(text: str) -> str:
    """]0,1[ -> (0,1): intervals as written in France and Germany."""
    if not (text.startswith("]") or text.endswith("[")):
        return text
    return _FRENCH.sub(lambda match: "(" if match.group() == "]" else ")", text)
