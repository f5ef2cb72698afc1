r"""Finds sentences in the parts of a text that are not prose: formulas (\text{...}), boxes, comments and code.

`text_cleaning.clean` drops these parts, since they mostly hold no natural language. This module extracts the runs of
words in them that look like a sentence: at least five words, six in code, where names and keywords also follow one
another; or six Han or kana characters. Every regular expression takes time linear in the text.
"""

from __future__ import annotations

import re

from verify.code_block import spans
from verify.extract import find_boxes
from verify.text_cleaning import _LONG_WORDS, letter_units

_COMMENT = re.compile(r"<!--(.*?)(?:-->|\Z)", re.DOTALL)
_VERBATIM = re.compile(r"\\begin\{(verbatim|lstlisting|comment)\}(.*?)(?:\\end\{\1\}|\Z)", re.DOTALL)
_INLINE_CODE = re.compile(r"`([^`\n]*)`")
_FORMULA = re.compile(
    r"\\begin\{((?:equation|align|aligned|gather|cases|array|[pbvBV]?matrix|multline"
    r"|split)\*?)\}.*?(?:\\end\{\1\}|\Z)"
    r"|\$\$.*?\$\$|\\\[.*?(?:\\\]|\Z)|\\\(.*?(?:\\\)|\n|\Z)|\$[^$\n]{1,400}\$",
    re.DOTALL,
)
_MACRO = re.compile(r"\\(?:begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+\*?|\\.|[{}$~&]")
_CODE_MARKS = re.compile(r"^[ \t]*(?:#+|//+|\*+|--|%+|\"{3}|'{3})[ \t]*", re.MULTILINE)
_ROW = re.compile(
    r"[^\W\d_]++(?:['’-][^\W\d_]++)*(?:(?:[,;:.!?]?+[ \t\r\n]++"
    r"|[ \t]++[,;:.!?][ \t\r\n]*+)[^\W\d_]++(?:['’-][^\W\d_]++)*)*+|[\u3040-\u30ff\u3400-\u9fff，。、；：！？]+"
)
_HAN_OR_KANA = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]")
LEAST_WORDS, LEAST_WORDS_IN_CODE = 5, 6
LEAST_UNITS = 18


def aside(text: str) -> list[str]:
    """Return the runs of words in a text's formulas, boxes, comments and code; in comments and code within one line."""
    if not any(mark in text for mark in ("$", "\\", "`", "~~~", "<!--")):
        return []
    code: list[str] = []
    rest: list[str] = []
    position = 0
    for start, end in spans(text):
        code.append(text[start:end].partition("\n")[2])
        rest.append(text[position:start])
        position = end
    text = "".join((*rest, text[position:]))
    for pattern, group in ((_VERBATIM, 2), (_COMMENT, 1), (_INLINE_CODE, 1)):
        code += [found.group(group) for found in pattern.finditer(text)]
        text = pattern.sub(" ", text)
    boxes, end = [], 0
    for start, stop in find_boxes(text):
        if start >= end:
            boxes.append(text[start:stop])
            end = stop
    formulas = [found.group() for found in _FORMULA.finditer(text) if not _is_prose(found.group())]
    words = " ".join(_MACRO.sub(" ", part) for part in (*formulas, *boxes))
    lines = [line for one in code for line in _CODE_MARKS.sub("", one).split("\n")]
    return [*_rows(words, LEAST_WORDS), *(row for line in lines for row in _rows(line, LEAST_WORDS_IN_CODE))]


def _is_prose(formula: str) -> bool:
    """Return whether a "$...$" is the words between two prices, which `text_cleaning.clean` keeps."""
    return formula[0] == "$" != formula[1] and "\\" not in formula and bool(_LONG_WORDS.search(formula))


def _rows(text: str, least: int) -> list[str]:
    found = []
    for match in _ROW.finditer(text):
        row = match.group().strip()
        if letter_units(row) >= LEAST_UNITS and (
            len(row.split()) >= least or len(_HAN_OR_KANA.findall(row)) >= LEAST_WORDS_IN_CODE
        ):
            found.append(" ".join(row.split()))
    return found
