r"""Extracts the prose of a text, without LaTeX, code, boxes, addresses and digits; its letters; its sentences; and the
sentences in what is no prose.

Language identification sees only this prose. Every regular expression here takes time linear in the text.
"""

from __future__ import annotations

import re

from verify.code_block import spans
from verify.extract import find_boxes

HAN_LETTERS = 3
"""letter units of one Han character: it carries about as much as three letters"""

_FENCE = re.compile(r"```.*?(?:```|\Z)", re.DOTALL)
_INLINE_CODE = re.compile(r"`([^`\n]*)`")
_ENVIRONMENT = re.compile(
    r"\\begin\{((?:equation|align|gather|cases|array|[pbvBV]?matrix|multline|split)\*?)\}.*?(?:\\end\{\1\}|\Z)",
    re.DOTALL,
)
_DISPLAY = re.compile(r"\$\$.*?\$\$|\\\[.*?(?:\\\]|\Z)|\\\(.*?(?:\\\)|\n|\Z)", re.DOTALL)
_DOLLARS = re.compile(r"\$([^$\n]{1,400})\$")
_BOX = re.compile(r"\\boxed\s*(?=\{)")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_URL = re.compile(r"(?:https?://|www\.)\S+")
_TEXT_MACRO = re.compile(r"\\(?:text|textbf|textit|emph|mbox|textrm)\s*\{([^{}]*)\}")
_MACRO = re.compile(r"\\[A-Za-z]+\*?")
_TAG = re.compile(r"</?[A-Za-z][^<>\n]{0,60}>")
_NOT_PROSE = re.compile(r"[^\w\s.!?。!?…;；:'’\-,，、]|[\d_]")
_SPACE = re.compile(r"[ \t\r\f\v]+")
_SENTENCE_END = re.compile(r"(?<=[.!?…;；。!?\n])")
_LONG_WORDS = re.compile(r"[^\W\d_]{3,}\s+[^\W\d_]{2,}|[\u4e00-\u9fff]{3,}")
_HAN = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")
_KANA = re.compile(r"[\u3040-\u30ff]")
_CYRILLIC = re.compile(r"[\u0400-\u04ff]")
_LATIN = re.compile(r"[A-Za-z\u00c0-\u024f]")
_LETTER = re.compile(r"[^\W\d_]")

_W = r"[A-Za-z\u00c0-\u052f]"
_FORMULA_WORD = re.compile(
    rf"(?<!{_W})(?:{_W}++(?=[(\[{{^_]|\.{_W}|[ ]?(?:[=<>≤≥≈/*+|→]|->))|{_W}{{1,3}}+(?=\d))"
    rf"|(?:(?<=[\^_)\]}}(\[{{])|(?<=[=<>≤≥≈/*+|→])[ ]?){_W}++"
    rf"|(?<=\d)[ ]?{_W}{{1,3}}+(?!{_W})"
    r"|\[asy\](?s:.*?)(?:\[/asy\]|\Z)"
)
_ITEM_NAME = re.compile(rf"(?:(?<=[,:;.\n])|\A)[ ]?+[A-Z\u00c0-\u00deА-Я]{_W}*+(?=[ ]?(?:[,:;.=\n]|\Z))")
LEAST_NAMES = 4
"""names that stand alone between commas, colons and numbers, from which they are a list"""
_SHORT_CAPITALS = re.compile(rf"(?<!{_W})[A-Z]{{1,4}}(?!{_W})")
_LONG_CAPITALS = re.compile(r"[A-Z]{5}")
LONG_NAME, MOST_NAMES = 3, 60
"""letters of a name, and letters of different such names from which the signs only join words"""
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\d_\u3040-\u30ff\u3400-\u9fff]+")
_ITEM = re.compile(r"\d+|[^\W\d_]")
LEAST_ITEMS = 10
LEAST_VARIED, LONG_TEXT = 18, 60
"""least letters of different words in a text of so many letters"""
REPEATED, MOST_WORDS = 1.5, 20
"""least mean count of a word in a filler, and most different words"""
_COMMENT = re.compile(r"<!--(.*?)(?:-->|\Z)", re.DOTALL)
_VERBATIM = re.compile(r"\\begin\{(verbatim|lstlisting|comment)\}(.*?)(?:\\end\{\1\}|\Z)", re.DOTALL)
_FORMULA = re.compile(
    r"\\begin\{((?:equation|align|aligned|gather|cases|array|[pbvBV]?matrix|multline"
    r"|split)\*?)\}.*?(?:\\end\{\1\}|\Z)"
    r"|\$\$.*?\$\$|\\\[.*?(?:\\\]|\Z)|\\\(.*?(?:\\\)|\n|\Z)|\$[^$\n]{1,400}\$",
    re.DOTALL,
)
_FORMULA_MARKUP = re.compile(r"\\(?:begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+\*?|\\.|[{}$~&]")
_CODE_MARKS = re.compile(r"^[ \t]*(?:#+|//+|\*+|--|%+|\"{3}|'{3})[ \t]*", re.MULTILINE)
_ROW = re.compile(
    r"[^\W\d_]++(?:['’-][^\W\d_]++)*(?:(?:[,;:.!?]?+[ \t\r\n]++"
    r"|[ \t]++[,;:.!?][ \t\r\n]*+)[^\W\d_]++(?:['’-][^\W\d_]++)*)*+|[\u3040-\u30ff\u3400-\u9fff，。、；：！？]+"
)
_HAN_OR_KANA = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]")
LEAST_WORDS, LEAST_WORDS_IN_CODE = 5, 6
"""words in a row that look like a sentence; in code names and keywords follow one another, too"""
LEAST_UNITS = 18


