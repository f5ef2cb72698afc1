r"""Compares problems independent of typesetting: tokens, numbers and drawings, MinHash candidates, shared n-grams.

Case, punctuation, LaTeX spacing (\, \left \!), dollars, braces, empty indices (n^{}_{}), \dfrac for \frac, digit
groups (10{,}000) and Unicode forms make no difference. Numbers, signs, brackets and names of LaTeX commands do.
Drawings are not part of the words and are compared separately.
"""

from __future__ import annotations

import re
import unicodedata
import zlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from curate.phrases import PHRASES
from curate.stage import Show
from curate.statements import drawings, without_drawings

SHINGLE = 2
"""tokens per shingle; with 2, one changed word of a text changes two shingles"""
BANDS, ROWS = 32, 4
"""of locality-sensitive hashing: a pair of Jaccard 0.65 is proposed with probability 0.998, one of 0.3 with 0.23"""
NGRAM, CHINESE_NGRAM = 13, 24
"""length of a shared run of words (characters of Chinese) that is no coincidence"""
COVERED = 0.6
"""share of an evaluation item's words that must be in shared runs; stock phrases cover less"""
SHOW_EVERY = 200
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
_SMALL = frozenset(word for lines in PHRASES["small_words"].values() for line in lines for word in line.split())


@dataclass(frozen=True)
class Text:
    """The tokens of a problem and of its drawings, for comparison with others."""

    tokens: tuple[str, ...]
    drawing: tuple[str, ...]
    """tokens of its drawings; () if it has none"""

    @property
    def numbers(self) -> Counter[str]:
        """The numbers in the text, with their counts."""
        return Counter(token for token in self.tokens if _is_number(token))

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

    @property
    def ngrams(self) -> list[tuple[str, ...]]:
        """All runs of 13 words (24 of Chinese), in order."""
        words, size = self.words, CHINESE_NGRAM if self.is_chinese else NGRAM
        return [words[start : start + size] for start in range(len(words) - size + 1)]


def read_text(problem: str) -> Text:
    """Split a problem into the tokens of its text and of its drawings."""
    text = without_drawings(problem)
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    text = _WRAPPER.sub(" ", _SPACING.sub(" ", text))
    text = unicodedata.normalize("NFKC", text).lower().replace("'", "").replace("’", "")
    tokens = (token.lstrip("0") or "0" if token.isdigit() else token for token in _TOKEN.findall(text))
    return Text(tuple(tokens), tuple(_TOKEN.findall(" ".join(drawings(problem)).lower())))


def _is_number(token: str) -> bool:
    return token[-1].isdigit()


def jaccard(one: frozenset[str], other: frozenset[str]) -> float:
    """Return the Jaccard similarity, shared shingles by all shingles, in [0, 1]."""
    union = len(one | other)
    return len(one & other) / union if union else 1.0


def same_drawings(one: Text, other: Text, least: float = 0.8) -> bool:
    """Whether the drawings are alike, or one text has none (copies often lose theirs)."""
    if not one.drawing or not other.drawing:
        return True
    figures = [frozenset(filter(_is_number, text.drawing)) for text in (one, other)]
    return one.drawing == other.drawing or jaccard(*figures) >= least


def _hash(text: str) -> int:
    """Return a 32-bit hash that is the same on every machine."""
    return zlib.crc32(text.encode("utf-8", "replace"))


async def candidates(texts: Sequence[Text], show: Show) -> dict[int, list[int]]:
    """Return, for each text, the earlier ones that may be alike (MinHash); texts without any are left out."""
    from datasketch import MinHash, MinHashLSH  # imports SciPy

    index = MinHashLSH(num_perm=BANDS * ROWS, params=(BANDS, ROWS))
    found: dict[int, list[int]] = {}
    for number, text in enumerate(texts):
        signature = MinHash(num_perm=BANDS * ROWS, hashfunc=_hash)
        signature.update_batch(text.shingles)
        if near := index.query(signature):
            found[number] = sorted(near)
        index.insert(number, signature)
        if number % SHOW_EVERY == 0:
            await show(number, len(texts))
    return found


class NgramIndex:
    """Finds texts that share long runs of words with given ones."""

    def __init__(self, given: Sequence[Text]) -> None:
        self.given = given
        self._by_hash: dict[int, list[int]] = defaultdict(list)
        for number, text in enumerate(given):
            for ngram in set(text.ngrams):
                self._by_hash[_hash(" ".join(ngram))].append(number)

    def sharing(self, text: Text) -> list[tuple[int, float]]:
        """Return (index, share of its words in shared runs) of the given texts whose numbers all occur in `text`.

        Only shares of at least COVERED: a stock phrase ("where m and n are relatively prime ...") covers less.
        """
        ngrams, numbers = set(text.ngrams), text.numbers
        near = {number for ngram in ngrams for number in self._by_hash.get(_hash(" ".join(ngram)), ())}
        found = []
        for number in sorted(near):
            other = self.given[number]
            if other.numbers <= numbers:
                starts = [start for start, ngram in enumerate(other.ngrams) if ngram in ngrams]
                size = CHINESE_NGRAM if other.is_chinese else NGRAM
                shared = {place for start in starts for place in range(start, start + size)}
                covered = len(shared) / len(other.words)
                if covered >= COVERED:
                    found.append((number, covered))
        return found
