"""Finds similar texts: candidates by MinHash and locality-sensitive hashing, exact Jaccard, shared runs of words.

MinHash (datasketch) proposes pairs without comparing all with all; every pair is then measured exactly. With 32 bands
of 4 rows, a pair of Jaccard 0.65 is proposed with probability 0.998, one of 0.3 with 0.23.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Sequence

from curate.stage import Show
from curate.tokens import Text, is_number

BANDS, ROWS = 32, 4
RUN, CHINESE_RUN = 13, 24
"""length of a shared run of words (characters of Chinese) that is no coincidence"""
COVERED = 0.6
"""share of an evaluation item's words that must be in shared runs; stock phrases cover less"""
SHOW_EVERY = 200


def _hash(data: bytes) -> int:
    """Return a 32-bit hash that is the same on every machine."""
    return zlib.crc32(data)


def jaccard(one: frozenset[str], other: frozenset[str]) -> float:
    """Return the Jaccard similarity, shared shingles by all shingles, in [0, 1]."""
    union = len(one | other)
    return len(one & other) / union if union else 1.0


async def candidates(texts: Sequence[Text], show: Show) -> dict[int, list[int]]:
    """Return, for each text, the earlier ones that may be alike; texts without any are left out."""
    from datasketch import MinHash, MinHashLSH  # imports SciPy

    index = MinHashLSH(num_perm=BANDS * ROWS, params=(BANDS, ROWS))
    found: dict[int, list[int]] = {}
    for number, text in enumerate(texts):
        signature = MinHash(num_perm=BANDS * ROWS, hashfunc=_hash)
        signature.update_batch([shingle.encode("utf-8", "replace") for shingle in text.shingles])
        if near := index.query(signature):
            found[number] = sorted(near)
        index.insert(number, signature)
        if number % SHOW_EVERY == 0:
            await show(number, len(texts))
    return found


def _runs(text: Text) -> list[tuple[str, ...]]:
    """Return all runs of 13 words (24 of Chinese), in order."""
    size = CHINESE_RUN if text.is_chinese else RUN
    words = text.words
    return [words[start : start + size] for start in range(len(words) - size + 1)]


class Runs:
    """Finds texts that share long runs of words with given ones."""

    def __init__(self, given: Sequence[Text]) -> None:
        self.given = given
        self._by_run: dict[int, list[int]] = defaultdict(list)
        for number, text in enumerate(given):
            for run in set(_runs(text)):
                self._by_run[_hash(" ".join(run).encode("utf-8", "replace"))].append(number)

    def sharing(self, text: Text) -> list[tuple[int, float]]:
        """Return (index, share of its words in shared runs) of the given texts whose numbers all occur in `text`.

        Only shares of at least COVERED: a stock phrase ("where m and n are relatively prime ...") covers less.
        """
        shared = set(_runs(text))
        near = {
            number
            for run in shared
            for number in self._by_run.get(_hash(" ".join(run).encode("utf-8", "replace")), ())
        }  # fmt: skip
        numbers = text.numbers
        found = []
        for number in sorted(near):
            other = self.given[number]
            if other.numbers <= numbers and (covered := _covered(other, shared)) >= COVERED:
                found.append((number, covered))
        return found


def _covered(text: Text, runs: set[tuple[str, ...]]) -> float:
    """Return the share of a text's words that are in one of these runs."""
    marked: set[int] = set()
    for start, run in enumerate(_runs(text)):
        if run in runs:
            marked.update(range(start, start + len(run)))
    return len(marked) / len(text.words)


def same_numbers(one: Text, other: Text) -> bool:
    """Whether two texts have the same numbers, each as often, in any order."""
    return one.numbers == other.numbers


def same_drawings(one: Text, other: Text, least: float = 0.8) -> bool:
    """Whether the drawings are alike, or one text has none (copies often lose theirs)."""
    if not one.drawing or not other.drawing:
        return True
    figures = [frozenset(token for token in text.drawing if is_number(token)) for text in (one, other)]
    return one.drawing == other.drawing or jaccard(*figures) >= least