def _drop_dollars(match: re.Match[str]) -> str:
    """Two prices in one sentence look like a formula; keep what reads as words."""
    content = match.group(1)
    return f" {content} " if "\\" not in content and _LONG_WORDS.search(content) else " "


def brace_end(text: str, start: int) -> int:
    """Return the position after the brace that closes the one at or after `start`; the end of the text without one."""
    level = 0
    for brace in _BRACE.finditer(text, start):
        level += {"{": 1, "}": -1}.get(brace.group(), 0)
        if level == 0:
            return brace.end()
    return len(text)


def _drop_boxes(text: str) -> str:
    r"""Remove every \boxed{...} with nested braces; an unclosed one up to the end."""
    kept: list[str] = []
    position = 0
    for box in _BOX.finditer(text):
        if box.start() < position:
            continue
        kept.append(text[position : box.start()])
        kept.append(" ")
        position = brace_end(text, box.end())
    kept.append(text[position:])
    return "".join(kept)


def clean(text: str) -> str:
    r"""Return the prose of a text: no code, formulas, boxes, macros, addresses, tags or digits.

    Words in \text{...} outside of formulas stay; sentence punctuation and line breaks stay for `sentences`.
    """
    text = _INLINE_CODE.sub(" ", _FENCE.sub(" ", text))
    text = _drop_boxes(_URL.sub(" ", text))
    text = _DISPLAY.sub(" ", _ENVIRONMENT.sub(" ", text))
    text = _DOLLARS.sub(_drop_dollars, text)
    text = _MACRO.sub(" ", _TEXT_MACRO.sub(r" \1 ", _TAG.sub(" ", text)))
    return _SPACE.sub(" ", _NOT_PROSE.sub(" ", text)).strip()


def without_formulas(text: str) -> str:
    """Return the text without names in formulas and code, units after numbers, points in capitals, items of a list.

    Words next to signs of operations or brackets, such as "speed = distance / time", are taken for names, unless there
    are so many long ones that the signs only join words.
    """
    if len(_ITEM_NAME.findall(text)) >= LEAST_NAMES:
        text = _ITEM_NAME.sub(" ", text)
    names = {name.strip() for name in _FORMULA_WORD.findall(text) if name[0] != "["}
    if sum(len(name) for name in names if len(name) >= LONG_NAME) >= MOST_NAMES:
        return text
    text = _FORMULA_WORD.sub(" ", text)
    return text if _LONG_CAPITALS.search(text) else _SHORT_CAPITALS.sub(" ", text)


