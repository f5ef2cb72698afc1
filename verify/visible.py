r"""Blanks what a reader of a response does not see: comments, code and struck-out or invisible text.

Every character that is not seen becomes a space, so positions stay. Hidden are fenced and inline code, comments of
HTML, LaTeX and Markdown, `verbatim`, `\verb`, `\phantom`, `\iffalse`, and what is struck out. A percent sign behind a
number is no comment. Indented blocks are not taken for code: responses indent their formulas. Linear in the text.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import lru_cache

from verify.code_block import spans
from verify.text_cleaning import brace_end

_HIDDEN = re.compile(
    r"<!--.*?(?:-->|\Z)"
    r"|\\begin\s*\{(comment|verbatim\*?|Verbatim|lstlisting|minted|filecontents\*?)\}.*?(?:\\end\s*\{\1\}|\Z)"
    r"|\\iffalse\b.*?(?:\\fi\b|\Z)"
    r"|\\(?:verb|lstinline)\*?([^A-Za-z\s*{])[^\n]{0,400}?\2"
    r"|<(code|pre|script|style|template|del|strike|s)(?:\s+[a-z-]+=[^<>\n]{0,200})?>.*?(?:</\3\s*>|\Z)"
    r"|<([a-z]{1,10})\s[^<>\n]{0,200}?(?:\bhidden\b|display\s*:\s*none)[^<>\n]{0,200}>.*?(?:</\4\s*>|\Z)"
    r"|(?<!~)~~(?![~\s])[^~\n]{1,400}~~(?!~)"
    r"|^[ ]{0,3}\[[^\]\n]{1,80}\]:[^\n]*",
    re.DOTALL | re.MULTILINE | re.IGNORECASE,
)
_INVISIBLE = re.compile(
    r"\\(?:[hv]?phantom|[xb]?cancel|sout|st|texttt|lstinline|mintinline|invisible|gobble|hidden)\s*(?=\{)"
)
_RUN = re.compile(r"`+")
_MATH = re.compile(
    r"\$\$.*?\$\$|\\\[.*?\\\]|\\\(.*?\\\)"
    r"|\\begin\{((?:equation|align|aligned|gather|cases|array|multline|split)\*?)\}.*?\\end\{\1\}|\$[^$\n]{1,300}\$",
    re.DOTALL,
)
_SEEN = re.compile(r"[^\n]")
_PERCENT = re.compile(r"(?<!\\)%")


@lru_cache(maxsize=8)
def visible(text: str) -> str:
    """Return the text with every character that no reader sees blanked; line breaks stay."""
    text = _blank_all(text, spans(text))
    if "`" in text:
        text = _blank_all(text, _inline_code(text))
    if "<" in text or "\\" in text or "~~" in text or "]:" in text:
        text = _blank_all(text, ((found.start(), found.end()) for found in _HIDDEN.finditer(text)))
        text = _blank_all(text, _invisible(text))
    return _blank_all(text, _comments(text)) if "%" in text else text


def _blank_all(text: str, regions: Iterable[tuple[int, int]]) -> str:
    """Blank regions, given in order and without overlap."""
    kept: list[str] = []
    position = 0
    for start, end in regions:
        region = text[start:end]
        kept += text[position:start], _SEEN.sub(" ", region) if "\n" in region else " " * len(region)
        position = end
    return "".join(kept) + text[position:]


def _inline_code(text: str) -> Iterator[tuple[int, int]]:
    """Yield inline code: a run of backticks, up to the next run of the same length in the same paragraph."""
    runs = [(found.start(), found.end()) for found in _RUN.finditer(text)]
    later: dict[int, list[int]] = defaultdict(list)
    for index in range(len(runs) - 1, -1, -1):
        later[runs[index][1] - runs[index][0]].append(index)
    index = 0
    while index < len(runs):
        start, opened = runs[index]
        same = later[opened - start]
        while same and same[-1] <= index:
            same.pop()
        if same and "\n\n" not in text[opened : min(runs[same[-1]][0], opened + 4_000)]:
            index = same[-1]
            yield start, runs[index][1]
        index += 1


def _invisible(text: str) -> Iterator[tuple[int, int]]:
    """Yield commands whose argument is not shown, or not meant to be believed."""
    position = 0
    while found := _INVISIBLE.search(text, position):
        position = brace_end(text, found.end())
        yield found.start(), position


def _comments(text: str) -> Iterator[tuple[int, int]]:
    """Yield comments: from a percent sign that is not a percentage to the end of its line, or of its formula."""
    regions = [found.span() for found in _MATH.finditer(text)]
    at = done = 0
    for sign in _PERCENT.finditer(text):
        start = sign.start()
        if start < done:
            continue
        while at < len(regions) and regions[at][1] <= start:
            at += 1
        formula = regions[at] if at < len(regions) and regions[at][0] <= start else None
        before = text[max(0, start - 40) : start]
        before = before if formula else before.rstrip(" \t")
        if before and (before[-1].isalnum() or before[-1] in "})]$|°'\"\\*"):
            continue
        line = text.find("\n", start)
        done = min(len(text) if line < 0 else line, formula[1] if formula else len(text))
        yield start, done
