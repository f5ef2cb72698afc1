r"""The stage `duplicates`: removes near duplicates within the input, and copies of evaluation items.

Texts are compared independent of typesetting: case, punctuation, LaTeX spacing (\, \left \!), dollars, braces, empty
indices (n^{}_{}), \dfrac for \frac, digit groups (10{,}000) and Unicode forms make no difference. Numbers, signs,
brackets and names of LaTeX commands do. Drawings are not part of the words and are compared separately.
"""

from __future__ import annotations

import json
import re
import unicodedata
import zlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import Field
from pydantic.dataclasses import dataclass

from curate.stage import Decision, Kept, Rejected, Share, Show, VerifyingStage, is_open
from curate.statements import PHRASES, drawings, without_drawings
from shared.jsonl import Row, text_of
from shared.types import Verdict
from verify.published import problem_rows
from verify.verifiers import verifier_of

CONFLICT = "duplicates with different answers"
SHINGLE = 2
"""tokens per shingle; with 2, one changed word of a text changes two shingles"""
BANDS, ROWS = 32, 4
"""Locality-sensitive hashing: a pair of Jaccard 0.65 is proposed with probability 0.998, one of 0.3 with 0.23"""
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


def _name(row: Row) -> str:
    """Return the name of a row in a reason: its id, or its line."""
    return str(row.fields.get("id") or f"line {row.number}")


@dataclass
class DuplicatesStage(VerifyingStage):
    """Keep one copy of each problem, and none of the evaluation files.

    Two texts are alike if the Jaccard similarity of pairs of neighbours in their cores (the words, numbers and signs
    without articles, "find", "what is") is at least --similarity, and numbers and drawings are the same.
    near duplicates: alike texts with equal answers; the first row is kept. The same text with other numbers is another
    problem, and so is a similar text with another answer ("the sum of the roots", "the product of the roots"), unless
    core and drawing are identical: then all copies go, for one answer is wrong.
    contamination: rows that are like an item of --against, whatever the answer, or that share runs of 13 words with it
    which cover 60 % of it and have all of its numbers. The reason names the evaluation file, the detail the item.

    examples:
      python -m curate duplicates formatted.jsonl --out single.jsonl
      python -m curate duplicates a.jsonl b.jsonl --against math500.jsonl.gz aime24.jsonl --out single.jsonl
    """

    name = "duplicates"
    similarity: Share = Field(default=0.65, description="Jaccard similarity from which texts are alike")
    against: list[Path] = Field(default_factory=list, description="evaluation files to keep apart from")

    async def prepare(self, rows: Sequence[Row], show: Show) -> None:
        """Compare all rows. Raises DataError for a row or an evaluation item without a problem."""
        items = [(path.name, row) for path in self.against for row in problem_rows(path)]
        self.rows = [*(row for _, row in items), *rows]
        """the items, then the rows; other indices here are places in this list"""
        total = len(self.rows) + len(items) + 2 * len(rows)
        self.texts: list[Text] = []
        for number, row in enumerate(self.rows):
            self.texts.append(read_text(text_of(row.fields, "problem", row.where)))
            if number % SHOW_EVERY == 0:
                await show(number, total)

        async def second(done: int, _: int) -> None:
            await show(len(self.rows) + done, total)

        near = await candidates(self.texts, second)
        foreign = self._contamination([file for file, _ in items], near)
        self.decisions = await self._inside(len(items), near, foreign)
        await show(total, total)

    def _similarity(self, text: Text, other: Text) -> float:
        """Return the similarity of two texts with the same numbers and drawings; 0 if they are not alike."""
        if text.numbers != other.numbers or not same_drawings(text, other):
            return 0.0
        share = jaccard(text.shingles, other.shingles)
        return share if share >= self.similarity else 0.0

    def _contamination(self, files: Sequence[str], near: dict[int, list[int]]) -> dict[int, Rejected]:
        """Return, for each row that is a copy of an evaluation item, its index and the rejection.

        files: of each item. near: the earlier texts that may be like each text.
        """
        ngrams = NgramIndex(self.texts[: len(files)])
        rejections: dict[int, Rejected] = {}
        for index in range(len(files), len(self.rows)):
            text = self.texts[index]
            others = [other for other in near.get(index, []) if other < len(files)]
            alike = [(other, share) for other in others if (share := self._similarity(text, self.texts[other]))]
            how = "similarity" if alike else "shared runs of words"
            alike = alike or ngrams.sharing(text)
            if alike:
                item, share = max(alike, key=lambda pair: pair[1])
                rejections[index] = Rejected(
                    f"contamination: {files[item]}", f"{_name(self.rows[item])}: {how} {share:.2f}"
                )
        return rejections

    async def _inside(self, items: int, near: dict[int, list[int]], foreign: dict[int, Rejected]) -> list[Decision]:
        """Return the decisions about all rows; items: how many of the texts are evaluation items."""
        first = list(range(len(self.rows)))
        """row -> an earlier row of its cluster, or itself for the first (union-find)"""
        conflicts: dict[int, tuple[int, int]] = {}
        """first row of a cluster -> two of its rows that contradict each other"""
        left_out = {*range(items), *foreign}
        for index, others in near.items():
            for other in others:
                if index in left_out or other in left_out:
                    continue
                if not self._similarity(self.texts[index], self.texts[other]):
                    continue
                same_core = self.texts[index].core == self.texts[other].core
                agree = await self._same_answer(index, other, same_core)
                if not agree and not (same_core and self.texts[index].drawing == self.texts[other].drawing):
                    continue
                earlier, later = sorted((_root(first, index), _root(first, other)))
                first[later] = earlier
                kept = conflicts.pop(later, None)
                if not agree:
                    kept = (other, index)
                if kept is not None:
                    conflicts.setdefault(earlier, kept)
        return [
            foreign.get(index) or self._decide(index, _root(first, index), conflicts)
            for index in range(items, len(self.rows))
        ]

    def _decide(self, index: int, root: int, conflicts: dict[int, tuple[int, int]]) -> Decision:
        """Decide about a row whose cluster begins with the row `root`."""
        if root in conflicts:
            pair = [self.rows[one] for one in conflicts[root]]
            return Rejected(CONFLICT, ", ".join(f"{_name(row)}: {str(row.fields.get('answer'))[:60]}" for row in pair))
        if root != index:
            share = jaccard(self.texts[index].shingles, self.texts[root].shingles)
            return Rejected("near duplicate", f"of {_name(self.rows[root])}: similarity {share:.2f}")
        return Kept([self.rows[index].fields])

    async def _same_answer(self, index: int, other: int, same_core: bool) -> bool:
        """Whether the answers of two rows are equal in meaning; for programming problems, whether the tests are equal.

        With the same core, a programming task with other tests is a duplicate too, and so is an open problem with an
        answer in other words.
        """
        row, copy = self.rows[index].fields, self.rows[other].fields
        if "tests" in (verifier_of(row.get("domain")).ground_truth, verifier_of(copy.get("domain")).ground_truth):
            return same_core or json.dumps(row.get("tests")) == json.dumps(copy.get("tests"))
        if is_open(row) or is_open(copy):
            return same_core or row.get("answer") == copy.get("answer")
        left, right = str(row.get("answer", "")).strip(), str(copy.get("answer", "")).strip()
        return left == right or Verdict.CORRECT in (await self.compare(left, right), await self.compare(right, left))


