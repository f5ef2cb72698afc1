r"""Splits a problem into words, numbers and signs, independent of typesetting, to find near duplicates.

Case, punctuation, LaTeX spacing (\, \left \!), dollars, braces, empty indices (n^{}_{}), \dfrac for \frac, digit
groups (10{,}000) and Unicode forms make no difference. Numbers, signs, brackets and names of LaTeX commands do.
Drawings are not part of the words and are compared separately.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from dataclasses import dataclass

from curate.wording import drawings, without_drawings

SHINGLE = 2
"""tokens per shingle; with 2, one changed word of a text changes two shingles"""
_SPACING = re.compile(
    r"\\(?:left|right|displaystyle|textstyle|limits|nolimits|quad|qquad|middle|big|Big|bigg|Bigg|bigl|bigr|Bigl|Bigr|"
    r"hfill|noindent|par)(?![A-Za-z])|\\[,;:! ]|[\^_]\s*\{\s*\}|\\(?:begin|end)\s*\{(?:align|aligned|equation|gather|"
    r"gathered|split|cases|center)\*?\}|\\label\{[^}]*\}|\\\\(?:\[[^\]\n]{0,9}\])?|\\[\[\]()]"
)
_WRAPPER = re.compile(r"\\(?:text\w*|mathrm|mathbf|mathit|mbox|emph|operatorname|rm|bf|it)(?![A-Za-z])\*?")
_SPELLINGS = (
    (re.compile(r"\\[dt]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"(?<=\d)(?:\{,\}|\\!?,\\!|,\\!|,)(?=\d{3}(?!\d))"), ""),
    (re.compile(r"\\(?:cdot|times)(?![A-Za-z])|[×·]"), "*"),
    (re.compile(r"\\(?:leq|le|leqslant)(?![A-Za-z])|≤"), "<="),
    (re.compile(r"\\(?:geq|ge|geqslant)(?![A-Za-z])|≥"), ">="),
    (re.compile(r"\\(?:neq|ne)(?![A-Za-z])|≠"), "!="),
    (re.compile(r"\\(?:ldots|cdots|dots|dotsb|dotsc)(?![A-Za-z])|…"), " "),
    (re.compile(r"\^\s*\{?\s*\\circ\s*\}?|°"), r" \\degree "),
    (re.compile(r"\^\s*\{\s*(?:\\(?:mathrm|text|rm)\s*\{?)?\s*(st|nd|rd|th)\s*\}?\s*\}"), r"\1"),
)
_TOKEN = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|\\[A-Za-z]+|[^\W\d_]+|\d+(?:\.\d+)?|\.\d+|[-+*/^=<>|%!()\[\]]")
_HAN = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]")
_SMALL = frozenset(
    """
    a an the of to in is are be was were that which this these those it its and then so now here there has have we you i
    if let suppose assume given consider find determine compute calculate evaluate what value s please give express your
    answer as following such by with for on at from do does can will would need needed whats
    le la les l un une des du de d est sont et que qui trouver trouvez trouve déterminer déterminez calculer calculez
    quel quelle quels quelles soit soient
    der die das den dem ein eine einen einer ist sind und dass finde bestimme berechne berechnen welche welcher
    el los las una uno del es son y encuentra encuentre determina halla calcule calcula cuál cual sea sean
    il lo gli uno è sono e che trova trovare determinare calcolare quale siano sia
    и в на что это найдите определите вычислите чему равно равна пусть
    """.split()  # noqa: SIM905 - readable
)


@dataclass(frozen=True)
class Text:
    """The tokens of a problem and of its drawings, for comparison with others."""

    tokens: tuple[str, ...]
    drawing: tuple[str, ...]
    """tokens of its drawings; () if it has none"""

    @property
    def numbers(self) -> Counter[str]:
        """The numbers in the text, with their counts."""
        return Counter(token for token in self.tokens if is_number(token))

    @property
    def core(self) -> tuple[str, ...]:
        """The tokens without articles, "find", "what is" and the like: texts with the same core ask the same."""
        return tuple(token for token in self.tokens if token not in _SMALL)

    @property
    def shingles(self) -> frozenset[str]:
        """All pairs of neighbours in the core, repeated ones numbered, so that f(f(x)) differs from f(x)."""
        core = self.core
        counts: Counter[str] = Counter()
        found = set()
        for start in range(max(1, len(core) - SHINGLE + 1)):
            pair = " ".join(core[start : start + SHINGLE])
            found.add(f"{pair} {counts[pair]}")
            counts[pair] += 1
        return frozenset(found)

    @property
    def words(self) -> tuple[str, ...]:
        """Words and numbers, without signs and LaTeX commands."""
        return tuple(token for token in self.tokens if token[0].isalnum())

    @property
    def is_chinese(self) -> bool:
        """Whether most words are single Chinese or Japanese characters."""
        return 2 * sum(bool(_HAN.match(word)) for word in self.words) > len(self.words)


def is_number(token: str) -> bool:
    """Whether a token is a number."""
    return token[-1].isdigit()


def read_text(problem: str) -> Text:
    """Split a problem into the tokens of its text and of its drawings."""
    inside = " ".join(drawings(problem))
    return Text(_tokens(without_drawings(problem)), tuple(_TOKEN.findall(inside.lower())))


def _tokens(text: str) -> tuple[str, ...]:
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    text = _WRAPPER.sub(" ", _SPACING.sub(" ", text))
    text = unicodedata.normalize("NFKC", text).lower().replace("'", "").replace("’", "")
    return tuple(token.lstrip("0") or "0" if token.isdigit() else token for token in _TOKEN.findall(text))
