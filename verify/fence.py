"""Markdown fenced blocks; the program of a solution is the first one that names a language.

Fences as in CommonMark: three or more backticks or tildes at the start of a line (at most three spaces before), the
language as the first word behind them, closed by a line of at least as many of the same character. One pass over the
lines. What it does not do: run programs, or guess the language of an untagged block. Who calls this: `format.py`,
`calls.py`.
Source: Magistral (2506.10910), section 2.2.1 (a block whose fence names a language; the first one is run).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_OPENING = re.compile(r" {0,3}(`{3,}|~{3,})[ \t]*+([^\s`]*+)[^`]*+$")
_CLOSING = re.compile(r" {0,3}(`{3,}|~{3,})\s*+$")


class Fence(NamedTuple):
    """One fenced block."""

    language: str
    """first word behind the opening fence, in lower case, e.g. "python", "cpp\""""
    source: str


def blocks(text: str) -> Iterator[Fence]:
    """The closed blocks of a text in order; `language` is "" where the fence names none."""
    marker = language = ""
    body: list[str] = []
    for line in text.split("\n"):
        if not marker:
            if opening := _OPENING.match(line):
                marker, language, body = opening.group(1), opening.group(2).strip("{}.").lower(), []
        elif (closing := _CLOSING.match(line)) and closing.group(1).startswith(marker):
            yield Fence(language, "\n".join(body) + "\n")
            marker = ""
        else:
            body.append(line)


def first_program(solution: str) -> Fence | None:
    """Return the first closed block that names a language, or None. An unclosed block is a truncated program."""
    return next((block for block in blocks(solution) if block.language), None)