def _root(first: list[int], index: int) -> int:
    """Return the first row of a cluster, halving the path to it."""
    while first[index] != index:
        first[index] = first[first[index]]
        index = first[index]
    return index


class Text(NamedTuple):
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
        shingles = set()
        for start in range(max(1, len(core) - SHINGLE + 1)):
            pair = " ".join(core[start : start + SHINGLE])
            shingles.add(f"{pair} {counts[pair]}")
            counts[pair] += 1
        return frozenset(shingles)

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


def jaccard(shingles: frozenset[str], other: frozenset[str]) -> float:
    """Return the Jaccard similarity, shared shingles by all shingles, in [0, 1]."""
    union = len(shingles | other)
    return len(shingles & other) / union if union else 1.0


def same_drawings(text: Text, other: Text, least: float = 0.8) -> bool:
    """Whether the drawings are alike, or one text has none (copies often lose theirs)."""
    if not text.drawing or not other.drawing:
        return True
    figures = [frozenset(filter(_is_number, each.drawing)) for each in (text, other)]
    return text.drawing == other.drawing or jaccard(*figures) >= least


def _hash(text: str) -> int:
    """Return a 32-bit hash that is the same on every machine."""
    return zlib.crc32(text.encode("utf-8", "replace"))


async def candidates(texts: Sequence[Text], show: Show) -> dict[int, list[int]]:
    """Return, for each text, the earlier ones that may be alike (MinHash); texts without any are left out."""
    from datasketch import MinHash, MinHashLSH  # imports SciPy

    index = MinHashLSH(num_perm=BANDS * ROWS, params=(BANDS, ROWS))
    alike: dict[int, list[int]] = {}
    for number, text in enumerate(texts):
        signature = MinHash(num_perm=BANDS * ROWS, hashfunc=_hash)
        signature.update_batch(text.shingles)
        if near := index.query(signature):
            alike[number] = sorted(near)
        index.insert(number, signature)
        if number % SHOW_EVERY == 0:
            await show(number, len(texts))
    return alike


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
        shares = []
        for number in sorted(near):
            other = self.given[number]
            if other.numbers <= numbers:
                starts = [start for start, ngram in enumerate(other.ngrams) if ngram in ngrams]
                size = CHINESE_NGRAM if other.is_chinese else NGRAM
                shared = {place for start in starts for place in range(start, start + size)}
                covered = len(shared) / len(other.words)
                if covered >= COVERED:
                    shares.append((number, covered))
        return shares
