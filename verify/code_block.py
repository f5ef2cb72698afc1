"""Reads Markdown fenced blocks; the program of a response is the first one that names a language.

Fences are those of CommonMark: three or more backticks or tildes at the start of a line, the language as the first word
after them, closed by a line of at least as many of the same character. A fence is indented by at most three spaces,
counted from where the text of the enclosing list item or quotation begins; the indentation of the opening is removed
from every line of the block. One pass over the lines. Source: Magistral (2506.10910), section 2.2.1 (a block whose
fence names a language; the first one is run).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_OPENING = re.compile(r"(`{3,}|~{3,})[ \t]*+([^\s`]*+)(.*)$", re.DOTALL)
_CLOSING = re.compile(r"(`{3,}|~{3,})\s*+$")
_ITEM = re.compile(r"(?:[-*+]|\d{1,9}[.)])(?:[ \t]{1,4}(?=\S)|[ \t](?=[ \t]*\S)|$)")
_QUOTE = re.compile(r"> ?")
_MOST_INDENT = 3
_TAB = 4


class CodeBlock(NamedTuple):
    """One fenced block: its language and its text."""

    language: str
    """first word after the opening fence, in lower case, e.g. "python", "cpp\""""
    source: str


class _Block(NamedTuple):
    fence: CodeBlock
    start: int
    end: int
    closed: bool


def _columns(line: str) -> int:
    """Return the indentation of a line in columns; a tab advances to the next multiple of four."""
    column = 0
    for character in line:
        if character == " ":
            column += 1
        elif character == "\t":
            column += _TAB - column % _TAB
        else:
            break
    return column


def _without(line: str, columns: int) -> str:
    """Remove up to `columns` columns of leading blanks from a line."""
    column = 0
    for index, character in enumerate(line):
        if column >= columns or character not in " \t":
            return " " * (column - columns) + line[index:]
        column += 1 if character == " " else _TAB - column % _TAB
    return ""


class _Nesting:
    """Tracks where the text of the list items around a line begins, and whether the line is in a quotation."""

    def __init__(self) -> None:
        self.items: list[int] = []
        self.quoted = False

    def enter(self, line: str) -> tuple[int, str]:
        """Update the nesting for a line; return its column and its text after marks of quotations and list items."""
        if line[:1].isalpha() and not self.quoted:
            self.items.clear()
            return 0, line
        column, rest = _columns(line), line.lstrip(" \t")
        if self.quoted or rest.startswith(">"):
            quotes = 0
            while rest.startswith(">") and quotes < 8:
                rest, quotes = rest[_QUOTE.match(rest).end() :], quotes + 1  # type: ignore[union-attr]
            self.quoted = quotes > 0
            if quotes:
                column, rest = _columns(rest), rest.lstrip(" \t")
                self.items = [] if quotes and column == 0 else self.items
        if rest.strip():
            while self.items and column < self.items[-1]:
                self.items.pop()
        while len(self.items) < 16 and column - self.base <= _MOST_INDENT and (mark := _ITEM.match(rest)):
            column += len(mark.group().expandtabs(_TAB))
            self.items.append(column)
            rest = rest[mark.end() :]
            column, rest = column + _columns(rest), rest.lstrip(" \t")
        return column, rest

    @property
    def base(self) -> int:
        """Column at which the text of the innermost list item begins."""
        return self.items[-1] if self.items else 0


def _blocks(text: str) -> Iterator[_Block]:
    if "```" not in text and "~~~" not in text:
        return
    nesting = _Nesting()
    marker = language = ""
    body: list[str] = []
    indent = start = position = 0
    for line in text.split("\n"):
        end = position + len(line)
        if not line:
            if marker:
                body.append(line)
        elif not marker:
            column, rest = nesting.enter(line)
            opening = _OPENING.match(rest) if column - nesting.base <= _MOST_INDENT else None
            if opening and ("`" not in opening.group(3) or opening.group(1)[0] == "~") and "`" not in opening.group(2):
                marker, body, start, indent = opening.group(1), [], position, column
                language = opening.group(2).strip("{}.").lower()
        else:
            inner = line
            if nesting.quoted:
                inner = _QUOTE.sub("", line.lstrip(" \t"), count=1)
            closing = None
            if marker in inner and _columns(inner) <= indent + _MOST_INDENT:
                closing = _CLOSING.match(inner.strip(" \t"))
            if closing and closing.group(1).startswith(marker):
                yield _Block(CodeBlock(language, "\n".join(body) + "\n"), start, end, True)
                marker = ""
            else:
                body.append(_without(inner, indent))
        position = end + 1
    if marker:
        yield _Block(CodeBlock(language, "\n".join(body)), start, len(text), False)


def blocks(text: str) -> Iterator[CodeBlock]:
    """Return the closed blocks of a text in order; `language` is "" where the fence names none."""
    return (block.fence for block in _blocks(text) if block.closed)


def spans(text: str) -> list[tuple[int, int]]:
    """Return (start, end) of every block; a last one that is not closed ends at the end of the text."""
    return [(block.start, block.end) for block in _blocks(text)]


def first_program(response: str) -> CodeBlock | None:
    """Return the first closed block that names a language, or None. An unclosed block is a truncated program."""
    return next((block for block in blocks(response) if block.language), None)