def is_filler(text: str) -> bool:
    """Return whether a text is a word or two again and again, or letters or numbers in their order."""
    if is_recital(text):
        return True
    tokens = text.split()
    if len(tokens) < LEAST_ITEMS // 2:
        tokens = list(text)
    if len(tokens) < REPEATED * len(different := set(tokens)) or len(different) > MOST_WORDS:
        return False
    words = _WORD.findall(clean(without_formulas(text)).lower())
    different = set(words)
    numbers = len(re.findall(r"\d+", text))
    if len(words) >= max(LEAST_ITEMS // 2, 2 * numbers) and len(different) <= 2:
        return True
    if numbers or sum(map(_weight, words)) < LONG_TEXT:
        return False
    return sum(_weight("".join(set(word))) for word in different) < LEAST_VARIED


def _weight(word: str) -> int:
    """Return the letters of a word, a Han or kana character counting as three."""
    return HAN_LETTERS * len(word) if "\u3040" <= word[0] <= "\u9fff" else len(word)


def is_recital(text: str) -> bool:
    """Return whether a text is the letters of an alphabet, or numbers, each one following the last."""
    text = text.strip().lower().replace("ё", "")
    items = iter(text) if text.isdigit() else (item.group() for item in _ITEM.finditer(text))
    count, jumps, before = 0, 0, 0
    for item in items:
        value = int(item[:20]) if item[0].isdecimal() else ord(item)
        jumps += abs(value - before) != 1
        count, before = count + 1, value
        if jumps > 1 + count / LEAST_ITEMS:
            return False
    return count >= LEAST_ITEMS


def letter_units(text: str) -> int:
    """Number of letters, a Han character counting as three."""
    return len(_LETTER.findall(text)) + (HAN_LETTERS - 1) * len(_HAN.findall(text))


def script_units(text: str) -> dict[str, int]:
    """Letter units by script: "han", "kana", "cyrillic", "latin", "all"."""
    return {
        "han": HAN_LETTERS * len(_HAN.findall(text)),
        "kana": HAN_LETTERS * len(_KANA.findall(text)),
        "cyrillic": len(_CYRILLIC.findall(text)),
        "latin": len(_LATIN.findall(text)),
        "all": letter_units(text),
    }


def sentences(prose: str, least_units: int) -> list[tuple[str, int]]:
    """Cut prose (from `clean`) at sentence ends; neighbours are joined until they hold `least_units` letter units.

    Returns (text, letter units) pairs. A short remainder at the end is a pair of its own, below `least_units`.
    """
    result: list[tuple[str, int]] = []
    pending, units = "", 0
    for piece in _SENTENCE_END.split(prose):
        own = letter_units(piece)
        if own == 0:
            continue
        pending, units = f"{pending} {piece.strip()}".strip(), units + own
        if units >= least_units:
            result.append((pending, units))
            pending, units = "", 0
    if pending:
        result.append((pending, units))
    return result


def asides(text: str) -> list[str]:
    r"""Return the sentences in a text's formulas (\text{...}), boxes, comments and code, which `clean` drops.

    A sentence is a run of at least five words, six in comments and code, where it must be in one line; or six Han or
    kana characters.
    """
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
        code += [match.group(group) for match in pattern.finditer(text)]
        text = pattern.sub(" ", text)
    boxes, end = [], 0
    for start, stop in find_boxes(text):
        if start >= end:
            boxes.append(text[start:stop])
            end = stop
    formulas = [match.group() for match in _FORMULA.finditer(text) if not _is_prose(match.group())]
    words = " ".join(_FORMULA_MARKUP.sub(" ", part) for part in (*formulas, *boxes))
    lines = [line for block in code for line in _CODE_MARKS.sub("", block).split("\n")]
    return [*_rows(words, LEAST_WORDS), *(row for line in lines for row in _rows(line, LEAST_WORDS_IN_CODE))]


def _is_prose(formula: str) -> bool:
    """Return whether a "$...$" is the words between two prices, which `clean` keeps."""
    return formula[0] == "$" != formula[1] and "\\" not in formula and bool(_LONG_WORDS.search(formula))


def _rows(text: str, least: int) -> list[str]:
    rows = []
    for match in _ROW.finditer(text):
        row = match.group().strip()
        if letter_units(row) >= LEAST_UNITS and (
            len(row.split()) >= least or len(_HAN_OR_KANA.findall(row)) >= LEAST_WORDS_IN_CODE
        ):
            rows.append(" ".join(row.split()))
    return rows
